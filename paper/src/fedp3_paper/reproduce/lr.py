"""The learning rate of a bench, which all methods share.

FedAvg chooses it on a validation part of the training samples.
"""

from pathlib import Path

from fedp3.config import Config
from fedp3.core import files
from fedp3_paper.reproduce.cells import LR, Bench, Cell, config_of
from fedp3_paper.reproduce.targets import FEDAVG

GRID = ("0.02", "0.05", "0.1", "0.2", "0.5", "1.0")


def cases(bench: Bench, rounds: int) -> dict[str, Config]:
    """Learning rate -> config of FedAvg on the class-wise split with seed 0."""
    cell, protocol = Cell(bench, "classes", FEDAVG), bench.protocols[0]
    return {lr: config_of(cell, protocol, 0, rounds, [f"local.lr={lr}"]) for lr in GRID}


def chosen(path: Path) -> dict[str, float]:
    """Bench -> learning rate: those of this package, and those of complete searches in a file."""
    rates = dict(LR)
    recorded = files.read_json(path) if path.exists() else {}
    for bench, search in recorded.items():
        if len(search["validation"]) == len(GRID):
            rates[bench] = float(search["chosen"])
    return rates
