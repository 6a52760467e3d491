"""The types that all stages share: plain frozen data without behaviour.

The letters are the paper's: W the global weights, l a layer, i a client, t a round, K the local
steps, L_i the layers that client i trains in full and uploads, P_i the pruning of what the server
sends to it, Q_i the pruning at each local step.  `docs/paper-map.md` lists which line of which
algorithm is implemented where.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from torch import Tensor

Layer = str  # l: a named group of tensors that is sent, uploaded and averaged together
Group = str  # the output units (neurons, channels) of one weight tensor
Params = Mapping[str, Tensor]  # tensor name -> value: the paper's W, buffers included

# What the server sends of a layer.
#   dense   all coordinates
#   pruned  the coordinates that P_i retains
#   none    nothing: the client has a personal layer
#   skip    nothing: the client's network lacks the layer, and passes its input through.  A block of
#           a transformer is left out of the forward pass; that of a ResNet has tensors of zero.
Send = Literal["dense", "pruned", "none", "skip"]
# What the client uploads of a layer: all coordinates, the retained ones, all with zeros at the
# pruned ones, or nothing.
Upload = Literal["all", "retained", "zeros", "none"]
# What a task requests: train and upload; evaluate the weights that were sent; or probe, which
# trains and evaluates and then discards the result.
Kind = Literal["train", "evaluate", "probe"]


# --------------------------------------------------------------------------- structure of a model


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: each unit of `group` has `repeat` consecutive indices of it.

    If it has several parts, all of one size, a unit has `repeat` indices of each.  Queries, keys
    and values of attention that are projected at once are three such parts.
    """

    group: Group
    repeat: int = 1
    parts: int = 1


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """The output units of one weight tensor, which other tensors read."""

    units: int
    layer: Layer
    granule: int = 1  # units are pruned in blocks of this size (GroupNorm normalises such blocks)
    fixed: str = ""  # why these units cannot be pruned; empty if they can
    heads: bool = False  # whether they are attention heads, and not neurons or channels


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTensor:
    """A tensor that is part of the network, but neither trained nor exchanged.

    Args:
        shape: its shape.
        layer: the layer that it is computed and skipped with; empty if there is none.
        after: how many layers have begun to compute before it: where none of them trains, no
            gradient passes through it.
        tied: it is an earlier frozen tensor under a second name, and takes no memory.
    """

    shape: tuple[int, ...]
    layer: Layer = ""
    after: int = 0
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """The layers of a plain MLP: linear layers with ReLU between them and nothing else."""

    layers: tuple[tuple[str, str | None], ...]  # weight and bias names, input first
    flattens: bool  # whether the network flattens its input itself


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Which tensors form which layer, and how units connect layers.

    Args:
        layers: the tensors of each layer, in order of execution; the last layer is the head.
        shapes: the shape of each tensor.
        axes: dimensions 0 and 1 of each tensor, frozen ones included; a tensor that is absent is
            connected to no units.
        groups: the groups of units.
        prunable: the weights that unstructured pruning may change.
        buffers: persistent buffers, such as running statistics; they are averaged, but never
            trained or pruned by coordinate.
        note: why units could not be traced through the network; empty if they could.
        chain: the layers of a plain MLP; None if the network is anything else.
        frozen: the frozen tensors, which belong to no layer.
        constant: layers that the server changes and sends, and no client trains or uploads.
        aliases: second names of tensors that are used in two places (tied weights), and their first
            names; only the first are among the tensors of layers.
        residual: blocks that add to what they read, by path, and their layers: a network works
            without them.
    """

    layers: Mapping[Layer, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, tuple[Axis | None, ...]]
    groups: Mapping[Group, UnitGroup]
    prunable: frozenset[str]
    buffers: frozenset[str]
    note: str = ""
    chain: Chain | None = None
    frozen: Mapping[str, FrozenTensor] = field(default_factory=dict)
    constant: frozenset[Layer] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    residual: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)

    @property
    def head(self) -> Layer:
        """The final layer (the paper's FFC), which is in every L_i."""
        return list(self.layers)[-1]

    @property
    def hidden(self) -> tuple[Layer, ...]:
        """All layers that clients train but the head."""
        return tuple(l for l in self.layers if l not in self.constant)[:-1]


# --------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What one client does with one layer."""

    send: Send = "dense"
    keep: float = 1.0  # share that P_i retains where send is "pruned"
    train: bool = True
    upload: Upload = "all"


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """Everything that the server decides about client i before a round (Alg. 1, l. 2).

    Args:
        client: the number of the client.
        layers: the plan of each layer.
        deal: (k, n) means that the client gets part k of n disjoint parts of the units.  Only
            selectors that deal units out read it.
        steps: the number of local steps; 0 means as many as the run's settings say.
        split: each batch is computed in this many parts, one after the other, which needs less
            memory; their gradients are added up.
        code: the code of what the client uploads; empty means the run's `upload.compress`.
    """

    client: int
    layers: Mapping[Layer, LayerPlan]
    deal: tuple[int, int] = (0, 1)
    steps: int = 0
    split: int = 1
    code: str = ""

    @property
    def full_layers(self) -> tuple[Layer, ...]:
        """L_i: the layers that are trained in full and uploaded."""
        return tuple(l for l, p in self.layers.items() if p.train and p.upload == "all")

    @property
    def uploaded(self) -> tuple[Layer, ...]:
        """The layers of which anything is uploaded."""
        return tuple(l for l, p in self.layers.items() if p.upload != "none")


# --------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Block:
    """The retained indices of dimensions 0 and 1; None means that all of them are retained."""

    rows: Tensor | None
    cols: Tensor | None


# Which coordinates of a tensor: all (None), single ones (a bool tensor), or rows and columns.
Mask = Tensor | Block | None


@dataclass(frozen=True, slots=True)
class Masks:
    """P_i made concrete for one client and round; a tensor that is not named is dense."""

    units: Mapping[Group, Tensor] = field(default_factory=dict)  # retained unit indices, ascending
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # tensor -> bool mask


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDownload:
    """How a client that may hold an earlier copy of a tensor gets its weights.

    Args:
        copied: all weights are sent, and what the client holds is not used.
        changes: else the coded changes that the client missed, oldest first.  Each is the bytes
            that stand for all coordinates of the tensor.
        common: the coordinates that the client holds and still needs, to which the changes apply;
            None means all.
        fresh: the coordinates that it needs and does not hold, whose weights are sent; None means
            that there are none.
    """

    copied: bool
    changes: tuple[Tensor, ...] = ()
    common: Mask = None
    fresh: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Download:
    """How the weights of a task are sent to a client that stores a copy of them.

    The copy is the one of the round that the client's state is of, or the initial weights.
    """

    tensors: Mapping[str, TensorDownload]
    bytes: int  # of the payload, masks included


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the server requests of one client in round t.

    `weights` are full-shaped with zeros at pruned coordinates.  Engines and clients must not write
    to them.
    """

    t: int
    plan: ClientPlan
    weights: Params
    masks: Masks = Masks()
    kind: Kind = "train"
    evaluate: bool = False  # evaluate the resulting model on the client's test samples
    state_from: int = -1  # the round whose client state this task starts from; -1 if there is none
    extra: Params = field(default_factory=dict)  # tensors that a method sends besides the weights
    download: Download | None = None  # how weights are sent; None sends all of them


@dataclass(frozen=True, slots=True)
class ClientState:
    """What stays on the client between rounds: personal layers and tensors of the method."""

    t: int  # the round in which it was written
    tensors: Params


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientUpdate:
    """All that a client uploads: the tensors of uploaded layers, full-shaped (Alg. 1, l. 12)."""

    client: int
    t: int
    tensors: Params
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Params = field(default_factory=dict)  # tensors that a method uploads besides the layers
    bytes: int = 0  # of its tensors, where an entropy code decides; 0 if the plan determines them


@dataclass(frozen=True, slots=True)
class AcceptedUpdate:
    """An accepted update with the plan and masks of its task."""

    update: ClientUpdate
    plan: ClientPlan
    masks: Masks

    @property
    def client(self) -> int:
        """The paper's i."""
        return self.plan.client

    @property
    def examples(self) -> int:
        """The client's number of training samples, as it reported it."""
        return self.update.examples


class RejectionCode(StrEnum):
    """Why an update was rejected, for programs; the text beside it is for people."""

    FAILED = "failed"  # the client's code raised an error, or its node refused the task
    LOST = "lost"  # the client's process died, or no node represents this client
    UNREADABLE = "unreadable"  # the message could not be decoded
    UNASKED = "unasked"  # the client got no task in this round
    DUPLICATE = "duplicate"  # the client had replied already
    STALE = "stale"  # the update belongs to another round
    COPY = "copy"  # the client's copy of the published weights is missing or damaged
    MALFORMED = "malformed"  # wrong names, shapes, types, counts or metrics
    NOT_FINITE = "not_finite"  # the update contains NaN or infinity


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why an update was rejected."""

    code: RejectionCode
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A client without a usable update, and the reason."""

    client: int
    t: int
    reason: str
    late: bool = False
    code: RejectionCode = RejectionCode.FAILED


Reply = ClientUpdate | Failure
Execute = Callable[[Sequence[Task]], Iterable[Reply]]  # an engine is this one callable
