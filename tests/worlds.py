"""Small networks, data and fleets, for the package and the reference implementations alike."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import reference as ref
from fedp3.client.batching import LocalSettings
from fedp3.client.context import ClientContext, RunSpec
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.settings import RunSettings
from fedp3.core.types import AcceptedUpdate, ClientPlan, LayerMap, Mask, Params, Reply, Task
from fedp3.data import Dataset, from_tensors
from fedp3.data.shards import Shard
from fedp3.engines.base import Engine, States
from fedp3.engines.in_process import sequential
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import PruneSettings
from fedp3.server.aggregation import make_aggregator
from fedp3.server.aggregators import AggregateSettings
from fedp3.server.averaging import RunningMean
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.gate import GateResult, admit

CLASSES = 4
# The reference implementations use masks; test_shrinking.py holds smaller networks equal to them.
MASKED = PruneSettings(physical=False)


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
        flat=nn.Flatten(),
        fc=nn.Linear(9, 8),
        relu=nn.ReLU(),
        drop=nn.Dropout(0.5),
        out=nn.Linear(8, CLASSES),
    )


def _links(*layers: str) -> list[ref.Link]:
    return [ref.Link(l, f"{l}.weight", (f"{l}.bias",)) for l in layers]


PLAN, AGGREGATE = PlanSettings(), AggregateSettings()
STATISTICS = ("norm.running_mean", "norm.running_var")
AFFINE = ("conv.bias", "norm.weight", "norm.bias")


@dataclass(frozen=True)
class Kind:
    """A network, its input shape, and its wiring spelled out for the reference implementations."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    chain: Sequence[ref.Link]


