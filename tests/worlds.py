"""Small nets, small data and small fleets, for the package and for the twins alike."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import reference as ref
from fedp3.aggregate import Aggregation
from fedp3.data import Dataset, from_tensors
from fedp3.engines.inprocess import Engine, States, sequential
from fedp3.gate import NOTHING, Brought, Verdict, sift
from fedp3.layermap import layer_map
from fedp3.masks import Kept
from fedp3.mean import Sum
from fedp3.models import Spec, build
from fedp3.plan import PlanRules, client_plans
from fedp3.prune import dispatch
from fedp3.recipe import Recipe, Shard
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.server import Problem, ServerState
from fedp3.types import ClientPlan, LayerMap, Local, Params, Pruning, Reply, Task

CLASSES = 4
MASKED = Pruning(physical=False)  # what the twins spell out; smaller nets are held equal to it in test_submodel.py


def _sequence(**modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(modules))


def _conv(norm: Callable[[int], nn.Module], channels: int) -> Callable[[], nn.Module]:
    return lambda: _sequence(
        conv=nn.Conv2d(1, channels, 3),  # 6x6 -> 4x4
        norm=norm(channels),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(2),  # 2x2: four inputs per channel behind the flatten
        flat=nn.Flatten(),
        fc=nn.Linear(4 * channels, 5),
        relu2=nn.ReLU(),
        out=nn.Linear(5, CLASSES),
    )


def _dropout() -> nn.Module:
    return _sequence(
        flat=nn.Flatten(), fc=nn.Linear(9, 8), relu=nn.ReLU(), drop=nn.Dropout(0.5), out=nn.Linear(8, CLASSES)
    )


def _links(*layers: str) -> list[ref.Link]:
    return [ref.Link(l, f"{l}.weight", (f"{l}.bias",)) for l in layers]


RULES = PlanRules()
STATISTICS = ("norm.running_mean", "norm.running_var")
AFFINE = ("conv.bias", "norm.weight", "norm.bias")


@dataclass(frozen=True)
class Kind:
    """A net, what it eats, and its wiring spelled out by hand for the twins."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    chain: Sequence[ref.Link]


KINDS: Mapping[str, Kind] = {
    "mlp": Kind(
        lambda: build("mlp", Spec((1, 3, 3), CLASSES, 0.006), 0), (1, 3, 3), _links("fc1", "fc2", "fc3", "ffc")
    ),
    "cnn": Kind(
        lambda: build("cnn", Spec((1, 32, 32), CLASSES, 1 / 32), 0),
        (1, 32, 32),
        _links("conv1", "conv2", "fc1", "fc2", "ffc"),
    ),
    "batchnorm": Kind(
        _conv(nn.BatchNorm2d, 4),
        (1, 6, 6),
        [ref.Link("conv", "conv.weight", AFFINE + STATISTICS, STATISTICS), *_links("fc", "out")],
    ),
    "groupnorm": Kind(
        _conv(lambda c: nn.GroupNorm(3, c), 6),
        (1, 6, 6),
        [ref.Link("conv", "conv.weight", AFFINE, granule=2), *_links("fc", "out")],
    ),
    "dropout": Kind(_dropout, (1, 3, 3), _links("fc", "out")),
    "resnet": Kind(lambda: build("resnet18", Spec((1, 8, 8), CLASSES, 1 / 16), 0), (1, 8, 8), ()),
}


