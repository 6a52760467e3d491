"""Runs side by side: accuracies, traffic, work and time, and accuracy at the MB that every run has spent."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from fedp3.report.runs import (
    KINDS,
    Curve,
    Run,
    Seed,
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


def compare(folders: Iterable[Path], last: int = 1) -> list[dict[str, object]]:
    """One row per run: accuracies, traffic, time, epsilon, and accuracy at the MB every run has spent.

    `budget_mb` is the smallest traffic, up and down, at which a seed was last evaluated; `G_at_mb`, `D_at_mb` and
    `P_at_mb` are read off the curves by MB, between two evaluations on the straight line that joins them.  `gflop` is
    what a client computed on average over the run, `fleet_seconds` what the rounds would take on the fleet.  With
    `last` above 1, G and D are means over so many last evaluations of each seed, which sway less than the final one; P
    is the final one, of all clients after all that the method lets them tune.
    """
    return compare_runs(load_runs(folders), last)


def compare_runs(runs: Sequence[Run], last: int = 1) -> list[dict[str, object]]:
    """`compare` for runs already read."""
    curves = [score_by_mb("G")(seed) for run in runs for seed in run.seeds]
    budget = min((c[-1][1] for c in curves if c and c[-1][1] > 0), default=None)
    rows = []
    for run in runs:
        row: dict[str, object] = {"run": run.name, "method": run.seeds[0].config["method"], "seeds": len(run.seeds)}
        for kind in KINDS:
            value = final(run, kind, last=1 if kind == "P" else last)
            row |= {kind: mean(value), f"{kind}_std": value and value.std}
        row["worst"] = mean(final(run, "G", "worst", last))
        for way in ("up", "down"):
            mb, share = moved(run, way)
            row |= {f"mb_{way}": mean(mb), f"share_{way}": share}
        row |= {
            "seconds": mean(stat(map(seconds, run.seeds))),
            "epsilon_max": max((e for s in run.seeds if (e := epsilon(s)) is not None), default=None),
            "privacy": run.seeds[0].result.get("privacy"),  # what gives the epsilon its meaning
            "rejected": sum(len(rejections(s)) for s in run.seeds),
            "gflop": mean(stat(map(client_gflop, run.seeds))),
            "fleet_seconds": mean(stat(map(fleet_seconds, run.seeds))),
            **{f"{kind}_at_mb": _at_budget(run, kind, budget) for kind in KINDS},
            "budget_mb": budget,
            "unfinished": ", ".join(_how_far(s) for s in run.seeds if not s.result),
        }
        rows.append(row)
    return rows


def _how_far(seed: Seed) -> str:
    run = seed.config["run"]
    return f"seed {run['seed']} at round {len(seed.events)} of {run['rounds']}"


def _at_budget(run: Run, kind: str, budget: float | None) -> float | None:
    """The mean over seeds, if all of them have a score there: over some it would say something else."""
    if budget is None:
        return None
    each = [at_mb(score_by_mb(kind)(seed), budget) for seed in run.seeds]
    return None if None in each else mean(stat(each))


def at_mb(curve: Curve, budget: float) -> float | None:
    """The height of a curve at this x, linear between its points; None outside them; where nothing moved, the last."""
    if curve and curve[-1][1] == 0:
        return curve[-1][2]
    for (_, x0, y0), (_, x1, y1) in pairwise(curve):
        if x0 <= budget <= x1:
            return y0 + (y1 - y0) * (budget - x0) / (x1 - x0) if x1 > x0 else y1
    return curve[-1][2] if curve and curve[-1][1] == budget else None
