"""Data sets: what is here, download, and a picture of who would have what."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir, Overrides
from fedp3.errors import InputError
from fedp3.lookup import pick

PICTURES = (".png", ".svg", ".pdf")

app = typer.Typer(
    help="Data sets: what is here, checked download, picture of a partition.",
    no_args_is_help=True,
    epilog="Example: fedp3 data ls",
)


@app.command("ls")
def ls(data_dir: DataDir = None, json: AsJson = False) -> None:
    """List the data sets and where each was found.

    Example: fedp3 data ls --data-dir ~/data
    """
    from dataclasses import asdict

    from fedp3 import data

    rows = data.inventory(data_dir)
    if json:
        show.as_json({"sets": [{k: str(v) if isinstance(v, Path) else v for k, v in asdict(r).items()} for r in rows]})
        return
    columns = {"name": "left", "samples": "right", "classes": "right", "shape": "left", "found": "left"}
    show.table(
        columns,
        [(r.name, f"{r.samples:,}", str(r.classes), "x".join(map(str, r.shape)), str(r.path or "no")) for r in rows],
    )
    show.tell("get one with: fedp3 data get NAME")


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Name, as `fedp3 data ls` shows it")], data_dir: DataDir = None
) -> None:
    """Download a data set and check it.

    Example: fedp3 data get fashion-mnist
    """
    from fedp3 import data

    show.tell(f"{name} is in {data.get(name, data_dir)}")


@app.command("show")
def show_partition(
    path: Annotated[Path, typer.Argument(help="Config file, or the name of a data set")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option("--out", help="Picture to write")] = Path("partition.png"),
) -> None:
    """Draw how many samples of each class every client would have.

    Example: fedp3 data show my.toml partition.kind=dirichlet
    """
    from fedp3 import config, data
    from fedp3.experiment import assemble
    from fedp3.report import draw_labels

    if out.suffix not in PICTURES:
        raise InputError(f"--out {out}: a picture's name ends in {', '.join(PICTURES)}")
    if not path.exists() and not path.suffix:
        pick(data.NAMES, str(path), "data set or config file")
        settings = config.parse({}, [f"data.name={path}", *(overrides or [])])
    else:
        settings = config.load(path, overrides or [])
    experiment = assemble(settings, data_dir)
    p = experiment.config.partition
    picture = draw_labels(experiment.labels, out, f"{experiment.config.data.name}, {p.kind}, {p.clients} clients")
    show.tell(f"open {os.path.relpath(picture)}")
