"""Reference implementations of methods that train adapters, by plain loops.

As in `reference.py`, of the package only the addressed generators are used.  Two hidden layers of
the small MLP have adapters; the head is trained itself, and everything else is frozen.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .reference import (
    OUT,
    Bench,
    Client,
    Round,
    Upload,
    Values,
    average,
    ceil_share,
    forward,
    local,
)

ADAPTED, RANK, SCALE = ("fc2", "fc3"), 4, 2.0


def product(a: Tensor, b: Tensor) -> Tensor:
    """B A as a sum of rank-1 matrices."""
    total = torch.zeros(b.shape[0], a.shape[1], dtype=a.dtype)
    for k in range(a.shape[0]):
        total = total + torch.outer(b[:, k], a[k])
    return total


def merged(W: Values, frozen: Values) -> Values:
    """The plain MLP that a network with adapters computes."""
    everything = {**frozen, **W}
    plain = {"fc1.weight": frozen["fc1.weight"], "fc1.bias": frozen["fc1.bias"]}
    for l in ADAPTED:
        change = product(everything[f"{l}.a.weight"], everything[f"{l}.b.weight"])
        plain[f"{l}.weight"] = frozen[f"{l}.base.weight"] + SCALE * change
        if f"{l}.fold.weight" in W:
            plain[f"{l}.weight"] = plain[f"{l}.weight"] + W[f"{l}.fold.weight"]
        plain[f"{l}.bias"] = frozen[f"{l}.base.bias"]
    return plain | {n: W[n] for n in OUT}


def pair_masks(W: Values, rank: int) -> Values:
    """The leading pairs of every adapter, and all of the head."""
    masks = {n: torch.ones_like(w) for n, w in W.items()}
    for n, mask in masks.items():
        if n.endswith(".a.weight"):
            mask[rank:] = 0
        if n.endswith(".b.weight"):
            mask[:, rank:] = 0
    return masks


Combine = Callable[[Values, Sequence[Values], Sequence[Values]], Values]


def adapters(b: Bench, frozen: Values, keeps: Sequence[float], combine: Combine) -> Round:
    """Every client trains the leading pairs; `combine(W, uploads, masks)` is the server."""

    def loss(V: Values, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(forward(merged(V, frozen), x), y)

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads, masks = [], []
        for i in b.train:
            mask = pair_masks(W, ceil_share(keeps[i], RANK))
            start = {n: w * mask[n] for n, w in W.items()}
            names = [n for n in W if ".fold." not in n]
            uploads.append(local(b, i, start, (t, i), names=names, loss=loss, masks=mask))
            masks.append(mask)
        return combine(W, uploads, masks)

    return one


def by_examples(b: Bench) -> Combine:
    """FedIT and FFA-LoRA: every coordinate by itself."""
    return lambda W, uploads, masks: average(
        W, [Upload(u, len(b.train[i]), masks[i]) for i, u in enumerate(uploads)]
    )


def by_norm(W: Values, uploads: Sequence[Values], masks: Sequence[Values]) -> Values:
    """HetLoRA: what a client does not have counts as zero; weights are norms of products."""
    new = average(W, [Upload({n: u[n] for n in OUT}) for u in uploads])
    for l in ADAPTED:
        names = (f"{l}.a.weight", f"{l}.b.weight")
        norms = [float(product(u[names[0]], u[names[1]]).square().sum().sqrt()) for u in uploads]
        own = [
            Upload({n: u[n] for n in names}, norm) for u, norm in zip(uploads, norms, strict=True)
        ]
        new |= {n: w for n, w in average(W, own).items() if n in names}
    return new


def by_product(b: Bench, *, cut: bool) -> Combine:
    """FlexLoRA: the mean product, cut back to the rank.  FLoRA: it is added to the weights."""

    def combine(W: Values, uploads: Sequence[Values], masks: Sequence[Values]) -> Values:
        weights = [len(b.train[i]) for i in b.train]
        head = [Upload({n: u[n] for n in OUT}, w) for u, w in zip(uploads, weights, strict=True)]
        new = average(W, head)
        for l in ADAPTED:
            mean = torch.zeros(W[f"{l}.b.weight"].shape[0], W[f"{l}.a.weight"].shape[1]).double()
            for u, w in zip(uploads, weights, strict=True):
                change = product(u[f"{l}.a.weight"].double(), u[f"{l}.b.weight"].double())
                mean = mean + w / math.fsum(weights) * change
            if not cut:
                new[f"{l}.fold.weight"] = W[f"{l}.fold.weight"] + SCALE * mean.float()
                continue
            U, S, V = torch.linalg.svd(mean)
            new[f"{l}.a.weight"] = V[:RANK].float()
            new[f"{l}.b.weight"] = (U[:, :RANK] * S[:RANK]).float()
        return new

    return combine


# --------------------------------------------------------------------------- blocks left out


def random_blocks(
    b: Bench,
    plain: nn.Module,
    frozen: Values,
    held: Callable[[int, int], Sequence[int]],
) -> Round:
    """FedRA: client i trains the adapters of the blocks `held(t, i)` in a network of these alone.

    Args:
        b: the fleet.
        plain: the network without adapters.
        frozen: the values of its tensors.
        held: from a round and a client to the numbers of its blocks.
    """

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            blocks = held(t, i)
            names = [n for n in W if not n.startswith("blocks.") or int(n.split(".")[1]) in blocks]
            shallow = copy.deepcopy(plain)
            shallow.blocks = nn.Sequential(*(shallow.blocks[j] for j in blocks))

            def loss(
                V: Values, x: Tensor, y: Tensor, net: nn.Module = shallow, at: Any = blocks
            ) -> Tensor:
                values = {n: frozen.get(n, V.get(n)) for n, _ in plain.named_parameters()}
                for j in range(len(plain.blocks)):
                    name = f"blocks.{j}.attention.qkv"
                    change = product(V[f"{name}.a.weight"], V[f"{name}.b.weight"])
                    values[f"{name}.weight"] = frozen[f"{name}.base.weight"] + SCALE * change
                    values[f"{name}.bias"] = frozen[f"{name}.base.bias"]
                left = {n: w for n, w in values.items() if not n.startswith("blocks.")}
                for place, j in enumerate(at):
                    for n, w in values.items():
                        if n.startswith(f"blocks.{j}."):
                            left[f"blocks.{place}." + n.split(".", 2)[2]] = w
                return cross_entropy(torch.func.functional_call(net, left, (x,)), y)

            back = local(b, i, W, (t, i), names=names, loss=loss)
            uploads.append(Upload({n: back[n] for n in names}, len(b.train[i])))
        return average(W, uploads)

    return one
