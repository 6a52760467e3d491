"""The one masked mean: of each coordinate, over those who sent it.

Sums run in double precision, in the order given and undivided: whole weights then add up without rounding, so their
scale leaves no trace, and equal uploads come back bit-equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.masks import Kept

AT_ONCE = 1 << 17  # numbers of small uploads of one tensor that are added in one call


@dataclass(slots=True)
class Sum:
    """sum_i a_i w_i and sum_i a_i of one tensor so far: no tensor of weights while everybody sent all of it."""

    num: Tensor
    den: Tensor | list[float] = field(default_factory=list)
    waiting: list[Tensor] = field(default_factory=list)  # the last ones of those in `den`, not yet in `num`

    def add_whole(self, rows: Sequence[Tensor], a: Sequence[float]) -> None:
        """Uploads of all of it, one after the other."""
        if not isinstance(self.den, list):
            for w, a_i in zip(rows, a, strict=True):
                self.add(w, None, a_i)
            return
        most, done = -(-AT_ONCE // max(1, self.num.numel())), 0
        while done < len(rows):
            end = done + most - len(self.waiting)
            self.waiting += rows[done:end]
            self.den += a[done:end]
            done = end
            if len(self.waiting) == most:
                self._settle()

    def add(self, w: Tensor, kept: Kept, a: float) -> None:
        """An upload of what is kept of it."""
        if kept is None and isinstance(self.den, list):
            self.add_whole([w], [a])
            return
        if isinstance(self.den, list):
            self._settle()
            self.den = torch.full_like(self.num, math.fsum(self.den))
        if isinstance(kept, Tensor):  # adding zeros costs less than reaching for the places of the others
            self.num += torch.where(kept, w, 0).to(torch.float64).mul_(a)
            self.den += kept.to(torch.float64).mul_(a)
            return
        values = M.take(w, kept).to(torch.float64) * a
        M.add_at(self.num, values, kept)
        M.add_at(self.den, torch.full_like(values, a), kept)

    def _settle(self) -> None:
        some, self.waiting = self.waiting, []
        assert isinstance(self.den, list)
        if len(some) == 1:
            self.num.add_(some[0], alpha=self.den[-1])
        elif some:
            rows, a = torch.stack(some), self.den[-len(some) :]
            if a.count(1.0) < len(a):  # times one changes no bit
                rows = rows * torch.tensor(a, dtype=torch.float64).view(-1, *[1] * self.num.dim())
            self.num += rows.sum(0, dtype=torch.float64)

    def mean(self, old: Tensor) -> Tensor:
        """sum_i a_i w_i / sum_i a_i, and `old` where nobody sent anything; the sum is used up."""
        if isinstance(self.den, list):
            self._settle()
            return self.num.div_(math.fsum(self.den)).to(old.dtype)
        return torch.where(self.den > 0, (self.num / self.den).to(old.dtype), old)
