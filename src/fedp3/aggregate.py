"""Algorithm 3: layer-wise aggregation.

For each coordinate j:  w_j <- sum_i a_i w_ij / sum_i a_i  over the clients that uploaded j this round; a coordinate
that nobody uploaded keeps its bits.  A rule only says what a is; normalising happens here, once.
Differs from the paper's print: its weighted rule divides by the sum over all n clients, under which weights decay
to zero (erratum A9).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.errors import RunError
from fedp3.lookup import pick
from fedp3.masks import Kept
from fedp3.rng import Use, stream
from fedp3.types import Contribution, Layer, LayerMap, Params


@dataclass(frozen=True, slots=True)
class Memory:
    """What attention remembers between rounds; empty for every other rule."""

    logits: Mapping[int, float]  # s_i
    shares: Mapping[Layer, Mapping[int, float]]  # a_i of the last round that averaged l
    sketches: Mapping[Layer, Mapping[int, Tensor]]  # the direction of W_i^l - W_{t+1}^l, sketched


EMPTY = Memory({}, {}, {})


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The run's rule and the numbers some rules read."""

    rule: str = "simple"
    tau: float = 1.0  # distance: temperature
    step: float = 0.25  # attention: size of a logit's step
    limit: float = 0.5  # attention: largest change of a logit in one round
    start: Literal["simple", "weighted"] = "simple"  # attention begins at s = 0, or at s = log |L_i|
    sketch: int = 1024  # attention: numbers kept per upload and layer; 0 keeps them all


# --------------------------------------------------------------------------- rules: what each sender weighs


@dataclass(frozen=True, slots=True)
class Vote:
    """One layer's aggregation, as a rule sees it."""

    who: Sequence[Contribution]  # the layer's senders, in client order
    sent: Mapping[str, Sequence[tuple[Tensor, Kept]]]  # tensor -> what each of them uploaded of it
    W: Params  # W_t
    how: Aggregation
    memory: Memory


def simple(v: Vote) -> list[float]:
    """Everybody counts the same (Alg. 3, l. 3)."""
    return [1.0] * len(v.who)


def examples(v: Vote) -> list[float]:
    """m_i: FedAvg's weights."""
    return [float(c.update.examples) for c in v.who]


def weighted(v: Vote) -> list[float]:
    """|L_i|, the head counted (Alg. 3, l. 5; A10)."""
    return [float(len(c.plan.uploaded)) for c in v.who]


def distance(v: Vote) -> list[float]:
    """The known attentive aggregation: softmax(-||W_i^l - W_t^l|| / tau), over the coordinates i uploaded."""
    moved = [[M.take(w.double() - v.W[n], kept) for w, kept in sent] for n, sent in v.sent.items()]
    norms = [[float(torch.linalg.vector_norm(d)) for d in of_tensor] for of_tensor in moved]
    far = torch.tensor([math.hypot(*of_client) for of_client in zip(*norms, strict=True)], dtype=torch.float64)
    return _softmax(-far / v.how.tau)


def attention(v: Vote) -> list[float]:
    """Softmax of one learned logit per client (Alg. 3, ll. 8-9; our own design, A11)."""
    return _softmax(torch.tensor([_logit(c, v.how, v.memory) for c in v.who], dtype=torch.float64))


def _softmax(s: Tensor) -> list[float]:
    # No share underflows: a coordinate that only a far client sent is still that client's.
    shares: list[float] = torch.softmax((s - s.max()).clamp(min=-600), 0).tolist()
    return shares


Rule = Callable[[Vote], list[float]]
RULES: Mapping[str, Rule] = {
    "simple": simple,
    "examples": examples,
    "weighted": weighted,
    "distance": distance,
    "attention": attention,
}
LEARNS = frozenset({"attention"})  # rules that need a memory of the last round


# --------------------------------------------------------------------------- the one masked mean


def masked_mean(old: Tensor, sent: Sequence[tuple[Tensor, Kept]], a: Sequence[float]) -> Tensor:
    """sum_i a_i w_i / sum_i a_i per coordinate, over those who sent it; where nobody did, `old`.

    Sums run in the order given, in double precision and undivided: whole weights then add up without rounding,
    so their scale leaves no trace, and equal uploads come back bit-equal.
    """
    num = torch.zeros(old.shape, dtype=torch.float64)
    if all(kept is None for _, kept in sent):
        for (w, _), a_i in zip(sent, a, strict=True):
            num.add_(w, alpha=a_i)
        return num.div_(math.fsum(a)).to(old.dtype)
    den = torch.zeros(old.shape, dtype=torch.float64)
    for (w, kept), a_i in zip(sent, a, strict=True):
        values = M.take(w, kept).to(torch.float64) * a_i
        M.add_at(num, values, kept)
        M.add_at(den, torch.full_like(values, a_i), kept)
    return torch.where(den > 0, (num / den).to(old.dtype), old)


