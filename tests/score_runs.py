"""Real small runs whose score is not an accuracy."""

from pathlib import Path

import torch
from torch import nn

import fedp3

METHODS = ("fedavg", "fedp3")


def regression_runs(folder: Path, seeds: int = 1) -> list[Path]:
    """A run of each method over phones, scored by RMSE."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=rng)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    for method in METHODS:
        for seed in range(seeds):
            torch.manual_seed(0)
            fedp3.run(
                nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)),
                (x, y),
                method=method,
                objective="regression",
                out=folder / method / f"seed-{seed}",
                partition={"clients": 4},
                run={"rounds": 3, "clients_per_round": 0, "eval_every": 1, "seed": seed},
                devices={"fleet": "phones", "round_seconds": 1},
            )
    return [folder / method for method in METHODS]
