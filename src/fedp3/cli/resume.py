"""`fedp3 resume`: continue a run that was stopped."""

from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli.options import AsJson, DataDir, EngineName, TensorBoard, Workers
from fedp3.cli.training import Options, show_end, train, train_seeds
from fedp3.core.errors import InputError


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder")],
    overrides: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    engine: EngineName = "inprocess",
    workers: Workers = 0,
    data_dir: DataDir = None,
    tensorboard: TensorBoard = False,
    json: AsJson = False,
) -> None:
    """Continue a run that was stopped or killed; for a finished run, show its result.

    Example: fedp3 resume runs/a
    """
    from fedp3.engines.catalogue import check_engine
    from fedp3.runs import session

    if overrides:
        changed = " ".join(overrides)
        raise InputError(
            f"a run is continued with the settings that it began with, not with {changed}; start a "
            f"new one with: fedp3 run {folder}/config.toml {changed} --out NEW_FOLDER"
        )
    check_engine(engine)
    several = session.recorded_seeds(folder)
    settings = several[0] if several is not None else session.reopen(folder)
    options = Options(
        workers=workers,
        engine=engine,
        data_dir=data_dir,
        tensorboard=tensorboard,
        plugins=session.plugins_of(folder),
    )
    if several is not None:
        results = train_seeds(settings, folder, several[1], options)
    else:
        results = [train(settings, folder, options, resume=True)]
    show_end(results, folder, json)
