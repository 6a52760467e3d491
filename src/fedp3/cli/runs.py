"""Start a run, or go on with one."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir, Overrides
from fedp3.cli.stop import Stopped, stoppable
from fedp3.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config
    from fedp3.driver import OnRound
    from fedp3.engines.inprocess import Engine
    from fedp3.experiment import Experiment
    from fedp3.record import Checkpoint

Workers = Annotated[
    int, typer.Option("--workers", min=0, help="Worker processes; 0 chooses. Changes no bit of a result")
]
EngineName = Annotated[
    str, typer.Option("--engine", help="inprocess, or flower: Flower's simulation. Changes no bit of a result")
]
MEANS = ("accuracy_global", "accuracy_dispatched", "accuracy_personal", "accuracy_worst_client")
COSTS = ("mb_up", "mb_down", "seconds")


def run(
    path: Annotated[Path, typer.Argument(help="Config file")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; else runs/NAME-1, -2, ...")] = None,
    engine: EngineName = "inprocess",
    workers: Workers = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Run this many seeds, into OUT/seed-0, ...")] = 1,
    data_dir: DataDir = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events")] = False,
    json: AsJson = False,
) -> None:
    """Train; the run folder holds config, events, checkpoints and result.

    Example: fedp3 run my.toml local.lr=0.1 --out runs/a --workers 2
    """
    from fedp3 import config, driver

    driver.check_engine(engine)
    settings = config.load(path, overrides or [])
    folder = out or _free(Path("runs"), path.stem)
    if seeds == 1:
        _finish([start(settings, folder, workers, data_dir, tensorboard, engine=engine)], folder, json)
        return
    if (folder / "seeds.json").exists() or (folder / "config.toml").exists():
        raise InputError(f"{folder} holds a run already; go on with it by: fedp3 resume {folder}")
    _finish(start_seeds(settings, folder, seeds, workers, data_dir, tensorboard, engine), folder, json)


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder")],
    engine: EngineName = "inprocess",
    workers: Workers = 0,
    data_dir: DataDir = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events")] = False,
    json: AsJson = False,
) -> None:
    """Go on with a run that was stopped or killed; a finished one prints its result.

    Example: fedp3 resume runs/a
    """
    from fedp3 import config, driver, record

    driver.check_engine(engine)
    if (folder / "seeds.json").exists():
        plan = record.read_json(folder / "seeds.json")
        first = config.parse(plan["config"])
        _finish(start_seeds(first, folder, int(plan["seeds"]), workers, data_dir, tensorboard, engine), folder, json)
        return
    settings = driver.reopen(folder)
    _finish([go_on(settings, folder, workers, data_dir, tensorboard, engine=engine)], folder, json)


def _free(parent: Path, stem: str) -> Path:
    numbers = range(1, 1 << 20)
    return next(parent / f"{stem}-{k}" for k in numbers if not (parent / f"{stem}-{k}").exists())


def start(
    settings: "Config",
    folder: Path,
    workers: int,
    data_dir: Path | None,
    tensorboard: bool = False,
    name: str = "",
    engine: str = "inprocess",
) -> dict[str, Any]:
    """Begin a run in a new folder and take it to its end."""
    from fedp3 import driver
    from fedp3.experiment import assemble
    from fedp3.locks import locked

    if (folder / "config.toml").exists():
        raise InputError(f"{folder} holds a run already; go on with it by: fedp3 resume {folder}")
    experiment = assemble(settings, data_dir)
    driver.begin(experiment, folder)
    with locked(folder):
        make = partial(driver.make_engine, workers=workers, engine=engine, data_dir=data_dir)
        return _train(experiment, folder, make, None, tensorboard, name)


def go_on(
    settings: "Config",
    folder: Path,
    workers: int,
    data_dir: Path | None,
    tensorboard: bool = False,
    name: str = "",
    engine: str = "inprocess",
) -> dict[str, Any]:
    """Take an existing run folder to its end."""
    from fedp3 import driver, inputs, record
    from fedp3.experiment import assemble
    from fedp3.locks import locked

    if (folder / "result.json").exists():
        return record.read_json(folder / "result.json") | {"out": str(folder)}  # it may have been moved
    experiment = assemble(settings, data_dir)
    inputs.check(folder, experiment)
    with locked(folder):
        checkpoint, broken = driver.pick_up(folder, settings.digest())
        for text in broken:
            show.say(text)
        done = checkpoint.state.t if checkpoint else 0
        show.say(f"going on after round {done} of {settings.run.rounds}")
        make = partial(driver.make_engine, workers=workers, engine=engine, data_dir=data_dir)
        return _train(experiment, folder, make, checkpoint, tensorboard, name)


def start_seeds(
    settings: "Config",
    folder: Path,
    seeds: int,
    workers: int,
    data_dir: Path | None,
    tensorboard: bool = False,
    engine: str = "inprocess",
) -> list[dict[str, Any]]:
    """Run several seeds, each in its own folder; those already there are finished or gone on with."""
    from fedp3 import driver, record
    from fedp3.experiment import assemble

    each = {folder / f"seed-{k}": _with_seed(settings, settings.run.seed + k) for k in range(seeds)}
    begun = {place: driver.reopen(place, mine) for place, mine in each.items() if (place / "config.toml").exists()}
    if not begun:
        assemble(settings, data_dir)  # every mistake shows before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    record.write_json(folder / "seeds.json", {"seeds": seeds, "config": settings.model_dump(mode="json")})
    results = []
    for place, mine in each.items():
        do = go_on if place in begun else start
        results.append(do(mine, place, workers, data_dir, tensorboard, f"{folder.name} seed {mine.run.seed}", engine))
    return results


def _with_seed(settings: "Config", seed: int) -> "Config":
    return settings.model_copy(update={"run": settings.run.model_copy(update={"seed": seed})})


def _train(
    experiment: "Experiment",
    folder: Path,
    make: "Callable[..., Engine]",
    checkpoint: "Checkpoint | None",
    tensorboard: bool,
    name: str,
) -> dict[str, Any]:
    from fedp3 import driver, record

    began = checkpoint.state if checkpoint else None
    total, before = experiment.problem.rounds, record.read_events(folder) if began else []
    with stoppable(), show.rounds(name or experiment.config.method, total, before) as progress:
        engine = make(experiment, states=driver.states_of(checkpoint))
        try:
            each = _also_tensorboard(progress, folder) if tensorboard else progress
            return dict(driver.drive(experiment, engine, folder, each, began).result)
        except Stopped as stopped:
            show.say(f"{stopped}; go on with: fedp3 resume {folder}")
            raise
        finally:
            engine.close()


def _also_tensorboard(progress: "OnRound", folder: Path) -> "Callable[[Any], None]":
    from fedp3.tensorboard import writer

    write = writer(folder / "tensorboard")

    def each(record: Any) -> None:
        progress(record)
        write(record)

    return each


def _finish(results: list[dict[str, Any]], folder: Path, json: bool) -> None:
    """Print the end of a run: a table and what to open next, or one object."""
    from fedp3 import record
    from fedp3.report import write_report

    page = write_report([folder])
    for text in record.read_json(Path(results[0]["out"]) / "run.json").get("warnings", {}).values():
        show.say(f"warning: {text}")
    if json:
        show.as_json(results[0] if not (folder / "seeds.json").exists() else _several(results, folder))
        return
    show.results([r | {"name": Path(r["out"]).name} for r in results])
    for r in results:
        if "privacy" in r:
            show.tell(show.guarantee(r["privacy"]))
            if r["rounds"] < record.read_json(Path(r["out"]) / "run.json")["config"]["run"]["rounds"]:
                show.tell(f"stopped after round {r['rounds']}: no client has budget for another")
    if results[0].get("density", 1.0) not in (None, 1.0):
        left = f"{100 * results[0]['density']:.1f} %"
        show.tell(f"local pruning left {left} of the pruned layers' weights active per step (realised)")
    show.tell(f"open {os.path.relpath(page)}")


def _several(results: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    means = {k: fmean(r[k] for r in results) if all(r[k] is not None for r in results) else None for k in MEANS + COSTS}
    spent = [r["epsilon_max"] for r in results if r["epsilon_max"] is not None]
    total = {"rejected": sum(r["rejected"] for r in results), "epsilon_max": max(spent, default=None)}
    return {"out": str(folder), "rounds": results[0]["rounds"], **means, **total, "runs": results}
