"""Where the batches and gradients of local steps come from: the interface that LDP implements.

`PlainSteps` is ordinary SGD.  `fedp3.privacy` has a second source, which draws records at random,
clips each record's gradient and adds noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedp3.client.batching import LocalSettings, batches
from fedp3.client.objectives import RecordLoss
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import Params
from fedp3.data.inputs import Inputs

# (net, x, y, trained tensors, masks of active coordinates)
#     -> (loss, gradients in the order of the trained tensors)
Gradient = Callable[[nn.Module, Inputs, Tensor, Params, Params], tuple[float, list[Tensor]]]


class StepSource(Protocol):
    """Batches, gradients and randomness of one client's tasks.

    `address` is (round, client, ...); it addresses all random draws of a task.
    """

    @property
    def is_plain(self) -> bool:
        """Whether this is ordinary SGD: losses may be reported, and clients may be stacked."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether computing a task again after a crash gives the same answer."""
        ...

    def batches(
        self, local: LocalSettings, samples: int, seed: int, *address: int
    ) -> Iterator[Tensor]:
        """The positions of the samples of each step."""
        ...

    def gradient(
        self,
        plain: Gradient,
        loss: RecordLoss,
        local: LocalSettings,
        samples: int,
        seed: int,
        *address: int,
    ) -> Gradient:
        """The gradient that replaces `plain`, the gradient of the mean of `loss`."""
        ...

    def generator(self, use: Stream, seed: int, *address: int) -> torch.Generator:
        """The generator of draws per sample: crops, flips, Dropout."""
        ...


@dataclass(frozen=True, slots=True)
class PlainSteps:
    """Ordinary SGD over shuffled epochs."""

    is_plain: bool = True
    repeatable: bool = True

    def batches(
        self, local: LocalSettings, samples: int, seed: int, *address: int
    ) -> Iterator[Tensor]:
        """Shuffled epochs."""
        return batches(samples, local, stream(seed, Stream.BATCHES, *address))

    def gradient(
        self,
        plain: Gradient,
        loss: RecordLoss,
        local: LocalSettings,
        samples: int,
        seed: int,
        *address: int,
    ) -> Gradient:
        """The gradient of the loss itself."""
        return plain

    def generator(self, use: Stream, seed: int, *address: int) -> torch.Generator:
        """A generator that the run's seed determines."""
        return stream(seed, use, *address)


PLAIN_STEPS = PlainSteps()
