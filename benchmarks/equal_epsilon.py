"""Accuracy at the same total epsilon: fewer bytes may take more rounds, and rounds cost privacy.

    python -m benchmarks.equal_epsilon --data DIR [--seeds 3]     # about 20 minutes of one core
    python -m benchmarks.equal_epsilon --table

FedAvg, FedP3 and fedp3-paced train a small MLP on FashionMNIST under LDP, for several numbers of
rounds.  Each run spends all of the same epsilon: the noise multiplier is solved for its own number
of steps.  Its learning rate is the best of a grid on validation samples (seed 0), a choice that no
epsilon pays for.  Finished runs are lines of benchmarks/results/equal-epsilon.jsonl.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from benchmarks.records import find, once
from fedp3 import config
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.runs import session
from fedp3.runs.tuning import validation_split

NAME = "equal-epsilon"
COMMON = (
    *("data.name=fashion-mnist", "model.name=mlp", "model.width=0.125"),
    *("partition.clients=20", "partition.sizes=700", "partition.kind=classes"),
    *("partition.classes=5", "local.steps=5", "run.clients_per_round=0", "run.eval_every=0"),
    *("privacy.enabled=true", "privacy.epsilon=8", "privacy.delta=1e-4"),
    *(
        "privacy.sample_rate=0.1",
        "privacy.clip=1",
        "privacy.randomness=seeded",
        "run.final_p=false",
    ),
)
METHODS: Mapping[str, Sequence[str]] = {
    "FedAvg": ("method=fedavg",),
    "FedP3 (OPU2)": ("method=fedp3-opu2", "prune.keep=0.9"),
    "fedp3-paced": ("method=fedp3-paced",),
}
ROUNDS = (20, 40, 80)
RATES = (0.5, 1.0, 2.0, 4.0)
TUNING_SEED = 0


def settings_of(method: str, rounds: int, lr: float, seed: int) -> config.Config:
    """The config of one run."""
    own = (f"run.rounds={rounds}", f"local.lr={lr}", f"run.seed={seed}")
    return config.parse({}, [*COMMON, *METHODS[method], *own])


def trained(experiment: Experiment) -> dict[str, Any]:
    """What is recorded of a run."""
    outcome = session.train(experiment, None, lambda e, states: sequential(e.client, e.shards))
    budget = experiment.server.budget
    assert budget is not None
    return {
        "G": outcome.result["accuracy_global"],
        "epsilon": outcome.result["epsilon_max"],
        "noise": budget.mechanism.noise_multiplier,
        "mb": outcome.result["mb_up"] + outcome.result["mb_down"],
    }


def learning_rate(method: str, rounds: int, data: Path | None) -> float | None:
    """The best of the grid on validation samples; None if another process looks for it."""
    found = {}
    for lr in RATES:
        settings = settings_of(method, rounds, lr, TUNING_SEED)

        def score(settings: config.Config = settings) -> dict[str, Any]:
            return trained(validation_split(assemble(settings, data)))

        line = once(NAME, score, kind="validation", method=method, rounds=rounds, lr=lr)
        if line is None:
            return None
        found[lr] = line["G"]
    return max(found, key=lambda lr: found[lr])


def table() -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| | rounds | noise multiplier | lr | epsilon | G | MB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for method in METHODS:
        for rounds in ROUNDS:
            runs = find(NAME, kind="run", method=method, rounds=rounds)
            if not runs:
                continue
            G = [100 * run["G"] for run in runs]
            spread = f" ± {pstdev(G):.1f}" if len(G) > 1 else ""
            epsilon = max(run["epsilon"] for run in runs)
            yield (
                f"| {method} | {rounds} | {runs[0]['noise']:.2f} | {runs[0]['lr']:g} "
                f"| {epsilon:.2f} | {fmean(G):.1f} %{spread} | {runs[0]['mb']:.1f} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, or print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_epsilon")
    parser.add_argument("--data", type=Path, default=None, help="the folder of data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print a table, train nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table()))
        return
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for rounds in ROUNDS:
            for method in METHODS:
                lr = learning_rate(method, rounds, options.data)
                if lr is None:
                    continue
                settings = settings_of(method, rounds, lr, seed)

                def line(settings: config.Config = settings) -> dict[str, Any]:
                    return trained(assemble(settings, options.data))

                once(NAME, line, kind="run", method=method, rounds=rounds, seed=seed, lr=lr)


if __name__ == "__main__":
    main()
