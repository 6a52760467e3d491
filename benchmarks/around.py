"""What a round costs besides training: the time of whole rounds, recorded and checkpointed, not spent in clients."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedp3 import driver
from fedp3.engines import inprocess
from fedp3.experiment import Experiment
from fedp3.server import RoundRecord
from fedp3.types import Reply, Task


def share(e: Experiment, rounds: int) -> float:
    """The share of the time of `rounds` rounds that is sampling, pruning, gate, aggregation, events, checkpoints."""
    training, ends = [0.0], []

    def timed(work: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            began = time.perf_counter()
            try:
                return work(*args)
            finally:
                training[0] += time.perf_counter() - began

        return call

    def ended(done: RoundRecord) -> None:
        ends.append((time.perf_counter(), training[0]))

    e = replace(e, problem=replace(e.problem, rounds=rounds + 1))
    engine = inprocess.sequential(e.recipe, e.shards)
    plain = inprocess.attempt_all

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        return engine.execute(tasks) if tasks[0].kind == "train" else iter(())  # evaluation is not part of this

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        driver.begin(e, folder)
        inprocess.attempt_all = timed(plain)  # type: ignore[assignment]
        try:
            driver.drive(e, replace(engine, execute=execute), folder, ended)
        finally:
            inprocess.attempt_all = plain
    (began, before), (end, after) = ends[0], ends[-1]  # the first round warms up
    return 1 - (after - before) / (end - began)