@lru_cache(maxsize=16)
def _net(kind: str) -> tuple[nn.Module, LayerMap, Params]:
    with layers_draw_from(stream(7, Use.INIT)):
        net = KINDS[kind].make()
    W = {n: w.detach().clone() for n, w in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    return net, layer_map(net), W


@lru_cache(maxsize=16)
def _data(shape: tuple[int, ...], samples: int) -> Dataset:
    """Noisy copies of one pattern per class."""
    rng = torch.Generator().manual_seed(11)
    y = torch.randint(CLASSES, (samples,), generator=rng)
    patterns = torch.randn(CLASSES, *shape, generator=rng)
    return from_tensors(patterns[y] + 0.7 * torch.randn(samples, *shape, generator=rng), y, classes=CLASSES)


@dataclass(frozen=True)
class World:
    """One small fleet: a net, data, and the settings a test plays with."""

    kind: str
    net: nn.Module
    layers: LayerMap
    W: Params
    data: Dataset
    shards: Mapping[int, Shard]
    local: Local
    pruning: Pruning
    seed: int = 0

    def but(self, Q: str | None = None, **changes: Any) -> "World":
        """This world with other fields, or other settings of its `Local` and `Pruning`; Q is the local pruning."""
        parts = (World, Local, Pruning)
        own, local, pruning = ({k: v for k, v in changes.items() if k in p.__dataclass_fields__} for p in parts)
        unknown = changes.keys() - own.keys() - local.keys() - pruning.keys()
        if unknown:
            raise TypeError(f"no such settings: {unknown}")
        pruning = {k: v for k, v in pruning.items() if k != "local"} | ({"local": Q} if Q else {})
        here = replace(self, **own)
        return replace(here, local=replace(here.local, **local), pruning=replace(here.pruning, **pruning))

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.net, self.layers, self.data, self.local, self.pruning, self.W, self.seed)

    @property
    def fleet(self) -> ref.Fleet:
        """The same world for the twins."""
        shards = {i: s.train.tolist() for i, s in self.shards.items()}
        chain, x, y = KINDS[self.kind].chain, self.data.x, self.data.y
        return ref.Fleet(self.net, chain, self.layers.layers, x, y, shards, self.local, self.pruning, self.seed)

    def plans(self, layers: str = "opu2", keep: float = 0.5, t: int = 0, **rules: Any) -> tuple[ClientPlan, ...]:
        return client_plans(PlanRules(layers, **rules), self.layers, [keep] * len(self.shards), self.seed, t)

    def tasks(self, plans: Sequence[ClientPlan], t: int = 0, W: Params | None = None, **fields: Any) -> list[Task]:
        sent = dispatch(self.W if W is None else W, plans, self.layers, self.pruning, t, self.seed)
        return [Task(t, plan, *each, **fields) for plan, each in zip(plans, sent, strict=True)]

    def engine(self, states: States | None = None) -> Engine:
        return sequential(self.recipe, self.shards, states)

    def problem(self, rules: PlanRules = RULES, keep: float = 0.5, **fields: Any) -> Problem:
        fields = {"aggregation": Aggregation(), "rounds": 3, "eval_every": 0, "seed": self.seed} | fields
        examples = {i: len(s.train) for i, s in self.shards.items()}
        shares = (keep,) * len(self.shards)
        return Problem(self.layers, rules, self.pruning, keep=shares, **({"examples": examples} | fields))

    @property
    def state(self) -> ServerState:
        return ServerState(0, self.W)


def world(kind: str = "mlp", clients: int = 4, sizes: Sequence[int] = (), **changes: Any) -> World:
    net, layers, W = _net(kind)
    sizes = sizes or [10 + i for i in range(clients)]  # unequal, so that weights by examples differ
    data = _data(KINDS[kind].shape, 200)
    shards, at = {}, 0
    for i, m in enumerate(sizes):
        shards[i] = Shard(torch.arange(at, at + m), torch.arange(at + m, at + m + 6))
        at += m + 6
    local = Local(steps=3, batch=4, lr=0.1, clip_norm=0, augment=False)
    return World(kind, net, layers, W, data, shards, local, MASKED).but(**changes)


def same(a: Params, b: Params) -> bool:
    """Whether two sets of tensors have the same names and the same bits."""
    bits = torch.int32  # so that 0.0 and -0.0 differ
    return a.keys() == b.keys() and all(torch.equal(a[n].view(bits), b[n].view(bits)) for n in a)


def judge(
    replies: Iterable[Reply],
    tasks: Sequence[Task],
    layers: LayerMap,
    examples: Mapping[int, int],
    brought: Brought = NOTHING,
) -> Verdict:
    """Sort replies; `examples` is how many training samples each client registered."""
    rejected: dict[int, str] = {}
    late: list[int] = []
    accepted = tuple(sift(replies, tasks, layers, examples, rejected, late, brought))
    return Verdict(accepted, rejected, tuple(sorted(late)))


def masked_mean(old: Tensor, sent: Iterable[tuple[Tensor, Kept]], a: Iterable[float]) -> Tensor:
    """The mean of these uploads, each of what is kept of it."""
    total = Sum(torch.zeros(old.shape, dtype=torch.float64))
    for (w, kept), a_i in zip(sent, a, strict=True):
        total.add(w, kept, a_i)
    return total.mean(old)
