"""Server optimisers: the masked mean of the uploads as a pseudo-gradient.

For every coordinate that somebody uploaded this round, with d = mean - w:
    none      w <- w + eta d                                       (eta = 1: the mean, to the bit)
    momentum  m <- beta1 m + d;                    w <- w + eta m  (FedAvgM)
    adam      m <- beta1 m + (1 - beta1) d;  v <- beta2 v + (1 - beta2) d²;  w <- w + eta m / (sqrt(v) + tau)  (FedAdam)
A coordinate that nobody uploaded keeps its bits, and so do its moments.  Running statistics are averaged as ever.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedp3.lookup import pick
from fedp3.types import LayerMap, Params


@dataclass(frozen=True, slots=True)
class Server:
    """The run's server optimiser."""

    kind: str = "none"
    lr: float = 1.0  # eta
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3  # adam: how little a coordinate must move to be sped up


MEAN = Server()
Moments = Mapping[str, Tensor]  # "m/tensor" and "v/tensor"
Step = Callable[[Tensor, dict[str, Tensor], Server], Tensor]  # (d, moments of this tensor, how) -> change of w


def _scaled(d: Tensor, moments: dict[str, Tensor], how: Server) -> Tensor:
    return how.lr * d


def _momentum(d: Tensor, moments: dict[str, Tensor], how: Server) -> Tensor:
    moments["m"] = how.beta1 * moments["m"] + d
    return how.lr * moments["m"]


def _adam(d: Tensor, moments: dict[str, Tensor], how: Server) -> Tensor:
    moments["m"] = how.beta1 * moments["m"] + (1 - how.beta1) * d
    moments["v"] = how.beta2 * moments["v"] + (1 - how.beta2) * d * d
    return how.lr * moments["m"] / (moments["v"].sqrt() + how.tau)


SERVERS: Mapping[str, tuple[Step, str]] = {  # the step, and its moments
    "none": (_scaled, ""),
    "momentum": (_momentum, "m"),
    "adam": (_adam, "mv"),
}


def optimise(
    W: Params, mean: Params, sent: Mapping[str, Tensor | None], layers: LayerMap, how: Server, moments: Moments
) -> tuple[Params, Moments]:
    """W_{t+1} and the moments; `sent` has a mask for each tensor that came back, None where all of it did."""
    step, kinds = pick(SERVERS, how.kind, "server optimiser")
    if how.kind == "none" and how.lr == 1:
        return mean, moments
    new, after = dict(mean), dict(moments)
    for n, mask in sent.items():
        if n in layers.buffers:
            continue
        before = {k: moments[at] if (at := f"{k}/{n}") in moments else _fresh(k, W[n], how) for k in kinds}
        own = dict(before)
        change = step(mean[n] - W[n], own, how)
        new[n] = _where(mask, W[n] + change, W[n])
        for k in kinds:
            after[f"{k}/{n}"] = _where(mask, own[k], before[k])
    return new, after


def _fresh(kind: str, like: Tensor, how: Server) -> Tensor:
    """A moment before its first step."""
    return torch.full_like(like, how.tau**2) if kind == "v" else torch.zeros_like(like)


def _where(mask: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if mask is None else torch.where(mask, new, old)
