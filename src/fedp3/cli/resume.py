"""`fedp3 resume`: continue a run that was stopped."""

from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli.options import AsJson, DataDir, EngineName, TensorBoard, Workers
from fedp3.cli.training import Options, show_end, train, train_seeds


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder")],
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
