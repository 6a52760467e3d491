"""Algorithm 3: layer-wise aggregation.

For each coordinate j:  w_j <- sum_i a_i w_ij / sum_i a_i  over the clients that uploaded j this round; a coordinate
that nobody uploaded keeps its bits.  A rule only says what a is; normalising happens here, once.
Differs from the paper's print: its weighted rule divides by the sum over all n clients, under which weights decay
to zero (erratum A9).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.errors import RunError
from fedp3.handful import handfuls
from fedp3.lookup import pick
from fedp3.masks import Kept
from fedp3.mean import Sum
from fedp3.optimise import MEAN, Moments, Server, optimise
from fedp3.plan import per_layers
from fedp3.rng import Use, stream
from fedp3.types import Contribution, Layer, LayerMap, Params


@dataclass(frozen=True, slots=True)
class Memory:
    """What attention and the server optimiser remember between rounds; empty without them."""

    logits: Mapping[int, float]  # s_i
    shares: Mapping[Layer, Mapping[int, float]]  # a_i of the last round that averaged l
    sketches: Mapping[Layer, Mapping[int, Tensor]]  # the direction of W_i^l - W_{t+1}^l, sketched
    moments: Moments = field(default_factory=dict)  # of the server optimiser


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
    server: Server = MEAN  # how the model follows the mean


# --------------------------------------------------------------------------- rules: what each sender weighs


def simple(c: Contribution) -> float:
    """Everybody counts the same (Alg. 3, l. 3)."""
    return 1.0


def examples(c: Contribution) -> float:
    """m_i: FedAvg's weights."""
    return float(c.update.examples)


def weighted(c: Contribution) -> float:
    """|L_i|, the head counted (Alg. 3, l. 5; A10); layers that come back pruned are not in L_i."""
    return float(len(c.plan.whole) or 1)


@dataclass(frozen=True, slots=True)
class Vote:
    """One layer's aggregation, as a rule sees it that compares the uploads."""

    who: Sequence[Contribution]  # the layer's senders, in client order
    sent: Mapping[str, Sequence[tuple[Tensor, Kept]]]  # tensor -> what each of them uploaded of it
    W: Params  # W_t
    how: Aggregation
    memory: Memory


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


Weigh = Callable[[Contribution], float]  # from one contribution alone: uploads need not wait for each other
Compare = Callable[[Vote], list[float]]  # from all of a layer's uploads together
ALONE: Mapping[str, Weigh] = {"simple": simple, "examples": examples, "weighted": weighted}
TOGETHER: Mapping[str, Compare] = {"distance": distance, "attention": attention}
RULES: Mapping[str, Weigh | Compare] = {**ALONE, **TOGETHER}
LEARNS = frozenset({"attention"})  # rules that need a memory of the last round


# --------------------------------------------------------------------------- Algorithm 3


def aggregate(
    W: Params, who: Iterable[Contribution], layers: LayerMap, stale: str, how: Aggregation, memory: Memory, seed: int
) -> tuple[Params, Memory]:
    """W_{t+1} from the accepted updates of round t (Alg. 1, l. 14), and what the rule remembers.

    Contributions come in client order.  Each is added up and let go, unless the rule compares them with each other.
    """
    pick(RULES, how.rule, "aggregation rule")
    if how.rule in ALONE:
        weigh = ALONE[how.rule]
        return _follow(W, *_add_up(W, who, layers, stale, lambda c, l: weigh(c)), layers, how, memory)
    who = list(who)
    senders = {l: [c for c in who if c.plan.layers[l].upload != "none"] for l in layers.layers}
    senders = {l: cs for l, cs in senders.items() if cs}
    learns = how.rule in LEARNS
    if learns:
        memory = _learn(W, senders, layers, stale, how, memory, seed)
    weights = {l: _compared(W, l, cs, layers, stale, how, memory) for l, cs in senders.items()}
    mean, sent = _add_up(W, who, layers, stale, lambda c, l: weights[l][c.client])
    if learns:
        sketches = {
            l: {c.client: _sketch(mean, c, l, layers, stale, how, seed) for c in cs} for l, cs in senders.items()
        }
        shares = {l: {i: a / math.fsum(of.values()) for i, a in of.items()} for l, of in weights.items()}
        memory = replace(memory, shares={**memory.shares, **shares}, sketches={**memory.sketches, **sketches})
    return _follow(W, mean, sent, layers, how, memory)


Sent = Mapping[str, Tensor | None]  # tensors that came back -> which coordinates did; None: all


def _follow(
    W: Params, mean: Params, sent: Sent, layers: LayerMap, how: Aggregation, memory: Memory
) -> tuple[Params, Memory]:
    """W_{t+1}: the mean, or where the server optimiser goes on its account."""
    new, moments = optimise(W, mean, sent, layers, how.server, memory.moments)
    return new, replace(memory, moments=moments)


def _add_up(
    W: Params, who: Iterable[Contribution], layers: LayerMap, stale: str, weigh: Callable[[Contribution, Layer], float]
) -> tuple[Params, Sent]:
    sums: dict[str, Sum] = {}
    uploaded = per_layers(lambda plan: frozenset(plan.uploaded))
    for some in handfuls(who, layers):
        for l, names in layers.layers.items():
            senders = [c for c in some if l in uploaded(c.plan)]
            a = [weigh(c, l) for c in senders]
            _check(a, senders, l)
            for n in names if senders else ():
                total = sums.get(n) or sums.setdefault(n, Sum(torch.zeros(W[n].shape, dtype=torch.float64)))
                _add(total, n, l, senders, a, layers, stale)
    sent = {n: s.den > 0 if isinstance(s.den, Tensor) else None for n, s in sums.items()}
    return {n: sums[n].mean(w) if n in sums else w for n, w in W.items()}, sent


def _check(a: Sequence[float], senders: Sequence[Contribution], l: Layer) -> None:
    for a_i, c in zip(a, senders, strict=True):
        if not 0 < a_i < math.inf:
            raise RunError(f"layer {l!r}, client {c.client}: want a finite weight > 0, got {a_i}")


def _add(
    total: Sum, n: str, l: Layer, who: Sequence[Contribution], a: Sequence[float], layers: LayerMap, stale: str
) -> None:
    """What these clients sent of one tensor."""
    if not any(c.masks.units or c.masks.weights for c in who):
        total.add_whole([c.update.tensors[n] for c in who], a)
        return
    for c, a_i in zip(who, a, strict=True):
        total.add(c.update.tensors[n], M.uploaded(n, l, c.plan, c.masks, layers, stale), a_i)


def _compared(
    W: Params, l: Layer, cs: Sequence[Contribution], layers: LayerMap, stale: str, how: Aggregation, memory: Memory
) -> dict[int, float]:
    """What each sender of a layer weighs under a rule that compares them."""
    sent = {
        n: [(c.update.tensors[n], M.uploaded(n, l, c.plan, c.masks, layers, stale)) for c in cs]
        for n in layers.layers[l]
    }
    a = TOGETHER[how.rule](Vote(cs, sent, W, how, memory))
    return {c.client: a_i for c, a_i in zip(cs, a, strict=True)}


# --------------------------------------------------------------------------- attention: learning the logits


def _logit(c: Contribution, how: Aggregation, memory: Memory) -> float:
    first = math.log(weighted(c)) if how.start == "weighted" else 0.0
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
    return replace(memory, logits=logits, sketches={l: s for l, s in memory.sketches.items() if l not in senders})


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
