"""Train a network of your own on tensors of your own, over devices of three sizes."""

import torch
from torch import nn

import fedp3


def main() -> fedp3.Result:
    torch.manual_seed(0)
    centres = 2 * torch.randn(4, 16)
    y = torch.arange(1200) % 4
    x = centres[y] + torch.randn(1200, 16)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    result = fedp3.run(
        net,
        (x, y),
        partition={"kind": "dirichlet", "clients": 12, "alpha": 0.5},
        plan={"layers": "opu1"},  # every client trains one hidden layer and the head in full
        prune={"keep": [0.9, 0.7, 0.5], "selector": "neuron"},  # three device classes
        local={"lr": 0.1, "steps": 5},
        run={"rounds": 15, "clients_per_round": 6, "eval_every": 5},
    )
    print(result)
    for row in result.history:
        if row["G"] is not None:
            kilobytes = row["bytes_up"] / 1e3
            print(f"round {row['round']}: G {100 * row['G']:.1f} %, {kilobytes:.0f} kB up")
    return result


if __name__ == "__main__":
    main()
