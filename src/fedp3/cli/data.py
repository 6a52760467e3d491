"""`fedp3 data`: list and download data sets, and draw a partition."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir, Overrides, Use
from fedp3.core.errors import InputError
from fedp3.core.registry import pick

PICTURES = (".png", ".svg", ".pdf")

app = typer.Typer(
    help="List and download data sets, and draw a partition.",
    no_args_is_help=True,
    epilog="Example: fedp3 data ls",
)


@app.command("ls")
def ls(data_dir: DataDir = None, json: AsJson = False) -> None:
    """List the data sets, and where each was found on this machine.

    Example: fedp3 data ls --data-dir ~/data
    """
    from dataclasses import asdict

    from fedp3 import data

    sets = data.inventory(data_dir)
    if json:
        rows = [asdict(s) | {"path": None if s.path is None else str(s.path)} for s in sets]
        terminal.as_json({"sets": rows})
        return
    columns = {
        "name": "left",
        "samples": "right",
        "classes": "right",
        "shape": "left",
        "found": "left",
    }
    cells = [
        (s.name, f"{s.samples:,}", str(s.classes), "x".join(map(str, s.shape)), str(s.path or "no"))
        for s in sets
    ]
    terminal.table(columns, cells)
    terminal.line("download one with: fedp3 data get NAME")


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Name of the data set, as in `fedp3 data ls`")],
    data_dir: DataDir = None,
) -> None:
    """Download a data set and verify it.

    Example: fedp3 data get fashion-mnist
    """
    from fedp3 import data

    terminal.line(f"{name} is in {data.get(name, data_dir)}")


@app.command("show")
def show_partition(
    path: Annotated[Path, typer.Argument(help="Config file, or the name of a data set")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    use: Use = None,
    out: Annotated[Path, typer.Option("--out", help="Picture to write")] = Path("partition.png"),
) -> None:
    """Draw how many samples of each class every client has.

    Example: fedp3 data show my.toml partition.kind=dirichlet
    """
    from fedp3 import config, data
    from fedp3.config.plugins import load_plugins
    from fedp3.experiment.assemble import assemble
    from fedp3.report import draw_labels

    if out.suffix not in PICTURES:
        raise InputError(f"--out {out}: a picture's name ends in {', '.join(PICTURES)}")
    load_plugins(use or ())
    if not path.exists() and not path.suffix:
        pick(data.DATASETS, str(path), "data set or config file")
        settings = config.parse({}, [f"data.name={path}", *(overrides or [])])
    else:
        settings = config.load(path, overrides or [])
    experiment = assemble(settings, data_dir)
    p = experiment.config.partition
    title = f"{experiment.config.data.name}, {p.kind}, {p.clients} clients"
    picture = draw_labels(experiment.labels, out, title)
    terminal.line(f"open {os.path.relpath(picture)}")
