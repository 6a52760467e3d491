"""Time to accuracy on a fleet of phones: fedp3's planner against FedAvg and methods of sub-models.

    python -m benchmarks.phones OUT [--data DIR] [--set fashion-mnist] [--only NAME,...] [--seeds 3]

Each row is trained with several seeds, in OUT/SET/NAME/seed-K, and what exists there is resumed.  A
finished run is a line of benchmarks/results/phones.jsonl, and is not trained again.  With --table
nothing is trained, and tables of the finished runs are printed: the time to a target, and P of each
kind of phone against training alone.  `fedp3 report OUT/SET/*` shows the runs as a page.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    "model.name=cnn",
    "model.width=0.5",
    "local.lr=0.1",
    "run.clients_per_round=10",
    "run.eval_every=4",
    "devices.fleet=phones",
)
MANUAL = ("devices.planner=manual",)
LIMIT = "devices.round_seconds=2"
DEADLINE = (*MANUAL, "devices.round_end=deadline", "devices.round_seconds=7")
# name -> settings; the deadline of FedAvg is the least that all phones but the 3G ones meet
ROWS: Mapping[str, Sequence[str]] = {
    "fedavg-waits": ("method=fedavg", *MANUAL, "run.rounds=40"),
    "auto": ("method=fedp3", LIMIT, "run.rounds=80"),
    "fedavg-deadline": ("method=fedavg", *DEADLINE, "run.rounds=40"),
    "fedavg-over-selection": ("method=fedavg", *MANUAL, "devices.round_end=first", "run.rounds=40"),
    "fedavg-int8-deadline": (
        "method=fedavg-int8",
        *MANUAL,
        "devices.round_end=deadline",
        "devices.round_seconds=3.5",
        "run.rounds=40",
    ),
    "heterofl": ("method=heterofl", LIMIT, "run.rounds=80"),
    "auto-random": ("method=fedp3", LIMIT, "devices.windows=random", "run.rounds=80"),
    "auto-fixed": ("method=fedp3", LIMIT, "devices.windows=fixed", "run.rounds=80"),
    "fiarse": ("method=fiarse", LIMIT, "run.rounds=80"),
    "fedrolex": ("method=fedrolex", LIMIT, "run.rounds=80"),
    "fjord": ("method=fjord", LIMIT, "run.rounds=80"),
    "auto-float": ("method=fedp3", LIMIT, "upload.compress=none", "run.rounds=80"),
    "auto-buffered": ("method=fedp3", LIMIT, "devices.round_end=buffered", "run.rounds=120"),
    "local": ("method=local", *MANUAL, "run.rounds=80"),
}


def settings_of(name: str, data: str, seed: int) -> config.Config:
    """The config of a row."""
    return config.parse({}, [f"data.name={data}", *COMMON, *ROWS[name], f"run.seed={seed}"])


def train(name: str, data: str, seed: int, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Train one row with one seed, or go on with it; returns what is recorded of it."""
    experiment = assemble(settings_of(name, data, seed), data_dir)

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
    return summary(folder) | {"config": experiment.config.digest(), "rounds": result["rounds"]}


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


def curves(data: str, row: str) -> dict[int, list[list[float]]]:
    """For each finished seed the virtual seconds and G of its evaluated rounds."""
    return {run["seed"]: run["curve"] for run in find(NAME, set=data, row=row)}


def reached(points: Sequence[Sequence[float]], target: float) -> float | None:
    """When a curve first has this value; None if it never does."""
    return next((seconds for seconds, G in points if target <= G), None)


def table(data: str) -> Iterator[str]:
    """Lines of a Markdown table: final G, seconds to the target, and seconds of a round."""
    rows = {name: curves(data, name) for name in ROWS}
    targets = {seed: TARGET * points[-1][1] for seed, points in rows[REFERENCE].items()}
    yield "| | seeds | final G | best G | s a round | s to the target |"
    yield "|---|---|---|---|---|---|"
    for name, seeds in rows.items():
        common = sorted(seeds.keys() & targets.keys())
        if not common:
            continue
        rounds = config.parse({}, [*COMMON, *ROWS[name]]).run.rounds
        final = fmean(seeds[k][-1][1] for k in common)
        best = fmean(max(G for _, G in seeds[k]) for k in common)
        each = fmean(seeds[k][-1][0] for k in common) / rounds
        times = [reached(seeds[k], targets[k]) for k in common]
        shown = ", ".join("never" if t is None else f"{t:.0f}" for t in times)
        yield (
            f"| {name} | {', '.join(map(str, common))} | {100 * final:.1f} % | {100 * best:.1f} % "
            f"| {each:.1f} | {shown} |"
        )


# Kinds of phones by speed, as thirds of the fleet.
KINDS = ("slow", "middle", "fast")
ALONE = "local"


def by_kind(data: str, row: str) -> Iterator[str]:
    """Lines of a Markdown table: P of each kind of phone, and its lead over training alone."""
    alone = {run["seed"]: run for run in find(NAME, set=data, row=ALONE)}
    for kind, name in enumerate(KINDS):
        leads, means = [], []
        for run in find(NAME, set=data, row=row):
            other = alone.get(run["seed"])
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
    parser.add_argument("--set", default="fashion-mnist", help="the data set")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print a table, train nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table(options.set)))
        print("\n| | phones | P | lead over training alone, points, 95 % interval over clients |")
        print("|---|---|---|---|")
        print("\n".join(line for row in ROWS for line in by_kind(options.set, row) if row != ALONE))
        return
    unknown = [name for name in options.only.split(",") if name not in ROWS]
    if unknown:
        sys.exit(f"unknown rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    for name in options.only.split(","):
        settings = settings_of(name, options.set, 0)
        folder = options.out / options.set / name
        if not (folder / existing.SEEDS).exists():
            existing.begin_seeds(settings, folder, options.seeds)
    for seed in range(options.seeds):
        for name in options.only.split(","):
            folder = options.out / options.set / name / f"seed-{seed}"
            make = partial(train, name, options.set, seed, folder, options.data)
            once(NAME, make, set=options.set, row=name, seed=seed)


if __name__ == "__main__":
    main()
