"""Train under local differential privacy, and read what it cost each client."""

import torch
from torch import nn

import fedp3


def main() -> fedp3.Result:
    torch.manual_seed(0)
    centres = 3 * torch.randn(4, 16)
    y = torch.arange(2000) % 4
    x = centres[y] + torch.randn(2000, 16)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    result = fedp3.run(
        net,
        (x, y),
        method="fedavg",
        partition={"kind": "iid", "clients": 8},
        local={"lr": 0.5, "steps": 5},
        privacy={"enabled": True, "epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.2},
        run={"rounds": 10, "clients_per_round": 4, "eval_every": 5},
    )
    privacy = result.outcome.result["privacy"]
    print(result)
    print("noise multiplier", privacy["noise_multiplier"])
    print(f"largest epsilon {privacy['spent']['max']:.2f}")
    return result


if __name__ == "__main__":
    main()
