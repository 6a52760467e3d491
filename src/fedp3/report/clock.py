"""Virtual time and energy of runs: totals and curves.

Runs with devices have a virtual clock.  Every function here returns None or nothing for a run
without one.
"""

from collections.abc import Callable

from fedp3.report.runs import Curve, Json, Run, Seed, start


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
        *(start(seed, kind) if clocks(seed) else ()),
        *(
            (event["round"], clock["ended"] / unit, event[kind]["mean"])
            for event, clock in clocks(seed)
            if event.get(kind)
        ),
    ]


def score_by_energy(kind: str, unit: float = 1.0) -> Callable[[Seed], Curve]:
    """G, D or P by the energy spent so far, in units of so many joules.

    The curve ends before the first round whose energy is not known.
    """

    def curve(seed: Seed) -> Curve:
        timed = clocks(seed)
        known = bool(timed) and timed[0][1]["joules"] is not None
        spent, points = 0.0, [*start(seed, kind)] if known else []
        for event, clock in timed:
            if clock["joules"] is None:
                break
            spent += clock["joules"]
            if event.get(kind):
                points.append((event["round"], spent / unit, event[kind]["mean"]))
        return points

    return curve
