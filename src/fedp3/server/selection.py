"""Selection: each client trains the layers where its gradient is largest (Sun et al., 2024).

With m_il whether client i trains layer l in the next round, and g_il^2 the squared norm of its
gradient in that layer, as it sent it with its last update, the server looks for

    max  sum_i sum_l m_il g_il^2 - lambda sum_{i<j} |m_i - m_j|_1    with sum_l m_il = R for all i

over the participants of the round.  The g^2 are divided by their mean, so that lambda has no unit.
It goes from client to client, until nobody changes: given the layers of the others, the best R
layers of client i are those with the largest g_il^2 + 2 lambda c_l, where c_l others train l.  The
sum never falls, and so it ends.

With lambda = 0 every client trains its own top layers.  If lambda is large, all train the same: if
two clients differed in l and l', each would rather train the layer of the other.  A client of
which nothing is known counts as the mean of the others; before the first round nothing is known of
anybody, and all layers are trained.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core.types import AcceptedUpdate, Layer, Params
from fedp3.server.aggregators import AggregateSettings, Aggregator, NextRound

NORMS = "norms"  # the exchanged tensor: the squared norms of all layers, in model order
SWEEPS = 1000  # far more than ever needed: a guard against rounding errors that go in circles


def with_selection(
    aggregator: Aggregator, settings: AggregateSettings, spec: RunSpec
) -> Aggregator:
    """The aggregator, whose state also has the norms that each client sent last."""
    names = tuple(spec.layers.layers)
    if not 0 < settings.select < len(names):
        return aggregator

    def init() -> Any:
        return {"aggregator": aggregator.init(), "norms": {}}

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        norms: dict[int, Tensor] = dict(state["norms"])
        new, inner = aggregator.apply(W, _noting_norms(updates, norms), state["aggregator"])
        return new, {"aggregator": inner, "norms": norms}

    def next_round(state: Any) -> NextRound:
        norms: Mapping[int, Tensor] = state["norms"]
        if not norms:
            return NextRound()
        typical = torch.stack(list(norms.values())).double().mean(0)

        def trained(clients: Sequence[int]) -> Mapping[int, Collection[Layer]]:
            rows = [norms.get(i, typical).double() for i in clients]
            chosen = select(torch.stack(rows), settings.select, settings.agreement)
            return {
                i: frozenset(names[l] for l in layers)
                for i, layers in zip(clients, chosen, strict=True)
            }

        return NextRound(trained=trained)

    return Aggregator(
        apply=apply,
        init=init,
        report=lambda state: aggregator.report(state["aggregator"]),
        next_round=next_round,
    )


def _noting_norms(
    updates: Iterable[AcceptedUpdate], norms: dict[int, Tensor]
) -> Iterator[AcceptedUpdate]:
    """The same updates; `norms` collects their squared norms, which cannot be negative."""
    for u in updates:
        norms[u.client] = u.update.extra[NORMS].clamp(min=0)
        yield u


def select(norms: Tensor, count: int, agreement: float) -> list[tuple[int, ...]]:
    """The layers that each client trains, in model order.

    Args:
        norms: (clients, layers): squared norms of gradients.
        count: R, how many layers each client trains.
        agreement: lambda.
    """
    mean = float(norms.mean())
    gains = (norms / mean if mean > 0 else norms).tolist()
    chosen = [_largest(row, count) for row in gains]
    trainers = [sum(l in layers for layers in chosen) for l in range(norms.shape[1])]
    for _ in range(SWEEPS if agreement else 0):
        before = list(chosen)
        for i, row in enumerate(gains):
            for l in chosen[i]:
                trainers[l] -= 1
            chosen[i] = _largest(
                [g + 2 * agreement * c for g, c in zip(row, trainers, strict=True)], count
            )
            for l in chosen[i]:
                trainers[l] += 1
        if chosen == before:
            break
    return chosen


def _largest(values: Sequence[float], count: int) -> tuple[int, ...]:
    """The places of the largest values; of equal ones the first."""
    return tuple(sorted(sorted(range(len(values)), key=lambda l: -values[l])[:count]))
