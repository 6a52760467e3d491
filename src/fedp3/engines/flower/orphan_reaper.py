"""Ends the processes that a killed simulation left behind: `python orphan_reaper.py FOLDER`.

Some of Ray's processes outlive a driver that was killed.  All of them have files of its session's
folder open, by which they are recognised.  This program waits until its standard input is closed,
which happens however the process that started it ends.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path


def processes_using(folder: Path) -> list[int]:
    """The processes that have a file of this folder open."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if any(folder in fd.readlink().parents for fd in (process / "fd").iterdir()):
                pids.append(int(process.name))
    return pids


def reap(folder: Path, spared: int) -> None:
    """End every process that uses the folder, except `spared`, then remove the folder."""
    for pid in set(processes_using(folder)) - {spared}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent
    parent = os.getppid()  # it may continue after the simulation, with a log of Ray's open
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]).resolve(), parent)
