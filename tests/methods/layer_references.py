"""Reference implementations of methods that upload some layers in some rounds, by plain loops.

As in `reference.py`, of the package only the addressed generators are used.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fedp3.client.batching import EVAL_BATCH
from fedp3.core.randomness import Stream, stream
from reference import floor_share, top_k

from .reference import (
    HEAD,
    HIDDEN,
    Bench,
    Client,
    Round,
    Upload,
    Values,
    average,
    forward,
    gradient,
    local,
    plain,
)

LAYERS = (*HIDDEN, HEAD)
Due = Callable[[int, int], Sequence[str]]  # (round, client) -> the layers that are due


def tensors_of(layers: Sequence[str]) -> list[str]:
    return [f"{l}.{k}" for l in layers for k in ("weight", "bias")]


def partly(
    b: Bench,
    due: Due,
    *,
    freeze: bool,
    by_examples: bool = True,
    damp: float = 0.0,
    steps: Mapping[int, int] | None = None,
    keeps: Sequence[float] = (),
) -> Round:
    """Clients upload the layers that are due, and train those alone or everything.

    With `keeps`, each weight that is not due is pruned to the largest of its values.
    """

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            sent = tensors_of(due(t, i))
            names = sent if freeze else tensors_of(LAYERS)
            start = dict(W)
            for n in W if keeps else ():
                if n not in sent and n.endswith("weight"):
                    start[n] = W[n] * top_k(W[n], floor_share(keeps[i], W[n].numel()))
            back = local(b, i, start, (t, i), names=names, steps=(steps or {}).get(i, 0))
            weight = len(b.train[i]) if by_examples else 1.0
            uploads.append(Upload({n: back[n] for n in sent}, weight))
        mean, out = average(W, uploads), {}
        for n in W:
            share = sum(n in u.tensors for u in uploads) / len(uploads)
            factor = (1 - damp) + damp * share
            out[n] = factor * mean[n] + (1 - factor) * W[n]
        return out

    return one


def in_cycles(warm: int, stretch: int) -> Due:
    """Written out: all layers in the warm rounds, then each layer for a stretch, then again."""
    rounds = [LAYERS] * warm + [(l,) for l in LAYERS for _ in range(stretch)]
    return lambda t, i: rounds[t % len(rounds)]


def by_coins(seed: int, clients: int, probability: float) -> Due:
    def due(t: int, i: int) -> list[str]:
        coins = torch.rand(clients, len(LAYERS), generator=stream(seed, Stream.SCHEDULE, t))
        return [l for l, u in zip(LAYERS, coins[i].tolist(), strict=True) if u < probability]

    return due


# --------------------------------------------------------------------------- FedLUAR


def recycled(b: Bench, count: int, kind: str) -> Round:
    """FedLUAR with its score, or with a random or cyclic choice of the layers."""
    held: dict[str, Any] = {"change": {}, "score": {}, "skip": [], "rounds": 0}

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        skip, uploads = held["skip"], []
        for i in b.train:
            back = local(b, i, W, (t, i))
            sent = tensors_of([l for l in LAYERS if l not in skip])
            uploads.append(Upload({n: back[n] for n in sent}, len(b.train[i])))
        new = average(W, uploads)
        for l in LAYERS:
            names = tensors_of([l])
            for n in names:
                if l in skip:
                    new[n] = W[n] + held["change"][n]
                else:
                    held["change"][n] = new[n] - W[n]
            if l not in skip:
                moved = math.sqrt(sum(float(v) ** 2 for n in names for v in flat(new[n] - W[n])))
                size = math.sqrt(sum(float(v) ** 2 for n in names for v in flat(W[n])))
                held["score"][l] = moved / (size + 1e-6)
        held["rounds"] += 1
        held["skip"] = chosen(held["score"], count, kind, b.seed, held["rounds"])
        return new

    return one


def flat(w: Tensor) -> list[float]:
    return w.flatten().tolist()


def chosen(score: Mapping[str, float], count: int, kind: str, seed: int, t: int) -> list[str]:
    rng = stream(seed, Stream.RECYCLE, t)
    if kind == "cyclic":
        return [LAYERS[(t * count + j) % len(LAYERS)] for j in range(count)]
    if kind == "random":
        return [LAYERS[j] for j in torch.randperm(len(LAYERS), generator=rng).tolist()[:count]]
    left, drawn = list(LAYERS), []
    for u in torch.rand(count, generator=rng, dtype=torch.float64).tolist():
        total = sum(1 / score[l] for l in left)
        end = 0.0
        for l in left:
            end += 1 / score[l] / total
            if u < end:
                drawn.append(l)
                left.remove(l)
                break
    return drawn


# --------------------------------------------------------------------------- selective layers

Choice = tuple[str, ...]


def objective(norms: Sequence[Mapping[str, float]], m: Sequence[Choice], strength: float) -> float:
    """sum_i sum_l m_il g_il^2 - lambda sum_{i<j} |m_i - m_j|_1, written out."""
    total = sum(norms[i][l] for i in range(len(m)) for l in m[i])
    for i in range(len(m)):
        for j in range(i):
            total -= strength * sum((l in m[i]) != (l in m[j]) for l in LAYERS)
    return total


def agreed(norms: Sequence[Mapping[str, float]], count: int, strength: float) -> list[Choice]:
    """Every client in turn tries all sets of layers, until nobody finds a better one."""
    mean = sum(g for row in norms for g in row.values()) / (len(norms) * len(LAYERS))
    norms = [{l: g / mean for l, g in row.items()} for row in norms]
    sets = list(itertools.combinations(LAYERS, count))
    m = [max(sets, key=lambda s, row=row: sum(row[l] for l in s)) for row in norms]
    for _ in range(100):
        before = list(m)
        for i in range(len(m)):
            m[i] = max(sets, key=lambda s: objective(norms, [*m[:i], s, *m[i + 1 :]], strength))
        if m == before:
            break
    return m


def selective(b: Bench, count: int, strength: float) -> Round:
    """Layers are selected by the gradients at the weights of the round before."""
    held: dict[str, list[Choice]] = {"due": [LAYERS] * len(b.train)}

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        due, norms = held["due"], []
        for i in b.train:
            first = torch.tensor(b.train[i])[:EVAL_BATCH]
            names = tensors_of(LAYERS)
            g = gradient(W, names, lambda leaves, at=first: plain(leaves, b.x[at], b.y[at]))
            norms.append(
                {l: sum(v * v for n in tensors_of([l]) for v in flat(g[n])) for l in LAYERS}
            )
        new = partly(b, lambda t, i: due[i], freeze=True)(t, W, clients)
        held["due"] = agreed(norms, count, strength)
        return new

    return one


# --------------------------------------------------------------------------- FedLAMA


def by_agreement(b: Bench, phi: int) -> Round:
    """FedLAMA: every client holds its own model, and layers are averaged after their intervals."""
    own: dict[int, Values] = {i: dict(b.W) for i in b.train}
    every = dict.fromkeys(LAYERS, 1)
    spread: dict[str, float] = {}

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        for i in b.train:
            own[i] = local(b, i, own[i], (t, i))
        due = [l for l in LAYERS if (t + 1) % every[l] == 0]
        names = tensors_of(due)
        new = average(W, [Upload({n: own[i][n] for n in names}, len(b.train[i])) for i in b.train])
        for l in due:
            of_clients = [
                sum((v - m) ** 2 for n in tensors_of([l])
                    for v, m in zip(flat(own[i][n]), flat(new[n]), strict=True))
                for i in b.train
            ]  # fmt: skip
            spread[l] = sum(of_clients) / len(of_clients) / every[l]
        for i in b.train:
            own[i] = {**own[i], **{n: new[n] for n in names}}
        if (t + 1) % phi == 0:
            size = {l: sum(W[n].numel() for n in tensors_of([l])) for l in LAYERS}
            every.update(dict.fromkeys(LAYERS, 1))
            done: list[str] = []
            for l in sorted(LAYERS, key=lambda l: spread[l] / size[l]):
                done.append(l)
                every[l] = phi
                have = sum(spread[m] for m in done) / sum(spread.values())
                leave = 1 - sum(size[m] for m in done) / sum(size.values())
                if leave < have:
                    break
        return new

    return one


# --------------------------------------------------------------------------- FIARSE


class Step(torch.autograd.Function):
    """1 where |w| is at least theta; its derivative is replaced as the paper's code does it."""

    @staticmethod
    def forward(ctx: Any, size: Tensor, theta: float) -> Tensor:
        ctx.save_for_backward(size)
        ctx.theta = theta
        return (size >= theta).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (size,) = ctx.saved_tensors
        slope = 2 * ctx.theta / (size + ctx.theta) ** 2
        return grads[0] * slope * (size >= ctx.theta), None


def fiarse_threshold(b: Bench, keeps: Sequence[float]) -> Round:
    """Autograd goes through the mask, which is computed anew from the weights of every step."""

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        weights = [f"{l}.weight" for l in HIDDEN]
        for i in b.train:
            sizes = sorted((abs(v) for n in weights for v in flat(W[n])), reverse=True)
            k = max(1, math.floor(Fraction(str(keeps[i])) * len(sizes)))
            theta = sizes[k - 1] if keeps[i] < 1 else 0.0
            masks = {n: torch.ones_like(w) for n, w in W.items()}
            for n in weights if keeps[i] < 1 else ():
                masks[n] = (W[n].abs() >= theta).float()

            def loss(V: Values, x: Tensor, y: Tensor, theta: float = theta) -> Tensor:
                seen = dict(V)
                for n in weights if theta else ():
                    seen[n] = V[n] * Step.apply(V[n].abs(), theta)
                return torch.nn.functional.cross_entropy(forward(seen, x), y)

            start = {n: w * masks[n] for n, w in W.items()}
            back = local(b, i, start, (t, i), loss=loss, masks=masks)
            uploads.append(Upload(back, 1.0, masks))
        return average(W, uploads)

    return one
