"""The learning rate of a bench, chosen once and for all methods: by FedAvg on a validation cut of the training part.

Each client trains on the first four fifths of its training samples and is scored on the rest; no test sample is seen.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedp3 import driver, record
from fedp3.experiment import Experiment, assemble
from fedp3.reproduce.cells import LR, SCORED, Bench, Cell, config_of
from fedp3.reproduce.targets import FEDAVG
from fedp3.steps import Shard

GRID = (0.02, 0.05, 0.1, 0.2, 0.5)
TRAINED = 0.8  # share of the training part that is trained on


def validation_cut(experiment: Experiment) -> Experiment:
    """The same experiment with the tests replaced by the end of every client's training part."""
    shards = {}
    for i, s in experiment.shards.items():
        at = int(TRAINED * len(s.train))
        shards[i] = Shard(s.train[:at], s.train[at:])
    problem = replace(experiment.problem, examples={i: len(s.train) for i, s in shards.items()})
    return replace(experiment, shards=shards, problem=problem)


def validate(bench: Bench, lr: float, rounds: int, data_dir: Path | None, workers: int) -> float:
    """Mean of the last evaluations of FedAvg's G on the validation cut, class-wise, seed 0."""
    config = config_of(Cell(bench, "classes", FEDAVG), bench.protocols[0], 0, rounds, [f"local.lr={lr}"])
    experiment = validation_cut(assemble(config, data_dir))
    engine = driver.make_engine(experiment, workers)
    scores: list[float] = []
    try:
        driver.drive(experiment, engine, None, lambda r: scores.extend([r.G.mean] if r.G else []))
    finally:
        engine.close()
    last = scores[-SCORED:]
    return sum(last) / len(last)


def search(
    bench: Bench, rounds: int, place: Path, data_dir: Path | None, workers: int
) -> Iterator[tuple[float, float]]:
    """Every rate of the grid with its score, recorded in `place` as it comes; recorded ones are read."""
    known = record.read_json(place) if place.exists() else {}
    mine: dict[str, float] = dict(known.get(bench.name, {}).get("validation", {}))
    for lr in GRID:
        if f"{lr:g}" not in mine:
            mine[f"{lr:g}"] = validate(bench, lr, rounds, data_dir, workers)
            known[bench.name] = {"lr": _best(mine), "rounds": rounds, "validation": mine}
            place.parent.mkdir(parents=True, exist_ok=True)
            record.write_json(place, known)
        yield lr, mine[f"{lr:g}"]


def chosen(place: Path) -> dict[str, float]:
    """Bench -> learning rate: those that came with this package, and what was recorded here to the end."""
    recorded = record.read_json(place) if place.exists() else {}
    whole = {bench: found for bench, found in recorded.items() if len(found["validation"]) == len(GRID)}
    return {**LR, **{bench: float(found["lr"]) for bench, found in whole.items()}}


def _best(scores: dict[str, float]) -> float:
    return float(max(scores, key=lambda lr: scores[lr]))
