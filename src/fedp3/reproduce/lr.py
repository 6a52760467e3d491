"""The learning rate of a bench, chosen once and for all methods: by FedAvg on a validation cut of the training part."""

from pathlib import Path

from fedp3 import record
from fedp3.config import Config
from fedp3.reproduce.cells import LR, Bench, Cell, config_of
from fedp3.reproduce.targets import FEDAVG

GRID = ("0.02", "0.05", "0.1", "0.2", "0.5", "1.0")


def cases(bench: Bench, rounds: int) -> dict[str, Config]:
    """FedAvg, class-wise, seed 0, at every rate of the grid."""
    cell, protocol = Cell(bench, "classes", FEDAVG), bench.protocols[0]
    return {lr: config_of(cell, protocol, 0, rounds, [f"local.lr={lr}"]) for lr in GRID}


def chosen(place: Path) -> dict[str, float]:
    """Bench -> learning rate: those that came with this package, and what was recorded here to the end."""
    recorded = record.read_json(place) if place.exists() else {}
    whole = {bench: found for bench, found in recorded.items() if len(found["validation"]) == len(GRID)}
    return {**LR, **{bench: float(found["chosen"]) for bench, found in whole.items()}}
