"""Two thousand rounds leave nothing behind: memory, threads and open files stay as they were."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fedp3 import config
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.server.rounds import run

SMALL = [
    "model.width=0.01",
    "partition.clients=6",
    "run.clients_per_round=4",
    "local.steps=1",
    "local.batch=4",
]
pytestmark = pytest.mark.slow


def processes() -> list[int]:
    """This process and its workers."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return [
        os.getpid(),
        *(int(child) for task in tasks for child in (task / "children").read_text().split()),
    ]


def used() -> dict[str, int]:
    resident = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in processes())
    files = sum(len(list(Path(f"/proc/{p}/fd").iterdir())) for p in processes())
    return {
        "MB": resident * os.sysconf("SC_PAGE_SIZE") // 10**6,
        "files": files,
        "threads": threading.active_count(),
    }


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "setting", ["prune.local_pruner=fixed", "prune.local_pruner=ordered_dropout"]
)  # stacked, and one by one
def test_memory_threads_and_files_are_flat_over_two_thousand_rounds(workers, setting):
    e = assemble(
        config.parse({}, [*SMALL, setting, "aggregate.rule=attention", "plan.head=personal"])
    )
    engine = make_engine(e, workers)
    seen = {}
    try:
        server = replace(e.server, run=replace(e.server.run, rounds=2000, eval_every=400))
        for state, _ in run(server, e.start, engine.execute):
            if state.t in (400, 2000):
                seen[state.t] = used()
    finally:
        engine.close()
    first, last = seen[400], seen[2000]
    assert last["MB"] - first["MB"] <= 8 and last["files"] <= first["files"] + 2
    assert last["threads"] <= first["threads"]
