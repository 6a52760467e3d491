"""`fedp3 run`: train from a config file."""

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli.options import AsJson, DataDir, EngineName, Overrides, TensorBoard, Use, Workers
from fedp3.cli.training import Options, show_end, train, train_seeds


def run(
    path: Annotated[Path, typer.Argument(help="Config file")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder; by default runs/NAME-1, -2, ...")
    ] = None,
    engine: EngineName = "inprocess",
    workers: Workers = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of seeds, run into OUT/seed-0, ...")
    ] = 1,
    data_dir: DataDir = None,
    use: Use = None,
    tensorboard: TensorBoard = False,
    json: AsJson = False,
) -> None:
    """Train a model from a config file.

    The run folder has the config, events, checkpoints, result and report of the run.

    Example: fedp3 run my.toml local.lr=0.1 --out runs/a --workers 2
    """
    from fedp3 import config
    from fedp3.config.plugins import load_plugins
    from fedp3.engines.catalogue import check_engine
    from fedp3.runs import existing

    check_engine(engine)
    plugins = load_plugins(use or ())
    settings = config.load(path, overrides or [])
    folder = out or _new_folder(Path("runs"), path.stem)
    existing.refuse_existing(folder)
    options = Options(
        workers=workers, engine=engine, data_dir=data_dir, tensorboard=tensorboard, plugins=plugins
    )
    if seeds > 1:
        results = train_seeds(settings, folder, seeds, options)
    else:
        results = [train(settings, folder, options)]
    show_end(results, folder, json)


def _new_folder(parent: Path, stem: str) -> Path:
    """The first of parent/stem-1, parent/stem-2, ... that does not exist."""
    names = (parent / f"{stem}-{k}" for k in count(1))
    return next(name for name in names if not name.exists())
