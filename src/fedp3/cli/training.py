"""Training as commands do it: `fedp3.runs.session` with a progress display and closing lines."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedp3.cli import terminal
from fedp3.cli.signals import Stopped, stoppable
from fedp3.core.errors import FedP3Error

if TYPE_CHECKING:
    from fedp3.config import Config
    from fedp3.config.plugins import Plugin
    from fedp3.core.types import Reply, Task
    from fedp3.engines.base import Engine, States
    from fedp3.experiment.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a command trains.  No option changes a result.

    Args:
        workers: number of processes; 0 chooses by the size of the run.
        engine: name of the engine.
        data_dir: folder of data sets.
        tensorboard: whether to write TensorBoard events as well.
        plugins: files of the user that the run needs.
        name: the name of the run in the progress display; empty means that of its method.
    """

    workers: int = 0
    engine: str = "inprocess"
    data_dir: Path | None = None
    tensorboard: bool = False
    plugins: "Sequence[Plugin]" = ()
    name: str = ""


def train(
    settings: "Config",
    folder: Path,
    options: Options,
    *,
    resume: bool = False,
    extend: bool = False,
) -> dict[str, Any]:
    """Train a run to its end; returns its result.

    Args:
        settings: the config.
        folder: the run folder.
        options: how to train.
        resume: continue the run in the folder; without it, a folder that holds a run is refused.
        extend: the config may have more rounds than the run in the folder.
    """
    from fedp3.experiment.assemble import assemble
    from fedp3.runs import existing, session
    from fedp3.runs.callbacks import log_to_tensorboard
    from fedp3.runs.stop_request import StopRequested

    if resume:
        finished = existing.finished_result(folder)
        if finished is not None and not extend:
            return finished
    else:
        existing.refuse_existing(folder)
    callbacks = [log_to_tensorboard(folder / "tensorboard")] if options.tensorboard else []
    _note_workers(options.workers)
    experiment = assemble(settings, options.data_dir)

    name, rounds = options.name or settings.method, settings.run.rounds
    with stoppable():
        try:
            outcome = session.train(
                experiment,
                folder,
                lambda experiment, states: _make_engine(experiment, states, options),
                resume=resume,
                plugins=options.plugins,
                watch=lambda _, before: terminal.rounds(name, rounds, before),
                callbacks=callbacks,
                tell=terminal.note,
            )
        except (Stopped, StopRequested) as stopped:
            terminal.note(f"{stopped}; resume with: {terminal.command('resume', folder)}")
            if isinstance(stopped, Stopped):
                raise
            raise Stopped(signal.SIGINT) from None  # a request ends a command as Ctrl-C does
    return dict(outcome.result)


def _note_workers(workers: int) -> None:
    """Say that more processes than cores only take time."""
    cores = len(os.sched_getaffinity(0))
    if workers > cores:
        terminal.note(
            f"{workers} workers share {cores} cores and will be slower than {cores}; "
            "--workers 0 chooses a number"
        )


def train_seeds(
    settings: "Config", folder: Path, seeds: int, options: Options
) -> list[dict[str, Any]]:
    """Train several seeds, each in its run folder; runs that exist are resumed.

    Args:
        settings: the config of the first seed.
        folder: the folder of the run folders.
        seeds: the number of seeds.
        options: how to train.
    """
    from fedp3.experiment.assemble import assemble
    from fedp3.runs import existing

    configs = existing.seed_configs(settings, folder, seeds)
    begun = [place for place in configs if existing.holds_run(place)]
    for place in begun:
        existing.reopen(place, configs[place])
    if not begun:
        assemble(settings, options.data_dir)  # finds every mistake before anything is written
    existing.begin_seeds(settings, folder, seeds, options.plugins)
    results = []
    for place, config in configs.items():
        named = replace(options, name=f"{folder.name} seed {config.run.seed}")
        results.append(train(config, place, named, resume=place in begun))
    return results


def _make_engine(experiment: "Experiment", states: "States | None", options: Options) -> "Engine":
    from fedp3.engines.catalogue import make_engine

    engine = make_engine(
        experiment, options.workers, states, options.engine, options.data_dir, options.plugins
    )
    return _with_traceback(engine) if options.engine == "debug" else engine


def _with_traceback(engine: "Engine") -> "Engine":
    """The engine, which prints the traceback of those exceptions that `main` shows as one line."""

    def execute(tasks: "Sequence[Task]") -> "Iterator[Reply]":
        try:
            yield from engine.execute(tasks)
        except (FedP3Error, OSError):
            traceback.print_exc(file=sys.stderr)
            raise

    return replace(engine, execute=execute)


# --------------------------------------------------------------------------- closing lines


def show_end(results: Sequence[dict[str, Any]], folder: Path, json: bool) -> None:
    """Print the results of a run or of several seeds, and write their report.

    Args:
        results: the result of each run.
        folder: the run folder, or the folder of several seeds.
        json: print one JSON object instead of a table.
    """
    from fedp3.core.files import read_json
    from fedp3.privacy.disclosure import STANDING
    from fedp3.report import write_report

    page = write_report([folder])
    descriptions = [read_json(Path(result["out"]) / "run.json") for result in results]
    for name, warning in descriptions[0].get("warnings", {}).items():
        if name not in STANDING:  # `fedp3 plan` and the report show these
            terminal.note(f"warning: {warning}")
    if json:
        several = (folder / "seeds.json").exists()
        terminal.as_json(_over_seeds(results, folder) if several else results[0])
        return
    terminal.results([result | {"name": Path(result["out"]).name} for result in results])
    for result, description in zip(results, descriptions, strict=True):
        _show_privacy(result, description["config"]["run"]["rounds"])
    density = results[0].get("density")
    if density not in (None, 1.0):
        terminal.line(
            f"local pruning retained {100 * density:.1f} % of the pruned layers' weights, "
            "mean over local steps"
        )
    terminal.line(f"open {os.path.relpath(page)}")


def _show_privacy(result: Mapping[str, Any], planned_rounds: int) -> None:
    if "privacy" in result:
        terminal.line(terminal.guarantee(result["privacy"]))
    if "client_privacy" in result:
        terminal.line(terminal.client_guarantee(result["client_privacy"]))
    if result.get("stopped"):
        terminal.line(f"stopped after round {result['rounds']}: {result['stopped']}")
        terminal.line(f"continue with: {terminal.command('resume', result['out'])}")
    elif result["stopped_early"]:
        terminal.line(f"stopped after round {result['rounds']}: G improved no further")
    elif result["rounds"] < planned_rounds:
        terminal.line(
            f"stopped after round {result['rounds']}: no client has budget for another round"
        )


KINDS = ("global", "dispatched", "personal", "worst_client")
MEANS = (
    *(f"score_{kind}" for kind in KINDS),
    *(f"accuracy_{kind}" for kind in KINDS),
    "mb_up",
    "mb_down",
    "seconds",
)


def _over_seeds(results: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    means: dict[str, float | None] = {}
    for key in MEANS:
        values = [result[key] for result in results]
        means[key] = None if None in values else fmean(values)
    epsilons = [r["epsilon_max"] for r in results if r["epsilon_max"] is not None]
    client_epsilons = [r["client_epsilon"] for r in results if r["client_epsilon"] is not None]
    return {
        "out": str(folder),
        "rounds": results[0]["rounds"],
        "score": results[0]["score"],
        **means,
        "rejected": sum(result["rejected"] for result in results),
        "epsilon_max": max(epsilons, default=None),
        "client_epsilon": max(client_epsilons, default=None),
        "runs": list(results),
    }
