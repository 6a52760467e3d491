"""How much a process grows that trains windows of a network; one child process for each window.

python -m benchmarks.resident CASE EVERY
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks import costs
from benchmarks.private import plain_step
from fedp3.client.sgd import prepare
from fedp3.core.types import ClientPlan, LayerMap

STEPS = 2
PROCESS = Path("/proc/self")


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = (PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def steps(net: nn.Module, batch: int, count: int) -> None:
    """Train."""
    for _ in range(count):
        plain_step(net, *costs.examples(batch))()


def growth(case: costs.Case, plan: ClientPlan, layers: LayerMap) -> int:
    """Peak memory of this process while it makes and trains the network, without what it had."""
    steps(case.small(), 2, 1)  # loads the program's pages, which are not the network's
    ctypes.CDLL(None).malloc_trim(0)
    (PROCESS / "clear_refs").write_text("5")  # forget the peak
    before = status("VmRSS")
    net = case.net()
    prepare(net, plan, layers)
    steps(net, case.process_batch, STEPS)
    return status("VmHWM") - before


def in_child(case: costs.Case, plan: ClientPlan, layers: LayerMap) -> int:
    """The growth of a new process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(growth(case, plan, layers)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return int(text)


def main() -> None:
    """Print the growth for every n-th window, one a line."""
    torch.set_num_threads(1)
    case = costs.CASES[sys.argv[1]]
    layers = costs.map_of(case, case.net())
    for plan in costs.plans_of(case, layers)[:: int(sys.argv[2])]:
        print(in_child(case, plan, layers), flush=True)


if __name__ == "__main__":
    main()
