"""A request to stop a run, which any process that can write to its folder may make.

It is a file in the run folder.  The run looks for it after every round and ends as with Ctrl-C: its
last round is on disk, and it can be resumed.  This works for every engine, and where the run is in
another container that shares the folder.
"""

from pathlib import Path

from fedp3.core.errors import InputError
from fedp3.core.files import is_locked, write_atomic

FILE = "stop"


class StopRequested(KeyboardInterrupt):
    """Somebody asked this run to stop; like Ctrl-C, this is no `Exception`."""

    def __init__(self) -> None:
        super().__init__("stopped by a request")


def request_stop(folder: Path) -> None:
    """Ask the run in this folder to stop after its current round.

    Raises:
        InputError: no process is training it.
    """
    if not is_locked(folder):
        raise InputError(f"no process is training the run in {folder}")
    write_atomic(folder / FILE, b"")


def is_requested(folder: Path) -> bool:
    """Whether the run was asked to stop, and has not stopped yet."""
    return (folder / FILE).exists()


def forget_request(folder: Path) -> None:
    """Remove a request that was made to an earlier process."""
    (folder / FILE).unlink(missing_ok=True)


def stop_if_requested(folder: Path | None) -> None:
    """Raise `StopRequested` if this run was asked to stop."""
    if folder is not None and is_requested(folder):
        forget_request(folder)
        raise StopRequested
