"""`make bench`: one table of ratios.

Each row times our code and its reference in turn, pair by pair, and prints the median ratio of the
pairs with its interval.  Machines are noisy, but less so between two measurements in a row.  Rows
over two processes measure wall time and need an otherwise idle machine; all others measure CPU time
on one thread.

    python -m benchmarks [--pairs N] [--only W1,W2,...] [--peers] [--tables FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks import (
    around,
    bare,
    codes,
    costs,
    devices,
    fleets,
    flower_messages,
    peers,
    private,
    tables,
)
from benchmarks.ratio import Work, compare, shown
from fedp3.engines.in_process import sequential
from fedp3.engines.process_pool import pool
from fedp3.experiment.experiment import Experiment
from fedp3.server.rounds import run_round

Row = Callable[[int], str]  # number of pairs -> what the row prints
MakeFleet = Callable[..., Experiment]


def ours(e: Experiment) -> Work:
    """A round of ours in this process."""
    engine = sequential(e.client, e.shards)

    def work() -> None:
        run_round(e.server, e.start, engine.execute)

    return work


def against_one(make: MakeFleet, pairs: int) -> str:
    """Ours against the bare loop, both on one thread."""
    e = make(*fleets.DENSE)
    return f"{shown(compare(ours(e), bare.one_process(e, 1), pairs))} of a bare loop, one thread"


def against_two(make: MakeFleet, pairs: int) -> str:
    """Ours over two workers against the bare loop over two threads, and over two processes."""
    e = make(*fleets.DENSE)
    engine = pool(e.client, e.shards, 2)
    two, close = bare.processes(e)

    def work() -> None:
        run_round(e.server, e.start, engine.execute)

    try:
        threads = compare(work, bare.one_process(e, 2), pairs, time.perf_counter)
        processes = compare(work, two, pairs, time.perf_counter)
    finally:
        engine.close()
        close()
    return f"{shown(processes)} of 2 bare processes, {shown(threads)} of 2 bare threads (wall time)"


def pruned(make: MakeFleet, pairs: int) -> str:
    """A round with half the units against the dense round with the same layers frozen."""
    half, dense = make(*fleets.HALF, "prune.keep=0.5"), make(*fleets.HALF, "prune.keep=1.0")
    ratio = compare(ours(half), ours(dense), pairs)
    predicted = mflops(half) / mflops(dense)
    return (
        f"{shown(ratio)} of the dense round; FLOPs predict {predicted:.3f}: "
        f"{ratio[0] / predicted:.2f} of that"
    )


def skipped(pairs: int) -> str:
    """A round without half of the blocks against the round of the entire network."""
    half, entire = fleets.vit(*fleets.SKIP_HALF), fleets.vit(*fleets.DENSE)
    ratio = compare(ours(half), ours(entire), pairs)
    return (
        f"{shown(ratio)} of the round of all blocks; FLOPs predict "
        f"{mflops(half) / mflops(entire):.3f}"
    )


def mflops(e: Experiment) -> float:
    """MFLOP per example, mean over the participants of the first round."""
    return statistics.fmean(e.costs[i].mflops_per_example for i in fleets.participants(e))


def memory(pairs: int) -> str:
    """Peak memory of ours and of the bare loop, both over two processes."""
    ours_mb, bare_mb = (float(in_new_process("benchmarks.memory", k)) for k in ("ours", "bare"))
    return f"{ours_mb / bare_mb:.2f} of 2 bare processes ({ours_mb:.0f} and {bare_mb:.0f} MB)"


def growth(pairs: int) -> str:
    """Time per client and memory over rounds, for fleets of growing size."""
    parts = []
    for clients in (100, 1000, 10000):
        printed = in_new_process("benchmarks.memory", "growth", str(clients))
        seconds, early, late = map(float, printed.split())
        per_client = 1e6 * seconds / (clients / 10)
        parts.append(
            f"{clients:,} clients {per_client:.0f} us per client, {early:.0f}->{late:.0f} MB"
        )
    return "; ".join(parts)


def in_new_process(module: str, *arguments: str) -> str:
    """The last line that a module prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def overhead(pairs: int) -> str:
    """The share of a round that is not training."""
    cases = {"CNN": (fleets.cnn, 2), "MLP": (fleets.mlp, 3), "tiny": (fleets.tiny, 120)}
    parts = []
    for name, (make, rounds) in cases.items():
        share = around.overhead(make("plan.layers=opu2", "prune.keep=0.9"), rounds)
        parts.append(f"{name} {100 * share:.1f} %")
    return ", ".join(parts) + " of a round is not training"


def demo(pairs: int) -> str:
    """The demo in a new process; its limit is 60 s."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        printed = in_new_process("fedp3", "demo", "--json", "--out", str(Path(folder) / "demo"))
        seconds = time.perf_counter() - began
    training = sum(run["seconds"] for run in json.loads(printed)["runs"])
    return f"{seconds:.1f} s in all, {training:.1f} s of it training"


ROWS: Mapping[str, Row] = {
    "W1 MLP 784-1024x3-10, 10 of 100 clients": lambda n: against_one(fleets.mlp, n),
    "W1 over two processes": lambda n: against_two(fleets.mlp, n),
    "W1 memory over two processes": memory,
    "W2 CNN 3x32x32, 10 of 100 clients": lambda n: against_one(fleets.cnn, n),
    "W2 over two processes": lambda n: against_two(fleets.cnn, n),
    "W3 MLP 64-32-10, 100 of 1,000 clients": lambda n: against_one(fleets.tiny, n),
    "W4 CNN, half the units, OPU2, others frozen": lambda n: pruned(fleets.cnn, n),
    "W5 ResNet18 x 0.25, half the units": lambda n: pruned(fleets.resnet, n),
    "W6 growth, tiny model, 10 % per round": growth,
    "W7 overhead besides training": overhead,
    "W8 ViT with LoRA of rank 8, 2 of 10 clients": lambda n: against_one(fleets.lora, n),
    "W9 ViT, half of six blocks skipped": skipped,
    **private.ROWS,
    **devices.ROWS,
    **codes.ROWS,
    **costs.ROWS,
    **flower_messages.ROWS,
    "demo": demo,
}


def main() -> None:
    """Print the rows that the arguments select."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=15, help="measurements of each row")
    parser.add_argument("--only", default="", help="first words of rows, separated by commas")
    parser.add_argument(
        "--peers", action="store_true", help="also time other libraries that are installed"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="FOLDER",
        help="also compare costs with published tables in this folder, see benchmarks/tables.py",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    only = [name for name in options.only.split(",") if name]
    rows = {
        **ROWS,
        **(peers.rows() if options.peers else {}),
        **(tables.rows(options.tables) if options.tables else {}),
    }
    print(f"median ratio of {options.pairs} interleaved pairs [95 % interval];")
    print("CPU time on one thread, unless noted otherwise")
    for name, row in rows.items():
        if not only or name.split()[0] in only:
            print(f"{name:<46} {row(options.pairs)}", flush=True)


if __name__ == "__main__":
    main()
