"""`fedp3 compare`: which run is best at equal cost, and all numbers behind it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, Folders, Target
from fedp3.cli.report import run_folders
from fedp3.core.errors import InputError
from fedp3.core.scores import ACCURACY, Score, score_of

if TYPE_CHECKING:
    from fedp3.report.answers import Answer
    from fedp3.report.equality import Inequality
    from fedp3.report.runs import Run

SCORES = ("G", "D", "P", "C")
EXPLANATIONS = (
    "G: server's model; D: as dispatched; P: after one local update; means over clients and",
    "seeds, ± one standard deviation over seeds; worst: the {lowest} G of any client; C, if shown:",
    "server's model on a test set of no client",
    "differences are {unit}, paired by seed, with 95 % intervals",
    "MB are of the entire run, in parentheses as a share of dense FedAvg; GFLOP are per client;",
    "fleet s: time on the fleet; seconds: measured on the machine that ran it",
)
CORRECTED = (
    "of {} comparisons at a budget: the chance that any verdict of better or worse is false is "
    "at most 5 % (Holm), so that one interval without 0 may not be enough"
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
Table = tuple[Mapping[str, str], Sequence[Sequence[str]], str]


def _budget(flag: str, unit: str) -> Any:
    help_text = f"Compare the scores after {unit}"
    return typer.Option(flag, min=0.0, help=help_text, show_default=False)


def compare(
    folders: Folders,
    at_mb: Annotated[float | None, _budget("--at-mb", "so many MB, up and down together")] = None,
    at_seconds: Annotated[
        float | None, _budget("--at-seconds", "so many virtual seconds, for runs with devices")
    ] = None,
    at_joules: Annotated[
        float | None, _budget("--at-joules", "so many joules, for devices with known watts")
    ] = None,
    at_round: Annotated[float | None, _budget("--at-round", "so many rounds")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="The run that the others are compared with; by default the best at the budget",
            show_default=False,
        ),
    ] = None,
    score: Annotated[
        str, typer.Option("--score", help="The score that verdicts are about: G, D, P or C")
    ] = "G",
    last: Annotated[
        int,
        typer.Option("--last", min=1, help="Average scores over this many last evaluations"),
    ] = 1,
    target: Target = None,
    by_device: Annotated[
        bool,
        typer.Option("--by-device", help="Also show what each device trains, its limit, D and P"),
    ] = False,
    json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown")
    ] = False,
) -> None:
    """Say which run is best at equal traffic, virtual time, energy and rounds.

    Differences are paired by seed, so that runs need three or more seeds in common for a verdict
    (fedp3 sweep --seeds 3).  The budgets are by default the largest that all runs have reached.

    Example: fedp3 compare sweeps/a/*

    Example: fedp3 compare sweeps/a/* --at-mb 50 --against fedavg

    Example: fedp3 compare runs/a runs/b --target 0.9
    """
    from fedp3.report.answers import answers, as_row
    from fedp3.report.comparison import compare_runs
    from fedp3.report.device_classes import as_row as device_row
    from fedp3.report.device_classes import device_classes
    from fedp3.report.equality import inequalities
    from fedp3.report.runs import load_runs
    from fedp3.report.target_table import target_table

    if score not in SCORES:
        raise InputError(f"--score {score}: want one of {', '.join(SCORES)}")
    given = {"mb": at_mb, "seconds": at_seconds, "joules": at_joules, "round": at_round}
    budgets = {axis: budget for axis, budget in given.items() if budget is not None}
    for axis, budget in budgets.items():
        if not math.isfinite(budget):
            raise InputError(f"--at-{axis} {budget}: want a number")
    runs = load_runs(run_folders(folders))
    if score == "C":
        _check_central(runs)
    found = inequalities(runs)
    answered = answers(runs, budgets, kind=score, against=against, last=last)
    rows = compare_runs(runs, last, target)
    devices = [device_row(run, c) for run in runs for c in device_classes(run)] if by_device else []
    if by_device and not devices:
        raise InputError("--by-device needs a run with [devices], and none of these has one")
    _warn(rows, found)
    if json:
        unequal = {i.condition: dict(i.values) for i in found}
        shown = {"answers": [as_row(a) for a in answered], "unequal": unequal, "runs": rows}
        terminal.as_json(shown | ({"devices": devices} if by_device else {}))
        return
    _show_answers(answered, several=len(runs) > 1)
    show = _show_markdown if markdown else terminal.table
    for columns, cells, title in _tables(answered, rows, found, target_table(rows), devices):
        show(columns, cells, title)
    _show_guarantees(rows)
    if not markdown:
        _explain(
            runs[0].score, max((a.comparisons for a in answered), default=0), by_device=by_device
        )
        page = terminal.command("report", *run_folders(folders), "--out", "compare.html")
        terminal.line(f"next: {page}")


def _check_central(runs: "Sequence[Run]") -> None:
    """Refuse to compare C of runs that have none, or test sets of different sizes."""
    from fedp3.report.runs import final

    if any(final(run, "C") is None for run in runs):
        raise InputError("--score C: not all of these runs have C; set data.test=official")
    samples = {run.seeds[0].about["central"]["samples"] for run in runs}
    if len(samples) > 1:
        sizes = " and ".join(map(str, sorted(samples)))
        raise InputError(f"--score C: the runs have different test sets, of {sizes} samples")


def _explain(score: Score, comparisons: int, *, by_device: bool) -> None:
    """Print what the columns and verdicts mean."""
    from fedp3.report.text import difference_unit, worst_end

    words = {"lowest": worst_end(score), "unit": difference_unit(score)}
    explanations = [explanation.format(**words) for explanation in EXPLANATIONS]
    explanations += DEVICE_EXPLANATIONS if by_device else ()
    if comparisons > 1:
        explanations.append(CORRECTED.format(comparisons))
    for explanation in explanations:
        terminal.prose(explanation)


def _warn(rows: Sequence[Mapping[str, Any]], found: "Sequence[Inequality]") -> None:
    for row in rows:
        if row["unfinished"]:
            terminal.note(
                f"warning: {row['run']} is not finished and counts up to its last round: "
                f"{row['unfinished']}"
            )
    if found:
        terminal.note("warning: these runs differ in what a comparison should keep equal:")
    for inequality in found:
        without = ": no verdict"
        if inequality.forbids:
            axes = "" if "mb" in inequality.forbids else " on time and energy"
            terminal.note(f"  {inequality.sentence}{without}{axes}")
        else:
            terminal.note(f"  {inequality.sentence}")


# --------------------------------------------------------------------------- tables


def _show_answers(answered: "Sequence[Answer]", *, several: bool) -> None:
    from fedp3.report.answers import sentence

    for answer in answered if several else ():
        terminal.prose(_plain(sentence(answer)))


def _tables(
    answered: "Sequence[Answer]",
    rows: Sequence[Mapping[str, Any]],
    found: "Sequence[Inequality]",
    to_target: Any,
    devices: Sequence[Mapping[str, Any]],
) -> list[Table]:
    """All tables, each with the fewest columns that make sense together."""
    tables = [_standings(answer) for answer in answered] if len(rows) > 1 else []
    tables += [_scores(rows), _costs(rows, found)]
    if to_target:
        heads = dict.fromkeys((name for name, _ in to_target.heads), "right")
        cells = [
            [str(row["run"]), *(_plain(" ".join(cell).strip()) for cell in line)]
            for row, line in zip(rows, to_target.lines, strict=True)
        ]
        tables.append(({"run": "left"} | heads, cells, _plain(to_target.title)))
    if devices:
        tables.append((DEVICE_COLUMNS, _device_cells(devices), "By device"))
    return tables


def _plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def _standings(answer: "Answer") -> Table:
    from fedp3.report.answers import difference_text
    from fedp3.report.text import score_stat

    columns = {
        "run": "left",
        answer.kind: "right",
        f"against {answer.reference}": "right",
        "verdict": "left",
    }
    cells = []
    for s in answer.standings:
        against = "" if s.run == answer.reference else "-"
        if s.difference:
            against = difference_text(answer.score, s.difference)
        why = f" ({s.reason})" if s.reason else ""
        cells.append(
            [s.run, _plain(score_stat(answer.score, s.score)), against, f"{s.verdict}{why}"]
        )
    return columns, cells, f"At {_plain(answer.place)}"


def _scores(rows: Sequence[Mapping[str, Any]]) -> Table:
    from fedp3.report.runs import kinds_of

    kinds = kinds_of(rows)
    columns = {"run": "left", **dict.fromkeys(("seeds", *kinds, "worst"), "right")}
    cells = [
        [
            str(row["run"]),
            str(row["seeds"]),
            *(_with_spread(row, kind) for kind in kinds),
            score_of(row).text(row["worst"]),
        ]
        for row in rows
    ]
    return columns, cells, f"Scores at the end{_described(score_of(rows[0]))}"


def _described(score: Score) -> str:
    """What the scores are, in parentheses, unless they are accuracies."""
    if score == ACCURACY:
        return ""
    return f" ({score.name}, {'lower' if score.lower_is_better else 'higher'} is better)"


def _costs(rows: Sequence[Mapping[str, Any]], found: "Sequence[Inequality]") -> Table:
    from fedp3.report.comparison import EPSILONS, shown_epsilons
    from fedp3.report.equality import FLEET

    epsilons = shown_epsilons(rows)
    # Times on different fleets must not stand side by side.
    fleet = [] if any(i.condition == FLEET for i in found) else ["fleet_seconds"]
    energy = ["joules"] if any(row["joules"] is not None for row in rows) else []
    heads = {"gflop": "GFLOP", "fleet_seconds": "fleet s", "joules": "J", "seconds": "seconds"}
    numbers = ["gflop", *fleet, *energy, "seconds"]
    names = ["MB up", "MB down", *(heads[key] for key in numbers)]
    columns = {"run": "left"} | dict.fromkeys([*names, *(EPSILONS[k] for k in epsilons)], "right")
    cells = []
    for row in rows:
        traffic = [
            f"{row[f'mb_{way}']:.1f} ({terminal.share(row[f'share_{way}'], 0)})"
            for way in ("up", "down")
        ]
        spent = ["-" if row[key] is None else f"{row[key]:.2f}" for key in epsilons]
        cells.append([str(row["run"]), *traffic, *(_number(row[key]) for key in numbers), *spent])
    return columns, cells, "Cost of the entire run"


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


def _with_spread(row: Mapping[str, Any], kind: str) -> str:
    score, std = score_of(row), row[f"{kind}_std"]
    return score.text(row[kind]) + ("" if std is None else f" ± {score.number(std)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
