"""What a method may add to the frame: one closed record of optional parts, all off by default.

A method is a plan (settings of layers, pruning, upload, aggregation) and these parts; no method has a loop of its own.
One local step under hooks, on the layers that the current pass trains:
    g = grad loss(net, batch) + mu (W - W_sent) + shift;    then mask, clip, decay, momentum and step as always
`exchange` carries a method's own tensors: the server holds them, every task brings them, every update answers with
tensors of the same names and shapes, and `combine` makes the next ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from fedp3.types import Kind, LayerMap, Params


@dataclass(frozen=True, slots=True)
class Pass:
    """One stretch of a client's training; those on the client's own model come after those on what was sent."""

    layers: Literal["all", "body", "head"] = "all"
    own: bool = False  # on a whole model that stays with the client, instead of the one that was sent
    mu: float = 0.0  # pull towards what was sent
    share: float = 1.0  # of the local steps


@dataclass(frozen=True, slots=True)
class Given:
    """What a loss may know besides net and batch."""

    labels: Tensor  # (classes,) bool: those among the client's training samples
    sent: Params  # the method's tensors as the server sent them


@dataclass(frozen=True, slots=True)
class Trained:
    """A client after its passes, as an exchange sees it."""

    net: nn.Module  # at the end of training
    start: Params
    end: Params
    reach: float  # number of steps times learning rate
    sent: Params  # the method's tensors: from the server, and kept from the client's last round
    kept: Params
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]  # the training samples once, in order


Loss = Callable[[nn.Module, Tensor, Tensor, Given], Tensor]
Answer = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels the client has) -> what it answers with


@dataclass(frozen=True, slots=True)
class Exchange:
    """A method's own tensors, both ways."""

    begin: Callable[[LayerMap, int], Params]  # (layers, classes) -> what the server holds before the first round
    reply: Callable[[Trained], tuple[Params, Params]]  # what goes back (named and shaped as `begin`), what stays
    combine: Callable[[Params, Sequence[Params], int], Params]  # (held, replies, clients in all) -> held
    shift: Callable[[Params, Params], Params] | None = None  # (sent, kept) -> added to every gradient, by tensor


@dataclass(frozen=True, slots=True)
class Hooks:
    """A method's parts beyond its plan."""

    passes: tuple[Pass, ...] = (Pass(),)
    probe: tuple[Pass, ...] = (Pass(),)  # of the update that P is measured after
    loss: Loss | None = None  # instead of the mean cross-entropy
    answer: Answer | None = None  # of a model that the client has trained, instead of the net's outputs; scores P
    scale: bool = False  # on the client, the outputs of cut units are divided by the share that is kept
    static_norm: bool = False  # running statistics are taken once, after the last step
    distil: bool = False  # under ordered dropout the drawn width also learns from the client's whole one
    exchange: Exchange | None = None

    def stretches(self, kind: Kind) -> tuple[Pass, ...]:
        """The passes of a task of this kind."""
        return {"train": self.passes, "probe": self.probe, "evaluate": ()}[kind]

    def plain(self, kind: Kind) -> bool:
        """Whether a task of this kind is done as if there were no hooks."""
        if self.scale:
            return False
        rest = (self.loss, self.static_norm, self.distil, self.exchange)
        return kind == "evaluate" or (self.stretches(kind) == (Pass(),) and not any(rest))


NONE = Hooks()


@dataclass(frozen=True, slots=True)
class Pull:
    """What is added to every gradient of a pass: mu (W - anchor) + shift."""

    mu: float = 0.0
    anchor: Params = field(default_factory=dict)
    shift: Mapping[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.mu > 0 or bool(self.shift)


NO_PULL = Pull()
