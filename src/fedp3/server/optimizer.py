"""Server optimizers: the aggregated uploads as a pseudo-gradient.

For every coordinate that somebody uploaded this round, with d = mean - w:
    none      w <- w + eta d            (eta = 1: the mean, to the bit)
    momentum  m <- beta1 m + d;         w <- w + eta m                           (FedAvgM)
    adam      m <- beta1 m + (1 - beta1) d;   v <- beta2 v + (1 - beta2) d²;
              w <- w + eta m / (sqrt(v) + epsilon)                               (FedAdam)
A coordinate that nobody uploaded is unchanged, bit for bit, and so are its moments.
Running statistics are averaged without an optimizer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.types import AcceptedUpdate, LayerMap, Params
from fedp3.server.aggregators import OPTIMIZERS, AggregateSettings, Aggregator, uploaded_mask

Moments = Mapping[str, Tensor]  # "m/tensor" and "v/tensor"
# tensors of which anything was uploaded -> which coordinates; None: all
Uploaded = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A server optimizer.

    Args:
        step: takes d, the moments of one tensor and the settings; updates the moments in place and
            returns the change of w.
        moments: the letters of its moments, of which "v" starts at epsilon squared and others at 0.
    """

    step: Callable[[Tensor, dict[str, Tensor], AggregateSettings], Tensor]
    moments: str = ""


def _scaled(d: Tensor, moments: dict[str, Tensor], settings: AggregateSettings) -> Tensor:
    return settings.server_lr * d


def _momentum(d: Tensor, moments: dict[str, Tensor], settings: AggregateSettings) -> Tensor:
    moments["m"] = settings.beta1 * moments["m"] + d
    return settings.server_lr * moments["m"]


def _adam(d: Tensor, moments: dict[str, Tensor], settings: AggregateSettings) -> Tensor:
    moments["m"] = settings.beta1 * moments["m"] + (1 - settings.beta1) * d
    moments["v"] = settings.beta2 * moments["v"] + (1 - settings.beta2) * d * d
    return settings.server_lr * moments["m"] / (moments["v"].sqrt() + settings.server_epsilon)


OPTIMIZERS.add("none", Optimizer(_scaled))
OPTIMIZERS.add("momentum", Optimizer(_momentum, "m"))
OPTIMIZERS.add("adam", Optimizer(_adam, "mv"))


def is_identity(settings: AggregateSettings) -> bool:
    """Whether the next model is the mean itself, to the bit."""
    return settings.server == "none" and settings.server_lr == 1


def with_optimizer(
    aggregator: Aggregator, settings: AggregateSettings, spec: RunSpec
) -> Aggregator:
    """The aggregator followed by the server optimizer of these settings."""
    if is_identity(settings):
        return aggregator

    def init() -> Any:
        return {"aggregator": aggregator.init(), "moments": {}}

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        uploaded: dict[str, Tensor | None] = {}
        mean, inner = aggregator.apply(
            W, _noting_uploads(updates, spec, uploaded), state["aggregator"]
        )
        new, moments = optimize(W, mean, uploaded, spec.layers, settings, state["moments"])
        return new, {"aggregator": inner, "moments": moments}

    return Aggregator(
        apply=apply,
        init=init,
        report=lambda state: aggregator.report(state["aggregator"]),
        of_changes=aggregator.of_changes,
    )


def _noting_uploads(
    updates: Iterable[AcceptedUpdate], spec: RunSpec, uploaded: dict[str, Tensor | None]
) -> Iterator[AcceptedUpdate]:
    """The same updates; `uploaded` collects which coordinates they have."""
    for u in updates:
        for l in u.plan.uploaded:
            for n in spec.layers.layers[l]:
                mask, shape = uploaded_mask(u, n, l, spec), spec.layers.shapes[n]
                before = uploaded.get(n, torch.zeros(shape, dtype=torch.bool))
                if mask is None or before is None:
                    uploaded[n] = None
                else:
                    uploaded[n] = before | M.as_bool(mask, shape)
        yield u


def optimize(
    W: Params,
    mean: Params,
    uploaded: Uploaded,
    layers: LayerMap,
    settings: AggregateSettings,
    moments: Moments,
) -> tuple[Params, Moments]:
    """One step of the server optimizer.

    Args:
        W: W_t.
        mean: the aggregated uploads.
        uploaded: which coordinates anybody uploaded.
        layers: the model's layers.
        settings: the optimizer and its settings.
        moments: those after the last round.

    Returns:
        W_{t+1} and the next moments.
    """
    optimizer: Optimizer = OPTIMIZERS.pick(settings.server)
    new, after = dict(mean), dict(moments)
    for n, mask in uploaded.items():
        if n in layers.buffers:
            continue
        before = {
            k: moments.get(f"{k}/{n}", _initial_moment(k, W[n], settings))
            for k in optimizer.moments
        }
        updated = dict(before)
        change = optimizer.step(mean[n] - W[n], updated, settings)
        new[n] = _where(mask, W[n] + change, W[n])
        for k in optimizer.moments:
            after[f"{k}/{n}"] = _where(mask, updated[k], before[k])
    return new, after


def _initial_moment(kind: str, w: Tensor, settings: AggregateSettings) -> Tensor:
    return torch.full_like(w, settings.server_epsilon**2) if kind == "v" else torch.zeros_like(w)


def _where(mask: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if mask is None else torch.where(mask, new, old)
