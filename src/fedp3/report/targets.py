"""What a target score cost: rounds, MB, virtual time and energy until it was first reached."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedp3.core.errors import InputError
from fedp3.core.scores import ACCURACY, Score
from fedp3.report.budgets import AXES
from fedp3.report.runs import Curve, Run, Seed, Stat, final, mean, stat

DEFAULT_SHARE = 0.98  # of the best final G, if nobody sets a target


@dataclass(frozen=True, slots=True)
class Target:
    """A score that runs are measured to, and where it comes from."""

    G: float
    origin: str = ""  # empty if the user set it


def choose_target(runs: Sequence[Run], wanted: float | None = None, last: int = 1) -> Target | None:
    """The target of a comparison; None if no run was evaluated.

    Args:
        runs: all runs that are compared.
        wanted: the G that the user asks for; None means a share of the best final G.
        last: G is a mean over this many last evaluations, as in the comparison.
    """
    score = runs[0].score
    if wanted is not None:
        _check(wanted, score)
        return Target(wanted)
    finals = {run.name: mean(final(run, "G", last=last)) for run in runs}
    known = {name: G for name, G in finals.items() if G is not None}
    if not known:
        return None
    leader = score.leader(known)
    best = known[leader]
    target = score.near(best, DEFAULT_SHARE)
    # where less is better, it is more than the best
    origin = f"{100 * (target / best if best else DEFAULT_SHARE):.0f} % of the final G"
    return Target(target, f"{origin} of {leader}" if len(runs) > 1 else origin)


def _check(wanted: float, score: Score) -> None:
    if score.percent and not 0 <= wanted <= 1:
        raise InputError(
            f"target {wanted:g}: {score.name} is a share, so want a number from 0 to 1, as in 0.8"
        )
    if not math.isfinite(wanted):
        raise InputError(f"target {wanted:g}: want a number, a value of {score.name}")


def first_at(curve: Curve, target: float, score: Score = ACCURACY) -> float | None:
    """The x of the first point that reaches the target; None if there is none."""
    return next((x for _, x, y in curve if score.reaches(y, target)), None)


def cost_to(seed: Seed, axis: str, target: float) -> float | None:
    """The cost until the first evaluated round with this G; None if there is none.

    Args:
        seed: the run.
        axis: the kind of cost, a key of `AXES`.
        target: the G.
    """
    return first_at(AXES[axis].curve("G")(seed), target, seed.score)


def cost_row(run: Run, target: Target | None) -> dict[str, object]:
    """The part of a row about a target: its cost on every axis, and how many seeds reached it."""
    row: dict[str, object] = {
        "target": None if target is None else target.G,
        "target_origin": None if target is None else target.origin,
    }
    for axis in AXES:
        costs = [] if target is None else [cost_to(seed, axis, target.G) for seed in run.seeds]
        value = over_all_seeds(costs)
        row[f"{axis}_to_target"] = mean(value)
        row[f"{axis}_to_target_std"] = None if value is None else value.std
        if axis == "round":
            row["seeds_at_target"] = len([cost for cost in costs if cost is not None])
    return row


def over_all_seeds(values: Sequence[float | None]) -> Stat | None:
    """The values over seeds; None if one of them has none."""
    return None if None in values else stat(values)
