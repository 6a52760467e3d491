"""Differences paired by seed, their 95 % intervals, and verdicts on claims.

All variants of one seed share data, initial weights and batches, so d_s = a_s - b_s spreads far
less than a or b.  The interval is mean(d) ± t_{0.975, S-1} std(d) / sqrt(S).  Places (a data set,
a network, a split) are taken as given: an interval covers what other seeds would give there, not
what another data set would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, variance

from fedp3_paper.theory.stats import t_quantile

ENOUGH = 3  # seeds: the interval of two that agree by chance is far too narrow
# Quantiles of Student's t for 1 to 9 degrees of freedom.
T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its limits; a single seed has none."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def text(self) -> str:
        """The interval for a table, as in -1.2 [-1.9, -0.5]."""
        limits = "" if self.low is None else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.mean:+.2f}{limits}"


def interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % limits."""
    return pooled([values])


def pooled(places: Sequence[Sequence[float]]) -> Interval:
    """The mean over P places that have the same S seeds, with the wider of two 95 % intervals.

    One comes from the spread of the seeds' means over places and has S - 1 degrees of freedom;
    with three seeds it can be far too narrow by luck.  The other comes from the spread of seeds
    within each place and has P (S - 1) degrees of freedom, as if places with the same seed had
    nothing in common.
    """
    P, S = len(places), len(places[0])
    means = [fmean(of_seed) for of_seed in zip(*places, strict=True)]
    mean = fmean(means)
    if S < 2:
        return Interval(mean=mean, low=None, high=None, seeds=S)
    between = _t975(S - 1) * sqrt(variance(means) / S)
    within = _t975(P * (S - 1)) * sqrt(fmean(variance(values) for values in places) / (P * S))
    reach = max(between, within)
    return Interval(mean=mean, low=mean - reach, high=mean + reach, seeds=S)


def _t975(freedom: int) -> float:
    return T975[freedom - 1] if freedom <= len(T975) else t_quantile(0.975, freedom)


def judge(d: Interval, low: float, high: float) -> str:
    """Whether the true mean is in (low, high).

    Returns:
        `holds`, `does not hold`, or `not decided` where the interval contains a limit or seeds are
        too few.
    """
    if d.low is None or d.high is None or d.seeds < ENOUGH:
        return "not decided"
    if d.low > low and d.high < high:
        return "holds"
    return "does not hold" if d.high <= low or d.low >= high else "not decided"
