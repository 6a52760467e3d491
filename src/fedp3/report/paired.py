"""Differences between runs, paired by seed, with intervals and verdicts.

Two runs with the same seed share data, split, initial weights and participants, so their
difference varies far less than either score.  With differences d_1, ..., d_S over S seeds the
interval is mean(d) ± t_{0.975, S-1} std(d) / sqrt(S), where t is a quantile of Student's t.  It
covers what other seeds would give on the same data, not what other data would.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

from fedp3.core.scores import Score

ERROR = 0.05  # chance of any false verdict in a comparison
ENOUGH_SEEDS = 3  # two differences that agree by chance would give far too narrow an interval
BETTER, WORSE, UNDECIDED = "better", "worse", "not decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A mean difference over seeds, with the limits of its interval.

    Limits and p-value are None where seeds are too few, or where all differences are equal: their
    spread cannot be estimated then.
    """

    mean: float
    seeds: int
    low: float | None = None
    high: float | None = None
    p: float | None = None  # two-sided, of the hypothesis that the true difference is 0


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Our scores minus theirs over the seeds that both have; None if there is none.

    Args:
        ours: seed -> score.
        theirs: seed -> score.
    """
    ds = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not ds:
        return None
    mean, seeds = statistics.fmean(ds), len(ds)
    spread = statistics.stdev(ds) if seeds > 1 else 0.0
    # Rounding alone makes equal differences differ in the last bits.
    if seeds < ENOUGH_SEEDS or spread <= 1e-12 * max(map(abs, ds)):
        return Difference(mean=mean, seeds=seeds)
    error, freedom = spread / math.sqrt(seeds), seeds - 1
    reach = float(stdtrit(freedom, 1 - ERROR / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(mean) / error))
    return Difference(mean=mean, seeds=seeds, low=mean - reach, high=mean + reach, p=p)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the given order.

    If every adjusted p-value below 0.05 is taken for a difference, the chance of any false one
    is at most 5 %, however many are compared.  A p-value that is None counts as a comparison.
    """
    ordered = sorted((p, k) for k, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, k) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ps) - rank) * p))
        adjusted[k] = largest
    return adjusted


def verdict(d: Difference | None, adjusted_p: float | None, score: Score) -> str:
    """Whether we are better or worse, or whether the seeds do not decide it.

    Args:
        d: our scores minus theirs.
        adjusted_p: its p-value after `holm`.
        score: what both are scores of.
    """
    if d is None or adjusted_p is None or adjusted_p >= ERROR:
        return UNDECIDED
    return BETTER if score.better(d.mean, 0.0) else WORSE


def reason(d: Difference | None, adjusted_p: float | None = None, comparisons: int = 1) -> str:
    """Why nothing is decided although there is a difference; empty if nothing needs explaining.

    Args:
        d: our scores minus theirs.
        adjusted_p: its p-value after `holm`.
        comparisons: the number of comparisons that `holm` corrected for.
    """
    if d is None:
        return "no seed in common"
    if d.seeds < ENOUGH_SEEDS:
        return f"{d.seeds} {'seed' if d.seeds == 1 else 'seeds'}, want {ENOUGH_SEEDS} or more"
    if d.p is None:
        return "the same difference in every seed"
    if adjusted_p is not None and d.p < ERROR <= adjusted_p:
        return f"too few seeds for {comparisons} comparisons"
    return ""
