"""Networks whose graph proves that they compute record by record, and networks without proof."""

import gc
import operator
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.privacy.clipping import ghost_agrees
from fedp3.privacy.per_record import per_record_graph
from worlds import world

Forward = Callable[[nn.Module, Tensor], Tensor]


class Written(nn.Module):
    """Two layers, a buffer and a list, with a `forward` between the layers."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.between = nn.Linear(6, 6), nn.Linear(6, 6), between
        self.register_buffer("table", torch.ones(6), persistent=False)
        self.register_buffer("places", torch.ones(4, 6), persistent=False)
        self.register_buffer("row", torch.ones(1, 6), persistent=False)
        self.register_buffer("cell", torch.ones(1, 1), persistent=False)
        self.register_buffer("plane", torch.ones(1, 1, 6), persistent=False)
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.between(self, torch.relu(self.fc1(x))))
        return out


def proven(net: nn.Module, x: Tensor) -> bool:
    return per_record_graph(net, x) is not None


def one_by_one(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(one[None]) for one in x])


# --------------------------------------------------------------------------- with proof

ZOO = {
    "mlp": ((1, 28, 28), ModelSettings(name="mlp", width=0.05)),
    "cnn": ((3, 32, 32), ModelSettings(name="cnn", width=0.05)),
    "resnet18": ((3, 32, 32), ModelSettings(name="resnet18", width=0.05, norm="group")),
    "resnet18 for large images": (
        (3, 32, 32),
        ModelSettings(name="resnet18", width=0.05, norm="group", stem=7),
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_the_shipped_networks_keep_ghost_clipping(name: str) -> None:
    shape, settings = ZOO[name]
    net = build(ModelSpec(shape, 10, settings), 0).train()
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    assert ghost_agrees(net, x, torch.arange(3), dict(net.named_parameters()))


@pytest.mark.parametrize("kind", ["mlp", "cnn", "groupnorm"])
def test_the_graph_of_a_network_computes_the_same_bits(kind: str) -> None:
    w = world(kind)
    graph = per_record_graph(w.net, w.data.x)
    assert graph is not None
    assert torch.equal(graph(w.data.x[:7]), w.net(w.data.x[:7]))


PROVEN: Mapping[str, Forward] = {
    "nothing": lambda m, h: h,
    "a sum": lambda m, h: h + torch.tanh(h) * 2 - 1,
    "a sum in place": lambda m, h: operator.iadd(h * 1, h),
    "a constant": lambda m, h: h * m.table + m.table,
    "a concatenation of features": lambda m, h: torch.cat([h[:, :2], h[:, 2:]], 1),
    "a view with the number of records": lambda m, h: h.view(h.size(0), 2, 3).flatten(1),
    "a view with the shape": lambda m, h: h.reshape(h.shape[0], -1),
    "a view with all other sizes": lambda m, h: h.view(-1, 3, 2).reshape(-1, 6),
    "a view with a size that is no batch": lambda m, h: h.view(-1, h.size(1)),
    "a transposition": lambda m, h: h.view(-1, 2, 3).transpose(1, 2).permute(0, 2, 1).flatten(1),
    "a softmax": lambda m, h: F.softmax(h, dim=-1),
    "a mean over places": lambda m, h: h + h.mean(1, keepdim=True),
    "one more dimension": lambda m, h: h.unsqueeze(1).squeeze(1),
    "pooling": lambda m, h: F.max_pool1d(h.unsqueeze(1), 1).squeeze(1),
    "a size as a number": lambda m, h: h * h.size(1),
}


@pytest.mark.parametrize("name", PROVEN)
def test_operations_on_single_records_are_proven(name: str) -> None:
    net, x = Written(PROVEN[name]), torch.randn(5, 6)
    graph = per_record_graph(net, x)
    assert graph is not None
    assert torch.equal(graph(x), net(x))
    assert torch.allclose(graph(x), one_by_one(net, x), atol=1e-6)


def doubled_with_its_alias(m: nn.Module, h: Tensor) -> Tensor:
    """In the graph of torch.fx, `+=` makes a new tensor."""
    alias = h = h * 1
    h += 1
    return h + alias


def test_a_graph_that_computes_something_else_than_the_network_is_not_used() -> None:
    net, x = Written(doubled_with_its_alias), torch.randn(3, 6)
    assert proven(net, x)
    assert not ghost_agrees(net, x, torch.arange(3), dict(net.named_parameters()))


# --------------------------------------------------------------------------- without proof


def mixing_from(records: int) -> Forward:
    return lambda m, h: h + h.mean(0) if len(h) >= records else h


def remembers(m: nn.Module, h: Tensor) -> Tensor:
    """Adds what it saw 40 batches ago."""
    m.past.append(h.detach().mean(0))
    return h + m.past[-41] if len(m.past) > 40 else h


def reads_an_earlier_batch(m: nn.Module, h: Tensor) -> Tensor:
    return h + SEEN


SEEN = torch.ones(6)
NOT_PROVEN: Mapping[str, Forward] = {
    "mixing from 4": mixing_from(4),
    "mixing from 7": mixing_from(7),
    "mixing only in full batches": lambda m, h: h + h.mean(0) if len(h) == 48 else h,
    "mixing by shape": lambda m, h: h + h.mean(0) if h.shape[0] > 3 else h,
    "mixing by size": lambda m, h: h + h.mean(0) if h.size(0) > 3 else h,
    "how many they are": lambda m, h: h * h.size(0),
    "how many they are, by shape": lambda m, h: h * h.shape[-2],
    "a mean": lambda m, h: h - h.mean(0),
    "a mean over everything": lambda m, h: h - h.mean(),
    "a negative mean": lambda m, h: h - h.mean(-2),
    "a mean over both": lambda m, h: h - h.mean((0, 1)),
    "a softmax over records": lambda m, h: F.softmax(h, 0),
    "a softmax over an unnamed dimension": lambda m, h: F.softmax(h),
    "a roll": lambda m, h: h + h.roll(1, 0),
    "a sorted batch": lambda m, h: h.sort(0).values,
    "another order": lambda m, h: h.flip(0),
    "a product": lambda m, h: h @ h.T @ h,
    "a transposition": lambda m, h: h.transpose(0, 1).contiguous().view(-1, 6),
    "a permutation": lambda m, h: h.permute(1, 0).reshape(-1, 6),
    "a transposition with one place": lambda m, h: h.unsqueeze(1).transpose(0, 1).mean(1),
    "a permutation with one place": lambda m, h: h.unsqueeze(1).permute(1, 0, 2).mean(1),
    "a concatenation of records": lambda m, h: torch.cat([h[:, :3], h[:, 3:]]).view(-1, 6),
    "a flat batch": lambda m, h: torch.flatten(h).view(-1, 6),
    "one record for all": lambda m, h: h + h[0],
    "one record for all, by slices": lambda m, h: h + h[:1],
    "one record for all, by a pair of slices": lambda m, h: h + h[:1, :],
    "a constant of more dimensions": lambda m, h: (h + m.plane).mean(1),
    "a view with a fixed number of records": lambda m, h: h.view(1, -1).view(-1, 6),
    "a view by the wrong size": lambda m, h: h.view(-1, 3).view(-1, 6),
    "a sum of records with features": lambda m, h: h + h.sum(1),
    "unbatched images": lambda m, h: nn.Conv2d(1, 1, 1)(h.view(1, 1, -1, 6)).view(-1, 6),
    "a table of places in the batch": lambda m, h: h + m.places[: h.size(0)],
    "a table with as many rows": lambda m, h: h + m.places,
    "a memory": remembers,
    "a memory in a buffer": lambda m, h: operator.iadd(m.table, h.mean(0)) + h,
    "a memory in a row": lambda m, h: operator.iadd(m.row, h) + h,
    "a memory as a result": lambda m, h: h + torch.mean(h, 1, keepdim=True, out=m.cell),
    "a buffer as a result": lambda m, h: h + operator.imul(m.places, h.size(1)),
    "a tensor from elsewhere": reads_an_earlier_batch,
    "a draw for all records": lambda m, h: h * (torch.rand(6) < 0.5),
    "a drawn number": lambda m, h: h * float(torch.rand(())),
    "a draw for each record": lambda m, h: h * (torch.rand_like(h) < 0.5),
    "Dropout as a function": lambda m, h: F.dropout(h, 0.5),
    "its weight in another place": lambda m, h: h @ m.fc1.weight,
    "a result in a tensor that exists": lambda m, h: torch.add(h, h, out=torch.empty(5, 6)),
}


@pytest.mark.parametrize("records", [1, 4, 5, 6])
@pytest.mark.parametrize("name", NOT_PROVEN)
def test_what_may_mix_records_is_not_proven(name: str, records: int) -> None:
    """The number of records on which a network is traced makes no difference."""
    assert not proven(Written(NOT_PROVEN[name]), torch.randn(records, 6))


class Unknown(nn.Linear):
    """A layer of a user: its own class says nothing about what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[0].register_forward_hook(lambda m, inputs, out: out - out.mean(0))
    return net


