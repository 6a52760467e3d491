"""The effect of weighting clients by |L_i| on the head.

It is measured by the effective number of clients in the head's mean, and by how uneven the classes
are that they train on.  Run it with

python -m fedp3_paper.reproduce.weights FOLDER_OF_THE_DATA
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np

from fedp3.cli import terminal
from fedp3.data.partition import histogram
from fedp3.experiment.assemble import assemble
from fedp3.server.round_plans import plans_for
from fedp3_paper.reproduce.cells import BENCHES, Cell, config_of
from fedp3_paper.reproduce.targets import layers
from fedp3_paper.theory.draws import Array

SEEDS = range(3)


def counted(a: Array) -> float:
    """Kish's effective number of clients: n for equal weights, 1 if one client has all weight."""
    return float(a.sum() ** 2 / (a**2).sum())


def uneven(a: Array, classes: Array) -> float:
    """The share of the weighted classes that would have to move to be even, in percent."""
    return float(100 * np.abs(a / a.sum() @ classes - 1 / classes.shape[1]).sum() / 2)


def head(bench: str, split: str, plan: str, seed: int, folder: Path) -> tuple[Array, Array]:
    """|L_i| of every client, and the shares of the classes among its training samples.

    All clients upload the head, so all of them count in its mean.
    """
    variant = layers(plan, "-weighted", {"aggregate.rule": "weighted"})
    config = config_of(Cell(BENCHES[bench], split, variant), "desk", seed)
    experiment = assemble(config, folder)
    plans, data = plans_for(experiment.server, 0), experiment.client.data
    samples = [experiment.shards[plan.client].train.numpy() for plan in plans]
    counts = histogram(data.y.numpy(), samples, data.classes)
    sizes = np.array([float(len(plan.full_layers)) for plan in plans])
    return sizes, counts / counts.sum(1, keepdims=True)


def main(folder: Path) -> None:
    """Print a line for every bench, split and plan."""
    terminal.line(
        "effective clients in the head, then uneven classes (%) by simple -> weighted averaging; "
        "means of three seeds"
    )
    benches = ("fashion-cnn", "cifar10-cnn")
    splits = ("classes", "dirichlet")
    plans = ("opu1-2-3", "opu2-3")
    for bench, split, plan in product(benches, splits, plans):
        heads = [head(bench, split, plan, seed, folder) for seed in SEEDS]
        n = np.mean([counted(a) for a, _ in heads])
        simple = np.mean([uneven(np.ones(len(a)), shares) for a, shares in heads])
        weighted = np.mean([uneven(a, shares) for a, shares in heads])
        terminal.line(
            f"{bench:<12} {split:<10} {plan:<9} {n:4.1f} of 20   {simple:4.1f} -> {weighted:4.1f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
