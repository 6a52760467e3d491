"""Overhead of a round: the time of recorded and checkpointed rounds that clients do not train."""

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedp3.core.types import Reply, Task
from fedp3.engines import in_process
from fedp3.engines.base import Answer, Engine, States
from fedp3.experiment.experiment import Experiment
from fedp3.runs import session
from fedp3.server.context import RoundRecord


def overhead(e: Experiment, rounds: int) -> float:
    """The share of a round that is sampling, pruning, gate, aggregation, events and checkpoints.

    Args:
        e: the run.
        rounds: the number of measured rounds; one more comes first, to warm up.
    """
    training, ends = 0.0, []
    attempt_all = in_process.attempt_all

    def timed(*arguments: object) -> list[Answer]:
        nonlocal training
        began = time.perf_counter()
        try:
            return list(attempt_all(*arguments))  # type: ignore[arg-type]
        finally:
            training += time.perf_counter() - began

    def make_engine(e: Experiment, states: States | None) -> Engine:
        engine = in_process.sequential(e.client, e.shards, states)

        def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
            # Evaluation is not part of the measurement.
            return engine.execute(tasks) if tasks[0].kind == "train" else iter(())

        return replace(engine, execute=execute)

    def on_round(record: RoundRecord) -> None:
        ends.append((time.perf_counter(), training))

    run = replace(e.server.run, rounds=rounds + 1)
    e = replace(e, server=replace(e.server, run=run))
    gc.collect()  # a full collection takes as long as five tiny rounds; imports and set-up cause it
    with tempfile.TemporaryDirectory() as folder:
        in_process.attempt_all = timed
        try:
            session.train(e, Path(folder) / "run", make_engine, watch=session.watch_with(on_round))
        finally:
            in_process.attempt_all = attempt_all
    (began, trained_before), (end, trained) = ends[0], ends[-1]
    return 1 - (trained - trained_before) / (end - began)
