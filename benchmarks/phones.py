"""Time to accuracy on a fleet of phones: fedp3's planner against FedAvg and methods of sub-models.

    python -m benchmarks.phones OUT [--data DIR] [--set fashion-mnist] [--only NAME,...] [--seeds 3]

Each row is trained with several seeds, in OUT/SET/NAME/seed-K.  What exists is resumed, so that the
command can be stopped and started again.  With --table nothing is trained, and a table of the
finished runs is printed.  `fedp3 report OUT/SET/*` shows them as a page.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import torch

from fedp3 import config
from fedp3.core.errors import BusyError
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.runs import session
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


def train(name: str, data: str, seed: int, folder: Path, data_dir: Path | None) -> None:
    """Train one row with one seed, or go on with it."""
    experiment = assemble(settings_of(name, data, seed), data_dir)

    def on_round(record: RoundRecord) -> None:
        if record.G is not None and record.clock is not None:
            print(
                f"{name} seed {seed}: round {record.t + 1}, {record.clock.ended:.0f} s, "
                f"G {100 * record.G.mean:.1f} %",
                flush=True,
            )

    session.train(
        experiment,
        folder,
        lambda experiment, states: sequential(experiment.client, experiment.shards, states),
        resume=True,
        watch=session.watch_with(on_round),
    )


# --------------------------------------------------------------------------- the table

REFERENCE = "fedavg-waits"
TARGET = 0.98  # of the final G of FedAvg that waits for everybody, with the same seed


def curves(folder: Path) -> dict[int, list[tuple[float, float]]]:
    """For each finished seed the virtual seconds and G of its evaluated rounds."""
    found = {}
    for place in sorted(folder.glob("seed-*")):
        if (place / "result.json").exists():
            events = [e for e in read_events(place) if e["G"]]
            points = [(e["clock"]["ended"], e["G"]["mean"]) for e in events]
            found[int(place.name.removeprefix("seed-"))] = points
    return found


def reached(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """When a curve first has this value; None if it never does."""
    return next((seconds for seconds, G in points if target <= G), None)


def table(folder: Path) -> Iterator[str]:
    """Lines of a Markdown table: final G, seconds to the target, and seconds of a round."""
    rows = {name: curves(folder / name) for name in ROWS}
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
        print("\n".join(table(options.out / options.set)))
        return
    unknown = [name for name in options.only.split(",") if name not in ROWS]
    if unknown:
        sys.exit(f"unknown rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    for name in options.only.split(","):
        settings = settings_of(name, options.set, 0)
        folder = options.out / options.set / name
        if not (folder / session.SEEDS).exists():
            session.begin_seeds(settings, folder, options.seeds)
    for seed in range(options.seeds):
        for name in options.only.split(","):
            folder = options.out / options.set / name / f"seed-{seed}"
            with suppress(BusyError):  # another process trains it
                train(name, options.set, seed, folder, options.data)


if __name__ == "__main__":
    main()
