"""The workloads: fleets with random data, since speed does not depend on the values."""

import torch
from torch import nn

from fedp3 import config
from fedp3.data import from_tensors
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.participation import eligible_clients, sample_clients

DENSE = ("plan.layers=full", "prune.keep=1.0", "aggregate.rule=simple")
SKIP_HALF = ("plan.layers=blocks-3", "plan.others=skip", "prune.keep=1.0", "aggregate.rule=simple")
HALF = ("plan.layers=opu2", "plan.others=freeze", "prune.selector=neuron")


def fleet(
    net: nn.Module, shape: tuple[int, ...], clients: int, samples: int, *overrides: str
) -> Experiment:
    """A fleet with random data.

    Args:
        net: the network.
        shape: shape of a sample.
        clients: number of clients.
        samples: training samples of each client; it has one more as its test part.
        *overrides: further settings.
    """
    rng = torch.Generator().manual_seed(0)
    total = clients * (samples + 1)
    x, y = torch.randn(total, *shape, generator=rng), torch.randint(10, (total,), generator=rng)
    settings = [
        "partition.kind=iid",
        f"partition.clients={clients}",
        f"partition.train_share={samples / (samples + 1)}",
        "run.eval_every=0",
        "run.rounds=1000000",
    ]
    return assemble_from(
        config.parse({}, [*settings, *overrides]), net, from_tensors(x, y, classes=10)
    )


def participants(e: Experiment) -> list[int]:
    """The clients of the first round."""
    return sample_clients(eligible_clients(e.server.examples, 0), e.server.run, 0)


def mlp(*overrides: str) -> Experiment:
    """W1: 784-1024-1024-1024-10, 100 clients x 392 samples, 10 per round, K = 10, batch 48."""
    net = build(ModelSpec((1, 28, 28), 10, ModelSettings(name="mlp")), 0)
    return fleet(net, (1, 28, 28), 100, 392, "run.clients_per_round=10", *overrides)


def cnn(*overrides: str) -> Experiment:
    """W2: the paper's CNN on 3x32x32, with the same numbers."""
    net = build(ModelSpec((3, 32, 32), 10, ModelSettings(name="cnn")), 0)
    return fleet(net, (3, 32, 32), 100, 392, "run.clients_per_round=10", *overrides)


def tiny(*overrides: str, clients: int = 1000) -> Experiment:
    """W3: 64-32-10, 1,000 clients x 100 samples, 100 per round, K = 10, batch 10."""
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    settings = (f"run.clients_per_round={clients // 10}", "local.batch=10")
    return fleet(net, (64,), clients, 100, *settings, *overrides)


def resnet(*overrides: str) -> Experiment:
    """W5: ResNet18 at a quarter of its width, two clients per round."""
    model = ModelSettings(name="resnet18", width=0.25, norm="group")
    net = build(ModelSpec((3, 32, 32), 10, model), 0)
    settings = ("run.clients_per_round=2", "local.steps=2")
    return fleet(net, (3, 32, 32), 18, 96, *settings, *overrides)


def lora(*overrides: str) -> Experiment:
    """W8: a ViT of four blocks with adapters of rank 8, ten clients x 96 samples, two per round."""
    net = build(ModelSpec((3, 32, 32), 10, ModelSettings(name="vit")), 0)
    settings = ("adapter.kind=lora", "run.clients_per_round=2", "local.steps=5", "local.batch=16")
    return fleet(net, (3, 32, 32), 10, 96, *settings, *overrides)


def vit(*overrides: str) -> Experiment:
    """W9: a ViT of six blocks, 128 wide, on 3x32x32, two clients per round."""
    net = build(ModelSpec((3, 32, 32), 10, ModelSettings(name="vit", blocks=6)), 0)
    settings = ("run.clients_per_round=2", "local.steps=2", "local.batch=32")
    return fleet(net, (3, 32, 32), 12, 96, *settings, *overrides)
