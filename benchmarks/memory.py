"""Peak memory of a process tree over a few rounds; shared pages are counted once.

python -m benchmarks.memory ours|bare|growth [CLIENTS]
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import bare, fleets
from fedp3.core.types import Execute
from fedp3.engines.in_process import sequential
from fedp3.engines.process_pool import pool
from fedp3.experiment.experiment import Experiment
from fedp3.server.rounds import run


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children = [
        int(c)
        for t in Path(f"/proc/{pid}/task").iterdir()
        for c in (t / "children").read_text().split()
    ]
    return [pid, *(d for c in children for d in tree(c))]


def used_mb(pid: int) -> float:
    """Proportional memory of a process tree, in MB."""
    total = 0
    for p in tree(pid):
        try:
            lines = Path(f"/proc/{p}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # the process has ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e3


def peak(work: Callable[[], None]) -> float:
    """The most memory that this process and its children use during work, sampled every 20 ms."""
    seen, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                seen.append(used_mb(os.getpid()))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return max(seen)


def rounds(e: Experiment, execute: Execute, n: int) -> Callable[[], None]:
    """Work that runs the first n rounds."""

    def work() -> None:
        for (state, _), _ in zip(run(e.server, e.start, execute), range(n), strict=False):
            del state

    return work


def ours() -> float:
    """Peak memory of ours over two processes, in MB."""
    e = fleets.mlp(*fleets.DENSE)
    engine = pool(e.client, e.shards, 2)
    try:
        return peak(rounds(e, engine.execute, 4))
    finally:
        engine.close()


def reference() -> float:
    """Peak memory of the bare loop over two processes, in MB."""
    work, close = bare.processes(fleets.mlp(*fleets.DENSE))

    def four_rounds() -> None:
        for _ in range(4):
            work()

    try:
        return peak(four_rounds)
    finally:
        close()


def growth(clients: int) -> tuple[float, float, float]:
    """CPU seconds per round, MB after 3 rounds, and MB after 30."""
    e = fleets.tiny(*fleets.DENSE, clients=clients)
    execute = sequential(e.client, e.shards).execute
    rounds(e, execute, 3)()
    early, began = used_mb(os.getpid()), time.process_time()
    rounds(e, execute, 27)()
    return (time.process_time() - began) / 27, early, used_mb(os.getpid())


def main() -> None:
    """Print the measurement that the first argument names."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], object]] = {
        "ours": ours,
        "bare": reference,
        "growth": lambda: " ".join(map(str, growth(int(sys.argv[2])))),
    }
    print(kinds[sys.argv[1]]())


if __name__ == "__main__":
    main()
