"""Peak memory of a whole process tree over a few rounds, each page counted once however many share it.

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
from fedp3.engines.inprocess import sequential
from fedp3.engines.pool import pool
from fedp3.experiment import Experiment
from fedp3.server import run


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    return [pid, *(d for c in children for d in tree(c))]


def held(pid: int) -> float:
    """Proportional memory of the tree, MB."""
    total = 0
    for p in tree(pid):
        try:
            lines = Path(f"/proc/{p}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e3


def peak(work: Callable[[], None]) -> float:
    """The most this process and its children held while working, seen every 20 ms."""
    seen, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                seen.append(held(os.getpid()))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return max(seen)


def rounds(e: Experiment, execute: Callable, n: int) -> Callable[[], None]:
    def work() -> None:
        for (state, _), _ in zip(run(e.problem, e.start, execute), range(n), strict=False):
            del state

    return work


def ours() -> float:
    e = fleets.mlp(*fleets.WHOLE)
    engine = pool(e.recipe, e.shards, 2)
    try:
        return peak(rounds(e, engine.execute, 4))
    finally:
        engine.close()


def yardstick() -> float:
    work, close = bare.processes(fleets.mlp(*fleets.WHOLE))
    try:
        return peak(lambda: [work() for _ in range(4)] and None)
    finally:
        close()


def growth(clients: int) -> tuple[float, float, float]:
    """Seconds of CPU a round, MB after 3 rounds, and MB after 30."""
    e = fleets.tiny(*fleets.WHOLE, clients=clients)
    execute = sequential(e.recipe, e.shards).execute
    rounds(e, execute, 3)()
    early, began = held(os.getpid()), time.process_time()
    rounds(e, execute, 27)()
    return (time.process_time() - began) / 27, early, held(os.getpid())


def main() -> None:
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], object]] = {
        "ours": ours,
        "bare": yardstick,
        "growth": lambda: " ".join(map(str, growth(int(sys.argv[2])))),
    }
    print(kinds[sys.argv[1]]())


if __name__ == "__main__":
    main()
