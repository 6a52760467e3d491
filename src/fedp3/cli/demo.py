"""`fedp3 demo`: FedAvg and FedP3 side by side, on data that needs no download."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, Workers
from fedp3.cli.training import Options, train
from fedp3.core.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config

SETTINGS = ("model.width=0.25", "local.lr=0.2", "run.rounds=30", "run.eval_every=5")
DEVICES = ("prune.keep=[0.9, 0.7, 0.5]",)


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the two runs and the report")
    ] = Path("fedp3-demo"),
    workers: Workers = 0,
    json: AsJson = False,
) -> None:
    """Train FedAvg and FedP3 on handwritten digits in seconds, and write a report.

    There are 20 clients in three device classes; the data come with an installed library.

    Example: fedp3 demo
    """
    from fedp3 import config
    from fedp3.report import write_report

    runs = {
        "fedavg": config.parse({"method": "fedavg"}, SETTINGS),
        "fedp3": config.parse({"method": "fedp3"}, SETTINGS + DEVICES),
    }
    for name, settings in runs.items():
        _check_replaceable(out / name, settings)
    for name in runs:
        shutil.rmtree(out / name, ignore_errors=True)
    terminal.note("20 clients, each with 5 of the 10 digits; there are three device classes,")
    terminal.note("which hold 90, 70 or 50 % of the layers that they do not train in full")
    rows = [
        train(settings, out / name, Options(workers=workers, name=name)) | {"name": name}
        for name, settings in runs.items()
    ]
    page = write_report([out / name for name in runs], out / "report.html")
    if json:
        terminal.as_json({"out": str(out), "report": str(page), "runs": rows})
        return
    terminal.results(rows, dense=rows[0])
    terminal.line("G: server's model; D: as dispatched to the device; P: after one local update;")
    terminal.line("MB: in parentheses as a share of FedAvg")
    terminal.line(f"open {os.path.relpath(page)}")


def _check_replaceable(folder: Path, settings: "Config") -> None:
    """Refuse a folder that exists, unless an earlier demo wrote it."""
    from fedp3.runs import session

    if not folder.exists():
        return
    try:
        session.reopen(folder, settings)
    except InputError as error:
        raise InputError(
            f"{folder} is not a run of this demo; choose another folder with --out, "
            f"or remove it ({error})"
        ) from None
