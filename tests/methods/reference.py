"""Reference implementations of the baselines for one small MLP, written from their papers.

Everything that a method does in a round is spelled out in plain loops: who gets which coordinates,
what the network computes, what is added to a gradient, what is uploaded.  Of the package only the
addressed generators are used, since both sides must draw the same.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, relu, softplus

from fedp3.client.batching import LocalSettings
from fedp3.core.randomness import Stream, stream
from reference import batches

Values = dict[str, Tensor]
HIDDEN, HEAD = ("fc1", "fc2", "fc3"), "ffc"
BODY = tuple(f"{l}.{k}" for l in HIDDEN for k in ("weight", "bias"))
OUT = ("ffc.weight", "ffc.bias")


@dataclass
class Bench:
    """One small fleet and how its clients train."""

    x: Tensor
    y: Tensor
    train: Mapping[int, Sequence[int]]  # client -> its training samples
    test: Mapping[int, Sequence[int]]
    W: Values  # W_0
    seed: int
    steps: int
    batch: int
    lr: float


@dataclass
class Client:
    """What stays on one client."""

    kept: Values = field(default_factory=dict)


def forward(W: Values, x: Tensor, shares: Mapping[str, float] | None = None) -> Tensor:
    h = x.flatten(1)
    for l in HIDDEN:
        h = relu((h @ W[f"{l}.weight"].T + W[f"{l}.bias"]) / (shares or {}).get(l, 1.0))
    return h @ W["ffc.weight"].T + W["ffc.bias"]


def orders(samples: int, steps: int, batch: int, rng: torch.Generator) -> list[list[int]]:
    """Shuffled epochs cut into batches, until there are enough."""
    return batches(samples, LocalSettings(steps=steps, batch=batch), rng)


def plain(W: Values, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(forward(W, x), y)


def gradient(W: Values, names: Sequence[str], loss: Callable[[Values], Tensor]) -> Values:
    leaves = {n: w.clone().requires_grad_(n in names) for n, w in W.items()}
    found = torch.autograd.grad(loss(leaves), [leaves[n] for n in names], allow_unused=True)
    return {
        n: torch.zeros_like(W[n]) if g is None else g for n, g in zip(names, found, strict=True)
    }


def local(
    b: Bench,
    i: int,
    start: Values,
    at: tuple[int, ...],
    *,
    names: Sequence[str] = BODY + OUT,
    loss: Callable[[Values, Tensor, Tensor], Tensor] = plain,
    add: Callable[[str, Tensor], Tensor] | None = None,
    masks: Values | None = None,
    steps: int = 0,
) -> Values:
    """K steps of SGD on these tensors; `add` is what a method adds to a gradient."""
    W = {n: w.clone() for n, w in start.items()}
    mine = torch.tensor(b.train[i])
    for rows in orders(len(mine), steps or b.steps, b.batch, stream(b.seed, Stream.BATCHES, *at)):
        x, y = b.x[mine[rows]], b.y[mine[rows]]
        grads = gradient(W, names, lambda leaves, x=x, y=y: loss(leaves, x, y))
        for n, g in grads.items():
            total = g + add(n, W[n]) if add else g
            W[n] = W[n] - b.lr * (total * masks[n] if masks else total)
    return W


def accuracy(b: Bench, i: int, W: Values) -> float:
    at = torch.tensor(b.test[i])
    return float((forward(W, b.x[at]).argmax(1) == b.y[at]).float().mean())


# --------------------------------------------------------------------------- the server


@dataclass
class Upload:
    tensors: Values
    weight: float = 1.0
    masks: Values = field(default_factory=dict)  # tensors not named: all of them


def average(W: Values, uploads: Sequence[Upload]) -> Values:
    """Every coordinate by itself, over those who sent it."""
    out = {n: w.clone() for n, w in W.items()}
    for n, w in W.items():
        for at in _coordinates(w):
            who = [
                u for u in uploads if n in u.tensors and (n not in u.masks or bool(u.masks[n][at]))
            ]
            if who:
                total = math.fsum(u.weight * float(u.tensors[n][at]) for u in who)
                out[n][at] = total / math.fsum(u.weight for u in who)
    return out


def _coordinates(w: Tensor) -> Iterable[tuple[int, ...]]:
    return [tuple(at) for at in torch.ones_like(w).nonzero().tolist()]


Round = Callable[[int, Values, list[Client]], Values]  # (t, W_t, clients) -> W_{t+1}


def run(b: Bench, rounds: int, one: Round) -> tuple[Values, list[Client]]:
    W, clients = b.W, [Client() for _ in b.train]
    for t in range(rounds):
        W = one(t, W, clients)
    return W, clients


def fedavg(b: Bench, **how: Any) -> Round:
    """Also FedProx, whose clients are pulled back by mu (W - W_t)."""
    mu = how.get("mu", 0.0)

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        back = [local(b, i, W, (t, i), add=lambda n, w: mu * (w - W[n])) for i in b.train]
        return average(W, [Upload(back[i], len(b.train[i])) for i in b.train])

    return one


# --------------------------------------------------------------------------- personal methods


def own_head(b: Bench, passes: Sequence[tuple[str, ...]]) -> Round:
    """FedPer, FedRep and FedBABU: the passes train these tensors in turn; the head stays."""

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            w = {**W, **{n: clients[i].kept.get(n, b.W[n]) for n in OUT}}
            for j, names in enumerate(passes):
                w = local(b, i, w, (t, i, *([j] if j else [])), names=names)
            clients[i].kept = {n: w[n] for n in OUT}
            uploads.append(Upload({n: w[n] for n in BODY}, len(b.train[i])))
        return average(W, uploads)

    return one


def ditto(b: Bench, mu: float) -> Round:
    def one(t: int, W: Values, clients: list[Client]) -> Values:
        back = [local(b, i, W, (t, i)) for i in b.train]
        for i in b.train:
            v = clients[i].kept or b.W
            clients[i].kept = local(b, i, v, (t, i, 1), add=lambda n, w: mu * (w - W[n]))
        return average(W, [Upload(back[i], len(b.train[i])) for i in b.train])

    return one


def alone(b: Bench) -> Round:
    def one(t: int, W: Values, clients: list[Client]) -> Values:
        for i in b.train:
            clients[i].kept = local(b, i, clients[i].kept or b.W, (t, i))
        return W

    return one


# --------------------------------------------------------------------------- sub-models


def ceil_share(share: float, n: int) -> int:
    return max(1, math.ceil(Fraction(str(share)) * n))


def unit_masks(W: Values, kept: Mapping[str, Sequence[int]]) -> Values:
    """Which coordinates exist when layer l keeps these units."""
    out, before = {}, None
    for l in (*HIDDEN, HEAD):
        rows, cols = W[f"{l}.weight"].shape
        weight, bias = torch.zeros(rows, cols), torch.zeros(rows)
        for r in range(rows):
            here = l not in kept or r in kept[l]
            bias[r] = here
            for c in range(cols):
                weight[r, c] = here and (before not in kept or c in kept[before])
        out[f"{l}.weight"], out[f"{l}.bias"] = weight, bias
        before = l
    return out


def sliced(
    b: Bench,
    keeps: Sequence[float],
    units: Callable[[int, int, int, str, float], Sequence[int]],
    aids: bool = False,
    by_examples: bool = False,
) -> Round:
    """Methods that prune units and upload what is left: `units(t, i, width, layer, keep)`."""

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            width = {l: len(W[f"{l}.bias"]) for l in HIDDEN}
            kept = {l: units(t, i, width[l], l, keeps[i]) for l in HIDDEN}
            masks = unit_masks(W, kept)
            start = {n: w * masks[n] for n, w in W.items()}
            shares = {l: len(kept[l]) / width[l] for l in HIDDEN} if aids else {}
            mine = set(b.y[torch.tensor(b.train[i])].tolist())

            def loss(
                V: Values, x: Tensor, y: Tensor, shares: Any = shares, mine: set[int] = mine
            ) -> Tensor:
                logits = forward(V, x, shares)
                if aids:
                    logits = torch.stack(
                        [
                            logits[:, c] if c in mine else torch.zeros(len(y))
                            for c in range(logits.shape[1])
                        ],
                        1,
                    )
                return cross_entropy(logits, y)

            back = local(b, i, start, (t, i), loss=loss, masks=masks)
            uploads.append(Upload(back, len(b.train[i]) if by_examples else 1.0, masks))
        return average(W, uploads)

    return one


def fjord(b: Bench, keeps: Sequence[float], grid: Sequence[float], distil: bool = False) -> Round:
    """Every batch trains the leading share p of the client's units, p drawn up to its capacity."""

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            width = {l: len(W[f"{l}.bias"]) for l in HIDDEN}
            most = {l: list(range(ceil_share(keeps[i], width[l]))) for l in HIDDEN}
            masks = unit_masks(W, most)
            w = {n: v * masks[n] for n, v in W.items()}
            own, draw = torch.tensor(b.train[i]), stream(b.seed, Stream.LOCAL_PRUNE, t, i)
            can = [p for p in grid if p <= keeps[i]]
            for rows in orders(len(own), b.steps, b.batch, stream(b.seed, Stream.BATCHES, t, i)):
                x, y = b.x[own[rows]], b.y[own[rows]]
                p = can[int(float(torch.rand((), generator=draw)) * len(can))]
                less = {l: most[l][: math.ceil(p / keeps[i] * len(most[l]) - 1e-9)] for l in HIDDEN}
                on = unit_masks(W, less)
                small = gradient(
                    {n: v * on[n] for n, v in w.items()},
                    BODY + OUT,
                    lambda V, x=x, y=y, w=w: _taught(V, x, y, w, distil),
                )
                grads = {n: g * on[n] for n, g in small.items()}
                if distil:
                    dense = gradient(w, BODY + OUT, lambda V, x=x, y=y: plain(V, x, y))
                    grads = {n: g + dense[n] * masks[n] for n, g in grads.items()}
                w = {n: v - b.lr * grads[n] for n, v in w.items()}
            uploads.append(Upload(w, len(b.train[i]), masks))
        return average(W, uploads)

    return one


