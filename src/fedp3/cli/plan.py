"""Before a run: write a config, look at what it asks of every client, list the methods."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedp3.cli import show
from fedp3.errors import InputError

Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as local.lr=0.05", show_default=False)]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets lie; else FEDP3_DATA, else the cache")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


def init(
    path: Annotated[Path, typer.Argument(help="File to write")] = Path("my.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite")] = False,
) -> None:
    """Write a commented config: digits, 30 rounds, seconds.

    Example: fedp3 init my.toml
    """
    from fedp3 import config

    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name, or overwrite it with --force")
    try:
        path.write_text(config.template())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    show.out.print(f"wrote {path}; next: fedp3 plan {path}, then fedp3 run {path}", highlight=False)


def plan(
    path: Annotated[Path, typer.Argument(help="Config file")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Show what a config asks of every client, without training.

    Example: fedp3 plan my.toml prune.keep=0.5
    """
    from fedp3 import config
    from fedp3.driver import describe
    from fedp3.experiment import assemble, costs

    experiment = assemble(config.load(path, overrides or []), data_dir)
    clients, covered = costs(experiment)
    if json:
        summary = describe(experiment)
        keys = ("layers", "parameters", "reductions", "dense_bytes")
        show.as_json({"clients": [asdict(c) for c in clients], "coverage": covered, **{k: summary[k] for k in keys}})
        return
    table = Table(title=f"{path}: what one round asks of each client")
    for name in ("client", "trains whole (L_i)", "other layers", "examples", "parameters", "MFLOP/example", "peak MB"):
        table.add_column(name, justify="left" if "layers" in name or "L_i" in name else "right")
    for name in ("MB down", "MB up"):
        table.add_column(name, justify="right")
    trains = experiment.config.plan.others == "train" or experiment.config.prune.upload != "none"
    for c in clients:
        rest = [f"{l} {k:g}" for l, k in c.keep.items() if l not in c.layers]
        table.add_row(
            str(c.id), " ".join(c.layers), " ".join(rest) or "-", str(c.examples), f"{c.parameters:,}",
            f"{c.mflops_per_example:.2f}", f"{c.peak_mb:.1f}", f"{c.mb_down:.2f}", f"{c.mb_up:.2f}",
        )  # fmt: skip
    show.out.print(table)
    show.out.print(f"other layers are sent pruned to the share shown and {'trained' if trains else 'frozen'} there")
    counts = ", ".join(f"{l} {len(who)}" for l, who in covered.items())
    show.out.print(f"clients that train and upload each layer: {counts}")
    if experiment.problem.layers.note:
        show.out.print(f"note: {experiment.problem.layers.note}")
    show.out.print(f"next: fedp3 run {path}", highlight=False)


def methods(json: AsJson = False) -> None:
    """List the methods a config can name.

    Example: fedp3 methods
    """
    from fedp3.config import ABOUT_METHODS

    if json:
        show.as_json(dict(ABOUT_METHODS))
        return
    for name, about in ABOUT_METHODS.items():
        show.out.print(f"{name:<10} {about}", highlight=False)
