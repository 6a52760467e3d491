"""`fedp3 compare`: runs side by side."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, Folders
from fedp3.cli.report import run_folders

EXPLANATIONS = (
    "accuracies are means over clients and seeds, ± one standard deviation over seeds",
    "MB are of the entire run, in parentheses as a share of dense FedAvg",
    "accuracies at equal MB are interpolated between evaluations, P over each round's participants",
    "GFLOP are per client; fleet s is the estimated time on devices as capable as their keep share",
    "seconds were measured on the machine that ran it; - means that there are too few evaluations",
)


def compare(
    folders: Folders,
    last: Annotated[
        int,
        typer.Option("--last", min=1, help="Average G and D over this many last evaluations"),
    ] = 1,
    json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown")
    ] = False,
) -> None:
    """Compare runs: accuracy, traffic, computation and time, and accuracy at equal traffic.

    Example: fedp3 compare sweeps/a/*
    """
    from fedp3.report import compare as compare_folders
    from fedp3.report.comparison import EPSILONS, shown_epsilons

    rows = compare_folders(run_folders(folders), last)
    for row in rows:
        if row["unfinished"]:
            terminal.note(
                f"warning: {row['run']} is not finished and counts up to its last round: "
                f"{row['unfinished']}"
            )
    if json:
        terminal.as_json({"runs": rows})
        return
    epsilons = shown_epsilons(rows)
    columns = _columns(rows[0]["budget_mb"], [EPSILONS[key] for key in epsilons])
    lines = [_cells(row, epsilons) for row in rows]
    if markdown:
        _show_markdown(columns, lines)
        _show_guarantees(rows)
        return
    terminal.table(columns, lines)
    _show_guarantees(rows)
    for explanation in EXPLANATIONS:
        terminal.line(explanation)
    terminal.line(
        "next: " + terminal.command("report", *run_folders(folders), "--out", "compare.html")
    )


def _columns(budget: object, epsilons: Sequence[str]) -> dict[str, str]:
    at_budget = f"{budget:.3g} MB" if isinstance(budget, float) else "equal MB"
    numbers = [
        "seeds",
        "G",
        "D",
        "P",
        "worst",
        "MB up",
        "MB down",
        "GFLOP",
        "fleet s",
        "seconds",
        f"G, P at {at_budget}",
    ]
    return {"run": "left", **dict.fromkeys([*numbers, *epsilons], "right")}


def _show_markdown(columns: Mapping[str, str], lines: Sequence[Sequence[str]]) -> None:
    alignment = ["---" if side == "left" else "---:" for side in columns.values()]
    for cells in (list(columns), alignment, *lines):
        terminal.line(f"| {' | '.join(cells)} |")


def _show_guarantees(rows: Sequence[Mapping[str, Any]]) -> None:
    """Explain the epsilon of every run under LDP or client-level DP."""
    for row in rows:
        if row["privacy"]:
            terminal.line(f"\n{row['run']}: {terminal.guarantee(row['privacy'])}")
        if row["client_privacy"]:
            terminal.line(f"\n{row['run']}: {terminal.client_guarantee(row['client_privacy'])}")


def _cells(row: Mapping[str, Any], epsilons: Sequence[str]) -> list[str]:
    cells = [str(row["run"]), str(row["seeds"])]
    for kind in ("G", "D", "P"):
        std = row[f"{kind}_std"]
        spread = "" if std is None else f" ± {100 * std:.1f}"
        cells.append(terminal.share(row[kind]) + spread)
    cells.append(terminal.share(row["worst"]))
    cells += [
        f"{row[f'mb_{way}']:.1f} ({terminal.share(row[f'share_{way}'], 0)})"
        for way in ("up", "down")
    ]
    cells += [_number(row["gflop"]), _number(row["fleet_seconds"]), f"{row['seconds']:.1f}"]
    cells.append(f"{terminal.share(row['G_at_mb'])}, {terminal.share(row['P_at_mb'])}")
    cells += ["-" if row[key] is None else f"{row[key]:.2f}" for key in epsilons]
    return cells


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
