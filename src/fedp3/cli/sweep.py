"""Several runs: report on them, sweep over methods and seeds, compare."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir, Overrides
from fedp3.cli.runs import Workers, start_seeds
from fedp3.errors import InputError

Folders = Annotated[list[Path], typer.Argument(help="Run folders")]


def _runs(folders: list[Path]) -> list[Path]:
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

    page = write_report(_runs(folders), out)
    figures = write_figures(folders, page.parent / "figures")
    show.tell(f"{len(figures)} figures in {os.path.relpath(page.parent / 'figures')}")
    show.tell(f"open {os.path.relpath(page)}")


def sweep(
    path: Annotated[Path, typer.Argument(help="Config file")],
    methods: Annotated[str, typer.Option("--methods", help="Methods, comma separated")],
    out: Annotated[Path, typer.Option("--out", help="Folder for all runs")],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per method")] = 1,
    workers: Workers = 0,
    data_dir: DataDir = None,
) -> None:
    """Run several methods over several seeds; call it again to go on where it stopped.

    Example: fedp3 sweep my.toml --methods fedavg,fedp3 --seeds 3 --out sweeps/a
    """
    from fedp3 import config

    names = [m.strip() for m in methods.split(",") if m.strip()]
    settings = {m: config.load(path, [*(overrides or []), f"method={m}"]) for m in names}  # all mistakes first
    for m, each in settings.items():
        start_seeds(each, out / m, seeds, workers, data_dir)
    show.tell(f"next: fedp3 compare {out}/*")


def compare(folders: Folders, json: AsJson = False) -> None:
    """Compare runs: accuracy, bytes, time.

    Example: fedp3 compare sweeps/a/*
    """
    from fedp3.report import compare as rows_of

    rows = rows_of(_runs(folders))
    if json:
        show.as_json({"runs": rows})
        return
    names = list(rows[0]) if rows else []
    show.table(
        {name: "left" if name in ("run", "method") else "right" for name in names},
        [[f"{v:.4g}" if isinstance(v, float) else "-" if v is None else str(v) for v in r.values()] for r in rows],
    )
