"""HeteroFL's aids for clients with fewer units (Diao et al., 2021), which FedRolex uses too.

Masked cross-entropy, a scaler on the outputs of pruned layers, and static batch normalisation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3.client.hooks import LossInputs
from fedp3.core.types import Group
from fedp3.data.inputs import Inputs, call


def zero_absent(logits: Tensor, labels: Tensor) -> Tensor:
    """Set the logits of labels that the client does not have to zero.

    They are zero and not minus infinity: absent labels stay in the softmax as a constant, and their
    rows get no gradient.
    """
    more_outputs = logits.shape[1] - len(labels)  # a head may have more outputs than classes
    absent = F.pad(~labels, (0, more_outputs), value=True)
    return logits.masked_fill(absent, 0.0)


def masked_cross_entropy(net: nn.Module, x: Inputs, y: Tensor, inputs: LossInputs) -> Tensor:
    """Cross-entropy in which the logits of absent labels are zero."""
    return F.cross_entropy(zero_absent(call(net, x), inputs.labels), y)


@contextmanager
def scaled_outputs(net: nn.Module, shares: Mapping[Group, float]) -> Iterator[None]:
    """HeteroFL's scaler: inside, outputs of pruned layers are divided by their retained share."""
    modules = dict(net.named_modules())

    def divide(share: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda module, _, output: output / share

    handles = [
        modules[g].register_forward_hook(divide(share)) for g, share in shares.items() if share < 1
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def recompute_statistics(net: nn.Module, batches: Iterable[tuple[Inputs, Tensor]]) -> None:
    """Static batch norm: running statistics become averages over the client's samples.

    Those of frozen layers stay as they are.
    """
    kind = nn.modules.batchnorm._BatchNorm
    norms = [m for m in net.modules() if isinstance(m, kind) and m.training]
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # torch then takes the cumulative average
    if norms:
        for x, _ in batches:
            call(net, x)
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum
