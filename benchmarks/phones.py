"""Time to accuracy on a fleet of phones: fedp3's planner against FedAvg and methods of sub-models.

    python -m benchmarks.phones OUT [--data DIR] [--scene SCENE] [--only ROW,...] [--seeds 3]

A row is trained with several seeds, in OUT/SCENE/ROW/seed-K, and what exists there is resumed.  A
finished run is a line of benchmarks/results/phones.jsonl, and is not trained again.  With --table
nothing is trained, and tables of the finished runs are printed: the time to a target, and P of each
kind of phone against training alone.  `fedp3 report OUT/SCENE/*` shows the runs as a page.

On one core a run takes about 4 minutes (fashion-mnist), 6 (cifar10), 12 (cifar10-whole) or 10
(cifar10-resnet18).  MAIN rows with three seeds on fashion-mnist and one seed elsewhere, and all
other rows of fashion-mnist with one seed, are about five hours.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.intervals import interval
from benchmarks.records import find, once
from fedp3 import config
from fedp3.core.files import read_json
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.runs import existing, session
from fedp3.runs.run_folder import read_events
from fedp3.server.context import RoundRecord

COMMON = (
    "partition.clients=100",
    "partition.kind=dirichlet",
    "partition.alpha=0.5",
    "local.lr=0.1",
    "run.clients_per_round=10",
    "devices.fleet=phones",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is trained, and how long a round may take.

    Args:
        settings: data and network.
        limit: seconds of a round of coded plans; it binds for at least half of the phones.
        rounds: of FedAvg; the others, whose rounds are shorter, take twice as many.
    """

    settings: tuple[str, ...]
    limit: float
    rounds: int = 40


