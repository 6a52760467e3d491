"""The workloads: fleets with random data, since speed does not depend on what is in it."""

import torch
from torch import nn

from fedp3 import config
from fedp3.data import from_tensors
from fedp3.experiment import Experiment, assemble_own
from fedp3.models import Spec, build

WHOLE = ("plan.layers=full", "prune.keep=1.0", "aggregate.rule=simple")
HALF = ("plan.layers=opu2", "plan.others=freeze", "prune.selector=neuron")


def fleet(net: nn.Module, shape: tuple[int, ...], clients: int, samples: int, *overrides: str) -> Experiment:
    """Clients with `samples` training samples each; one more is their test part."""
    rng = torch.Generator().manual_seed(0)
    total = clients * (samples + 1)
    x, y = torch.randn(total, *shape, generator=rng), torch.randint(10, (total,), generator=rng)
    share = f"partition.train_share={samples / (samples + 1)}"
    common = ["partition.kind=iid", f"partition.clients={clients}", share, "run.eval_every=0", "run.rounds=1000000"]
    return assemble_own(config.parse({}, [*common, *overrides]), net, from_tensors(x, y, classes=10))


def mlp(*overrides: str) -> Experiment:
    """W1: 784-1024-1024-1024-10, 100 clients x 392, 10 a round, K = 10, batch 48."""
    net = build("mlp", Spec((1, 28, 28), 10), 0)
    return fleet(net, (1, 28, 28), 100, 392, "run.clients_per_round=10", *overrides)


def cnn(*overrides: str) -> Experiment:
    """W2: the paper's CNN on 3x32x32, the same numbers."""
    return fleet(build("cnn", Spec((3, 32, 32), 10), 0), (3, 32, 32), 100, 392, "run.clients_per_round=10", *overrides)


def tiny(*overrides: str, clients: int = 1000) -> Experiment:
    """W3: 64-32-10, 1,000 clients x 100, 100 a round, K = 10, batch 10."""
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return fleet(net, (64,), clients, 100, f"run.clients_per_round={clients // 10}", "local.batch=10", *overrides)


def resnet(*overrides: str) -> Experiment:
    """W5: ResNet18 at a quarter of its width, two clients a round."""
    net = build("resnet18", Spec((3, 32, 32), 10, 0.25, "group"), 0)
    few = ("run.clients_per_round=2", "local.steps=2")
    return fleet(net, (3, 32, 32), 18, 96, *few, *overrides)