def _taught(V: Values, x: Tensor, y: Tensor, w: Values, distil: bool) -> Tensor:
    return cross_entropy(forward(V, x), forward(w, x).detach().softmax(1) if distil else y)


def fiarse(b: Bench, keeps: Sequence[float]) -> Round:
    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            masks = {n: torch.ones_like(w) for n, w in W.items()}
            weights = [f"{l}.weight" for l in HIDDEN]
            places = [
                (-abs(v), n, j) for n in weights for j, v in enumerate(W[n].flatten().tolist())
            ]
            k = max(1, math.floor(Fraction(str(keeps[i])) * len(places)))
            best = {(n, j) for _, n, j in sorted(places, key=lambda place: place[0])[:k]}
            for n in weights if keeps[i] < 1 else ():
                flat = [float((n, j) in best) for j in range(W[n].numel())]
                masks[n] = torch.tensor(flat).reshape(W[n].shape)
            start = {n: w * masks[n] for n, w in W.items()}
            uploads.append(Upload(local(b, i, start, (t, i), masks=masks), 1.0, masks))
        return average(W, uploads)

    return one


# --------------------------------------------------------- what is exchanged, compressed, optimised


def scaffold(b: Bench) -> tuple[Round, Values]:
    c = {n: torch.zeros_like(w) for n, w in b.W.items()}

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads, changes = [], []
        for i in b.train:
            own = clients[i].kept or {n: torch.zeros_like(w) for n, w in W.items()}
            y = local(b, i, W, (t, i), add=lambda n, w, own=own: c[n] - own[n])
            new = {n: own[n] - c[n] + (W[n] - y[n]) / (b.steps * b.lr) for n in W}
            changes.append({n: new[n] - own[n] for n in W})
            clients[i].kept = new
            uploads.append(Upload(y))
        for n in c:
            for change in changes:
                c[n] = c[n] + change[n] / len(b.train)
        return average(W, uploads)

    return one, c


