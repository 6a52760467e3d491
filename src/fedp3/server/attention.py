"""Attention: a softmax over one learned logit per client (Alg. 3, ll. 8-9).

The paper leaves the design open (A11); this one needs no data on the server.  A client's logit
grows if the next round's senders of the same layer move in the direction of its last upload.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import AcceptedUpdate, Layer, Params
from fedp3.server.aggregators import (
    AGGREGATORS,
    AggregateSettings,
    Aggregator,
    masked_mean,
    softmax,
    uploaded_mask,
    weighted,
)


class AttentionState(TypedDict):
    """What attention stores between rounds."""

    logits: dict[int, float]  # s_i
    shares: dict[Layer, dict[int, float]]  # a_i of the last round that averaged the layer
    # the sketched direction of W_i^l - W_{t+1}^l in that round
    sketches: dict[Layer, dict[int, Tensor]]


Senders = Mapping[Layer, Sequence[AcceptedUpdate]]


@AGGREGATORS.register("attention")
def attention(settings: AggregateSettings, spec: RunSpec) -> Aggregator:
    """A mean weighted by the softmax of learned logits, one per client."""

    def init() -> AttentionState:
        return {"logits": {}, "shares": {}, "sketches": {}}

    def apply(
        W: Params, updates: Iterable[AcceptedUpdate], state: AttentionState
    ) -> tuple[Params, Any]:
        received = list(updates)
        senders = {
            l: [u for u in received if u.plan.layers[l].upload != "none"]
            for l in spec.layers.layers
        }
        senders = {l: us for l, us in senders.items() if us}
        learned = _learn(W, senders, settings, spec, state)
        weights = {l: _weights(us, settings, learned["logits"]) for l, us in senders.items()}
        mean = masked_mean(W, received, spec, lambda u, l: weights[l][u.client])
        sketches = {
            l: {u.client: _sketch(mean, u, l, settings, spec) for u in us}
            for l, us in senders.items()
        }
        shares = {
            l: {i: a / math.fsum(of_layer.values()) for i, a in of_layer.items()}
            for l, of_layer in weights.items()
        }
        after: AttentionState = {
            "logits": learned["logits"],
            "shares": {**learned["shares"], **shares},
            "sketches": {**learned["sketches"], **sketches},
        }
        return mean, after

    return Aggregator(apply=apply, init=init, report=lambda state: state["logits"])


def _weights(
    senders: Sequence[AcceptedUpdate], settings: AggregateSettings, logits: Mapping[int, float]
) -> dict[int, float]:
    values = torch.tensor([_logit(u, settings, logits) for u in senders], dtype=torch.float64)
    return dict(zip((u.client for u in senders), softmax(values), strict=True))


def _logit(
    update: AcceptedUpdate, settings: AggregateSettings, logits: Mapping[int, float]
) -> float:
    start = math.log(weighted(update)) if settings.start == "weighted" else 0.0
    return logits.get(update.client, start)


def _learn(
    W: Params, senders: Senders, settings: AggregateSettings, spec: RunSpec, state: AttentionState
) -> AttentionState:
    """One step of the logits of the last senders, judged by where this round's senders move.

    Let D^l be their mean update; -D^l stands for the gradient at W_t^l, the last round's mean, so
    d loss / d s_i = -a_i <D^l, W_i^l - W_t^l>.  All updates enter by direction only, those in D^l
    too: a longer move earns nothing, and a client that still moves far (for example because its
    labels cannot be learned) does not outvote clients that have converged.  a_i is relative to an
    equal share, so that a step does not depend on the number of senders.
    """
    gains: dict[int, list[float]] = {}
    logits = dict(state["logits"])
    for l, updates in senders.items():
        for u in updates:
            logits.setdefault(u.client, _logit(u, settings, state["logits"]))
        if l in state["sketches"]:
            D = _unit(torch.stack([_sketch(W, u, l, settings, spec) for u in updates]).mean(0))
            last = state["sketches"][l]
            for i, delta in last.items():
                gains.setdefault(i, []).append(len(last) * state["shares"][l][i] * float(D @ delta))
    for i, terms in gains.items():
        step = settings.step * math.fsum(terms) / len(terms)
        logits[i] += max(-settings.limit, min(settings.limit, step))
    sketches = {l: s for l, s in state["sketches"].items() if l not in senders}
    return {"logits": logits, "shares": state["shares"], "sketches": sketches}


def _sketch(
    base: Params, update: AcceptedUpdate, l: Layer, settings: AggregateSettings, spec: RunSpec
) -> Tensor:
    """A short unit vector, whose inner products approximate those of the unit W_i^l - base^l.

    It is a count sketch that needs no index: random signs, then strided sums.  Coordinates that
    were not uploaded count as zero.
    """
    parts = []
    for n in spec.layers.layers[l]:
        # in double precision, in which this cannot overflow
        moved = update.update.tensors[n].double() - base[n]
        parts.append(M.zero_pruned(moved, uploaded_mask(update, n, l, spec)).flatten())
    v = torch.cat(parts)
    if 0 < settings.sketch < len(v):
        v = v * _signs(spec.seed, list(spec.layers.layers).index(l), len(v))
        padded = torch.nn.functional.pad(v, (0, -len(v) % settings.sketch))
        v = padded.view(-1, settings.sketch).sum(0)
    return _unit(v).float()


def _unit(v: Tensor) -> Tensor:
    norm = float(v.norm())
    return v / norm if norm > 0 else v


@lru_cache(maxsize=64)
def _signs(seed: int, layer: int, n: int) -> Tensor:
    bits = torch.randint(2, (n,), generator=stream(seed, Stream.SKETCH, layer))
    return bits.mul_(2).sub_(1).to(torch.int8)
