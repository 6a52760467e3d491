"""`fedp3 demo`: two plans compared on data that need no download."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import demo_transformer, terminal
from fedp3.cli.options import AsJson, Workers
from fedp3.cli.training import Options, train_seeds
from fedp3.core.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config

METHODS = ("fedavg", "fedp3")
SEEDS = 3  # the fewest that decide anything
PHONES = (
    "20 phones, from a Nexus S of 2010 to a Honor 20 Pro, each with 5 of 10 digits.",
    "FedAvg trains all layers on all of them, and sends 32 bits. FedP3 plans for one second a",
    "round: changes are sent in few bits, and phones with a slow upload train a few layers.",
)
SETTINGS = (
    "model.width=0.25",
    "local.lr=0.2",
    "run.rounds=30",
    "run.eval_every=1",
    "devices.fleet=phones",
    "devices.round_seconds=1",
)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs and the report")] = Path(
        "fedp3-demo"
    ),
    transformer: Annotated[
        Path | None,
        typer.Option(
            "--transformer",
            metavar="DIR",
            help="Train adapters of the pretrained transformer in this folder instead, on "
            "sentences of Python's manual; takes minutes and needs the extra fedp3[hf]",
        ),
    ] = None,
    workers: Workers = 0,
    json: AsJson = False,
) -> None:
    """Train FedAvg and FedP3 on handwritten digits over 20 phones, and say which is better.

    Both have the same phones, data and number of rounds, and three seeds.  The data come with an
    installed library.

    Example: fedp3 demo
    """
    from fedp3.report import write_report

    if out.is_file():
        raise InputError(f"{out} is a file; choose a folder with --out")
    texts = out / "texts.txt"
    if transformer is None:
        runs, notes = _phones(), PHONES
    else:
        runs, notes = demo_transformer.runs(transformer, texts), demo_transformer.NOTES
    for name, settings in runs.items():
        _check_replaceable(out / name, settings)
    for name in runs:
        shutil.rmtree(out / name, ignore_errors=True)
    if transformer is not None:
        demo_transformer.write_texts(transformer, texts)
    for line in notes:
        terminal.note(line)
    results = [
        train_seeds(settings, out / name, SEEDS, Options(workers=workers))
        for name, settings in runs.items()
    ]
    folders = [out / name for name in runs]
    page = write_report(folders, out / "report.html")
    if json:
        rows = [row | {"name": name} for name, of in zip(runs, results, strict=True) for row in of]
        terminal.as_json({"out": str(out), "report": str(page), "runs": rows})
        return
    for line in _headline(folders):
        terminal.line(line)
    terminal.line("next: " + terminal.command("compare", *folders))
    terminal.line(f"open {os.path.relpath(page)}")


def _phones() -> dict[str, "Config"]:
    from fedp3 import config

    return {name: config.parse({"method": name}, SETTINGS) for name in METHODS}


def _headline(folders: list[Path]) -> list[str]:
    from fedp3.report.headline import headline
    from fedp3.report.runs import load_runs

    return [sentence.replace("\u00a0", " ") for sentence in headline(load_runs(folders))]


def _check_replaceable(folder: Path, settings: "Config") -> None:
    """Refuse a folder that exists, unless an earlier demo wrote it."""
    from fedp3.runs import existing

    if not folder.exists():
        return
    try:
        for place, config in existing.seed_configs(settings, folder, SEEDS).items():
            existing.reopen(place, config)
    except InputError as error:
        raise InputError(
            f"{folder} is not a run of this demo; choose another folder with --out, "
            f"or remove it ({error})"
        ) from None
