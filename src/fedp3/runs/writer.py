"""Writes a run's rounds to its folder while the next round trains.

One thread writes in one order: the event of a round, then its checkpoint, then those of the next
round.  At most one round is waiting.  So a slow disk delays a run only if it takes longer than a
round, and a process that is killed loses at most the round that is waiting and the one in training.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fedp3.runs.checkpoint import Checkpoint, save_checkpoint
from fedp3.runs.run_folder import append_event
from fedp3.server.context import RoundRecord

# hands over a record and a checkpoint, which must not change afterwards
Write = Callable[[RoundRecord | None, Checkpoint | None], None]


@contextmanager
def round_writer(folder: Path, digest: str, *, at_once: bool) -> Iterator[Write]:
    """A context in which rounds can be handed over; at its end they are on disk.

    The error of a write is raised by the next call, or at the end.

    Args:
        folder: the run folder.
        digest: the digest of the run's config.
        at_once: each round is on disk before the call returns.
    """
    last: Future[None] | None = None

    def write_now(record: RoundRecord | None, checkpoint: Checkpoint | None) -> None:
        if record is not None:
            append_event(folder, record)
        if checkpoint is not None:
            save_checkpoint(folder, checkpoint, digest)

    with ThreadPoolExecutor(1, thread_name_prefix="round-writer") as executor:

        def write(record: RoundRecord | None, checkpoint: Checkpoint | None) -> None:
            nonlocal last
            if last is not None:
                last.result()  # raises if that write failed: the record must not have gaps
            last = executor.submit(write_now, record, checkpoint)
            if at_once:
                last.result()

        try:
            yield write
        finally:
            if last is not None:
                last.result()
