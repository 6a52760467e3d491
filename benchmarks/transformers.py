"""Transformers by layers: the score of a plan against the MB that it exchanges.

    python -m benchmarks.transformers SCENE [--data DIR] [--rows NAME,...] [--seeds 3]
    python -m benchmarks.transformers SCENE --table

Scenes on a text need its file (`--data FILE`), those on images the folder of data sets.  Each
finished run is one line of benchmarks/results/transformers.jsonl and is not trained again.  The
learning rate of a row is the best of a grid on validation samples, over a third of the rounds.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.equal_bytes import train
from benchmarks.records import find, once
from fedp3 import config
from fedp3.core.scores import Score
from fedp3.experiment.assemble import assemble
from fedp3.runs.tuning import shortened, validate

NAME = "transformers"


@dataclass(frozen=True)
class Scene:
    """A data set, a network, and the plans that are compared on them.

    Args:
        common: settings of all rows.
        rows: name of a row -> its settings.
        rates: the learning rates to choose from.
        is_file: whether the data are one file, whose path is a setting.
    """

    common: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    rates: Sequence[float]
    is_file: bool = False


FLEET = ("partition.clients=20", "run.clients_per_round=10", "run.eval_every=5")
ADAM = ("local.optimizer=adam", "local.clip_norm=1", "local.steps=5", "local.batch=16")
# As in the paper, layers outside L_i are trained too; windows freeze them, so that the backward
# pass ends at the lowest block of a window.
LAYERS: Mapping[str, Sequence[str]] = {
    "fedavg": ("method=fedavg",),
    "opu3": ("method=fedp3-opu3",),
    "opu2": ("method=fedp3-opu2",),
    "lowerb": ("method=fedp3-lowerb",),
    "windows of 2": ("method=fedp3-opu2", "plan.others=hold", "plan.redraw=true"),
}
GPT = (
    *("data.name=text", "data.length=64", "run.rounds=80"),
    *("model.name=gpt", "model.blocks=4", "model.heads=4", "model.width=0.5"),
)
VIT = (
    *("data.name=cifar10", "partition.sizes=700", "run.rounds=80"),
    *("model.name=vit", "model.blocks=4", "model.heads=4", "model.width=0.5"),
    *("partition.kind=classes", "partition.classes=5"),
)
SCENES: Mapping[str, Scene] = {
    "shakespeare-roles": Scene(
        (*FLEET, *ADAM, *GPT, "partition.kind=roles"), LAYERS, (0.001, 0.003, 0.01), is_file=True
    ),
    "shakespeare-iid": Scene(
        # 250 records a client are about as many as the twenty largest roles have
        (*FLEET, *ADAM, *GPT, "partition.kind=iid", "partition.sizes=330"),
        *(LAYERS, (0.001, 0.003, 0.01)),
        is_file=True,
    ),
    "vit-cifar10": Scene((*FLEET, *ADAM, *VIT), LAYERS, (0.0003, 0.001, 0.003)),
}


def settings_of(
    scene: Scene, row: str, seed: int, lr: float, data: Path | None = None
) -> config.Config:
    """The config of one run; without data it serves for its numbers alone."""
    path = [f"data.path={data}"] if scene.is_file else []
    overrides = [*scene.common, *scene.rows[row], *path, f"run.seed={seed}", f"local.lr={lr}"]
    return config.parse({}, overrides)


def learning_rate(name: str, row: str, data: Path | None) -> float | None:
    """The best learning rate of a row; None if another process is looking for it."""
    scene = SCENES[name]
    found: dict[float, float] = {}
    for lr in scene.rates:
        settings = settings_of(scene, row, 0, lr, data)
        third = shortened(settings, settings.run.rounds // 3)
        folder = None if scene.is_file else data

        def score(third: config.Config = third, folder: Path | None = folder) -> dict[str, Any]:
            return {"G": validate(third, folder, 1, lambda record: None)[0]}

        line = once(NAME, score, kind="validation", scene=name, row=row, lr=lr)
        if line is None:
            return None
        found[lr] = line["G"]
    return _better(found, score_kind(name, data).lower_is_better)


def _better(found: Mapping[float, float], lower_is_better: bool) -> float:
    pick = min if lower_is_better else max
    return pick(found, key=found.__getitem__)


def score_kind(name: str, data: Path | None) -> Score:
    """What G is in a scene."""
    scene = SCENES[name]
    settings = settings_of(scene, "fedavg", 0, scene.rates[0], data)
    return assemble(settings, None if scene.is_file else data).server.spec.objective.score


def result(scene: Scene, row: str, seed: int, lr: float, data: Path | None) -> dict[str, Any]:
    """What is recorded of one run."""
    settings = settings_of(scene, row, seed, lr, data)
    return train(settings, None if scene.is_file else data)


# --------------------------------------------------------------------------- the table


def table(name: str) -> Iterator[str]:
    """Lines of a Markdown table: G and P at the end, and what was exchanged."""
    yield "| | seeds | lr | G | P | MB up | MB down | GFLOP |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in SCENES[name].rows:
        runs = find(NAME, kind="run", scene=name, row=row)
        if not runs:
            continue
        ends = [run["curve"][-1] for run in runs]
        up, down, gflop = (fmean(end[k] for end in ends) for k in (1, 2, 3))
        yield (
            f"| {row} | {len(runs)} | {runs[0]['lr']:g} | {_spread([end[5] for end in ends])} "
            f"| {_spread([run['P'] for run in runs])} "
            f"| {up / 1e6:.0f} | {down / 1e6:.0f} | {gflop:.0f} |"
        )


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{deviation}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the arguments name, or print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers", description=__doc__)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--data", type=Path, help="the text file, or the folder of data sets")
    parser.add_argument("--rows", help="rows, separated by commas; by default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print a table, train nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table(options.scene)))
        return
    scene = SCENES[options.scene]
    rows = options.rows.split(",") if options.rows else list(scene.rows)
    unknown = [row for row in rows if row not in scene.rows]
    if unknown:
        sys.exit(f"unknown {', '.join(unknown)}; there are {', '.join(scene.rows)}")
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for row in rows:
            lr = learning_rate(options.scene, row, options.data)
            if lr is None:
                continue
            make = partial(result, scene, row, seed, lr, options.data)
            once(NAME, make, kind="run", scene=options.scene, row=row, seed=seed, lr=lr)


if __name__ == "__main__":
    main()
