"""Scores at equal cost: after so many MB, virtual seconds, joules or rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from fedp3.report import text
from fedp3.report.clock import score_by_energy, score_by_time
from fedp3.report.runs import Curve, Run, Seed, score_by_mb, score_curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A cost at which runs are compared."""

    curve: Callable[[str], Callable[[Seed], Curve]]  # G, D or P by this cost
    amount: Callable[[float], str]  # an amount of it in words
    noun: str
    needs: str  # why no run may have it


AXES: Mapping[str, Axis] = {
    "mb": Axis(curve=score_by_mb, amount=text.mb, noun="traffic", needs="no run was evaluated"),
    "seconds": Axis(
        curve=score_by_time,
        amount=text.duration,
        noun="virtual time",
        needs="no run has devices",
    ),
    "joules": Axis(
        curve=score_by_energy,
        amount=text.energy,
        noun="energy",
        needs="no device has watts",
    ),
    "round": Axis(
        curve=score_curve,
        amount=lambda x: f"{x:g} rounds",
        noun="training",
        needs="no run was evaluated",
    ),
}


def value_at(curve: Curve, x: float) -> float | None:
    """The value of a curve at a cost, linear between its points.

    Outside the curve it is None; for a run that costs nothing it is the last value.
    """
    if not curve:
        return None
    rounds, end, last_value = curve[-1]
    if end == 0 and rounds > 0:
        return last_value
    for (_, x0, y0), (_, x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return last_value if end == x else None


def smoothed(curve: Curve, last: int) -> Curve:
    """Every value replaced by the mean of it and those before it, `last` in all.

    The value before the first round is averaged with none.
    """
    first = [point for point in curve if point[0] == 0]
    trained = curve[len(first) :]
    return first + [
        (t, x, fmean(y for _, _, y in trained[max(0, k + 1 - last) : k + 1]))
        for k, (t, x, _) in enumerate(trained)
    ]


def common_budget(axis: Axis, runs: Sequence[Run], kind: str = "G") -> float | None:
    """The largest cost at which every seed was evaluated; None if some run has no such cost.

    Runs that were not evaluated at all do not count.
    """
    curves = [axis.curve(kind)(seed) for run in runs for seed in run.seeds if _evaluated(seed)]
    if not all(curves):
        return None
    return min((x for curve in curves if (x := curve[-1][1]) > 0), default=None)


def _evaluated(seed: Seed) -> bool:
    return any(event["G"] for event in seed.events)


def scores_at(
    run: Run, axis: Axis, budget: float, kind: str = "G", last: int = 1
) -> dict[int, float]:
    """The score of each seed at a cost, for the seeds that were evaluated before and after it.

    Args:
        run: the run.
        axis: the kind of cost.
        budget: the cost.
        kind: G, D or P.
        last: average this many evaluations up to each point.
    """
    found = {}
    for seed in run.seeds:
        score = value_at(smoothed(axis.curve(kind)(seed), last), budget)
        if score is not None:
            found[int(seed.config["run"]["seed"])] = score
    return found
