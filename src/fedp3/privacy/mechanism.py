"""One local step of LDP-FedP3 (Algorithm 5).

    S ~ Poisson(q) of the m records
    g = (sum_{j in S} g_j min(1, C / ||g_j||) + N(0, z² C² I)) / (q m)

There is one norm over all trained coordinates, and noise on every one of them.  The denominator
q m is public, and a step with an empty S is a step like any other.  As in the proof of the
algorithm, noise is added to the mean gradient and not to the weights.  Momentum, Adam, weight
decay and everything that the server does afterwards are post-processing.

`PrivateSteps` plugs the step into local training.  It only calls the functions of this module.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedp3.client.batching import LocalSettings
from fedp3.client.context import ClientContext
from fedp3.client.objectives import RecordLoss, cross_entropies
from fedp3.client.step_source import Gradient
from fedp3.core.randomness import Stream, os_stream, stream
from fedp3.core.types import Params
from fedp3.data.inputs import Inputs, map_tensors
from fedp3.privacy.clipping import add_clipped
from fedp3.privacy.settings import Mechanism

NOISE_CHUNK = 1 << 16  # coordinates that get their second draw at once; they fit into the cache

RANDOMNESS: Mapping[str, Callable[..., torch.Generator]] = {
    "os": lambda *address: os_stream(),
    "seeded": stream,  # simulation only: whoever knows the seed can remove the noise
}


@dataclass(frozen=True, slots=True)
class PrivateSteps:
    """The `StepSource` under LDP: Poisson batches, clipped and noised gradients, secret draws."""

    mechanism: Mechanism
    is_plain: bool = False

    @property
    def repeatable(self) -> bool:
        """Only seeded draws can be repeated; new draws would be a release that is not charged."""
        return self.mechanism.randomness != "os"

    def batches(
        self, local: LocalSettings, samples: int, seed: int, *address: int
    ) -> Iterator[Tensor]:
        """The records of each step of one task."""
        return private_batches(self.mechanism, local, samples, seed, *address)

    def gradient(
        self,
        plain: Gradient,
        loss: RecordLoss,
        local: LocalSettings,
        samples: int,
        seed: int,
        *address: int,
    ) -> Gradient:
        """The private gradient; the plain one is not used."""
        return private_gradient(self.mechanism, local, samples, seed, *address, loss=loss)

    def generator(self, use: Stream, seed: int, *address: int) -> torch.Generator:
        """The generator of crops and Dropout, which must be as secret as the noise.

        Draws are assigned by position in the batch, so one more record shifts the draws of all
        records after it.  Whoever knew the draws could see that shift.
        """
        return secret_generator(self.mechanism, use, seed, *address)


def mechanism_of(context: ClientContext) -> Mechanism | None:
    """The mechanism under which the clients of this context train; None without LDP."""
    return context.steps.mechanism if isinstance(context.steps, PrivateSteps) else None


def secret_generator(
    mechanism: Mechanism, use: Stream, seed: int, *address: int
) -> torch.Generator:
    """The generator of every draw that touches records: batches, noise, crops, Dropout."""
    return RANDOMNESS[mechanism.randomness](seed, use, *address)


def poisson(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    """The positions of each step's records; every record is drawn independently."""
    for _ in range(steps):
        coins = torch.rand(samples, generator=rng, dtype=torch.float64)
        yield (coins < rate).nonzero().flatten()  # Alg. 5, l. 5


def private_batches(
    mechanism: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int
) -> Iterator[Tensor]:
    """The records of each step of one task; `address` is (round, client)."""
    rng = secret_generator(mechanism, Stream.BATCHES, seed, *address)
    return poisson(samples, mechanism.sample_rate, mechanism.steps_per_task(local), rng)


def private_gradient(
    mechanism: Mechanism,
    local: LocalSettings,
    samples: int,
    seed: int,
    *address: int,
    loss: RecordLoss = cross_entropies,
) -> Gradient:
    """The gradient of one task's steps: clipped by record, summed, noised, divided by q m.

    Args:
        mechanism: clip, noise and sample rate.
        local: its `batch` bounds how many records are in memory at once.
        samples: m, the number of the client's training records.
        seed: the run's seed, for simulations.
        *address: (round, client), for simulations.
        loss: of each record.
    """
    rng = secret_generator(mechanism, Stream.NOISE, seed, *address)
    expected_size = mechanism.sample_rate * samples  # public; the size of S is not
    # All steps reuse these tensors: allocating them takes as long as filling them with noise.
    sums: dict[str, Tensor] = {}

    def gradient(
        net: nn.Module, x: Inputs, y: Tensor, W: Params, masks: Params
    ) -> tuple[float, list[Tensor]]:
        for n, w in W.items():
            if n not in sums or sums[n].shape != w.shape:
                sums[n] = torch.empty(w.shape, device=w.device)
            # Alg. 5, l. 8; differs: the noise is added before the step, not after it
            fill_with_noise(sums[n], mechanism, rng)
        for begin in range(0, len(y), local.batch):  # bounds memory; all of S is used
            part = slice(begin, begin + local.batch)
            some = x[part] if isinstance(x, Tensor) else _rows(x, part)
            add_clipped(sums, net, some, y[part], W, masks, mechanism, loss)  # Alg. 5, l. 6
        total = [sums[n] for n in W]
        torch._foreach_div_(total, expected_size)
        return math.nan, total  # the loss of private records must not be reported

    return gradient


def _rows(x: Inputs, part: slice) -> Inputs:
    rows: Inputs = map_tensors(lambda w: w[part], x)
    return rows


def fill_with_noise(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
    """Fill a tensor with N(0, z² C²); z = 0 means no noise, even if C is infinite.

    Each number is the sum of two draws.  A single 32-bit draw never leaves ±5.77 standard
    deviations, so a value beyond them would prove that a record is there.  The sum of two draws
    reaches 8.16 deviations, and its rounding reveals less.
    """
    if not mechanism.noise_multiplier:
        out.zero_()
        return
    noise = out if out.device == rng.device else torch.empty(out.shape)
    deviation = mechanism.noise_multiplier * mechanism.clip / math.sqrt(2)
    noise.normal_(0, deviation, generator=rng)
    flat = noise.view(-1)
    second = torch.empty(min(NOISE_CHUNK, noise.numel()))
    for begin in range(0, len(flat), NOISE_CHUNK):
        chunk = flat[begin : begin + NOISE_CHUNK]
        chunk.add_(second[: len(chunk)].normal_(0, deviation, generator=rng))
    out.copy_(noise)