def hooked_at_the_root() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net.register_forward_pre_hook(lambda m, inputs: inputs[0] - inputs[0].mean(0))
    return net


def patched() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].forward = lambda x: x - x.mean(0)
    return net


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "a module of a user": lambda: nn.Sequential(nn.Linear(6, 6), Unknown(6, 6)),
    "a forward hook": hooked,
    "a hook of the network itself": hooked_at_the_root,
    "a forward of one object": patched,
    "BatchNorm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 6)),
    "a softmax over records": lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(0)),
    "a softmax over an unnamed dimension": lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax()),
    "records as channels": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv2d(1, 1, 1), nn.Flatten()
    ),
    "a norm over the batch": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((1, 6))),
    "a flat batch": lambda: nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 6))),
}


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_not_known_are_not_proven(name: str) -> None:
    assert not proven(MODULES[name](), torch.randn(1, 6))


def test_a_network_is_proven_for_each_mode_by_itself() -> None:
    net = Written(lambda m, h: h - h.mean(0) if m.training else h)
    assert not proven(net.train(), torch.randn(3, 6))
    assert proven(net.eval(), torch.randn(3, 6))
    assert not proven(net.train(), torch.randn(3, 6))


def test_tracing_draws_nothing_and_a_network_that_is_gone_leaves_nothing() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    before = torch.random.get_rng_state()
    assert proven(net, torch.randn(3, 6, generator=torch.Generator()))
    assert torch.equal(before, torch.random.get_rng_state())
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None


