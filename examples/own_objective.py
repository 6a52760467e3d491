"""Add an objective of your own: quantile regression, scored by how often it covers the target.

A network predicts the 10 % and the 90 % quantile of a number; 80 % of the numbers are between them.
As a file of a run:  fedp3 run my.toml local.objective=interval --use examples/own_objective.py
"""

import torch

import fedp3

QUANTILES = torch.tensor([0.1, 0.9])


def pinball(outputs: torch.Tensor, batch: fedp3.Batch) -> torch.Tensor:
    """One loss per record, not their mean: under LDP, each record's gradient is clipped."""
    error = batch.y - outputs
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).sum(1)


def covered(outputs: torch.Tensor, batch: fedp3.Batch) -> dict[str, torch.Tensor]:
    """Sums over records, which add up over batches."""
    inside = (outputs[:, :1] <= batch.y) & (batch.y <= outputs[:, 1:])
    return {"covered": inside.sum(), "width": (outputs[:, 1] - outputs[:, 0]).sum()}


interval = fedp3.Objective(
    loss=pinball,
    score=fedp3.Score("coverage", percent=True),
    sums=covered,
    metrics={"coverage": fedp3.ratio("covered"), "width": fedp3.ratio("width")},
    shares=frozenset({"covered"}),
)
fedp3.register.objective("interval")(interval)


def main() -> fedp3.Result:
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, generator=rng)
    y = 2 * x + (0.2 + x) * torch.randn(2000, 1, generator=rng)
    net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    result = fedp3.run(
        net,
        (x, y),
        objective=interval,
        local={"lr": 0.01, "optimizer": "adam", "steps": 20},
        run={"rounds": 30, "eval_every": 10},
    )
    print(f"coverage {100 * result.scores['G']:.1f} %")
    return result


if __name__ == "__main__":
    main()
