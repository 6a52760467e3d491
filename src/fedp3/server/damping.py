"""Damping: clients that did not upload a coordinate count as votes for its current value.

With r the share of a round's clients that uploaded a coordinate, and d = `aggregate.damp`,

    f = 1 - d (1 - r);    w <- f mean + (1 - f) w

so that d = 0 is the mean over the senders, as without damping, and d = 1 is CoCoFL's rule
w <- r mean + (1 - r) w.  Every client has one vote, whatever its weight in the mean is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.types import AcceptedUpdate, Params
from fedp3.server.aggregators import AggregateSettings, Aggregator, uploaded_mask


def with_damping(aggregator: Aggregator, settings: AggregateSettings, spec: RunSpec) -> Aggregator:
    """The aggregator followed by damping."""
    if settings.damp == 0:
        return aggregator

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        votes = _Votes(spec)
        mean, state = aggregator.apply(W, votes.counting(updates), state)
        return {n: _damped(W[n], mean[n], votes.share(n), settings.damp) for n in W}, state

    return replace(aggregator, apply=apply)


class _Votes:
    """How many of a round's clients uploaded each coordinate."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.clients = 0
        self.dense: dict[str, int] = {}  # uploads of a whole tensor
        self.masked: dict[str, Tensor] = {}  # uploads of a part, by coordinate

    def counting(self, updates: Iterable[AcceptedUpdate]) -> Iterator[AcceptedUpdate]:
        """The same updates, counted as they pass."""
        layers = self.spec.layers
        for u in updates:
            self.clients += 1
            for l in u.plan.uploaded:
                for n in layers.layers[l]:
                    mask = uploaded_mask(u, n, l, self.spec)
                    if mask is None:
                        self.dense[n] = self.dense.get(n, 0) + 1
                        continue
                    count = self.masked.setdefault(
                        n, torch.zeros(layers.shapes[n], dtype=torch.float64)
                    )
                    count += M.as_bool(mask, layers.shapes[n])
            yield u

    def share(self, n: str) -> Tensor:
        """The share r of each coordinate of a tensor, or one number for all of them."""
        none = torch.zeros((), dtype=torch.float64)
        return (self.masked.get(n, none) + self.dense.get(n, 0)) / max(1, self.clients)


def _damped(w: Tensor, mean: Tensor, share: Tensor, damp: float) -> Tensor:
    factor = 1 - damp * (1 - share)
    if bool((factor == 1).all()):
        return mean
    # Where nobody uploaded, the mean is w: the difference is 0, and w keeps its bits.
    moved = (w + factor * (mean.double() - w)).to(w.dtype)
    return torch.where(factor == 1, mean, moved)