KINDS: Mapping[str, Kind] = {
    "mlp": Kind(
        lambda: build(ModelSpec((1, 3, 3), CLASSES, ModelSettings(name="mlp", width=0.006)), 0),
        (1, 3, 3),
        _links("fc1", "fc2", "fc3", "ffc"),
    ),
    "cnn": Kind(
        lambda: build(ModelSpec((1, 32, 32), CLASSES, ModelSettings(name="cnn", width=1 / 32)), 0),
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
    "resnet": Kind(
        lambda: build(
            ModelSpec((1, 8, 8), CLASSES, ModelSettings(name="resnet18", width=1 / 16)), 0
        ),
        (1, 8, 8),
        (),
    ),
}


@lru_cache(maxsize=16)
def _net(kind: str) -> tuple[nn.Module, LayerMap, Params]:
    with layers_draw_from(stream(7, Stream.INIT)):
        net = KINDS[kind].make()
    W = {
        n: w.detach().clone()
        for n, w in net.state_dict().items()
        if not n.endswith("num_batches_tracked")
    }
    return net, layer_map(net), W


@lru_cache(maxsize=16)
def _data(shape: tuple[int, ...], samples: int) -> Dataset:
    """Noisy copies of one pattern per class."""
    rng = torch.Generator().manual_seed(11)
    y = torch.randint(CLASSES, (samples,), generator=rng)
    patterns = torch.randn(CLASSES, *shape, generator=rng)
    return from_tensors(
        patterns[y] + 0.7 * torch.randn(samples, *shape, generator=rng), y, classes=CLASSES
    )


@dataclass(frozen=True)
class World:
    """One small fleet: a network, data, and the settings that a test varies."""

    kind: str
    net: nn.Module
    layers: LayerMap
    W: Params
    data: Dataset
    shards: Mapping[int, Shard]
    local: LocalSettings
    pruning: PruneSettings
    seed: int = 0
    rounds: int = 30

    def but(self, **changes: Any) -> "World":
        """This world with other fields, or with other settings of `local` and `pruning`."""
        parts = (World, LocalSettings, PruneSettings)
        own, local, pruning = (
            {k: v for k, v in changes.items() if k in p.__dataclass_fields__} for p in parts
        )
        unknown = changes.keys() - own.keys() - local.keys() - pruning.keys()
        if unknown:
            raise TypeError(f"no such settings: {unknown}")
        here = replace(self, **own)
        return replace(
            here, local=replace(here.local, **local), pruning=replace(here.pruning, **pruning)
        )

    @property
    def spec(self) -> RunSpec:
        """What server and clients both know."""
        return RunSpec(layers=self.layers, pruning=self.pruning, seed=self.seed, rounds=self.rounds)

    @property
    def context(self) -> ClientContext:
        """What all clients share."""
        return ClientContext(
            spec=self.spec, net=self.net, data=self.data, local=self.local, initial=self.W
        )

    @property
    def fleet(self) -> ref.Fleet:
        """The same world for the reference implementations."""
        shards = {i: s.train.tolist() for i, s in self.shards.items()}
        chain, x, y = KINDS[self.kind].chain, self.data.x, self.data.y
        return ref.Fleet(
            self.net, chain, self.layers.layers, x, y, shards, self.local, self.pruning, self.seed
        )

    def plans(
        self, layers: str = "opu2", keep: float = 0.5, t: int = 0, **plan: Any
    ) -> tuple[ClientPlan, ...]:
        settings = PlanSettings(layers=layers, **plan)
        return client_plans(settings, self.layers, [keep] * len(self.shards), self.seed, t)

    def tasks(
        self, plans: Sequence[ClientPlan], t: int = 0, W: Params | None = None, **fields: Any
    ) -> list[Task]:
        sent = dispatch(self.W if W is None else W, plans, self.layers, self.pruning, t, self.seed)
        return [
            Task(t=t, plan=plan, weights=weights, masks=masks, **fields)
            for plan, (weights, masks) in zip(plans, sent, strict=True)
        ]

    def engine(self, states: States | None = None) -> Engine:
        return sequential(self.context, self.shards, states)

    def server(
        self,
        plan: PlanSettings = PLAN,
        keep: float | Sequence[float] = 0.5,
        aggregate: AggregateSettings = AGGREGATE,
        spec: RunSpec | None = None,
        **fields: Any,
    ) -> ServerContext:
        """The server of this world; `fields` are those of `RunSettings` and `ServerContext`."""
        run = {"rounds": 3, "eval_every": 0, "clients_per_round": 0, "seed": self.seed}
        run |= {k: fields.pop(k) for k in list(fields) if k in RunSettings.__dataclass_fields__}
        spec = replace(spec or self.spec, rounds=run["rounds"])
        shares = (keep,) * len(self.shards) if isinstance(keep, float | int) else tuple(keep)
        fields = {"examples": {i: len(s.train) for i, s in self.shards.items()}} | fields
        return ServerContext(
            spec=spec,
            plan=plan,
            run=RunSettings(**run),
            aggregator=make_aggregator(aggregate, spec),
            keep=shares,
            **fields,
        )

    def state(self, server: ServerContext | None = None) -> ServerState:
        """Before the first round."""
        aggregator = (server or self.server()).aggregator
        return ServerState(t=0, W=self.W, aggregator=aggregator.init())


def world(kind: str = "mlp", clients: int = 4, sizes: Sequence[int] = (), **changes: Any) -> World:
    net, layers, W = _net(kind)
    sizes = sizes or [10 + i for i in range(clients)]  # unequal, so that weights by examples differ
    data = _data(KINDS[kind].shape, 200)
    shards, at = {}, 0
    for i, m in enumerate(sizes):
        shards[i] = Shard(torch.arange(at, at + m), torch.arange(at + m, at + m + 6))
        at += m + 6
    local = LocalSettings(steps=3, batch=4, lr=0.1, clip_norm=0, augment=False)
    return World(kind, net, layers, W, data, shards, local, MASKED).but(**changes)


def same(a: Params, b: Params) -> bool:
    """Whether two sets of tensors have the same names and the same bits."""
    bits = torch.int32  # so that 0.0 and -0.0 differ
    return a.keys() == b.keys() and all(torch.equal(a[n].view(bits), b[n].view(bits)) for n in a)


def judge(
    replies: Iterable[Reply],
    tasks: Sequence[Task],
    spec: RunSpec,
    examples: Mapping[int, int],
    extra: Params | None = None,
) -> tuple[list[AcceptedUpdate], GateResult]:
    """The updates that pass the gate, and what became of the others."""
    result = GateResult()
    return list(admit(replies, tasks, spec, examples, extra or {}, result)), result


def masked_mean(
    old: Tensor, uploads: Iterable[tuple[Tensor, Mask]], weights: Iterable[float]
) -> Tensor:
    """The mean of these uploads of one tensor, each over its mask."""
    mean = RunningMean(torch.zeros(old.shape, dtype=torch.float64))
    for (w, mask), weight in zip(uploads, weights, strict=True):
        mean.add(w, mask, weight)
    return mean.mean(old)
