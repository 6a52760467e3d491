"""What weighting clients by |L_i| does to the head: how many clients count in it, and how even its classes are.

python experiments/weights.py FOLDER_OF_THE_DATA
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np

from fedp3 import config
from fedp3.experiment import assemble
from fedp3.partition import histogram
from fedp3.server import plans_for

HERE = Path(__file__).parent
SEEDS = range(3)


def counted(a: np.ndarray) -> float:
    """Kish's effective number: n for equal weights, 1 if one client has all."""
    return float(a.sum() ** 2 / (a**2).sum())


def uneven(a: np.ndarray, classes: np.ndarray) -> float:
    """How far the weighted classes are from even: the share that would have to move, in percent."""
    return float(100 * np.abs(a / a.sum() @ classes - 1 / classes.shape[1]).sum() / 2)


def head(bench: str, split: str, plan: str, seed: int, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """|L_i| of every client, all of which send the head, and the shares of the classes in its training part."""
    path = HERE / f"desk/{bench}/{split}/{plan}-weighted.toml"
    e = assemble(config.load(path, [f"run.seed={seed}"]), folder)
    plans, data = plans_for(e.problem, 0), e.recipe.data
    counts = histogram(data.y.numpy(), [e.shards[p.client].train.numpy() for p in plans], data.classes)
    return np.array([len(p.whole) for p in plans]), counts / counts.sum(1, keepdims=True)


def main(folder: Path) -> None:
    print("head of: clients counted, classes uneven (%) by simple -> weighted; means of three seeds")
    for bench, split, plan in product(("fashion-cnn", "cifar10-cnn"), ("classes", "dirichlet"), ("opu1-2-3", "opu2-3")):
        found = [head(bench, split, plan, seed, folder) for seed in SEEDS]
        n = np.mean([counted(a) for a, _ in found])
        simple = np.mean([uneven(np.ones(len(a)), shares) for a, shares in found])
        weighted = np.mean([uneven(a, shares) for a, shares in found])
        print(f"{bench:<12} {split:<10} {plan:<9} {n:4.1f} of 20   {simple:4.1f} -> {weighted:4.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
