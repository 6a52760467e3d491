"""Virtual time and energy of runs: totals, curves, and what a target accuracy took.

Runs with devices have a virtual clock.  Every function here returns None or nothing for a run
without one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedp3.core.scores import ACCURACY, Score
from fedp3.report.runs import Curve, Json, Run, Seed, final, mean

DEFAULT_SHARE = 0.98  # of the best final G, if nobody sets a target


@dataclass(frozen=True, slots=True)
class Target:
    """An accuracy that runs are timed to, and where it comes from."""

    G: float
    origin: str = ""  # empty if the user set it


def choose_target(runs: Sequence[Run], wanted: float | None = None, last: int = 1) -> Target | None:
    """The target of a comparison; None if no run has a clock or none was evaluated.

    Args:
        runs: all runs that are compared, with and without a clock.
        wanted: the G that the user asks for; None means a share of the best final G.
        last: G is a mean over this many last evaluations, as in the comparison.
    """
    if not any(map(has_clock, runs)):
        return None
    if wanted is not None:
        return Target(wanted)
    finals = {run.name: mean(final(run, "G", last=last)) for run in runs}
    known = {name: G for name, G in finals.items() if G is not None}
    if not known:
        return None
    kind = runs[0].seeds[0].score
    best = max(known, key=lambda name: kind.utility(known[name]))  # the first of equal ones
    origin = f"{100 * DEFAULT_SHARE:.0f} % of the final G"
    G = kind.near(known[best], DEFAULT_SHARE)
    return Target(G, f"{origin} of {best}" if len(runs) > 1 else origin)


def has_clock(run: Run) -> bool:
    """Whether any round of the run has virtual time."""
    return any(clocks(seed) for seed in run.seeds)


def clocks(seed: Seed) -> list[tuple[Json, Json]]:
    """Every round that has virtual time, with its clock."""
    return [(event, event["clock"]) for event in seed.events if event.get("clock")]


# --------------------------------------------------------------------------- totals


def virtual_seconds(seed: Seed) -> float | None:
    """Virtual time of the run until the end of its last round."""
    timed = clocks(seed)
    return float(timed[-1][1]["ended"]) if timed else None


def joules(seed: Seed) -> float | None:
    """Energy of all clients over the run; None if it is not known for every round."""
    spent = [clock["joules"] for _, clock in clocks(seed)]
    return float(sum(spent)) if spent and None not in spent else None


# --------------------------------------------------------------------------- curves


def score_by_time(kind: str, unit: float = 1.0) -> Callable[[Seed], Curve]:
    """G, D or P by the virtual time at the end of the round, in units of so many seconds."""
    return lambda seed: [
        (event["round"], clock["ended"] / unit, event[kind]["mean"])
        for event, clock in clocks(seed)
        if event[kind]
    ]


def score_by_energy(kind: str, unit: float = 1.0) -> Callable[[Seed], Curve]:
    """G, D or P by the energy spent so far, in units of so many joules.

    The curve ends before the first round whose energy is not known.
    """

    def curve(seed: Seed) -> Curve:
        spent, points = 0.0, []
        for event, clock in clocks(seed):
            if clock["joules"] is None:
                break
            spent += clock["joules"]
            if event[kind]:
                points.append((event["round"], spent / unit, event[kind]["mean"]))
        return points

    return curve


def first_at(curve: Curve, target: float, kind: Score = ACCURACY) -> float | None:
    """The x of the first point at the target or better; None if there is none."""
    return next((x for _, x, y in curve if kind.reaches(y, target)), None)


def seconds_to(seed: Seed, target: float) -> float | None:
    """Virtual time until the first evaluated round with this G."""
    return first_at(score_by_time("G")(seed), target, seed.score)


def joules_to(seed: Seed, target: float) -> float | None:
    """Energy until the first evaluated round with this G."""
    return first_at(score_by_energy("G")(seed), target, seed.score)
