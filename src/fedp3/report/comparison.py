"""Runs side by side: accuracy, traffic, computation and time, and accuracy at equal traffic."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from fedp3.report.clock import (
    Target,
    choose_target,
    joules,
    joules_to,
    seconds_to,
    virtual_seconds,
)
from fedp3.report.runs import (
    KINDS,
    Curve,
    Run,
    Seed,
    Stat,
    client_epsilon,
    client_gflop,
    epsilon,
    final,
    fleet_seconds,
    load_runs,
    mean,
    moved,
    rejections,
    score_by_mb,
    seconds,
    stat,
)

# Key of a row -> name of its column: two promises, never to be taken for each other.
EPSILONS: Mapping[str, str] = {
    "epsilon_max": "epsilon",
    "client_epsilon": "client-level epsilon",
}


def shown_epsilons(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys of `EPSILONS` of which any of these rows has a value."""
    return [key for key in EPSILONS if any(row[key] is not None for row in rows)]


def compare(
    folders: Iterable[Path], last: int = 1, target: float | None = None
) -> list[dict[str, object]]:
    """Compare runs; returns one row per run.

    Args:
        folders: the run folders.
        last: with more than 1, G and D are means over this many last evaluations of each seed,
            which vary less than the final one.  P is always the final one, over all clients.
        target: the G that runs with a virtual clock are timed to; None means 98 % of the best
            final G of these runs.

    Some keys of a row need an explanation:
        budget_mb: the traffic, up and down, that every seed of every run reached at an evaluation.
        G_at_mb, D_at_mb, P_at_mb: accuracy at that traffic, interpolated between two evaluations.
        gflop: computation of one client over the run, mean over clients.
        fleet_seconds: estimated time of the rounds on the fleet.
        target: the G that runs are timed to, and target_origin where it comes from; None if no run
            has a virtual clock.
        seeds_at_target: how many seeds reached the target in an evaluated round.
        seconds_to_target, joules_to_target: virtual time and energy until the first such round;
            None unless all seeds reached it, and for energy unless every device has watts.
        virtual_seconds, joules: the totals of the run.
    """
    return compare_runs(load_runs(folders), last, target)


def compare_runs(
    runs: Sequence[Run], last: int = 1, target: float | None = None
) -> list[dict[str, object]]:
    """Like `compare`, for runs that were already read."""
    budget = _common_budget(runs)
    chosen = choose_target(runs, target, last)
    return [_row(run, last, budget) | _clock(run, chosen) for run in runs]


def _common_budget(runs: Sequence[Run]) -> float | None:
    """The smallest traffic at which a seed was last evaluated; None if nothing was sent."""
    curves = [score_by_mb("G")(seed) for run in runs for seed in run.seeds]
    ends = [curve[-1][1] for curve in curves if curve]
    return min((mb for mb in ends if mb > 0), default=None)


def _row(run: Run, last: int, budget: float | None) -> dict[str, object]:
    row: dict[str, object] = {
        "run": run.name,
        "method": run.seeds[0].config["method"],
        "seeds": len(run.seeds),
    }
    for kind in KINDS:
        value = final(run, kind, last=1 if kind == "P" else last)
        row[kind] = mean(value)
        row[f"{kind}_std"] = None if value is None else value.std
    row["worst"] = mean(final(run, "G", "worst", last))
    for way in ("up", "down"):
        mb, share = moved(run, way)
        row |= {f"mb_{way}": mean(mb), f"share_{way}": share}
    spent = [e for e in map(epsilon, run.seeds) if e is not None]
    client_spent = [e for e in map(client_epsilon, run.seeds) if e is not None]
    result = run.seeds[0].result
    return row | {
        "seconds": mean(stat(map(seconds, run.seeds))),
        # each epsilon with the settings that it belongs to
        "epsilon_max": max(spent, default=None),
        "privacy": result.get("privacy"),
        "client_epsilon": max(client_spent, default=None),
        "client_privacy": result.get("client_privacy"),
        "rejected": sum(len(rejections(seed)) for seed in run.seeds),
        "gflop": mean(stat(map(client_gflop, run.seeds))),
        "fleet_seconds": mean(stat(map(fleet_seconds, run.seeds))),
        **{f"{kind}_at_mb": _at_budget(run, kind, budget) for kind in KINDS},
        "budget_mb": budget,
        "unfinished": ", ".join(_progress(seed) for seed in run.seeds if not seed.result),
    }


def _clock(run: Run, target: Target | None) -> dict[str, object]:
    """The part of a row about virtual time and energy."""
    totals = {
        "virtual_seconds": _over_all_seeds([virtual_seconds(seed) for seed in run.seeds]),
        "joules": _over_all_seeds([joules(seed) for seed in run.seeds]),
    }
    times, energies = [], []
    if target is not None:
        times = [seconds_to(seed, target.G) for seed in run.seeds]
        energies = [joules_to(seed, target.G) for seed in run.seeds]
    totals["seconds_to_target"] = _over_all_seeds(times)
    totals["joules_to_target"] = _over_all_seeds(energies)
    row: dict[str, object] = {
        "target": None if target is None else target.G,
        "target_origin": None if target is None else target.origin,
        "seeds_at_target": len([t for t in times if t is not None]),
    }
    for key, value in totals.items():
        row |= {key: mean(value), f"{key}_std": None if value is None else value.std}
    return row


def _over_all_seeds(values: Sequence[float | None]) -> Stat | None:
    """The values over seeds; None if one of them has none."""
    return None if None in values else stat(values)


def _progress(seed: Seed) -> str:
    run = seed.config["run"]
    return f"seed {run['seed']} at round {len(seed.events)} of {run['rounds']}"


def _at_budget(run: Run, kind: str, budget: float | None) -> float | None:
    """The mean over all seeds; None if one of them has no score at this traffic."""
    if budget is None:
        return None
    scores = [at_mb(score_by_mb(kind)(seed), budget) for seed in run.seeds]
    return None if None in scores else mean(stat(scores))


def at_mb(curve: Curve, budget: float) -> float | None:
    """The value of a curve at this traffic, linear between its points.

    Outside the curve it is None; for a run that sends nothing it is the last value.
    """
    if not curve:
        return None
    _, end, last_value = curve[-1]
    if end == 0:
        return last_value
    for (_, x0, y0), (_, x1, y1) in pairwise(curve):
        if x0 <= budget <= x1:
            return y0 + (y1 - y0) * (budget - x0) / (x1 - x0) if x1 > x0 else y1
    return last_value if end == budget else None