def aggregate(
    W: Params, who: Sequence[Contribution], layers: LayerMap, stale: str, how: Aggregation, memory: Memory, seed: int
) -> tuple[Params, Memory]:
    """W_{t+1} from the accepted updates of round t (Alg. 1, l. 14), and what the rule remembers."""
    who = sorted(who, key=lambda c: c.client)
    rule = pick(RULES, how.rule, "aggregation rule")
    senders = {l: [c for c in who if c.plan.layers[l].upload != "none"] for l in layers.layers}
    senders = {l: cs for l, cs in senders.items() if cs}
    learns = how.rule in LEARNS
    if learns:
        memory = _learn(W, senders, layers, stale, how, memory, seed)
    new, shares = dict(W), {}
    for l, cs in senders.items():
        sent = {
            n: [(c.update.tensors[n], M.uploaded(n, l, c.plan, c.masks, layers, stale)) for c in cs]
            for n in layers.layers[l]
        }
        a = rule(Vote(cs, sent, W, how, memory))
        _check(a, l, cs)
        shares[l] = {c.client: a_i / math.fsum(a) for c, a_i in zip(cs, a, strict=True)}
        for n in layers.layers[l]:
            new[n] = masked_mean(W[n], sent[n], a)
    if learns:
        sketches = {
            l: {c.client: _sketch(new, c, l, layers, stale, how, seed) for c in cs} for l, cs in senders.items()
        }
        memory = Memory(memory.logits, {**memory.shares, **shares}, {**memory.sketches, **sketches})
    return new, memory


def _check(a: Sequence[float], l: Layer, cs: Sequence[Contribution]) -> None:
    if not (all(math.isfinite(x) and x >= 0 for x in a) and math.fsum(a) > 0):
        raise RunError(
            f"layer {l!r}, clients {[c.client for c in cs]}: want one finite weight >= 0 each and a positive sum, "
            f"got {list(a)}"
        )


# --------------------------------------------------------------------------- attention: learning the logits


def _logit(c: Contribution, how: Aggregation, memory: Memory) -> float:
    first = math.log(len(c.plan.uploaded)) if how.start == "weighted" else 0.0
    return memory.logits.get(c.client, first)


def _learn(
    W: Params,
    senders: Mapping[Layer, Sequence[Contribution]],
    layers: LayerMap,
    stale: str,
    how: Aggregation,
    memory: Memory,
    seed: int,
) -> Memory:
    """One step of the logits of the last senders, judged by where this round's senders move.

    Let D^l be their mean update; -D^l stands for the gradient at W_t^l, the last round's mean, so
    d loss / d s_i = -a_i <D^l, W_i^l - W_t^l>.  All updates enter by direction only, those in D^l too: moving further
    earns nothing, and who still moves far (on labels that cannot be learned, say) does not outvote who has arrived.
    a_i is taken relative to an equal share, so the step does not depend on how many sent.
    """
    gain: dict[int, list[float]] = {}
    logits = dict(memory.logits)
    for l, cs in senders.items():
        for c in cs:
            logits.setdefault(c.client, _logit(c, how, memory))
        if l in memory.sketches:
            D = _unit(torch.stack([_sketch(W, c, l, layers, stale, how, seed) for c in cs]).mean(0))
            last = memory.sketches[l]
            for i, delta in last.items():
                gain.setdefault(i, []).append(len(last) * memory.shares[l][i] * float(D @ delta))
    for i, terms in gain.items():
        step = how.step * math.fsum(terms) / len(terms)
        logits[i] += max(-how.limit, min(how.limit, step))
    return Memory(logits, memory.shares, {l: s for l, s in memory.sketches.items() if l not in senders})


def _sketch(
    base: Params, c: Contribution, l: Layer, layers: LayerMap, stale: str, how: Aggregation, seed: int
) -> Tensor:
    """A short unit vector whose inner products are those of the direction of W_i^l - base^l, up to noise.

    Random signs, then strided sums: a count sketch that needs no index.  Coordinates not uploaded count as zero.
    """
    parts = []
    for n in layers.layers[l]:
        kept = M.uploaded(n, l, c.plan, c.masks, layers, stale)
        parts.append(M.zero_pruned(c.update.tensors[n].double() - base[n], kept).flatten())  # double: cannot overflow
    v = torch.cat(parts)
    if 0 < how.sketch < len(v):
        v = v * _signs(seed, list(layers.layers).index(l), len(v))
        v = torch.nn.functional.pad(v, (0, -len(v) % how.sketch)).view(-1, how.sketch).sum(0)
    return _unit(v).float()


def _unit(v: Tensor) -> Tensor:
    norm = float(v.norm())
    return v / norm if norm > 0 else v


@lru_cache(maxsize=64)
def _signs(seed: int, layer: int, n: int) -> Tensor:
    return torch.randint(2, (n,), generator=stream(seed, Use.SKETCH, layer)).mul_(2).sub_(1).to(torch.int8)
