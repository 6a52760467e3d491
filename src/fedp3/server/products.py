"""Adapters of several clients combined by their products B A, and not matrix by matrix.

The mean of B times the mean of A is not the mean of B A.  Under the rule `product` (FlexLoRA), the
server computes for every adapter

    M = sum_i a_i B_i A_i / sum_i a_i        over the clients i that uploaded the layer
    M = U S V'                               singular values in descending order
    B <- U_R S_R,  A <- V_R'                 the R largest

so that the leading r pairs are the best approximation of M that a device of rank r can have.  A has
rows of length 1, whatever S is: a pair whose B is zero can still learn.

Under the rule `stack` (FLoRA), nothing is cut: W <- W + scale M for the weight that the adapter is
beside, and every round begins with A as it was drawn and B = 0.  What was added to W since the
first round is a matrix of the model (`folded`), which the server sends and no client uploads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core.threads import one_thread
from fedp3.core.types import AcceptedUpdate, Layer, Params
from fedp3.models.lora import Pair, pairs_of
from fedp3.server.aggregators import (
    AGGREGATORS,
    AggregateSettings,
    Aggregator,
    examples,
    masked_mean,
    simple,
    weighted,
)

WEIGHTS = {"simple": simple, "examples": examples, "weighted": weighted}
SMALLEST = 1e-12  # of a client's weight: one that learned nothing does not make a sum zero


def with_products(aggregator: Aggregator, settings: AggregateSettings, spec: RunSpec) -> Aggregator:
    """The aggregator, but adapters follow from their mean products."""
    pairs = tuple(pairs_of(spec.layers))
    follow = FOLLOW.get(spec.adapter.rule)
    if not pairs or follow is None:
        return aggregator
    weigh = WEIGHTS[settings.rule]

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        sums: dict[Pair, Tensor] = {}
        totals: dict[Pair, float] = {}

        def adding(updates: Iterable[AcceptedUpdate]) -> Iterator[AcceptedUpdate]:
            for u in updates:
                with one_thread():
                    add(u, weigh(u))
                yield u

        def add(u: AcceptedUpdate, weight: float) -> None:
            uploaded = set(u.plan.uploaded)
            for pair in pairs:
                if pair.layer in uploaded:
                    a, b = (u.update.tensors[n].double() for n in (pair.a, pair.b))
                    zero = torch.zeros(len(b), a.shape[1], dtype=torch.float64)
                    sums.setdefault(pair, zero).addmm_(b, a, alpha=weight)
                    totals[pair] = totals.get(pair, 0.0) + weight

        mean, state = aggregator.apply(W, adding(updates), state)
        new = dict(mean)
        with one_thread():  # bits may not depend on the number of threads
            for pair, total in sums.items():
                changed = follow(W, pair, total / totals[pair], spec.adapter.scale)
                new |= {n: w.to(W[n].dtype) for n, w in changed.items()}
        return new, state

    return Aggregator(apply=apply, init=aggregator.init, report=aggregator.report)


def _cut(W: Params, pair: Pair, M: Tensor, scale: float) -> Params:
    """Matrices of the same rank whose product is the nearest to M."""
    B, A = factorised(M, W[pair.a].shape[0])
    return {pair.a: A, pair.b: B}


def _folded(W: Params, pair: Pair, M: Tensor, scale: float) -> Params:
    """M joins the weights, and the adapter begins anew."""
    return {pair.fold: W[pair.fold].double() + scale * M, pair.a: W[pair.a], pair.b: W[pair.b]}


# (W_t, adapter, mean of B A, scale) -> tensors of W_{t+1}
Follow = Callable[[Params, Pair, Tensor, float], Params]
FOLLOW: Mapping[str, Follow] = {"product": _cut, "stack": _folded}


def factorised(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B and A whose product is the nearest to M of this rank.

    Singular vectors are known up to a sign: the largest number of each row of A is positive.
    """
    U, S, V = torch.linalg.svd(M, full_matrices=False)
    U, S, V = U[:, :rank], S[:rank], V[:rank]
    signs = V.gather(1, V.abs().argmax(1, keepdim=True)).sign()
    return U * S * signs.T, V * signs


# --------------------------------------------------------------------------- weights by norm


def product_norm(settings: AggregateSettings, spec: RunSpec) -> Aggregator:
    """Weights by the norm of a client's products B A in the layer (HetLoRA).

    In layers without adapters all clients count the same.
    """
    by_layer: dict[Layer, list[Pair]] = {}
    for pair in pairs_of(spec.layers):
        by_layer.setdefault(pair.layer, []).append(pair)

    def weigh(u: AcceptedUpdate, l: Layer) -> float:
        if l not in by_layer:
            return 1.0
        squares = [_square(u.update.tensors, pair) for pair in by_layer[l]]
        return float(torch.stack(squares).sum().sqrt().clamp(min=SMALLEST))

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        return masked_mean(W, updates, spec, weigh), state

    return Aggregator(apply=apply)


def _square(tensors: Mapping[str, Tensor], pair: Pair) -> Tensor:
    """||B A||^2, from two matrices of rank x rank."""
    a, b = tensors[pair.a].double(), tensors[pair.b].double()
    return ((b.T @ b) * (a @ a.T)).sum().clamp(min=0)


AGGREGATORS.add("product_norm", product_norm)
