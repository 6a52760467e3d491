"""Intervals: layers on which clients agree are averaged less often (FedLAMA).

Layers are averaged in every round or, if they are rare, in every phi-th.  Between two means clients
continue to train a rare layer from where they left off, without receiving or uploading it.  After
every phi rounds the server chooses the rare layers anew.  With u_l the mean of layer l over m
clients, dim_l its number of weights and tau_l the rounds since its last mean,

    d_l = sum_i ||W_i^l - u_l||^2 / (m tau_l dim_l)

is the discrepancy of a layer, per weight.  Layers become rare in the order of d_l, smallest first,
until the share of the discrepancy that they have exceeds the share of the weights that they leave.
Participants are drawn once in phi rounds.  A client that missed the round before is sent a copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fedp3.client.context import RunSpec
from fedp3.core.types import AcceptedUpdate, Layer, LayerMap, Params
from fedp3.server.aggregators import AggregateSettings, Aggregator, NextRound, uploads_of


def with_intervals(
    aggregator: Aggregator, settings: AggregateSettings, spec: RunSpec
) -> Aggregator:
    """The aggregator, whose state also has the rare layers and the discrepancies of all."""
    phi = settings.interval
    if phi == 1:
        return aggregator

    def init() -> Any:
        inner = aggregator.init()
        return {"aggregator": inner, "rare": [], "discrepancies": {}, "rounds": 0, "last": -1}

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        received = list(updates)
        new, inner = aggregator.apply(W, received, state["aggregator"])
        rare, rounds = state["rare"], state["rounds"] + 1
        discrepancies = dict(state["discrepancies"])
        for l in spec.layers.layers:
            distance = _mean_square_distance(new, received, l, spec)
            if distance is not None:
                discrepancies[l] = distance / (phi if l in rare else 1)
        if rounds % phi == 0:
            rare = rare_layers(discrepancies, spec.layers)
        return new, {
            "aggregator": inner,
            "rare": rare,
            "discrepancies": discrepancies,
            "rounds": rounds,
            "last": max((u.update.t for u in received), default=state["last"]),
        }

    def next_round(state: Any) -> NextRound:
        rare, place = frozenset(state["rare"]), state["rounds"] % phi
        return NextRound(
            left_out=rare if place < phi - 1 else frozenset(),
            stored=True,
            continued=rare if place > 0 else frozenset(),
            since=state["last"],
        )

    return Aggregator(
        apply=apply,
        init=init,
        report=lambda state: aggregator.report(state["aggregator"]),
        next_round=next_round,
        interval=phi,
    )


def _mean_square_distance(
    mean: Params, received: Sequence[AcceptedUpdate], l: Layer, spec: RunSpec
) -> float | None:
    """The mean over clients of ||W_i^l - u_l||^2; None if nobody uploaded the layer."""
    total, clients = 0.0, 0
    for n, uploads in uploads_of(received, l, spec).items():
        clients = len(uploads)
        if n not in spec.layers.buffers:
            for _, w, _ in uploads:
                total += float(torch.linalg.vector_norm(w.double() - mean[n])) ** 2
    return total / clients if clients else None


def rare_layers(discrepancies: Mapping[Layer, float], layers: LayerMap) -> list[Layer]:
    """The layers that are averaged only at the end of the next phi rounds.

    Args:
        discrepancies: d_l dim_l of every layer.
        layers: the model's layers.
    """
    sizes = {l: _weights(layers, l) for l in discrepancies}
    total, values = sum(discrepancies.values()), sum(sizes.values())
    rare: list[Layer] = []
    moved = left = 0.0
    for l in sorted(discrepancies, key=lambda l: discrepancies[l] / sizes[l]):
        rare.append(l)
        moved += discrepancies[l]
        left += sizes[l]
        if total and moved / total > 1 - left / values:
            break
    return rare


def _weights(layers: LayerMap, l: Layer) -> int:
    shapes = (layers.shapes[n] for n in layers.layers[l] if n not in layers.buffers)
    return sum(torch.Size(shape).numel() for shape in shapes) or 1