def compressed(
    b: Bench, squeeze: Callable[[Tensor, torch.Generator], Tensor], feedback: bool = False
) -> Round:
    """FedAvg in which the server sees W_t + squeeze(change)."""

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads = []
        for i in b.train:
            back, rng = local(b, i, W, (t, i)), stream(b.seed, Stream.COMPRESS, t, i)
            seen = {}
            for n in W:
                change = back[n] - W[n] + (clients[i].kept.get(n, 0) if feedback else 0)
                sent = squeeze(change, rng)
                clients[i].kept[n] = change - sent
                seen[n] = W[n] + sent
            uploads.append(Upload(seen, len(b.train[i])))
        return average(W, uploads)

    return one


def top_share(share: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    def squeeze(d: Tensor, rng: torch.Generator) -> Tensor:
        values = d.flatten().tolist()
        k = max(1, math.floor(Fraction(str(share)) * len(values)))
        best = sorted(range(len(values)), key=lambda j: (-abs(values[j]), j))[:k]
        return torch.tensor([v if j in best else 0.0 for j, v in enumerate(values)]).reshape(
            d.shape
        )

    return squeeze


def eight_bits(d: Tensor, rng: torch.Generator) -> Tensor:
    """Rounded up with a chance of the fraction; a word of 64 random bits serves four numbers."""
    scale = float(d.abs().max()) / 127
    words = torch.empty(math.ceil(d.numel() / 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=rng)
    rounded = []
    for j, v in enumerate(d.flatten().tolist()):
        piece = (int(words[j // 4]) >> 16 * (j % 4)) & 0xFFFF
        signed = piece - 0x10000 if piece >= 0x8000 else piece
        rounded.append(scale * math.floor(v / scale + (signed + 0x8000 + 0.5) / 0x10000))
    return torch.tensor(rounded).reshape(d.shape)


def served(b: Bench, kind: str, lr: float, beta1: float, beta2: float, tau: float) -> Round:
    """FedAvg whose server follows the mean by momentum or Adam."""
    m = {n: torch.zeros_like(w) for n, w in b.W.items()}
    v = {n: torch.full_like(w, tau**2) for n, w in b.W.items()}
    plainly = fedavg(b)

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        mean, out = plainly(t, W, clients), {}
        for n in W:
            d = mean[n] - W[n]
            if kind == "momentum":
                m[n] = beta1 * m[n] + d
                out[n] = W[n] + lr * m[n]
            else:
                m[n], v[n] = beta1 * m[n] + (1 - beta1) * d, beta2 * v[n] + (1 - beta2) * d**2
                out[n] = W[n] + lr * m[n] / (v[n].sqrt() + tau)
        return out

    return one


# --------------------------------------------------------------------------- FedCR


def code_of(W: Values, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.flatten(1)
    for l in ("fc1", "fc2"):
        h = relu(h @ W[f"{l}.weight"].T + W[f"{l}.bias"])
    out = h @ W["code.linear.weight"].T + W["code.linear.bias"]
    z = out.shape[1] // 2
    return out[:, :z], softplus(out[:, z:])


def fedcr(b: Bench, beta: float, draws: int, classes: int) -> tuple[Round, Values]:
    body = [n for n in b.W if n not in OUT]
    z = b.W["ffc.weight"].shape[1]
    held = {"mean": torch.zeros(classes, z), "std": torch.ones(classes, z)}

    def loss(V: Values, x: Tensor, y: Tensor) -> Tensor:
        mu, sigma = code_of(V, x)
        fit = torch.zeros(())
        for _ in range(draws):
            code = mu + sigma * torch.randn_like(sigma)
            fit = fit + cross_entropy(code @ V["ffc.weight"].T + V["ffc.bias"], y) / draws
        apart = torch.zeros(())
        for k, label in enumerate(y.tolist()):
            r = torch.distributions.Normal(held["mean"][label], held["std"][label])
            q = torch.distributions.Normal(mu[k], sigma[k])
            apart = apart + torch.distributions.kl_divergence(r, q).sum() / len(y)
        return fit + beta * apart

    def one(t: int, W: Values, clients: list[Client]) -> Values:
        uploads, experts = [], []
        for i in b.train:
            w = {**W, **{n: clients[i].kept.get(n, b.W[n]) for n in OUT}}
            with torch.random.fork_rng(devices=[]):
                torch.random.set_rng_state(stream(b.seed, Stream.LAYER, t, i).get_state())
                w = local(b, i, w, (t, i), names=[*body, *OUT], loss=loss)
            clients[i].kept = {n: w[n] for n in OUT}
            uploads.append(Upload({n: w[n] for n in body}))
            experts.append(_experts(b, i, w, classes))
        for label in range(classes):
            precision, weighted = torch.ones(z), torch.zeros(z)
            for of in experts:
                if label in of:
                    mean, trust = of[label]
                    precision, weighted = precision + trust, weighted + trust * mean
            held["mean"][label], held["std"][label] = weighted / precision, precision**-0.5
        return average(W, uploads)

    return one, held


def _experts(b: Bench, i: int, W: Values, classes: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Of each class at the client: the product of its samples' Gaussians, as mean and precision."""
    out = {}
    for label in range(classes):
        own = [s for s in b.train[i] if int(b.y[s]) == label]
        if own:
            mu, sigma = code_of(W, b.x[torch.tensor(own)])
            trust = (sigma**-2).sum(0)
            out[label] = ((mu * sigma**-2).sum(0) / trust, trust)
    return out
