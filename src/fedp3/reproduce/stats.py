"""Differences paired by seed, with 95 % intervals, and what they say of a claim.

All variants of one seed share data, initial weights and batches, so d_s = a_s - b_s has far less spread than a or b;
the interval is mean(d) ± t_{0.975, S-1} std(d) / sqrt(S).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from fedp3.theory.stats import t_quantile

ENOUGH = 3  # seeds; two that agree by chance have an interval of next to nothing
T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)  # 1 to 9 degrees of freedom


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds; one seed has no limits."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def text(self) -> str:
        """For a table: -1.2 [-1.9, -0.5], 3 seeds."""
        limits = "" if self.low is None else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.mean:+.2f}{limits}"


def interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % limits."""
    n = len(values)
    mean = fmean(values)
    if n < 2:
        return Interval(mean, None, None, n)
    t = T975[n - 2] if n - 1 <= len(T975) else t_quantile(0.975, n - 1)
    reach = t * stdev(values) / sqrt(n)
    return Interval(mean, mean - reach, mean + reach, n)


def judge(d: Interval, low: float, high: float) -> str:
    """Whether the true mean lies in (low, high): `not decided` where the interval holds a limit, or seeds are few."""
    if d.low is None or d.high is None or d.seeds < ENOUGH:
        return "not decided"
    if d.low > low and d.high < high:
        return "holds"
    return "does not hold" if d.high <= low or d.low >= high else "not decided"
