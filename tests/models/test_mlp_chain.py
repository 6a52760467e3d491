"""Which networks are plain MLPs, as `layer_map` reports them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedp3.core.types import Chain
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import MODELS, ModelSettings, ModelSpec, build

TWO = (("a.weight", "a.bias"), ("b.weight", "b.bias"))


class Net(nn.Module):
    """Two linear layers; `forward` is a function of the network and its input."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize(
    ("run", "flattens"),
    [
        (lambda n, x: n.b(F.relu(n.a(x))), False),
        (lambda n, x: n.b(torch.relu(n.a(x))), False),
        (lambda n, x: n.b(n.a(x).relu()), False),
        (lambda n, x: n.b(F.relu(n.a(torch.flatten(x, 1)))), True),
        (lambda n, x: n.b(F.relu(n.a(x.flatten(1)))), True),
    ],
)
def test_a_chain_records_layers_and_whether_the_network_flattens(run, flattens):
    assert layer_map(Net(run)).chain == Chain(TWO, flattens)


@pytest.mark.parametrize(
    "run",
    [
        lambda n, x: n.b(n.a(x)),
        lambda n, x: n.b(F.relu(F.relu(n.a(x)))),
        lambda n, x: F.relu(n.b(F.relu(n.a(x)))),
        lambda n, x: n.b(F.relu(n.a(F.relu(x)))),
        lambda n, x: n.b(F.relu(n.a(x)).flatten(1)),
        lambda n, x: n.b(F.relu(n.a(torch.flatten(x)))),
        lambda n, x: n.b(F.relu(n.a(torch.flatten(x, 1, 2)))),
        lambda n, x: n.b(F.relu(n.a(torch.flatten(x, 1, end_dim=2)))),
        lambda n, x: n.b(F.relu(n.a(x.flatten(1, end_dim=2)))),
        lambda n, x: x,
        lambda n, x: n.a(x),
    ],
)
def test_other_wirings_of_linear_layers_are_no_chain(run):
    assert layer_map(Net(run)).chain is None


def test_a_parameter_outside_the_layers_prevents_a_chain():
    run = lambda n, x: n.b(F.relu(n.a(x)))  # noqa: E731
    assert layer_map(Net(run, scale=nn.Parameter(torch.ones(2)))).chain is None


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_network_with_hooks_is_no_chain(register):
    net = Net(lambda n, x: n.b(F.relu(n.a(x))))
    getattr(net.b, register)(lambda *_: None)
    assert layer_map(net).chain is None


def test_a_network_that_cannot_be_traced_is_no_chain():
    layers = layer_map(Net(lambda n, x: n.b(n.a(x) if x.sum() > 0 else n.a(-x))))
    assert layers.note and layers.chain is None


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"gpt", "hf"}))
def test_of_the_papers_networks_only_the_mlp_is_a_chain(name):
    net = build(ModelSpec((1, 32, 32), 4, ModelSettings(name=name, width=1 / 32)), 0)
    layers = tuple((f"{l}.weight", f"{l}.bias") for l in ("fc1", "fc2", "fc3", "ffc"))
    assert layer_map(net).chain == (Chain(layers, flattens=True) if name == "mlp" else None)
