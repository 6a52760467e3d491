"""What is frozen is computed with, and neither trained, sent nor copied."""

import copy

import pytest
import torch
from torch import nn

import fedp3
from fedp3.core.errors import InputError
from fedp3.core.hashing import model_sha256
from fedp3.costs.compute import flops, measure
from fedp3.models.frozen import (
    copy_network,
    freeze,
    frozen_sha256,
    frozen_tensors,
    tensors_named,
    thaw,
)
from fedp3.models.layer_map import layer_map
from fedp3.models.shrinking import shrink_net
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.prune_settings import PruneSettings

FULL = PlanSettings(layers="full")
RUN = {
    "method": "fedavg",
    "partition": {"kind": "iid", "clients": 4},
    "local": {"steps": 2, "lr": 0.1},
    "run": {"rounds": 2, "clients_per_round": 2, "eval_every": 0},
}


class Net(nn.Module):
    """A body with running statistics, whose first and last weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.last(torch.relu(self.middle(x)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def data():
    y = torch.arange(80) % 2
    return torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None], y


BODY = ["first.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]


def test_a_frozen_copy_computes_the_same_shares_the_memory_and_leaves_the_network_alone():
    plain = net()
    before = {n: w.clone() for n, w in plain.state_dict().items()}
    frozen = freeze(plain, BODY)
    x = torch.randn(5, 6)
    assert torch.equal(frozen.eval()(x), plain.eval()(x))
    assert set(dict(frozen.named_parameters())) == {
        "middle.weight", "middle.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert frozen.first.weight.data_ptr() == plain.first.weight.data_ptr()
    assert frozen.last.weight is frozen.first.weight  # tied before, tied now
    assert not set(frozen_tensors(frozen)) & set(frozen.state_dict())
    assert plain.state_dict().keys() == before.keys()
    again = copy_network(frozen)
    assert again.first.weight is frozen.first.weight
    assert again.middle.weight is not frozen.middle.weight


def test_thawing_gives_the_network_back():
    plain = net()
    frozen = copy.deepcopy(freeze(plain, BODY))
    thaw(frozen)
    assert model_sha256(frozen.state_dict()) == model_sha256(plain.state_dict())
    assert frozen.last.weight is frozen.first.weight
    assert isinstance(frozen.first.weight, nn.Parameter)
    assert frozen_sha256(frozen) == ""


def test_layers_keep_their_names_and_units_around_a_frozen_tensor_are_fixed():
    chain = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.ReLU())))[:-1]
    whole = layer_map(chain)
    part = layer_map(freeze(chain, ["2.weight", "2.bias", "4.bias"]))
    assert part.layers == {"0": whole.layers["0"], "4": ("4.weight",), "6": whole.layers["6"]}
    assert {n: (w.layer, w.after) for n, w in part.frozen.items()} == {
        "2.weight": ("", 1), "2.bias": ("", 1), "4.bias": ("4", 2),
    }  # fmt: skip
    assert part.groups["0"].fixed and part.groups["4"].fixed
    assert not whole.groups["0"].fixed


def test_flops_count_frozen_weights_once_or_twice_and_memory_counts_them():
    chain = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.ReLU())))[:-1]
    frozen = freeze(chain, ["0.weight", "0.bias", "4.weight", "4.bias"])
    layers = layer_map(frozen)
    (plan,) = client_plans(FULL, layers, (1.0,), seed=0, t=0)
    each = 2 * 6 * 6
    # frozen and nothing before it trains; trained first; frozen behind it; trained behind it
    assert flops(measure(frozen, (6,)), plan, layers, PruneSettings()) == each * (1 + 2 + 2 + 3)


def test_a_smaller_network_shares_the_frozen_part():
    wide = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.ReLU())))[:-1]
    frozen = freeze(wide, ["0.weight", "0.bias"])
    small = shrink_net(frozen, layer_map(frozen), {"2": 3})
    assert small[0].weight is frozen[0].weight
    assert small[2].weight.shape == (3, 6) and small[4].weight.shape == (6, 3)


def test_a_run_neither_sends_nor_changes_what_is_frozen_and_exports_it(data, tmp_path):
    body = {"frozen": ["first", "norm", "last"]}
    plain = net()
    before = {n: w.clone() for n, w in plain.state_dict().items()}
    result = fedp3.run(plain, data, model=body, out=tmp_path / "r", **RUN)
    values = sum(w.numel() for n, w in before.items() if n.startswith(("middle", "head")))
    assert result.weights.keys() == {n for n in before if n.startswith(("middle", "head"))}
    assert result.history[0]["bytes_up"] == 2 * 4 * values
    exported = result.model.state_dict()
    assert exported.keys() == before.keys()
    for n, w in before.items():
        assert torch.equal(exported[n], w) == (n.split(".")[0] in {"first", "norm", "last"})
    # resuming needs the same frozen part
    other = net()
    other.first.weight.data += 1
    longer = {**RUN, "run": {**RUN["run"], "rounds": 3}}
    with pytest.raises(InputError, match="begun with other frozen part"):
        fedp3.run(other, data, model=body, out=tmp_path / "r", resume=True, **longer)
    assert fedp3.run(plain, data, model=body, out=tmp_path / "r", resume=True, **longer)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["fist"], r"no layer, module or tensor 'fist'; its layers are first, middle"),
        (["first", "norm", "middle", "last", "head"], "names all layers"),
    ],
)
def test_wrong_names_are_refused_before_training(names, text, data):
    with pytest.raises(InputError, match=text):
        fedp3.run(net(), data, model={"frozen": names}, **RUN)


def test_a_module_called_head_comes_before_the_last_layer() -> None:
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 4))
    net.add_module("head", nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    layers = {"body": ("body.weight",), "a": ("head.0.weight",), "b": ("head.2.weight",)}
    inside = ["head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"]
    assert tensors_named(net, layers, ["head"], "here") == inside
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    layers = {"0": ("0.weight", "0.bias"), "1": ("1.weight", "1.bias")}
    assert tensors_named(plain, layers, ["head"], "here") == ["1.weight", "1.bias"]
