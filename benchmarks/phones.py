"""Time to accuracy on a fleet of phones: fedp3's planner against FedAvg and methods of sub-models.

    python -m benchmarks.phones OUT [--data DIR] [--set fashion-mnist] [--only NAME,...] [--seeds 3]

Each row is trained with several seeds, in OUT/SET/NAME/seed-K.  What exists is resumed, so that the
command can be stopped and started again.  `fedp3 compare OUT/SET/*` and `fedp3 report OUT/SET/*`
then show the result.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from fedp3 import config
from fedp3.core.errors import BusyError
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.runs import session
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the rows that the arguments name, seed by seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phones", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=None, help="the folder of data sets")
    parser.add_argument("--set", default="fashion-mnist", help="the data set")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
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
