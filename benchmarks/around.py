"""What a round costs besides training: the time of whole rounds, recorded and checkpointed, not spent in clients."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedp3 import driver, record
from fedp3.engines import inprocess
from fedp3.experiment import Experiment
from fedp3.server import run
from fedp3.types import Reply, Task


def share(e: Experiment, rounds: int) -> float:
    """The share of CPU time of `rounds` rounds that is sampling, pruning, gate, aggregation, events, checkpoints."""
    training = [0.0]

    def timed(work: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            began = time.process_time()
            try:
                return work(*args)
            finally:
                training[0] += time.process_time() - began

        return call

    e = replace(e, problem=replace(e.problem, rounds=rounds))
    engine = inprocess.sequential(e.recipe, e.shards)
    plain = inprocess.attempt_all

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        return engine.execute(tasks) if tasks[0].kind == "train" else iter(())  # evaluation is not part of this

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        driver.begin(e, folder)
        inprocess.attempt_all = timed(plain)  # type: ignore[assignment]
        began = time.process_time()
        try:
            for state, done in run(e.problem, e.start, execute):
                record.append_event(folder, done)
                record.save_checkpoint(folder, record.Checkpoint(state, engine.states.of), e.config.digest())
        finally:
            inprocess.attempt_all = plain
        total = time.process_time() - began
    return 1 - training[0] / total
