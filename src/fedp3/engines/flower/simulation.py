"""Flower's simulation: every client a node of its own, played by Ray's processes on this machine.

The clients are on this machine, so their states stay with the engine and are in the checkpoint, as in process.
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedp3.codec import room_for
from fedp3.engines.flower import reaper
from fedp3.engines.flower.client import client_app, configured
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import clean
from fedp3.engines.inprocess import Engine, States
from fedp3.errors import RunError
from fedp3.experiment import Experiment

POLL = 0.02
TRIES = 3
START_SECONDS = 600.0  # Ray's processes import torch on a machine that may be busy


def simulation(experiment: Experiment, workers: int, data_dir: Path | None, states: States | None = None) -> Engine:
    """An engine over `workers` simulating processes, one torch thread each."""
    here = _begin(experiment, workers, data_dir)
    problem, run = experiment.problem, experiment.config.run
    wire = Wire(
        problem.layers, problem.pruning, experiment.config.digest(), "0" * 32, run.deadline, here.rest,
        problem.compression, room_for(experiment.start.extra),
    )  # fmt: skip
    roster = Roster()
    try:
        missing = roster.gather(here.grid, wire, experiment.shards, START_SECONDS)
        if missing:
            why = "; ".join(sorted(set(roster.refused.values()))) or f"no answer within {START_SECONDS:g} s"
            raise RunError(f"{len(missing)} of {len(experiment.shards)} simulated clients did not start: {why}")
    except BaseException:
        here.close()
        raise
    engine = over(here.grid, wire, roster, states if states is not None else States())
    return Engine(engine.execute, engine.states, here.close)


@dataclass(frozen=True, slots=True)
class _Simulated:
    grid: Grid
    rest: Callable[[], None]  # raises once nobody can answer any more
    close: Callable[[], None]


def _begin(experiment: Experiment, workers: int, data_dir: Path | None) -> _Simulated:
    """Start the simulation on a thread of its own."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what goes wrong in a client comes back as its reason
    met: Queue[Grid | None] = Queue()
    ended: list[BaseException] = []
    done = threading.Event()

    def simulate() -> None:
        try:
            _simulate(_handing_over(met, done), experiment, data_dir)
        except BaseException as error:
            ended.append(error)
        met.put(None)

    thread = threading.Thread(target=simulate, name="flower")
    stop_ray = _start_ray(workers)

    def rest() -> None:
        if not thread.is_alive():
            raise RunError(f"Flower's simulation ended: {_why(ended)}")
        time.sleep(POLL)

    def close() -> None:
        done.set()
        thread.join()
        stop_ray()

    thread.start()
    grid = met.get()
    if grid is None:
        close()
        raise RunError(f"Flower's simulation did not start: {_why(ended)}")
    return _Simulated(grid, rest, close)


def _handing_over(met: Queue[Grid | None], done: threading.Event) -> ServerApp:
    """A ServerApp that gives its grid away and lives until it is told that all is done."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        met.put(grid)
        done.wait()

    return app


def _why(ended: list[BaseException]) -> str:
    """The error at the bottom of those that Flower lays on top of each other."""
    error = ended[0] if ended else None
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return clean(f"{type(error).__name__}: {error}") if error else "its server returned"


def _start_ray(workers: int) -> Callable[[], None]:
    """Ray's own processes, before Flower would start them: it gives them 30 s, too few on a busy machine.

    Returns what stops them.  Should this process be killed, the reaper does.
    """
    temporary = tempfile.mkdtemp(prefix="fp3-")  # Ray's sockets lie inside, whose paths must be short
    command = [sys.executable, "-I", reaper.__file__, temporary]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def stop() -> None:
        ray.shutdown()
        watch.communicate()

    try:
        _init_ray(workers, temporary)
    except BaseException:
        stop()
        raise
    return stop


def _init_ray(workers: int, temporary: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that train
    for left in reversed(range(TRIES)):
        try:
            ray.init(
                num_cpus=workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",  # else Ray looks for a way out to learn its address
                _temp_dir=temporary,
            )
            return
        except Exception as error:
            ray.shutdown()
            if not left:
                raise RunError(f"Ray did not start: {clean(str(error))}") from None


def _simulate(app: ServerApp, experiment: Experiment, data_dir: Path | None) -> None:
    """The one call of `run_simulation`, which Flower means to replace; it returns when the ServerApp does."""
    run_simulation(
        app,
        client_app(configured(experiment.config, data_dir), carried=True),
        num_supernodes=len(experiment.shards),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