# --------------------------------------------------------------------------- chains of operations

DIMS = st.integers(-4, 3)
STEPS: st.SearchStrategy[tuple[str, Callable[[Tensor], Tensor]]] = st.one_of(
    DIMS.map(lambda d: (f"mean {d}", lambda h: h + h.mean(d, keepdim=True))),
    DIMS.map(lambda d: (f"mean {d} away", lambda h: h.mean(d))),
    DIMS.map(lambda d: (f"softmax {d}", lambda h: F.softmax(h, d))),
    DIMS.map(lambda d: (f"add sum {d}", lambda h: h + h.sum(d))),
    DIMS.map(lambda d: (f"unsqueeze {d}", lambda h: h.unsqueeze(d))),
    DIMS.map(lambda d: (f"squeeze {d}", lambda h: h.squeeze(d))),
    DIMS.map(lambda d: (f"flatten {d}", lambda h: torch.flatten(h, d))),
    DIMS.map(lambda d: (f"cat {d}", lambda h: torch.cat([h, h], d))),
    st.tuples(DIMS, DIMS).map(lambda d: (f"transpose {d}", lambda h: h.transpose(*d))),
    st.permutations(range(3)).map(lambda d: (f"permute {d}", lambda h: h.permute(d))),
    st.integers(1, 4).map(lambda n: (f"view -1 {n}", lambda h: h.reshape(-1, n))),
    st.integers(1, 4).map(lambda n: (f"view n {n}", lambda h: h.reshape(h.shape[0], n, -1))),
    st.integers(1, 4).map(lambda n: (f"view {n}", lambda h: h.reshape(n, -1))),
    st.just(("first", lambda h: h[:, 0])),
    st.just(("first record", lambda h: h[0])),
    st.just(("pool", lambda h: F.avg_pool1d(h, 2))),
    st.just(("relu", lambda h: F.relu(h))),
)


class Chain(nn.Module):
    def __init__(self, steps: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.steps, self.first = steps, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for step in self.steps:
            h = step(h)
        return h.flatten(1)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    steps=st.lists(STEPS, max_size=5),
    records=st.integers(2, 6),
)
def test_every_proven_chain_of_operations_computes_record_by_record(
    shape: list[int], steps: list[tuple[str, Callable[[Tensor], Tensor]]], records: int
) -> None:
    net = Chain([step for _, step in steps])
    x = torch.randn(records, *shape, generator=torch.Generator().manual_seed(0))
    graph = per_record_graph(net, x)
    if graph is not None:
        assert torch.allclose(graph(x), one_by_one(net, x), atol=1e-5), [n for n, _ in steps]
