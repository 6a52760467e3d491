"""Waits for the end of the process that started it, then ends what that one left: `python reaper.py FOLDER`.

Some of Ray's processes outlive a driver that was killed.  All of them hold files open in its session's folder, and
by that they are known.  The end is when standard input closes, which no way of dying can prevent.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path


def holding(folder: Path) -> list[int]:
    """The processes that have a file of this folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours to look at, or gone
            if any(folder in fd.readlink().parents for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def reap(folder: Path, spared: int) -> None:
    """End every process that uses the folder but one, then remove it."""
    for pid in set(holding(folder)) - {spared}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one it waits for
    parent = os.getppid()  # it may go on after the simulation, with a log of Ray's still open
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]).resolve(), parent)
