"""A run that kills itself with SIGKILL at a named moment.

The process, the signal and the files are real; only the moment is arranged.
"""

import os
import signal
from pathlib import Path

from fedp3 import cli
from fedp3.core import files
from fedp3.runs import checkpoint, run_folder, session, writer
from fedp3.server import averaging, context


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(calls: int, function, half=None):
    """`function`, until its n-th call: then die, before it or in the middle of it."""
    left = calls

    def wrapped(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            if half is not None:
                half(*args, **kwargs)
            die()
        return function(*args, **kwargs)

    return wrapped


def half_written(path: Path, data: bytes, **how) -> None:
    path.with_name(f".{path.name}.new").write_bytes(data[: len(data) // 2])


def half_event(folder: Path, done: context.RoundRecord) -> None:
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"t": 2, "samp')


def only_tensors(write):
    """A write that dies between a checkpoint's tensors and its manifest."""

    def wrapped(path: Path, data: bytes, **how) -> None:
        if path.name == "00000002.json":
            die()
        write(path, data, **how)

    return wrapped


def replace_in(module: object, name: str, function: object) -> None:
    setattr(module, name, function)


MOMENTS = {
    "in aggregation": lambda n: replace_in(
        averaging.RunningMean, "mean", after(8 * n, averaging.RunningMean.mean)
    ),
    "before the event": lambda n: replace_in(
        writer, "append_event", after(n, run_folder.append_event)
    ),
    "inside the event": lambda n: replace_in(
        writer, "append_event", after(n, run_folder.append_event, half_event)
    ),
    "between event and checkpoint": lambda n: replace_in(
        writer, "save_checkpoint", after(n, checkpoint.save_checkpoint)
    ),
    "inside the checkpoint": lambda n: replace_in(
        checkpoint, "write_atomic", after(n, files.write_atomic, half_written)
    ),
    "between tensors and manifest": lambda n: replace_in(
        checkpoint, "write_atomic", only_tensors(files.write_atomic)
    ),
    "in the last evaluation": lambda n: replace_in(session, "finish", after(1, session.finish)),
}


def train(config: str, folder: str, moment: str, number: int) -> None:
    """Train until this moment."""
    MOMENTS[moment](number)
    cli.main(["run", config, "--out", folder])
