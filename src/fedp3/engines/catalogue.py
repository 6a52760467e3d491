"""Engines by name, and how many worker processes are worth starting."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fedp3.config.plugins import Plugin
from fedp3.core.errors import InputError
from fedp3.core.registry import Registry
from fedp3.costs.compute import flops
from fedp3.engines.base import Engine, States
from fedp3.engines.in_process import debug, sequential
from fedp3.engines.process_pool import pool
from fedp3.experiment.experiment import Experiment

SMALL_RUN = 3e11  # FLOPs of a run, below which starting processes costs more time than they save

MakeEngine = Callable[[Experiment, int, States | None, Path | None, Sequence[Plugin]], Engine]
ENGINES: Registry[MakeEngine] = Registry("engine")


def make_engine(
    experiment: Experiment,
    workers: int = 0,
    states: States | None = None,
    engine: str = "inprocess",
    data_dir: Path | None = None,
    plugins: Sequence[Plugin] = (),
) -> Engine:
    """Start an engine.

    The engine and the number of workers change no bit of a result, with one exception: the debug
    engine never stacks clients, so that it agrees with the others up to rounding.

    Args:
        experiment: the run.
        workers: number of processes; 0 chooses a number.
        states: the clients' states, from a checkpoint.
        engine: the name of the engine.
        data_dir: the folder of data sets, for processes that read them themselves.
        plugins: files that worker processes import.
    """
    if workers < 0:
        raise InputError(f"workers={workers}: it must be a number of processes, or 0 to choose one")
    if experiment.server.client_level is not None and experiment.config.run.deadline > 0:
        raise InputError(
            "client-level DP refused: in a simulation clients share one machine, so that one more "
            "client can make others late, and its clip would not bound its influence; set "
            "run.deadline=0"
        )
    return ENGINES.pick(engine)(experiment, workers, states, data_dir, plugins)


@ENGINES.register("inprocess")
def _in_process(
    experiment: Experiment,
    workers: int,
    states: States | None,
    data_dir: Path | None,
    plugins: Sequence[Plugin],
) -> Engine:
    workers = workers or _choose_workers(experiment)
    deadline = experiment.config.run.deadline
    if workers == 1:
        return sequential(experiment.client, experiment.shards, states, deadline)
    return pool(experiment.client, experiment.shards, workers, states, deadline, plugins)


@ENGINES.register("flower")
def _flower(
    experiment: Experiment,
    workers: int,
    states: States | None,
    data_dir: Path | None,
    plugins: Sequence[Plugin],
) -> Engine:
    from fedp3.engines.flower.simulation import simulation

    return simulation(experiment, workers or _cores(), data_dir, states, plugins)


@ENGINES.register("debug")
def _debug(
    experiment: Experiment,
    workers: int,
    states: States | None,
    data_dir: Path | None,
    plugins: Sequence[Plugin],
) -> Engine:
    return debug(experiment.client, experiment.shards, states)


def check_engine(engine: str) -> None:
    """Refuse an engine that does not exist or is not installed."""
    ENGINES.pick(engine)
    if engine != "flower":
        return
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise InputError(
            "engine 'flower' needs Flower and its simulation: pip install 'fedp3[flower]'"
        )


def _choose_workers(experiment: Experiment) -> int:
    """One process for a small run, else one per core."""
    server, client = experiment.server, experiment.client
    if client.device != "cpu":
        return 1
    per_example = flops(
        experiment.profile, experiment.first_plans[0], client.layers, client.pruning
    )
    local, samples = client.local, max(server.examples.values())
    examples = local.steps * min(local.batch, samples)
    if local.epochs:
        examples = local.epochs * samples
    if per_example * examples * server.participants * server.run.rounds < SMALL_RUN:
        return 1
    return max(1, min(server.participants, _cores()))


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
