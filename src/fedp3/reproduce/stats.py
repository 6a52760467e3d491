"""Differences paired by seed, with 95 % intervals, and what they say of a claim.

All variants of one seed share data, initial weights and batches, so d_s = a_s - b_s has far less spread than a or b;
the interval is mean(d) ± t_{0.975, S-1} std(d) / sqrt(S).  Places (a data set, a net, a split) are taken as given:
an interval says what other seeds would give there, not what another data set would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, variance

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
    return pooled([values])


def pooled(places: Sequence[Sequence[float]]) -> Interval:
    """The mean over places that have the same S seeds, with the wider of two 95 % intervals.

    One takes the spread of the seeds' means over places, S - 1 degrees of freedom; with three seeds it can be
    next to nothing by luck.  The other takes the spread of seeds within each of the P places, P (S - 1) degrees of
    freedom, as if places with the same seed had nothing in common.
    """
    P, S = len(places), len(places[0])
    means = [fmean(each) for each in zip(*places, strict=True)]
    mean = fmean(means)
    if S < 2:
        return Interval(mean, None, None, S)
    between = _t975(S - 1) * sqrt(variance(means) / S)
    within = _t975(P * (S - 1)) * sqrt(fmean(variance(values) for values in places) / (P * S))
    reach = max(between, within)
    return Interval(mean, mean - reach, mean + reach, S)


def _t975(freedom: int) -> float:
    return T975[freedom - 1] if freedom <= len(T975) else t_quantile(0.975, freedom)


def judge(d: Interval, low: float, high: float) -> str:
    """Whether the true mean lies in (low, high): `not decided` where the interval holds a limit, or seeds are few."""
    if d.low is None or d.high is None or d.seeds < ENOUGH:
        return "not decided"
    if d.low > low and d.high < high:
        return "holds"
    return "does not hold" if d.high <= low or d.low >= high else "not decided"
