"""FIARSE's gradient through the threshold (Wu et al., 2024).

A sub-model retains the weights of at least theta in magnitude, M(w) = 1 where |w| >= theta.  The
mask is a function of the weights, and its derivative is replaced by 2 theta / (|w| + theta)^2 where
it retains a weight.  With g the gradient of the loss with respect to M(w) w, the weights then have
the gradient

    g M(w) (1 + 2 theta |w| / (|w| + theta)^2)

which is 1.5 g at the threshold and g far above it: weights that may be pruned soon move faster.  A
weight that falls below the threshold during local training is pruned from then on.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedp3.client.step_source import Gradient
from fedp3.core.types import Params
from fedp3.data.inputs import Inputs


def through_threshold(gradient: Gradient, start: Params, masks: Mapping[str, Tensor]) -> Gradient:
    """The gradient of the loss as a function of weights that decide about their own mask.

    Args:
        gradient: the gradient of the loss under a fixed mask.
        start: the weights that the client was sent.
        masks: the retained coordinates of pruned tensors; theta is the smallest of their weights.
    """
    retained = [start[n].detach().abs()[mask] for n, mask in masks.items()]
    if not any(len(weights) for weights in retained):
        return gradient
    theta = torch.cat(retained).min()

    def with_mask(
        net: nn.Module, x: Inputs, y: Tensor, W: Params, active: Params
    ) -> tuple[float, list[Tensor]]:
        sizes = {n: W[n].detach().abs() for n in W if n in masks}
        kept = {n: (size >= theta) & masks[n] for n, size in sizes.items()}
        with _pruned(W, kept):
            loss, grads = gradient(net, x, y, W, active)
        for n, g in zip(W, grads, strict=True):
            if n in kept:
                g.mul_(torch.where(kept[n], 1 + _slope(sizes[n], theta), 0))
        return loss, grads

    return with_mask


def _slope(size: Tensor, theta: Tensor) -> Tensor:
    """2 theta |w| / (|w| + theta)^2, and 0 where both are 0."""
    return torch.nan_to_num(2 * theta * size / (size + theta) ** 2)


@contextmanager
def _pruned(W: Params, kept: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside this context, weights outside the mask are zero; afterwards, W is restored."""
    full = {n: W[n].data for n in kept}
    for n, w in full.items():
        # In place, because a product would lose the channels-last layout.
        W[n].data = w.clone().mul_(kept[n].to(w.dtype))
    try:
        yield
    finally:
        for n, w in full.items():
            W[n].data = w
