"""What a method may add to local training: one record of optional parts, all off by default.

A method consists of a plan (layer sets, pruning, uploads, aggregation) and these parts; all methods
share one training loop.  One local step with hooks, on the layers that the current pass trains:

    g = grad loss(net, batch) + mu (W - W_sent) + shift

After that, the step masks, clips, decays and applies momentum as without hooks.

An `Exchange` carries a method's own tensors.  The server holds them and sends them with every task.
Every update answers with tensors of the same names and shapes, and `combine` computes the server's
next ones from these.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from fedp3.client.step_source import Gradient
from fedp3.core.types import Group, Kind, LayerMap, Params
from fedp3.data.inputs import Inputs

if TYPE_CHECKING:
    from fedp3.client.sgd import LocalPass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sequence of local steps; a task may consist of several passes.

    Args:
        layers: which layers train.
        personal: train a full model that stays on the client, instead of the model that was sent.
            Such passes come after those on the model that was sent.
        mu: proximal coefficient, which pulls towards the weights that were sent (FedProx, Ditto).
        share: number of steps, as a share of the local steps.
    """

    layers: Literal["all", "body", "head"] = "all"
    personal: bool = False
    mu: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may use besides the network and the batch."""

    labels: Tensor  # (classes,) bool: the labels among the client's training samples
    sent: Params  # the method's tensors as the server sent them


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedClient:
    """A client after its passes, as an exchange sees it."""

    net: nn.Module  # at the end of training
    start: Params
    end: Params
    steps_times_lr: float
    sent: Params  # the method's tensors from the server
    state: Params  # the method's tensors that stayed on the client after its last round
    batches: Callable[[], Iterator[tuple[Inputs, Tensor]]]  # the training samples once, in order
    loss: Callable[[Inputs, Tensor], Tensor]  # the mean loss of `net` over a batch
    layers: LayerMap


Loss = Callable[[nn.Module, Inputs, Tensor, LossInputs], Tensor]
# (outputs, labels that the client has) -> outputs that are scored
TransformOutputs = Callable[[Tensor, Tensor], Tensor]
ForwardContext = Callable[[nn.Module, Mapping[Group, float]], AbstractContextManager[None]]
AfterPass = Callable[[nn.Module, Iterable[tuple[Inputs, Tensor]]], None]
ReplaceGradient = Callable[[Gradient, Params, Mapping[str, Tensor]], Gradient]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A method's own tensors, in both directions.

    Args:
        begin: takes the layers and the number of classes; returns the server's tensors before the
            first round.
        reply: takes a trained client; returns the tensors that it sends, with the names and shapes
            of `begin`, and the tensors that stay on the client.
        combine: takes the server's tensors, the replies and the number of all clients; returns the
            server's next tensors.
        shift: takes the tensors that were sent and those that stayed on the client; returns a term
            that is added to every gradient.
        by_class: whether the tensors belong to classes, so that it needs labels.
    """

    begin: Callable[[LayerMap, int], Params]
    reply: Callable[[TrainedClient], tuple[Params, Params]]
    combine: Callable[[Params, Sequence[Params], int], Params]
    shift: Callable[[Params, Params], Params] | None = None
    by_class: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHook:
    """A method's replacement for the local step, where a step prunes entire units.

    Args:
        run: takes the pass, the number of the step, a batch, its labels and the units of this step;
            updates the weights and returns the loss.
        full_passes: for costs, the number of forward and backward passes over the client's full
            model that it adds to a step.
    """

    run: "Callable[[LocalPass, int, Inputs, Tensor, Mapping[Group, Tensor]], float]"
    full_passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """A method's parts beyond its plan.

    Args:
        passes: the passes of a training task.
        probe: the passes after which P, the accuracy of the personal models, is measured.
        loss: replaces the mean loss of the objective, which must be classification.
        transform_outputs: replaces the outputs of a model that the client has trained, when P is
            scored.
        forward: makes a context in which the client's network runs; takes the network and the share
            of units that is retained in each group.
        after_pass: called after each pass with the network and the training samples in order.
        step: replaces the local step where units are pruned at every step.
        gradient: replaces the gradient of the loss; takes it, the weights that a pass starts from,
            and the masks of the pruned ones among them.
        exchange: the method's own tensors.
    """

    passes: tuple[Pass, ...] = (Pass(),)
    probe: tuple[Pass, ...] = (Pass(),)
    loss: Loss | None = None
    transform_outputs: TransformOutputs | None = None
    forward: ForwardContext | None = None
    after_pass: AfterPass | None = None
    step: StepHook | None = None
    gradient: ReplaceGradient | None = None
    exchange: Exchange | None = None

    def passes_of(self, kind: Kind) -> tuple[Pass, ...]:
        """The passes of a task of this kind."""
        return {"train": self.passes, "probe": self.probe, "evaluate": ()}[kind]

    @property
    def needs_labels(self) -> list[str]:
        """The parts that assume classification."""
        parts: Mapping[str, object] = {
            "loss": self.loss,
            "transform_outputs": self.transform_outputs,
            "step": self.step,
            "exchange": self.exchange is not None and self.exchange.by_class,
        }
        return [name for name, part in parts.items() if part]

    def is_plain(self, kind: Kind) -> bool:
        """Whether a task of this kind is plain SGD and plain scoring, so that it may be stacked."""
        if self.forward is not None:
            return False
        others = (
            self.loss,
            self.transform_outputs,
            self.after_pass,
            self.step,
            self.gradient,
            self.exchange,
        )
        return kind == "evaluate" or (self.passes_of(kind) == (Pass(),) and not any(others))


NO_HOOKS = Hooks()


@dataclass(frozen=True, slots=True)
class ProximalTerm:
    """What is added to every gradient of a pass: mu (W - anchor) + shift."""

    mu: float = 0.0
    anchor: Params = field(default_factory=dict)
    shift: Mapping[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.mu > 0 or bool(self.shift)


NO_PROXIMAL_TERM = ProximalTerm()
