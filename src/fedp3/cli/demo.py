"""The first minute: FedAvg and FedP3 side by side on embedded data."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson
from fedp3.cli.runs import Workers, start
from fedp3.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config

SETTINGS = ("model.width=0.25", "local.lr=0.2", "run.rounds=30", "run.eval_every=5")
DEVICES = ("prune.keep=[0.9, 0.7, 0.5]",)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the two runs and the report")] = Path("fedp3-demo"),
    workers: Workers = 0,
    json: AsJson = False,
) -> None:
    """Train FedAvg and FedP3 on embedded digits over 20 clients in three device classes; seconds.

    Example: fedp3 demo
    """
    from fedp3 import config
    from fedp3.report import write_report

    fedavg = config.parse({"method": "fedavg"}, SETTINGS)
    fedp3 = config.parse({"method": "fedp3"}, SETTINGS + DEVICES)
    runs = {"fedavg": fedavg, "fedp3": fedp3}
    for name, settings in runs.items():
        _check(out / name, settings)
    for name in runs:
        shutil.rmtree(out / name, ignore_errors=True)
    show.say(
        "20 clients, 5 of 10 digits each; a third of the devices each hold 90, 70 or 50 % of what they do not train"
    )
    rows = [start(settings, out / name, workers, None, name=name) | {"name": name} for name, settings in runs.items()]
    page = write_report([out / "fedavg", out / "fedp3"], out / "report.html")
    if json:
        show.as_json({"out": str(out), "report": str(page), "runs": rows})
        return
    show.results(rows, dense=rows[0])
    show.tell("G server's model, D as dispatched to the device, P after one local update; MB against FedAvg")
    show.tell(f"open {os.path.relpath(page)}")


def _check(folder: Path, settings: "Config") -> None:
    """An earlier demo makes room for this one, and nothing else does."""
    from fedp3 import driver

    if folder.exists():
        try:
            driver.reopen(folder, settings)
        except InputError as error:
            raise InputError(
                f"{folder} is not a run of this demo; choose another place with --out, or remove it ({error})"
            ) from None
