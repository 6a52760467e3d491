"""Recycling: some layers are not uploaded, and the server repeats their last change (FedLUAR).

After every round the server draws the layers that no client uploads in the next one.  For those it
adds the change that they had when they were last uploaded.  With D_l the last change of layer l,

    l was uploaded:    D_l <- W_l' - W_l,  s_l <- ||D_l|| / (||W_l|| + 1e-6)
    l is recycled:     W_l' <- W_l + D_l;  D_l and s_l stay

Layers that change little relative to their size are recycled most often: they are drawn one by one
with probabilities proportional to 1 / s_l.  Running statistics do not move while their layer is
recycled.  The first round uploads everything.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import AcceptedUpdate, Layer, LayerMap, Params
from fedp3.server.aggregators import RECYCLED_BY, AggregateSettings, Aggregator, NextRound

Scores = Mapping[Layer, float]
# (scores, number of layers, round, generator) -> the layers of the next round
Choose = Callable[[Scores, int, int, torch.Generator], Sequence[Layer]]


def with_recycling(
    aggregator: Aggregator, settings: AggregateSettings, spec: RunSpec
) -> Aggregator:
    """The aggregator, whose state also has last changes, scores, and the layers to recycle."""
    count = recycled_count(settings, spec.layers)
    if count == 0:
        return aggregator
    choose: Choose = RECYCLED_BY.pick(settings.recycle_by)

    def init() -> Any:
        inner = aggregator.init()
        return {"aggregator": inner, "changes": {}, "scores": {}, "recycled": [], "rounds": 0}

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        uploaded: set[Layer] = set()
        new, inner = aggregator.apply(W, _noting_layers(updates, uploaded), state["aggregator"])
        changes, scores, rounds = state["changes"], dict(state["scores"]), state["rounds"] + 1
        repeated = {n for l in state["recycled"] for n in spec.layers.layers[l]} & changes.keys()
        new = {n: W[n] + changes[n] if n in repeated else w for n, w in new.items()}
        fresh = [l for l in spec.layers.layers if l in uploaded]
        changes = {**changes, **_changes(W, new, spec.layers, fresh)}
        for l in fresh:
            names = [n for n in spec.layers.layers[l] if n in changes]
            scores[l] = _norm(changes, names) / (_norm(W, names) + 1e-6)
        rng = stream(spec.seed, Stream.RECYCLE, rounds)
        recycled = list(choose(scores, min(count, len(scores)), rounds, rng))
        return new, {
            "aggregator": inner,
            "changes": changes,
            "scores": scores,
            "recycled": recycled,
            "rounds": rounds,
        }

    return Aggregator(
        apply=apply,
        init=init,
        report=lambda state: aggregator.report(state["aggregator"]),
        next_round=lambda state: NextRound(left_out=frozenset(state["recycled"])),
    )


def recycled_count(settings: AggregateSettings, layers: LayerMap) -> int:
    """How many layers are recycled in a round."""
    return int(settings.recycle * len(layers.layers) + 1e-9)


def _noting_layers(
    updates: Iterable[AcceptedUpdate], uploaded: set[Layer]
) -> Iterator[AcceptedUpdate]:
    """The same updates; `uploaded` collects the layers that they have anything of."""
    for u in updates:
        uploaded.update(u.plan.uploaded)
        yield u


def _changes(W: Params, new: Params, layers: LayerMap, fresh: Iterable[Layer]) -> dict[str, Tensor]:
    names = [n for l in fresh for n in layers.layers[l] if n not in layers.buffers]
    return {n: new[n] - W[n] for n in names}


def _norm(tensors: Params, names: Iterable[str]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensors[n].double())) for n in names))


# --------------------------------------------------------------------------- which layers


@RECYCLED_BY.register("ratio")
def _by_ratio(scores: Scores, count: int, t: int, rng: torch.Generator) -> list[Layer]:
    """Drawn without replacement, with probabilities proportional to 1 / s_l."""
    left = {l: 1 / max(s, 1e-12) for l, s in scores.items()}
    drawn: list[Layer] = []
    for u in torch.rand(count, generator=rng, dtype=torch.float64).tolist():
        ends = list(accumulate(left.values()))
        at = min(bisect_right(ends, u * ends[-1]), len(ends) - 1)  # u times the sum may round up
        drawn.append(list(left)[at])
        del left[drawn[-1]]
    return drawn


@RECYCLED_BY.register("random")
def _at_random(scores: Scores, count: int, t: int, rng: torch.Generator) -> list[Layer]:
    """All layers with the same chance: a control."""
    names = list(scores)
    return [names[j] for j in torch.randperm(len(names), generator=rng)[:count].tolist()]


@RECYCLED_BY.register("cyclic")
def _in_turn(scores: Scores, count: int, t: int, rng: torch.Generator) -> list[Layer]:
    """One layer after the other: a control."""
    names = list(scores)
    return [names[(t * count + j) % len(names)] for j in range(count)]
