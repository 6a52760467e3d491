"""Optimizers of local steps: from a clipped gradient to new weights.

Coordinates that are not active at a step keep their weight and their state.  The state begins at
zero in every round, or stays on the client from one round to the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedp3.core.registry import Registry
from fedp3.core.types import Params

if TYPE_CHECKING:
    from fedp3.client.batching import LocalSettings

STEPS = "steps"  # the name of the number of steps among the tensors of a state


@dataclass(slots=True)
class OptimizerState:
    """What an optimizer remembers: some tensors for each weight, and the number of steps."""

    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # slot -> weight -> tensor
    steps: int = 0

    def slot(self, name: str) -> dict[str, Tensor]:
        """The tensors of one slot."""
        return self.slots.setdefault(name, {})


def to_tensors(state: OptimizerState) -> dict[str, Tensor]:
    """The state as named tensors in host memory."""
    slots = {
        f"{slot}/{n}": w.cpu().clone(memory_format=torch.contiguous_format)
        for slot, tensors in state.slots.items()
        for n, w in tensors.items()
    }
    return {**slots, STEPS: torch.tensor([state.steps])}


def from_tensors(tensors: Params, device: str) -> OptimizerState:
    """The state that `to_tensors` wrote; a new one if there are no tensors."""
    state = OptimizerState()
    for name, w in tensors.items():
        if name == STEPS:
            state.steps = int(w)
        else:
            slot, _, n = name.partition("/")
            state.slot(slot)[n] = w.to(device, copy=True)
    return state


class Step(Protocol):
    """One step in place.

    Args:
        W: the weights.
        grads: their gradients, which may be overwritten.
        state: of the optimizer.
        active: masks of active coordinates; a tensor that is not named is active entirely.
        local: the settings.
        lr: the learning rate of this step.
    """

    def __call__(
        self,
        W: Mapping[str, Tensor],
        grads: list[Tensor],
        state: OptimizerState,
        active: Mapping[str, Tensor],
        local: "LocalSettings",
        lr: float,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One way to step.

    Args:
        step: the step.
        slots: takes the settings; returns how many tensors it remembers for each weight.
        decoupled_decay: whether the step itself decays weights; otherwise the decay is part of the
            gradient.
    """

    step: Step
    slots: "Callable[[LocalSettings], int]"
    decoupled_decay: bool = False


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")


def slots_of(local: "LocalSettings") -> int:
    """How many numbers the optimizer of these settings remembers for each weight."""
    return OPTIMIZERS.pick(local.optimizer).slots(local)


def _sgd(
    W: Mapping[str, Tensor],
    grads: list[Tensor],
    state: OptimizerState,
    active: Mapping[str, Tensor],
    local: "LocalSettings",
    lr: float,
) -> None:
    if local.momentum:
        velocity = state.slot("velocity")
        for (n, w), g in zip(W.items(), grads, strict=True):
            v = velocity.setdefault(n, torch.zeros_like(w))
            new = local.momentum * v + g
            velocity[n] = torch.where(active[n], new, v) if n in active else new
            g.copy_(new * active[n] if n in active else new)
    torch._foreach_add_(list(W.values()), grads, alpha=-lr)


def _adam(
    W: Mapping[str, Tensor],
    grads: list[Tensor],
    state: OptimizerState,
    active: Mapping[str, Tensor],
    local: "LocalSettings",
    lr: float,
) -> None:
    """Adam (Kingma and Ba, 2015), as torch computes it; gradients are zero where not active."""
    beta1, beta2 = local.betas
    means, squares = state.slot("mean"), state.slot("square")
    t = state.steps + 1
    for (n, w), g in zip(W.items(), grads, strict=True):
        mask = active.get(n)
        m = _blended(means.setdefault(n, torch.zeros_like(w)), g, beta1, mask)
        v = _blended(squares.setdefault(n, torch.zeros_like(w)), g.square(), beta2, mask)
        length = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(local.eps)
        step = torch.div(m, length, out=length)
        w.add_(step if mask is None else step.mul_(mask.to(step.dtype)), alpha=-lr / (1 - beta1**t))


def _blended(past: Tensor, now: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """Beta * past + (1 - beta) * now in place, where the mask is set."""
    if mask is None:
        return past.lerp_(now, 1 - beta)
    return past.copy_(torch.where(mask, past.lerp(now, 1 - beta), past))


def _adamw(
    W: Mapping[str, Tensor],
    grads: list[Tensor],
    state: OptimizerState,
    active: Mapping[str, Tensor],
    local: "LocalSettings",
    lr: float,
) -> None:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""
    if local.weight_decay:
        for n, w in W.items():
            w.sub_(w * active[n] if n in active else w, alpha=lr * local.weight_decay)
    _adam(W, grads, state, active, local, lr)


OPTIMIZERS.add("sgd", Optimizer(step=_sgd, slots=lambda local: int(local.momentum > 0)))
OPTIMIZERS.add("adam", Optimizer(step=_adam, slots=lambda local: 2))
OPTIMIZERS.add("adamw", Optimizer(step=_adamw, slots=lambda local: 2, decoupled_decay=True))
