"""`make bench`: one table of ratios.

Each row times ours and its yardstick in turn, pair by pair, and reports the median ratio of the pairs with its
interval; machines are noisy, ratios of neighbours in time less so.  Rows over two processes are wall time and want
a machine with nothing else on it; all others are CPU time on one thread.

    python -m benchmarks [--pairs N] [--only W1,W2,...] [--peers]
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

from benchmarks import around, bare, fleets, peers, private
from benchmarks.ratio import Work, compare, shown
from fedp3.engines.inprocess import sequential
from fedp3.engines.pool import pool
from fedp3.experiment import Experiment, costs
from fedp3.server import run_round, sample


def ours(e: Experiment) -> Work:
    """A round of ours in this process."""
    engine = sequential(e.recipe, e.shards)
    return lambda: run_round(e.problem, e.start, engine.execute) and None


def against_one(make: Callable[..., Experiment], pairs: int) -> str:
    e = make(*fleets.WHOLE)
    return f"{shown(compare(ours(e), bare.one_process(e, 1), pairs))} of a bare loop, one thread"


def against_two(make: Callable[..., Experiment], pairs: int) -> str:
    """Ours over two workers against the bare loop over two threads, and over two processes."""
    e = make(*fleets.WHOLE)
    engine = pool(e.recipe, e.shards, 2)
    two, close = bare.processes(e)

    def round_of_two() -> None:
        run_round(e.problem, e.start, engine.execute)

    try:
        threads = compare(round_of_two, bare.one_process(e, 2), pairs, time.perf_counter)
        processes = compare(round_of_two, two, pairs, time.perf_counter)
    finally:
        engine.close()
        close()
    return f"{shown(processes)} of 2 bare processes, {shown(threads)} of 2 bare threads (wall time)"


def sliced(make: Callable[..., Experiment], pairs: int) -> str:
    """A round with half the units cut against the dense round with the same layers frozen, and what FLOPs say."""
    half, dense = make(*fleets.HALF, "prune.keep=0.5"), make(*fleets.HALF, "prune.keep=1.0")
    ratio, said = compare(ours(half), ours(dense), pairs), mflops(half) / mflops(dense)
    return f"{shown(ratio)} of the dense round; FLOPs say {said:.3f}: {ratio[0] / said:.2f} of that"


def mflops(e: Experiment) -> float:
    each = costs(e)[0]
    return statistics.fmean(each[i].mflops_per_example for i in sample(e.problem, 0))


def memory(pairs: int) -> str:
    mine, theirs = (float(alone("benchmarks.memory", kind)) for kind in ("ours", "bare"))
    return f"{mine / theirs:.2f} of 2 bare processes ({mine:.0f} and {theirs:.0f} MB)"


def growth(pairs: int) -> str:
    parts = []
    for clients in (100, 1000, 10000):
        seconds, early, late = map(float, alone("benchmarks.memory", "growth", str(clients)).split())
        parts.append(
            f"{clients:,} clients {1e6 * seconds / (clients / 10):.0f} us per client, {early:.0f}->{late:.0f} MB"
        )
    return "; ".join(parts)


def alone(module: str, *arguments: str) -> str:
    """The last line that a module prints in a process of its own."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def besides(pairs: int) -> str:
    cases = {"CNN": (fleets.cnn, 2), "MLP": (fleets.mlp, 3), "tiny": (fleets.tiny, 120)}
    found = {n: around.share(make("plan.layers=opu2", "prune.keep=0.9"), k) for n, (make, k) in cases.items()}
    return ", ".join(f"{n} {100 * part:.1f} %" for n, part in found.items()) + " of a round is not training"


def demo(pairs: int) -> str:
    """The whole demo in a fresh process, limit 60 s."""
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        command = [sys.executable, "-m", "fedp3", "demo", "--json", "--out", str(Path(place) / "demo")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took = time.perf_counter() - began
    training = sum(r["seconds"] for r in json.loads(done.stdout.splitlines()[-1])["runs"])
    return f"{took:.1f} s in all, {training:.1f} s of it training"


Row = Callable[[int], str]
ROWS: Mapping[str, Row] = {
    "W1 MLP 784-1024x3-10, 10 of 100 clients": lambda n: against_one(fleets.mlp, n),
    "W1 over two processes": lambda n: against_two(fleets.mlp, n),
    "W1 memory over two processes": memory,
    "W2 CNN 3x32x32, 10 of 100 clients": lambda n: against_one(fleets.cnn, n),
    "W2 over two processes": lambda n: against_two(fleets.cnn, n),
    "W3 MLP 64-32-10, 100 of 1,000 clients": lambda n: against_one(fleets.tiny, n),
    "W4 CNN, half the units, OPU2, others frozen": lambda n: sliced(fleets.cnn, n),
    "W5 ResNet18 x 0.25, half the units": lambda n: sliced(fleets.resnet, n),
    "W6 growth, tiny model, 10 % a round": growth,
    "W7 besides training": besides,
    **private.ROWS,
    "demo": demo,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="first words of rows, comma separated")
    parser.add_argument("--peers", action="store_true", help="also time the peers that are installed")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    only = [name for name in chosen.only.split(",") if name]
    print(f"median ratio of {chosen.pairs} interleaved pairs [95 % interval]; CPU time, one thread, unless said")
    for name, row in {**ROWS, **(peers.rows() if chosen.peers else {})}.items():
        if not only or name.split()[0] in only:
            print(f"{name:<46} {row(chosen.pairs)}", flush=True)


if __name__ == "__main__":
    main()
