"""`fedp3 compare`: runs side by side."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, Folders, Target
from fedp3.cli.report import run_folders
from fedp3.core.errors import InputError

EXPLANATIONS = (
    "accuracies are means over clients and seeds, ± one standard deviation over seeds",
    "MB are of the entire run, in parentheses as a share of dense FedAvg",
    "accuracies at equal MB are interpolated between evaluations, P over each round's participants",
    "GFLOP are per client; fleet s is the time on the fleet, by its clock or by the keep shares",
    "seconds were measured on the machine that ran it; - means that there are too few evaluations",
)

CLOCK_EXPLANATIONS = (
    "virtual time and energy to a target count until the first evaluated round that reached it",
)
DEVICE_EXPLANATIONS = (
    "by device: means over its clients; it trains these layers in full, the seconds of a round are",
    "as planned, the limit keeps it from training more, used is the share of updates aggregated",
)
DEVICE_COLUMNS = {
    "device": "left",
    "run": "left",
    "clients": "right",
    "trains": "left",
    "round s": "right",
    "limit": "left",
    "used": "right",
    "D": "right",
    "P": "right",
}


def compare(
    folders: Folders,
    last: Annotated[
        int,
        typer.Option("--last", min=1, help="Average G and D over this many last evaluations"),
    ] = 1,
    target: Target = None,
    by_device: Annotated[
        bool,
        typer.Option("--by-device", help="Also show what each device trains, its limit, D and P"),
    ] = False,
    json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown")
    ] = False,
) -> None:
    """Compare runs: accuracy, traffic, computation and time, and accuracy at equal traffic.

    Runs with devices are also compared by the virtual time and the energy that a target took.

    Example: fedp3 compare sweeps/a/*
    """
    from fedp3.report.clock_table import clock_table
    from fedp3.report.comparison import EPSILONS, compare_runs, shown_epsilons
    from fedp3.report.device_classes import as_row, device_classes
    from fedp3.report.runs import load_runs

    runs = load_runs(run_folders(folders))
    rows = compare_runs(runs, last, target)
    devices = [as_row(run, c) for run in runs for c in device_classes(run)] if by_device else []
    clock = clock_table(rows)
    _refuse_without_devices(by_device and not devices, target is not None and clock is None)
    for row in rows:
        if row["unfinished"]:
            terminal.note(
                f"warning: {row['run']} is not finished and counts up to its last round: "
                f"{row['unfinished']}"
            )
    if json:
        terminal.as_json({"runs": rows} | ({"devices": devices} if by_device else {}))
        return
    epsilons = shown_epsilons(rows)
    columns = _columns(rows[0]["budget_mb"], [EPSILONS[key] for key in epsilons])
    lines = [_cells(row, epsilons) for row in rows]
    show = _show_markdown if markdown else terminal.table
    show(columns, lines)
    if clock:
        heads = dict.fromkeys((name for name, _ in clock.heads), "right")
        cells = [
            [str(row["run"]), *map(_cell, line)]
            for row, line in zip(rows, clock.lines, strict=True)
        ]
        show({"run": "left"} | heads, cells, clock.title)
    if devices:
        show(DEVICE_COLUMNS, _device_cells(devices), "By device")
    _show_guarantees(rows)
    if markdown:
        return
    for explanation in EXPLANATIONS:
        terminal.line(explanation)
    for explanation in CLOCK_EXPLANATIONS if clock else ():
        terminal.line(explanation)
    for explanation in DEVICE_EXPLANATIONS if devices else ():
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


def _refuse_without_devices(by_device: bool, target: bool) -> None:
    """Raise if options were given that none of the runs has an answer to."""
    needs = {
        "--by-device needs a run with [devices]": by_device,
        "--target needs a run with a virtual clock, which runs with [devices] have": target,
    }
    wrong = [f"{reason}, and none of these has one" for reason, given in needs.items() if given]
    if wrong:
        raise InputError("; ".join(wrong))


def _cell(cell: tuple[str, str]) -> str:
    return " ".join(cell).strip()


def _device_cells(devices: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each device and run, from the slowest device; its runs are side by side."""
    from fedp3.report.device_classes import limits_text

    return [
        [
            d["device"],
            d["run"],
            f"{d['clients']:.3g}",
            d["trains"],
            _number(d["seconds"]),
            limits_text(d["limits"]),
            terminal.share(d["used"], 0),
            *(_with_spread(d, kind) for kind in ("D", "P")),
        ]
        for d in sorted(devices, key=lambda d: (d["gflops"], d["device"]))
    ]


def _show_markdown(
    columns: Mapping[str, str], lines: Sequence[Sequence[str]], title: str | None = None
) -> None:
    if title is not None:
        terminal.line(f"\n{title}\n")
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
    cells += [_with_spread(row, kind) for kind in ("G", "D", "P")]
    cells.append(terminal.share(row["worst"]))
    cells += [
        f"{row[f'mb_{way}']:.1f} ({terminal.share(row[f'share_{way}'], 0)})"
        for way in ("up", "down")
    ]
    cells += [_number(row["gflop"]), _number(row["fleet_seconds"]), f"{row['seconds']:.1f}"]
    cells.append(f"{terminal.share(row['G_at_mb'])}, {terminal.share(row['P_at_mb'])}")
    cells += ["-" if row[key] is None else f"{row[key]:.2f}" for key in epsilons]
    return cells


def _with_spread(row: Mapping[str, Any], kind: str) -> str:
    std = row[f"{kind}_std"]
    return terminal.share(row[kind]) + ("" if std is None else f" ± {100 * std:.1f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
