"""Writes a run's rounds to its folder while the next round trains.

One thread and one order: the event of a round, then its checkpoint, then those of the next.  At most one round is
waiting, so a slow disk holds a run up only where it takes longer than a round, and a process that is killed loses that
round at most, besides the one in training.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fedp3 import record
from fedp3.record import Checkpoint
from fedp3.server import RoundRecord

Put = Callable[[RoundRecord | None, Checkpoint | None], None]  # neither may change afterwards


@contextmanager
def scribe(folder: Path, digest: str, *, at_once: bool) -> Iterator[Put]:
    """Inside, rounds can be handed over; at the end they are on disk, and what went wrong with one is raised.

    With `at_once` each is on disk before `put` returns.
    """
    last: Future[None] | None = None

    def write(done: RoundRecord | None, checkpoint: Checkpoint | None) -> None:
        if done is not None:
            record.append_event(folder, done)
        if checkpoint is not None:
            record.save_checkpoint(folder, checkpoint, digest)

    with ThreadPoolExecutor(1, thread_name_prefix="scribe") as hand:

        def put(done: RoundRecord | None, checkpoint: Checkpoint | None) -> None:
            nonlocal last
            if last is not None:
                last.result()  # after a write that failed, nothing is written: it would lack what came before
            last = hand.submit(write, done, checkpoint)
            if at_once:
                last.result()

        try:
            yield put
        finally:
            if last is not None:
                last.result()
