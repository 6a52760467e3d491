"""`make bench`: one table of ratios.

Each row times ours and its yardstick in turn, pair by pair, in this process on one torch thread, and reports the
median ratio of the pairs with its interval; machines are noisy, ratios of neighbours in time less so.

    python -m benchmarks [--pairs N] [--only W1,W2,...]
"""

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3 import config
from fedp3.data import from_tensors
from fedp3.engines.inprocess import sequential
from fedp3.experiment import Experiment, assemble_own, costs
from fedp3.models import Spec, build
from fedp3.rng import Use, stream
from fedp3.server import run_round, sample
from fedp3.steps import batches

Pair = tuple[Callable[[], None], Callable[[], None]]  # ours, yardstick


def fleet(net: nn.Module, shape: tuple[int, ...], clients: int, samples: int, *overrides: str) -> Experiment:
    """A fleet with random data: speed does not depend on what is in it."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(clients * samples, *shape, generator=rng)
    y = torch.randint(10, (clients * samples,), generator=rng)
    common = ["partition.kind=iid", f"partition.clients={clients}", "run.eval_every=0", "partition.train_share=0.99"]
    return assemble_own(config.parse({}, [*common, *overrides]), net, from_tensors(x, y, classes=10))


def round_against_bare(experiment: Experiment) -> Pair:
    """A round of ours against the same SGD steps in a bare loop and a plain mean."""
    problem, recipe, shards = experiment.problem, experiment.recipe, experiment.shards
    net = copy.deepcopy(recipe.net)

    def bare() -> None:
        total: dict[str, Tensor] = {}
        clients = sample(problem, 0)
        for i in clients:
            net.load_state_dict(experiment.start.W)
            net.train()
            optimiser = torch.optim.SGD(net.parameters(), lr=recipe.local.lr)
            for rows in batches(len(shards[i].train), recipe.local, stream(0, Use.BATCHES, 0, i)):
                at = shards[i].train[rows]
                optimiser.zero_grad()
                F.cross_entropy(net(recipe.data.x[at]), recipe.data.y[at]).backward()
                nn.utils.clip_grad_norm_(net.parameters(), recipe.local.clip_norm)
                optimiser.step()
            for n, w in net.state_dict().items():
                total[n] = total[n] + w if n in total else w.clone()
        _ = {n: w / len(clients) for n, w in total.items()}

    return round_of(experiment), bare


def pruned_against_dense(make: Callable[[str], Experiment]) -> tuple[Pair, float]:
    """A round with half the units cut against the dense round, and the ratio of their FLOPs."""
    small, dense = make("0.5"), make("1.0")
    return (round_of(small), round_of(dense)), mflops(small) / mflops(dense)


def mflops(experiment: Experiment) -> float:
    each = costs(experiment)[0]
    return statistics.fmean(each[i].mflops_per_example for i in sample(experiment.problem, 0))


def round_of(experiment: Experiment) -> Callable[[], None]:
    engine = sequential(experiment.recipe, experiment.shards)

    def work() -> None:
        run_round(experiment.problem, experiment.start, engine.execute)

    return work


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(pair: Pair, pairs: int) -> tuple[float, float, float]:
    """Median ratio ours / yardstick over interleaved pairs, and the interval that holds it with 95 %."""
    for work in pair:
        work()
    ratios = sorted(seconds(pair[0]) / seconds(pair[1]) for _ in range(pairs))
    half = math.ceil(0.98 * math.sqrt(pairs))
    low, high = max(0, pairs // 2 - half), min(pairs - 1, pairs // 2 + half)
    return statistics.median(ratios), ratios[low], ratios[high]


def cnn_fleet(keep: str) -> Experiment:
    half = ["prune.selector=neuron", f"prune.keep={keep}", "plan.others=freeze", "run.clients_per_round=2"]
    return fleet(build("cnn", Spec((3, 32, 32), 10), 0), (3, 32, 32), 8, 100, *half)


def rows(pairs: int) -> Mapping[str, Callable[[], str]]:
    whole = ["plan.layers=full", "prune.keep=1.0"]

    def against_bare(make: Callable[[], Experiment]) -> Callable[[], str]:
        def line() -> str:
            median, low, high = compare(round_against_bare(make()), pairs)
            return f"{median:.2f} [{low:.2f}-{high:.2f}] of a bare loop"

        return line

    def sliced() -> str:
        pair, flops = pruned_against_dense(cnn_fleet)
        median, low, high = compare(pair, pairs)
        return f"{median:.2f} [{low:.2f}-{high:.2f}] of the dense round; FLOPs say {flops:.2f}"

    def mlp() -> Experiment:
        net = build("mlp", Spec((1, 28, 28), 10), 0)
        return fleet(net, (1, 28, 28), 20, 396, *whole, "run.clients_per_round=4")

    def cnn() -> Experiment:
        net = build("cnn", Spec((3, 32, 32), 10), 0)
        return fleet(net, (3, 32, 32), 10, 396, *whole, "run.clients_per_round=2")

    def tiny() -> Experiment:
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        return fleet(net, (64,), 1000, 100, *whole, "run.clients_per_round=100", "local.batch=10")

    return {
        "W1 MLP 784-1024x3-10, a round": against_bare(mlp),
        "W2 CNN 3x32x32, a round": against_bare(cnn),
        "W3 MLP 64-32-10, 100 of 1,000 clients": against_bare(tiny),
        "W4 CNN, half the units, OPU2, others frozen": sliced,
        "demo": demo,
    }


def demo() -> str:
    """The whole demo in a fresh process, limit 60 s."""
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        command = [sys.executable, "-m", "fedp3", "demo", "--json", "--out", str(Path(place) / "demo")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took = time.perf_counter() - began
    training = sum(r["seconds"] for r in json.loads(done.stdout.splitlines()[-1])["runs"])
    return f"{took:.1f} s in all, {training:.1f} s of it training"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="first words of rows, comma separated")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    only = [name for name in chosen.only.split(",") if name]
    print(f"CPU time on one thread, median ratio of {chosen.pairs} interleaved pairs [95 % interval]")
    for name, line in rows(chosen.pairs).items():
        if not only or name.split()[0] in only:
            print(f"{name:<45} {line()}", flush=True)


if __name__ == "__main__":
    main()
