"""The running masked mean of one tensor: each coordinate over the clients that uploaded it.

Sums run in double precision and in the order given; the division comes last.  Integer weights then
add up without rounding, so that their scale leaves no trace, and equal uploads come back bit-equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.types import Mask
from fedp3.server.grouping import GROUP_SIZE


@dataclass(slots=True)
class RunningMean:
    """sum_i a_i w_i and sum_i a_i of one tensor so far.

    The weights are a list of numbers while all uploads are dense, and a tensor after the first one
    with a mask.
    """

    total: Tensor
    weights: Tensor | list[float] = field(default_factory=list)
    # the newest uploads: their weights are in `weights` already, they are not in `total` yet
    waiting: list[Tensor] = field(default_factory=list)

    def add_dense(self, rows: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Add dense uploads, one after the other."""
        if not isinstance(self.weights, list):
            for w, weight in zip(rows, weights, strict=True):
                self.add(w, None, weight)
            return
        limit = math.ceil(GROUP_SIZE / max(1, self.total.numel()))
        done = 0
        while done < len(rows):
            end = done + limit - len(self.waiting)
            self.waiting += rows[done:end]
            self.weights += weights[done:end]
            done = end
            if len(self.waiting) == limit:
                self._settle()

    def add(self, w: Tensor, mask: Mask, weight: float) -> None:
        """Add an upload of the coordinates in the mask."""
        if mask is None and isinstance(self.weights, list):
            self.add_dense([w], [weight])
            return
        if isinstance(self.weights, list):
            self._settle()
            self.weights = torch.full_like(self.total, math.fsum(self.weights))
        if isinstance(mask, Tensor):  # adding zeros is faster than gathering the coordinates
            self.total += torch.where(mask, w, 0).to(torch.float64).mul_(weight)
            self.weights += mask.to(torch.float64).mul_(weight)
            return
        values = M.take(w, mask).to(torch.float64) * weight
        M.add_at(self.total, values, mask)
        M.add_at(self.weights, torch.full_like(values, weight), mask)

    def _settle(self) -> None:
        waiting, self.waiting = self.waiting, []
        assert isinstance(self.weights, list)
        if len(waiting) == 1:
            self.total.add_(waiting[0], alpha=self.weights[-1])
        elif waiting:
            rows, weights = torch.stack(waiting), self.weights[-len(waiting) :]
            if weights.count(1.0) < len(weights):  # a factor of one changes no bit
                factors = torch.tensor(weights, dtype=torch.float64)
                rows = rows * factors.view(-1, *[1] * self.total.dim())
            self.total += rows.sum(0, dtype=torch.float64)

    def mean(self, old: Tensor) -> Tensor:
        """sum_i a_i w_i / sum_i a_i, and `old` where nobody uploaded anything.

        It may divide `total` in place, so that it can be called once only.
        """
        if isinstance(self.weights, list):
            self._settle()
            return self.total.div_(math.fsum(self.weights)).to(old.dtype)
        return torch.where(self.weights > 0, (self.total / self.weights).to(old.dtype), old)
