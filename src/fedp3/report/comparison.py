"""Runs side by side: scores, traffic, computation and time, and scores at equal traffic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fedp3.report.budgets import AXES, common_budget, scores_at
from fedp3.report.clock import joules, virtual_seconds
from fedp3.report.runs import (
    KINDS,
    Run,
    Seed,
    client_epsilon,
    client_gflop,
    epsilon,
    final,
    fleet_seconds,
    load_runs,
    mean,
    moved,
    rejections,
    seconds,
    stat,
)
from fedp3.report.targets import choose_target, cost_row, over_all_seeds

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
        target: the G whose cost is measured; None means 98 % of the best final G of these runs
            (102 % where less is better).

    Some keys of a row need an explanation:
        budget_mb: the traffic, up and down, that every seed of every run reached at an evaluation.
        score: what G, D and P are: its name, whether lower is better, and whether it is a share.
        G_at_mb, D_at_mb, P_at_mb: scores at that traffic, interpolated between two evaluations.
        gflop: computation of one client over the run, mean over clients.
        fleet_seconds: estimated time of the rounds on the fleet.
        target: the G whose cost is measured, and target_origin where it comes from.
        seeds_at_target: how many seeds reached the target in an evaluated round.
        round_to_target, mb_to_target, seconds_to_target, joules_to_target: rounds, traffic, virtual
            time and energy until the first such round; None unless all seeds reached it, for time
            without a virtual clock, and for energy unless every device has watts.
        virtual_seconds, joules: the totals of the run.
    """
    return compare_runs(load_runs(folders), last, target)


def compare_runs(
    runs: Sequence[Run], last: int = 1, target: float | None = None
) -> list[dict[str, object]]:
    """Like `compare`, for runs that were already read."""
    budget = common_budget(AXES["mb"], runs)
    chosen = choose_target(runs, target, last)
    return [_row(run, last, budget) | cost_row(run, chosen) for run in runs]


def _row(run: Run, last: int, budget: float | None) -> dict[str, object]:
    row: dict[str, object] = {
        "run": run.name,
        "method": run.seeds[0].config["method"],
        "seeds": len(run.seeds),
        "score": asdict(run.score),
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
        "virtual_seconds": mean(over_all_seeds([virtual_seconds(seed) for seed in run.seeds])),
        "joules": mean(over_all_seeds([joules(seed) for seed in run.seeds])),
        "unfinished": ", ".join(_progress(seed) for seed in run.seeds if not seed.result),
    }


def _progress(seed: Seed) -> str:
    run = seed.config["run"]
    return f"seed {run['seed']} at round {len(seed.events)} of {run['rounds']}"


def _at_budget(run: Run, kind: str, budget: float | None) -> float | None:
    """The mean over all seeds; None if one of them has no score at this traffic."""
    if budget is None:
        return None
    scores = scores_at(run, AXES["mb"], budget, kind)
    return mean(stat(scores.values())) if len(scores) == len(run.seeds) else None
