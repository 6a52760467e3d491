"""The nouns of the package: plain frozen data, no behaviour.

Letters as in the paper: W the global weights, l a layer, i a client, t a round, K the local steps,
L_i the layers client i trains whole and uploads, P_i the pruning of what the server sends it,
Q_i the pruning at each local step.  `docs/paper-map.md` lists which line of which algorithm is where.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Layer = str  # l: a named group of tensors that travels and is averaged together
Group = str  # the output units (neurons, channels) of one weight tensor
Params = Mapping[str, Tensor]  # tensor name -> value: the paper's W, buffers included
Chain = tuple[tuple[str, str | None], ...]  # weight and bias of each layer of an MLP, input first

# none: the client's own layer stays in its place; skip: nothing does, the layer is zero and a residual block idle
Send = Literal["dense", "pruned", "none", "skip"]
Upload = Literal["all", "kept", "zeros", "none"]
# train: update and upload; evaluate: score what was sent; probe: train, score, then forget it all
Kind = Literal["train", "evaluate", "probe"]


# --------------------------------------------------------------------------- the model, as the plan sees it


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a tensor: each unit of `group` owns `repeat` consecutive indices of it."""

    group: Group
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """The units one layer writes and others read."""

    units: int
    layer: Layer
    granule: int = 1  # units are cut in blocks of this size (GroupNorm normalises whole blocks)
    fixed: str = ""  # why these units cannot be cut; empty: they can


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Which tensors form which layer, and how units connect layers."""

    layers: Mapping[Layer, tuple[str, ...]]  # in order of execution; the last one is the head
    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, tuple[Axis | None, ...]]  # sides 0 and 1 of a tensor; absent: not wired
    groups: Mapping[Group, UnitGroup]
    prunable: frozenset[str]  # weights that unstructured pruning may touch
    buffers: frozenset[str]  # running statistics: averaged, never trained or pruned by coordinate
    note: str = ""  # why units could not be followed through the net; empty: they were

    @property
    def head(self) -> Layer:
        """The final layer (the paper's FFC): in every L_i."""
        return list(self.layers)[-1]

    @property
    def hidden(self) -> tuple[Layer, ...]:
        """All layers but the head."""
        return tuple(self.layers)[:-1]


# --------------------------------------------------------------------------- decisions, before any work


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one client does with one layer."""

    send: Send = "dense"
    keep: float = 1.0  # share P_i keeps where send is "pruned"
    train: bool = True
    upload: Upload = "all"


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """Everything the server decides about client i before a round (Alg. 1, l. 2)."""

    client: int
    layers: Mapping[Layer, LayerPlan]
    deal: tuple[int, int] = (0, 1)  # which of how many parts, for selectors that deal units out to a round's clients

    @property
    def whole(self) -> tuple[Layer, ...]:
        """L_i: the layers trained whole and uploaded."""
        return tuple(l for l, p in self.layers.items() if p.train and p.upload == "all")

    @property
    def uploaded(self) -> tuple[Layer, ...]:
        """The layers of which anything comes back."""
        return tuple(l for l, p in self.layers.items() if p.upload != "none")


@dataclass(frozen=True, slots=True)
class Pruning:
    """The run's rules for P_i and Q_i."""

    selector: str = "magnitude"
    hold: bool = True  # pruned coordinates stay zero while the client trains
    stale: Literal["abstain", "vote"] = "abstain"  # columns of L_i that no active unit feeds
    local: str = "fixed"  # Q_i
    q: float | tuple[float, ...] = ()  # a constant, a grid to draw from, or empty: U[q_min, 1]
    q_min: float = 0.5
    physical: bool = True  # where whole units are cut, train a smaller net instead of a masked one
    q_of: Literal["kept", "whole"] = "kept"  # q as a share of what P_i kept, or of the whole net and at most keep


@dataclass(frozen=True, slots=True)
class Local:
    """How a client trains: Algorithm 2's K steps of SGD."""

    steps: int = 10  # ignored where epochs > 0
    epochs: int = 0
    batch: int = 48
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 10.0  # 0: no clip
    schedule: str = "constant"
    rounds: int = 30  # T, for schedules
    augment: bool = True


@dataclass(frozen=True, slots=True)
class Compression:
    """How uploads are written: what is compressed is the change of what was sent."""

    kind: str = "none"
    share: float = 0.01  # topk: of the coordinates of each tensor


AS_IS = Compression()


@dataclass(frozen=True, slots=True)
class Private:
    """LDP-FedP3's local step: a Gaussian on the clipped gradients of Poisson-drawn records (Algorithm 5)."""

    clip: float = 1.0  # C: largest norm of one record's gradient, over all coordinates that train
    noise: float = 1.0  # z: the noise on the sum of a step's gradients has deviation z C
    rate: float = 0.1  # q: the chance of each record to be in a step
    randomness: Literal["os", "seeded"] = "os"
    ghost: bool = True  # per-example norms without per-example gradients, where layers allow it


# --------------------------------------------------------------------------- what travels


@dataclass(frozen=True, slots=True)
class Masks:
    """P_i made concrete for one client and round; what is not named is whole."""

    units: Mapping[Group, Tensor] = field(default_factory=dict)  # kept unit indices, ascending
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # tensor -> bool mask


@dataclass(frozen=True, slots=True)
class Task:
    """What the server asks of one client in round t.

    `weights` are full-shaped with zeros at pruned coordinates; engines and clients must not write to them.
    """

    t: int
    plan: ClientPlan
    weights: Params
    masks: Masks = Masks()
    kind: Kind = "train"
    evaluate: bool = False  # score the client's test part with what it holds in the end
    state_from: int = -1  # the round whose client state this task starts from; -1: none yet
    extra: Params = field(default_factory=dict)  # a method's own tensors, from the server


@dataclass(frozen=True, slots=True)
class ClientState:
    """What stays on the client: personal layers and a method's own tensors."""

    t: int  # the round that left it
    tensors: Params


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """All that leaves a client: the uploaded layers' tensors, full-shaped (Alg. 1, l. 12)."""

    client: int
    t: int
    tensors: Params
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Params = field(default_factory=dict)  # a method's own tensors, from the client


@dataclass(frozen=True, slots=True)
class Contribution:
    """One accepted update with what the server knows about it."""

    update: ClientUpdate
    plan: ClientPlan
    masks: Masks

    @property
    def client(self) -> int:
        """The paper's i."""
        return self.plan.client


@dataclass(frozen=True, slots=True)
class Failure:
    """A client that sent nothing usable, and why."""

    client: int
    t: int
    reason: str
    late: bool = False


Reply = ClientUpdate | Failure
Execute = Callable[[Sequence[Task]], Iterable[Reply]]  # an engine is this one callable