HALF = ("model.name=cnn", "model.width=0.5", "run.eval_every=4")
SCENES = {
    "fashion-mnist": Scene(settings=("data.name=fashion-mnist", *HALF), limit=1.0),
    "cifar10": Scene(settings=("data.name=cifar10", *HALF), limit=1.0),
    "cifar10-whole": Scene(
        settings=("data.name=cifar10", "model.name=cnn", "run.eval_every=8"), limit=4.0
    ),
    "cifar10-resnet18": Scene(
        settings=(
            *("data.name=cifar10", "model.name=resnet18", "model.norm=group", "model.stem=7"),
            "run.eval_every=8",
        ),
        limit=16.0,
        rounds=24,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method on the phones.

    Args:
        settings: the method and its codes.
        limits: a round may take so many times the scene's limit; 0 means that it is not planned.
        deadline: rounds end when three quarters of all phones would have answered.
        rounds: so many times the scene's rounds.
    """

    settings: tuple[str, ...]
    limits: float = 0.0
    deadline: bool = False
    rounds: int = 1


def fedavg(*settings: str, deadline: bool = False, rounds: int = 1) -> Row:
    """FedAvg on all phones that can hold the network."""
    return Row(settings=("method=fedavg", *settings), deadline=deadline, rounds=rounds)


def auto(*settings: str, limits: float = 1.0, rounds: int = 2) -> Row:
    """Windows of layers that are planned for each phone."""
    return Row(settings=("method=fedp3", *settings), limits=limits, rounds=rounds)


def sub_models(method: str, *settings: str, limits: float = 2.0, rounds: int = 2) -> Row:
    """The largest sub-model that fits each phone; uncoded ones have twice the time of a round."""
    return Row(settings=(f"method={method}", *settings), limits=limits, rounds=rounds)


INT8 = ("upload.compress=int8", "download.compress=int8")
TERNARY = ("upload.compress=ternary", "download.compress=ternary")
ROWS: Mapping[str, Row] = {
    "fedavg-waits": fedavg(),
    "auto": auto(),
    "fedavg-deadline": fedavg(deadline=True),
    "fedavg-ternary-deadline": fedavg(*TERNARY, deadline=True, rounds=2),
    "local": Row(settings=("method=local",), rounds=2),
    "fedavg-int8-both-deadline": fedavg(*INT8, deadline=True),
    "fedavg-int8-deadline": fedavg("upload.compress=int8", deadline=True),
    "fedavg-over-selection": fedavg("devices.round_end=first"),
    "heterofl-ternary": sub_models("heterofl", *TERNARY, limits=1.0, rounds=3),
    "heterofl": sub_models("heterofl"),
    "auto-random": auto("devices.windows=random"),
    "auto-fixed": auto("devices.windows=fixed"),
    "auto-ternary": auto(*TERNARY),
    "auto-int8": auto("upload.compress=int8", "download.compress=none", limits=2.0),
    "auto-float": auto("upload.compress=none", "download.compress=none", limits=2.0),
    "auto-buffered": auto("devices.round_end=buffered", rounds=3),
    "fiarse": sub_models("fiarse"),
    "fedrolex": sub_models("fedrolex"),
    "fjord": sub_models("fjord"),
}
MAIN = ("fedavg-waits", "auto", "fedavg-deadline", "fedavg-ternary-deadline", "local")
MET_BY = 0.75  # the share of all phones that meet a deadline; those with 3G are 16 %


def settings_of(name: str, scene: str, seed: int, data_dir: Path | None = None) -> config.Config:
    """The config of a row."""
    row, place = ROWS[name], SCENES[scene]
    overrides = [*COMMON, *place.settings, *row.settings, f"run.rounds={row.rounds * place.rounds}"]
    overrides.append(f"run.seed={seed}")
    if row.limits:
        return config.parse({}, [*overrides, f"devices.round_seconds={row.limits * place.limit}"])
    overrides.append("devices.planner=manual")
    if row.deadline:
        seconds = _met_by_most(config.parse({}, overrides), data_dir)
        overrides += ["devices.round_end=deadline", f"devices.round_seconds={seconds}"]
    return config.parse({}, overrides)


def _met_by_most(settings: config.Config, data_dir: Path | None) -> float:
    """The least deadline, in tenths of a second, that the share MET_BY of all phones meets."""
    seconds = sorted(cost.seconds for cost in assemble(settings, data_dir).costs)
    return math.ceil(10 * seconds[math.ceil(MET_BY * len(seconds)) - 1]) / 10


def train(name: str, scene: str, seed: int, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Train one row with one seed, or go on with it; returns what is recorded of it."""
    experiment = assemble(settings_of(name, scene, seed, data_dir), data_dir)

    def on_round(record: RoundRecord) -> None:
        if record.G is not None and record.clock is not None:
            print(
                f"{name} seed {seed}: round {record.t + 1}, {record.clock.ended:.0f} s, "
                f"G {100 * record.G.mean:.1f} %",
                flush=True,
            )

    result = session.train(
        experiment,
        folder,
        lambda experiment, states: sequential(experiment.client, experiment.shards, states),
        resume=True,
        watch=session.watch_with(on_round),
    ).result
    bound = Counter(experiment.server.fleet.binding if experiment.server.fleet else ())
    return summary(folder) | {
        "config": experiment.config.digest(),
        "rounds": result["rounds"],
        "binds": {limit or "nothing": count for limit, count in sorted(bound.items())},
    }


def summary(folder: Path) -> dict[str, Any]:
    """What is recorded of a finished run: its curve, and P and speed of each client."""
    events = [e for e in read_events(folder) if e["G"]]
    result, about = read_json(folder / "result.json"), read_json(folder / "run.json")
    final = result["final"]["P"]
    return {
        "curve": [[round(e["clock"]["ended"], 3), round(e["G"]["mean"], 5)] for e in events],
        "P": {int(i): round(p, 5) for i, p in final["clients"].items()} if final else {},
        "gflops": [device["gflops"] for device in about["devices"]],
    }


# --------------------------------------------------------------------------- the table

NAME = "phones"
REFERENCE = "fedavg-waits"
TARGET = 0.98  # of the final G of FedAvg that waits for everybody, with the same seed


def runs_of(scene: str, row: str) -> dict[int, dict[str, Any]]:
    """The finished runs of a row, by seed."""
    return {run["seed"]: run for run in find(NAME, set=scene, row=row)}


def reached(points: Sequence[Sequence[float]], target: float) -> float | None:
    """When a curve first has this value; None if it does not have it in these rounds."""
    return next((seconds for seconds, G in points if target <= G), None)


def table(scene: str) -> Iterator[str]:
    """Lines of a Markdown table: final G, seconds to the target, and seconds of a round."""
    rows = {name: runs_of(scene, name) for name in ROWS}
    targets = {k: TARGET * run["curve"][-1][1] for k, run in rows[REFERENCE].items()}
    yield "| | seeds | final G | best G | s a round | s to the target |"
    yield "|---|---|---|---|---|---|"
    for name, runs in rows.items():
        common = sorted(runs.keys() & targets.keys())
        if not common:
            continue
        points = {k: runs[k]["curve"] for k in common}
        final = fmean(points[k][-1][1] for k in common)
        best = fmean(max(G for _, G in points[k]) for k in common)
        each = fmean(points[k][-1][0] / runs[k]["rounds"] for k in common)
        times = [reached(points[k], targets[k]) for k in common]
        shown = ", ".join(
            f"> {points[k][-1][0]:.0f}" if t is None else f"{t:.0f}"
            for k, t in zip(common, times, strict=True)
        )
        yield (
            f"| {name} | {', '.join(map(str, common))} | {100 * final:.1f} % | {100 * best:.1f} % "
            f"| {each:.1f} | {shown} |"
        )


# Kinds of phones by speed, as thirds of the fleet.
KINDS = ("slow", "middle", "fast")
ALONE = "local"


def by_kind(scene: str, row: str) -> Iterator[str]:
    """Lines of a Markdown table: P of each kind of phone, and its lead over training alone."""
    alone = runs_of(scene, ALONE)
    for kind, name in enumerate(KINDS):
        leads, means = [], []
        for seed, run in runs_of(scene, row).items():
            other = alone.get(seed)
            if other is None:
                continue
            order = sorted(range(len(run["gflops"])), key=run["gflops"].__getitem__)
            chosen = [str(i) for i in order[kind * len(order) // 3 : (kind + 1) * len(order) // 3]]
            both = [i for i in chosen if i in run["P"] and i in other["P"]]
            means.append(fmean(run["P"][i] for i in both))
            leads += [run["P"][i] - other["P"][i] for i in both]
        if leads:
            yield f"| {row} | {name} | {100 * fmean(means):.1f} % | {interval(leads)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the rows that the arguments name, seed by seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phones", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=None, help="the folder of data sets")
    parser.add_argument("--scene", default="fashion-mnist", choices=SCENES)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print a table, train nothing")
    options = parser.parse_args(arguments)
    names, scene = options.only.split(","), options.scene
    if options.table:
        others = [row for row in ROWS if row != ALONE]
        print("\n".join(table(scene)))
        print("\n| | phones | P | lead over training alone, points, 95 % interval over clients |")
        print("|---|---|---|---|")
        print("\n".join(line for row in others for line in by_kind(scene, row)))
        return
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        sys.exit(f"unknown rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for name in names:
            folder = options.out / scene / name
            if not (folder / existing.SEEDS).exists():
                settings = settings_of(name, scene, 0, options.data)
                existing.begin_seeds(settings, folder, options.seeds)
            make = partial(train, name, scene, seed, folder / f"seed-{seed}", options.data)
            once(NAME, make, set=scene, row=name, seed=seed)


if __name__ == "__main__":
    main()
