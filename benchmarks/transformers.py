"""Transformers by layers and ranks: the score of a plan against the MB that it exchanges.

    python -m benchmarks.transformers SCENE [--data PLACE] [--model DIR] [--rows NAME,...]
    python -m benchmarks.transformers SCENE --table

PLACE is a text file for the scenes shakespeare-*, a folder of train.tsv and test.tsv (lines of a
text, a tab and its label) for agnews and sst2, and the folder of data sets for vit-cifar10.  DIR is
the folder of a pretrained model of Hugging Face's kind.  Each finished run is one line of
benchmarks/results/transformers.jsonl and is not trained again.  The learning rate of a row is the
best of a grid on validation samples, over a third of the rounds.
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

from benchmarks.records import find, once
from fedp3 import config
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.runs.tuning import shortened, validate
from fedp3.server.rounds import run
from fedp3.server.scoring import finish

NAME = "transformers"
LOWER_IS_BETTER = ("shakespeare-roles", "shakespeare-iid", "llama-roles")  # nats a token
Settings = Sequence[str]


@dataclass(frozen=True)
class Scene:
    """A data set, a network, and the plans that are compared on them.

    Args:
        common: settings of all rows; {data} and {model} are the arguments of the command.
        rows: name of a row -> its settings.
        rates: the learning rates to choose from.
    """

    common: Settings
    rows: Mapping[str, Settings]
    rates: Sequence[float]

    def settings(self, row: str, seed: int, lr: float, **places: Path | None) -> config.Config:
        """The config of one run."""
        given = [setting.format(**places) for setting in (*self.common, *self.rows[row])]
        return config.parse({}, [*given, f"run.seed={seed}", f"local.lr={lr}"])


FLEET = ("partition.clients=20", "local.clip_norm=1", "local.steps=5", "local.batch=16")
ADAM = (*FLEET, "local.optimizer=adam", "run.clients_per_round=10", "run.eval_every=5")
# As in the paper, layers outside L_i are trained too.  Windows freeze them, so that the backward
# pass ends at the lowest block of a window.
LAYERS: Mapping[str, Settings] = {
    "fedavg": ("method=fedavg",),
    "opu3": ("method=fedp3-opu3",),
    "opu2": ("method=fedp3-opu2",),
    "lowerb": ("method=fedp3-lowerb",),
    "windows of 2": ("method=fedp3-opu2", "plan.others=hold", "plan.redraw=true"),
}
SMALL = ("model.blocks=4", "model.heads=4", "model.width=0.5", "run.rounds=80")
PLAY = ("data.name=text", "data.path={data}", "data.length=64")
# Clients differ: one, two, three or all six blocks, drawn for each; the others are left out.
SOME_BLOCKS = ("plan.layers=opu1-2-3-6", "plan.others=skip", "plan.redraw=true")
ADAPTERS: Mapping[str, Settings] = {
    "all adapters": ("method=ffa-lora",),
    "both matrices": ("method=fedit",),
    "windows of blocks": ("method=ffa-lora", *SOME_BLOCKS),
    "random blocks": ("method=fedra",),
    "ranks 2, 4, 8": ("method=hetlora",),
    "head alone": ("method=fedavg", "model.frozen=['net.bert']"),
}
BERT = (
    *("data.name=tsv", "data.path={data}/train.tsv", "data.test_path={data}/test.tsv"),
    *("data.length=32", "model.name=hf", "model.path={model}", "adapter.rank=8"),
    *("run.rounds=20", "run.clients_per_round=0", "run.eval_every=10"),
)
SCENES: Mapping[str, Scene] = {
    "shakespeare-roles": Scene(
        (*ADAM, *SMALL, *PLAY, "model.name=gpt", "partition.kind=roles"),
        *(LAYERS, (0.001, 0.003, 0.01)),
    ),
    "shakespeare-iid": Scene(
        # as many records as the twenty largest roles have in the mean
        (*ADAM, *SMALL, *PLAY, "model.name=gpt", "partition.kind=iid", "partition.sizes=330"),
        *(LAYERS, (0.001, 0.003, 0.01)),
    ),
    "llama-roles": Scene(
        (
            *(*ADAM, *PLAY, "model.name=hf", "model.path={model}", "partition.kind=roles"),
            "run.rounds=40",
        ),
        *(LAYERS, (0.0003, 0.001, 0.003)),
    ),
    "vit-cifar10": Scene(
        (
            *(*ADAM, *SMALL, "data.name=cifar10", "partition.sizes=700", "model.name=vit"),
            *("partition.kind=classes", "partition.classes=5"),
        ),
        *(LAYERS, (0.0003, 0.001, 0.003)),
    ),
    "agnews": Scene(
        (*FLEET, *BERT, "partition.kind=classes", "partition.classes=2"),
        *(ADAPTERS, (0.1, 0.3, 1.0)),
    ),
    "sst2": Scene(
        (*FLEET, *BERT, "partition.kind=dirichlet", "partition.alpha=0.5", "partition.sizes=500"),
        *(ADAPTERS, (0.1, 0.3, 1.0)),
    ),
}


def train(settings: config.Config, data_dir: Path | None) -> dict[str, Any]:
    """Train one run, and return its curve and its final scores."""
    experiment = assemble(settings, data_dir)
    engine = sequential(experiment.client, experiment.shards)
    up = down = 0
    curve = []
    for state, record in run(experiment.server, experiment.start, engine.execute):
        up, down = up + record.bytes_up, down + record.bytes_down
        if record.G is not None:
            central = None if record.C is None else round(record.C.mean, 5)
            curve.append([record.t + 1, up, down, round(record.G.mean, 5), central])
            print(f"  round {record.t + 1}: G {record.G.mean:.4f}, C {central}", flush=True)
        last = state, record
    state, record = last
    final = finish(experiment.server, state, engine.execute, last=record)
    return {"curve": curve, "P": None if final.P is None else round(final.P.mean, 5)}


def learning_rate(
    name: str, row: str, data_dir: Path | None, **places: Path | None
) -> float | None:
    """The best learning rate of a row; None if another process is looking for it."""
    scene = SCENES[name]
    found: dict[float, float] = {}
    for lr in scene.rates:
        settings = scene.settings(row, 0, lr, **places)
        third = shortened(settings, settings.run.rounds // 3)

        def score(third: config.Config = third) -> dict[str, Any]:
            return {"G": validate(third, data_dir, 1, lambda record: None)[0]}

        line = once(NAME, score, kind="validation", scene=name, row=row, lr=lr)
        if line is None:
            return None
        found[lr] = line["G"]
    best = min if name in LOWER_IS_BETTER else max
    return best(found, key=found.__getitem__)


# --------------------------------------------------------------------------- the table


def table(name: str) -> Iterator[str]:
    """Lines of a Markdown table: the scores at the end, and what was exchanged."""
    yield "| | seeds | lr | G | C | P | MB up | MB down |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in SCENES[name].rows:
        runs = find(NAME, kind="run", scene=name, row=row)
        if not runs:
            continue
        ends = [run["curve"][-1] for run in runs]
        up, down = (fmean(end[k] for end in ends) / 1e6 for k in (1, 2))
        G, C = (_spread([end[k] for end in ends]) for k in (3, 4))
        P = _spread([run["P"] for run in runs])
        yield (
            f"| {row} | {len(runs)} | {runs[0]['lr']:g} | {G} | {C} | {P} | {up:.3g} | {down:.3g} |"
        )


def _spread(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    return f"{fmean(known):.3f}" + (f" ± {stdev(known):.3f}" if len(known) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the arguments name, or print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers", description=__doc__)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--data", type=Path, help="the data of the scene")
    parser.add_argument("--model", type=Path, help="the folder of a pretrained model")
    parser.add_argument("--rows", help="rows, separated by commas; by default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, help="a learning rate that is not tuned, for a look")
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
    places = {"data": options.data, "model": options.model}
    data_dir = options.data if options.data and options.data.is_dir() else None
    for seed in range(options.seeds):
        for row in rows:
            lr = options.lr or learning_rate(options.scene, row, data_dir, **places)
            if lr is not None:
                make = partial(train, scene.settings(row, seed, lr, **places), data_dir)
                once(NAME, make, kind="run", scene=options.scene, row=row, seed=seed, lr=lr)


if __name__ == "__main__":
    main()
