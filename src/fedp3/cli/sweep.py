"""Several runs: report on them, sweep over methods and seeds, compare."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir, Overrides
from fedp3.cli.runs import Workers, start_seeds
from fedp3.cli.stop import stoppable
from fedp3.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config

Folders = Annotated[list[Path], typer.Argument(help="Run folders")]


def _runs(paths: list[Path]) -> list[Path]:
    """The run folders among these; `DIR/*` may name a page or a picture as well."""
    folders = [p for p in paths if not p.is_file()] or paths
    bad = [f for f in folders if not (f / "config.toml").exists() and not (f / "seeds.json").exists()]
    if bad:
        raise InputError(f"{bad[0]} is not a run folder: it has no config.toml")
    return folders


def report(
    folders: Folders,
    out: Annotated[Path | None, typer.Option("--out", help="Page to write; else report.html in the first run")] = None,
) -> None:
    """Write one self-contained page about one or several runs, and its figures as files.

    Example: fedp3 report runs/a runs/b --out compare.html
    """
    from fedp3.report import write_figures, write_report

    folders = _runs(folders)
    page = write_report(folders, out)
    figures = write_figures(folders, page.parent / "figures")
    show.tell(f"{len(figures)} figures in {os.path.relpath(page.parent / 'figures')}")
    show.tell(f"open {os.path.relpath(page)}")


def sweep(
    path: Annotated[Path, typer.Argument(help="Config file")],
    methods: Annotated[str, typer.Option("--methods", help="Methods, comma separated")],
    out: Annotated[Path, typer.Option("--out", help="Folder for all runs")],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per method")] = 1,
    tune: Annotated[str, typer.Option("--tune", help="Choose a key for each method by G, as in local.lr=0.1,0.2")] = "",
    tune_rounds: Annotated[int, typer.Option("--tune-rounds", min=0, help="Rounds per value; 0: as the config")] = 0,
    workers: Workers = 0,
    data_dir: DataDir = None,
) -> None:
    """Run several methods over several seeds; call it again to go on where it stopped.

    --tune scores every value on a cut of the training samples with the first seed; OUT/tuned.json has the scores.

    Example: fedp3 sweep my.toml --methods fedavg,fedp3 --seeds 3 --tune local.lr=0.1,0.2,0.5 --out sweeps/a
    """
    from fedp3 import config
    from fedp3.experiment import assemble

    names = [m.strip() for m in methods.split(",") if m.strip()]
    if not names:
        raise InputError("--methods names none; give some as in fedavg,fedp3 (`fedp3 methods` lists them)")
    key, values = _grid(tune)
    settings = {  # all mistakes first
        m: {v: config.load(path, [*(overrides or []), f"method={m}", *([f"{key}={v}"] if key else [])]) for v in values}
        for m in names
    }
    for cases in settings.values():
        assemble(cases[values[0]], data_dir)
    for m, cases in settings.items():
        value = _best(m, cases, tune_rounds, out / "tuned.json", workers, data_dir) if key else ""
        start_seeds(cases[value], out / m, seeds, workers, data_dir)
    show.tell(f"next: fedp3 compare {out}/*")


def _grid(text: str) -> tuple[str, list[str]]:
    """A key and the values to try; no key and one empty value where nothing is asked for."""
    key, _, values = text.partition("=")
    each = [v.strip() for v in values.split(",") if v.strip()]
    if text and (not key.strip() or len(each) < 2):
        raise InputError(f"--tune {text}: name a key and at least two values, as in local.lr=0.1,0.2,0.5")
    return key.strip(), each or [""]


def _best(
    method: str, cases: "Mapping[str, Config]", rounds: int, place: Path, workers: int, data_dir: Path | None
) -> str:
    """The value that does best on the validation cut."""
    from fedp3 import tune

    short = {v: tune.shortened(c, rounds) for v, c in cases.items()}
    with stoppable():
        scores = dict(tune.search(method, short, place, data_dir, workers, show.rounds))
    value = tune.best(scores)
    if len(set(scores.values())) == 1:
        show.say(f"warning: {method}: all values do alike by G on the validation cut; {value}, the first, is taken")
        return value
    tried = ", ".join(f"{v}: {100 * s:.1f} %" for v, s in scores.items())
    show.say(f"{method}: {value} is best on the validation cut ({tried})")
    return value


def compare(
    folders: Folders,
    last: Annotated[int, typer.Option("--last", min=1, help="G, D: mean of so many last evaluations")] = 1,
    json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a document")] = False,
) -> None:
    """Compare runs: accuracy, bytes, work and time, and accuracy at the MB that every run has spent.

    Example: fedp3 compare sweeps/a/*
    """
    from fedp3.report import compare as rows_of

    rows = rows_of(_runs(folders), last)
    for r in rows:
        if r["unfinished"]:
            show.say(f"warning: {r['run']} is not finished and counts as far as it came: {r['unfinished']}")
    if json:
        show.as_json({"runs": rows})
        return
    budget = rows[0]["budget_mb"]
    at_budget = f"G, P at {budget:.3g} MB" if isinstance(budget, float) else "G, P at equal MB"
    spent = ["epsilon"] if any(r["epsilon_max"] is not None for r in rows) else []
    names = ("seeds", "G", "D", "P", "worst", "MB up", "MB down", "GFLOP", "fleet s", "seconds", at_budget, *spent)
    columns = {"run": "left", **dict.fromkeys(names, "right")}
    lines = [_row(r) + [_epsilon(r) for _ in spent] for r in rows]
    if markdown:
        ways = ["---" if side == "left" else "---:" for side in columns.values()]
        for line in (list(columns), ways, *lines):
            show.tell(f"| {' | '.join(line)} |")
        _guarantees(rows)
        return
    show.table(columns, lines)
    _guarantees(rows)
    show.tell("accuracies: mean over clients and seeds, ± deviation over seeds; MB: whole run, against dense FedAvg")
    show.tell("at equal MB: read off the curves, P of each round's participants; -: too few evaluations")
    show.tell("GFLOP: per client; fleet s: the rounds on devices as capable as their keep (a model); seconds: here")
    show.tell("next: " + show.command("report", *_runs(folders), "--out", "compare.html"))


def _guarantees(rows: Sequence[Mapping[str, Any]]) -> None:
    """What each epsilon means: a line for every run under LDP."""
    for r in rows:
        if r["privacy"]:
            show.tell(f"\n{r['run']}: {show.guarantee(r['privacy'])}")


def _epsilon(r: Mapping[str, Any]) -> str:
    return "-" if r["epsilon_max"] is None else f"{r['epsilon_max']:.2f}"


def _row(r: Mapping[str, Any]) -> list[str]:
    spread = {k: "" if r[f"{k}_std"] is None else f" ± {100 * r[f'{k}_std']:.1f}" for k in ("G", "D", "P")}
    traffic = [f"{r[f'mb_{way}']:.1f} ({show.share(r[f'share_{way}'], 0)})" for way in ("up", "down")]
    scores = [show.share(r[k]) + spread[k] for k in ("G", "D", "P")]
    name, seeds, seconds = str(r["run"]), str(r["seeds"]), f"{r['seconds']:.1f}"
    fleet = ["-" if r[k] is None else f"{r[k]:.3g}" for k in ("gflop", "fleet_seconds")]
    at_budget = f"{show.share(r['G_at_mb'])}, {show.share(r['P_at_mb'])}"
    return [name, seeds, *scores, show.share(r["worst"]), *traffic, *fleet, seconds, at_budget]
