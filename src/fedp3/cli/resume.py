"""`fedp3 resume`: continue a run that was stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli.options import AsJson, DataDir, EngineName, TensorBoard, Workers
from fedp3.cli.training import Options, show_end, train, train_seeds
from fedp3.core.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="run.rounds=N to extend the run; with a derived noise also a new total epsilon",
            show_default=False,
        ),
    ] = None,
    engine: EngineName = "inprocess",
    workers: Workers = 0,
    data_dir: DataDir = None,
    tensorboard: TensorBoard = False,
    json: AsJson = False,
) -> None:
    """Continue a run that was stopped or killed; for a finished run, show its result.

    With run.rounds=N, a run that is finished or not goes on to N rounds.

    Example: fedp3 resume runs/a run.rounds=300
    """
    from fedp3.engines.catalogue import check_engine
    from fedp3.runs import existing

    check_engine(engine)
    several = existing.recorded_seeds(folder)
    settings = several[0] if several is not None else existing.reopen(folder)
    if overrides:
        settings = _extended(folder, overrides, several is not None)
    options = Options(
        workers=workers,
        engine=engine,
        data_dir=data_dir,
        tensorboard=tensorboard,
        plugins=existing.plugins_of(folder),
    )
    if several is not None:
        results = train_seeds(settings, folder, several[1], options)
    else:
        results = [train(settings, folder, options, resume=True, extend=bool(overrides))]
    show_end(results, folder, json)


def _extended(folder: Path, overrides: list[str], several: bool) -> "Config":
    """The config with more rounds; raises if the overrides are something else."""
    from fedp3 import config
    from fedp3.runs.extension import EXTENDABLE, extended

    keys = {f"{section}.{key}" for section, key in EXTENDABLE}
    others = [text for text in overrides if text.partition("=")[0].strip() not in keys]
    if others:
        changed = " ".join(others)
        raise InputError(
            f"a run is continued with the settings that it began with, not with {changed}; only "
            f"{', '.join(sorted(keys))} can change; start a new one with: fedp3 run "
            f"{folder}/config.toml {changed} --out NEW_FOLDER"
        )
    if several:
        raise InputError(
            f"{folder} holds several seeds, which cannot be extended together; start new ones "
            f"with: fedp3 run {folder}/seed-0/config.toml {' '.join(overrides)} --seeds N "
            "--out NEW_FOLDER"
        )
    return extended(folder, config.load(folder / "config.toml", overrides))
