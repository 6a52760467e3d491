"""A folder for one writer at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedp3.errors import BusyError, InputError


@contextmanager
def locked(folder: Path, name: str = ".lock", wait: bool = False) -> Iterator[None]:
    """Hold the folder for one writer; the lock of a dead process is no lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / name).open("a+")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            handle.seek(0)
            who = handle.read().strip()
            raise BusyError(
                f"{folder} is being written by process {who or 'unknown'}; wait for it, or stop it"
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield
