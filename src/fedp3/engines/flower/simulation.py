"""Flower's simulation: every client is a node, played by Ray's processes on this machine.

The clients are on this machine, so that the engine holds their states and they are part of the
checkpoint, as in the in-process engine.
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedp3.config.plugins import Plugin
from fedp3.core.errors import RunError
from fedp3.engines.base import Engine, States
from fedp3.engines.flower import orphan_reaper
from fedp3.engines.flower.client_app import client_app, configured
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import clean
from fedp3.experiment.experiment import Experiment
from fedp3.messages.codec import room_for
from fedp3.models.frozen import frozen_sha256
from fedp3.privacy.mechanism import mechanism_of

POLL_SECONDS = 0.02
TRIES = 3
START_SECONDS = 600.0  # Ray's processes import torch on a machine that may be busy


def simulation(
    experiment: Experiment,
    workers: int,
    data_dir: Path | None,
    states: States | None = None,
    plugins: Sequence[Plugin] = (),
) -> Engine:
    """An engine over `workers` simulating processes, one torch thread each."""
    running = _begin(experiment, workers, data_dir, plugins)
    wire = Wire(
        spec=experiment.server.spec,
        digest=experiment.config.digest(),
        run="0" * 32,
        mechanism=mechanism_of(experiment.client),
        deadline=experiment.config.run.deadline,
        rest=running.rest,
        room=room_for(experiment.start.extra),
        frozen=frozen_sha256(experiment.client.net),
    )
    roster = Roster()
    try:
        missing = roster.gather(running.grid, wire, experiment.shards, START_SECONDS)
        if missing:
            reasons = "; ".join(sorted(set(roster.refused.values())))
            reasons = reasons or f"no answer within {START_SECONDS:g} s"
            clients = f"{len(missing)} of {len(experiment.shards)} simulated clients"
            raise RunError(f"{clients} did not start: {reasons}")
    except BaseException:
        running.close()
        raise
    engine = over(running.grid, wire, roster, states if states is not None else States())
    return replace(engine, close=running.close)


@dataclass(frozen=True, slots=True)
class _Simulation:
    """A simulation that runs on another thread."""

    grid: Grid
    rest: Callable[[], None]  # waits a moment; raises once the simulation has ended
    close: Callable[[], None]


def _begin(
    experiment: Experiment, workers: int, data_dir: Path | None, plugins: Sequence[Plugin]
) -> _Simulation:
    """Start the simulation on another thread."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # a client's failure is in its reply
    grids: Queue[Grid | None] = Queue()  # receives the grid, or None if there is none
    errors: list[BaseException] = []
    done = threading.Event()

    def simulate() -> None:
        try:
            _simulate(_server_app(grids, done), experiment, data_dir, plugins)
        except BaseException as error:
            errors.append(error)
        grids.put(None)

    thread = threading.Thread(target=simulate, name="flower")
    stop_ray = _start_ray(workers)

    def rest() -> None:
        if not thread.is_alive():
            raise RunError(f"Flower's simulation ended: {_root_cause(errors)}")
        time.sleep(POLL_SECONDS)

    def close() -> None:
        done.set()
        thread.join()
        stop_ray()

    thread.start()
    grid = grids.get()
    if grid is None:
        close()
        raise RunError(f"Flower's simulation did not start: {_root_cause(errors)}")
    return _Simulation(grid, rest, close)


def _server_app(grids: Queue[Grid | None], done: threading.Event) -> ServerApp:
    """A ServerApp that hands its grid over and then waits until the run is done."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        grids.put(grid)
        done.wait()

    return app


def _root_cause(errors: list[BaseException]) -> str:
    """The first of the errors that Flower chains."""
    error = errors[0] if errors else None
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return clean(f"{type(error).__name__}: {error}") if error else "its server returned"


def _start_ray(workers: int) -> Callable[[], None]:
    """Start Ray's processes, and return a function that stops them.

    Flower would start them too, but allows only 30 s, which is not enough on a busy machine.
    If this process is killed, `orphan_reaper` stops them.
    """
    temporary = tempfile.mkdtemp(prefix="fp3-")  # Ray's sockets are inside: paths must be short
    command = [sys.executable, "-I", orphan_reaper.__file__, temporary]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def stop() -> None:
        ray.shutdown()
        reaper.communicate()

    try:
        _init_ray(workers, temporary)
    except BaseException:
        stop()
        raise
    return stop


def _init_ray(workers: int, temporary: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that train
    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(
                num_cpus=workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",  # else Ray contacts other machines to learn it
                _temp_dir=temporary,
            )
            return
        except Exception as error:
            ray.shutdown()
            if not tries_left:
                raise RunError(f"Ray did not start: {clean(str(error))}") from None


def _simulate(
    app: ServerApp, experiment: Experiment, data_dir: Path | None, plugins: Sequence[Plugin]
) -> None:
    """Run until the ServerApp returns.

    This is the only call of `run_simulation`, which Flower plans to replace.
    """
    run_simulation(
        app,
        client_app(configured(experiment.config, data_dir, plugins), state_in_message=True),
        num_supernodes=len(experiment.shards),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
