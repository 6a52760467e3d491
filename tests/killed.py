"""A run that kills itself with SIGKILL at a named moment: `python killed.py CONFIG FOLDER MOMENT N`.

The process, the signal and the files are real; only the moment is arranged.
"""

import os
import signal
import sys
from pathlib import Path

from fedp3 import cli, driver, record, server


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


def half_event(folder: Path, done: server.RoundRecord) -> None:
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"t": 2, "samp')


def only_tensors(write):
    """A write that dies between a checkpoint's tensors and its manifest."""

    def wrapped(path: Path, data: bytes, **how) -> None:
        if path.name == "00000002.json":
            die()
        write(path, data, **how)

    return wrapped


MOMENTS = {
    "in aggregation": lambda n: setattr(server, "aggregate", after(n, server.aggregate)),
    "before the event": lambda n: setattr(record, "append_event", after(n, record.append_event)),
    "inside the event": lambda n: setattr(record, "append_event", after(n, record.append_event, half_event)),
    "between event and checkpoint": lambda n: setattr(record, "save_checkpoint", after(n, record.save_checkpoint)),
    "inside the checkpoint": lambda n: setattr(record, "write_atomic", after(n + 3, record.write_atomic, half_written)),
    "between tensors and manifest": lambda n: setattr(record, "write_atomic", only_tensors(record.write_atomic)),
    "in the last evaluation": lambda n: setattr(driver, "finish", after(1, driver.finish)),
}

if __name__ == "__main__":
    config, folder, moment, number = sys.argv[1:5]
    MOMENTS[moment](int(number))
    cli.main(["run", config, "--out", folder])
