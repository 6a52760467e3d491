"""Reference implementations of Algorithms 1-3, written from the paper with plain loops.

They are slow and obvious, and never to be optimised; tests compare the package with them.
They share the package's types (`fedp3.core.types`), its random streams and the network itself, and
none of its helpers: the wiring of a network is written by hand as a chain of `Link`s, masks are
bool tensors filled coordinate by coordinate, sums run over Python floats, and shares are exact
fractions.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedp3.client.batching import LocalSettings
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import ClientPlan, LayerPlan
from fedp3.planning.prune_settings import PruneSettings

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Link:
    """One layer of a chain: its weight, and the vectors with one entry per output unit."""

    layer: str
    weight: str
    vectors: tuple[str, ...] = ()  # bias, normalisation, running statistics
    buffers: tuple[str, ...] = ()  # those of the vectors that are statistics
    granule: int = 1


Chain = Sequence[Link]


def coordinates(shape: Iterable[int]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(d) for d in shape))


def floor_share(keep: float, n: int) -> int:
    return max(1, math.floor(Fraction(str(keep)) * n))


def ceil_share(keep: float, n: int) -> int:
    return max(1, math.ceil(Fraction(str(keep)) * n))


# --------------------------------------------------------------------------- P_i (Alg. 1, l. 6)


def top_k(w: Tensor, k: int) -> Tensor:
    """The k largest magnitudes by sorting; among equal values the first."""
    values = [abs(v) for v in w.flatten().tolist()]
    best = sorted(range(len(values)), key=lambda j: (-values[j], j))[:k]
    return torch.tensor([j in best for j in range(len(values))]).reshape(w.shape)


def drawn(w: Tensor, k: int, rng: torch.Generator) -> Tensor:
    best = torch.randperm(w.numel(), generator=rng).tolist()[:k]
    return torch.tensor([j in best for j in range(w.numel())]).reshape(w.shape)


def norms(w: Tensor, granule: int) -> list[float]:
    """The norm of each block of rows."""
    rows = [math.fsum(v * v for v in row.flatten().tolist()) for row in w]
    return [math.sqrt(math.fsum(rows[b : b + granule])) for b in range(0, len(rows), granule)]


UNITS: Mapping[str, Callable[[list[float], int, int, torch.Generator], list[int]]] = {
    "neuron": lambda size, k, t, rng: torch.randperm(len(size), generator=rng).tolist()[:k],
    "neuron_norm": lambda size, k, t, rng: sorted(range(len(size)), key=lambda u: (-size[u], u))[
        :k
    ],
    "ordered": lambda size, k, t, rng: list(range(k)),
    "rolling": lambda size, k, t, rng: [(t + j) % len(size) for j in range(k)],
}


def hand(cards: list[int], j: int, m: int) -> list[int]:
    """Player j's cards when all cards are dealt to m players; one card if there are too few."""
    n = len(cards)
    owners = [max(i for i in range(m) if Fraction(i * n, m) < place + 1) for place in range(n)]
    dealt = [card for card, owner in zip(cards, owners, strict=True) if owner == j]
    return dealt or [cards[math.floor(Fraction(j * n, m))]]


WEIGHTS = {"magnitude": lambda w, k, rng: top_k(w, k), "random": drawn}


def kept_units(
    W: Values, chain: Chain, plan: ClientPlan, selector: str, t: int, seed: int
) -> dict[str, list[int]]:
    """Layer -> the units that P_i retains, for pruned layers; the output layer is never pruned."""
    rng = stream(seed, Stream.GLOBAL_PRUNE, t, plan.client)
    deck = stream(seed, Stream.DEAL, t)  # the same for all clients of a round
    retained = {}
    for link in chain[:-1]:
        p = plan.layers[link.layer]
        if p.send == "pruned" and p.keep < 1:
            blocks = norms(W[link.weight], link.granule)
            if selector == "dealt":
                chosen = hand(torch.randperm(len(blocks), generator=deck).tolist(), *plan.deal)
            else:
                chosen = UNITS[selector](blocks, ceil_share(p.keep, len(blocks)), t, rng)
            retained[link.layer] = sorted(
                b * link.granule + j for b in chosen for j in range(link.granule)
            )
    return retained


def unit_masks(
    W: Values,
    chain: Chain,
    rows: Mapping[str, list[int]],
    cols: Mapping[str, Mapping[str, list[int]]],
) -> dict[str, Tensor]:
    """Masks of all tensors from retained units: `rows` of each layer, `cols[l]` of its inputs."""
    masks = {}
    for before, link in zip([None, *chain], chain, strict=False):
        for n in (link.weight, *link.vectors):
            mask = torch.ones(W[n].shape, dtype=torch.bool)
            for index in coordinates(W[n].shape):
                if link.layer in rows and index[0] not in rows[link.layer]:
                    mask[index] = False
                if before and n == link.weight and before.layer in cols[link.layer]:
                    # Behind a flatten a channel has several inputs.
                    repeat = W[n].shape[1] // W[before.weight].shape[0]
                    if index[1] // repeat not in cols[link.layer][before.layer]:
                        mask[index] = False
            masks[n] = mask
    return masks


def pruned_masks(
    W: Values, chain: Chain, plan: ClientPlan, selector: str, t: int, seed: int
) -> dict[str, Tensor]:
    """P_i as masks over every tensor."""
    if selector in (*UNITS, "dealt"):
        retained = kept_units(W, chain, plan, selector, t, seed)
        return unit_masks(W, chain, retained, {link.layer: retained for link in chain})
    rng = stream(seed, Stream.GLOBAL_PRUNE, t, plan.client)
    masks = unit_masks(W, chain, {}, {link.layer: {} for link in chain})
    if selector == "magnitude_all":
        weights = {link.weight: (W[link.weight], plan.layers[link.layer]) for link in chain}
        return masks | top_k_of_all(weights)
    for link in chain:
        p = plan.layers[link.layer]
        if p.send == "pruned" and p.keep < 1:
            w = W[link.weight]
            masks[link.weight] = WEIGHTS[selector](w, floor_share(p.keep, w.numel()), rng)
    return masks


def top_k_of_all(weights: Mapping[str, tuple[Tensor, LayerPlan]]) -> dict[str, Tensor]:
    """The largest magnitudes over all pruned weights together; among equal values the first."""
    pruned = {n: (w, p) for n, (w, p) in weights.items() if p.send == "pruned" and p.keep < 1}
    places = [
        (abs(v), n, j) for n, (w, _) in pruned.items() for j, v in enumerate(w.flatten().tolist())
    ]
    k = max(1, math.floor(sum(Fraction(str(p.keep)) * w.numel() for w, p in pruned.values())))
    best = {(n, j) for _, n, j in sorted(places, key=lambda place: -place[0])[:k]}
    return {
        n: torch.tensor([(n, j) in best for j in range(w.numel())]).reshape(w.shape)
        for n, (w, _) in pruned.items()
    }


# --------------------------------------------------------------------------- Q_i (Alg. 2, l. 2)


def draw_q(pruning: PruneSettings, rng: torch.Generator) -> float:
    if isinstance(pruning.q, int | float):
        return pruning.q
    u = float(torch.rand((), generator=rng))
    if pruning.q:
        return pruning.q[math.floor(u * len(pruning.q))]
    return pruning.q_min + (1 - pruning.q_min) * u


def step_masks(
    local: str,
    q: float,
    W: Values,
    chain: Chain,
    plan: ClientPlan,
    retained: Mapping[str, list[int]],
    rng: torch.Generator,
) -> dict[str, Tensor]:
    """q_{i,k} as masks over every tensor; `retained` are the units that P_i left."""
    pruned = [link.layer for link in chain if plan.layers[link.layer].send == "pruned"]
    masks = unit_masks(W, chain, {}, {link.layer: {} for link in chain})
    if local == "uniform":
        for link in chain:
            if link.layer in pruned:
                draws = torch.rand(W[link.weight].shape, generator=rng)
                for index in coordinates(W[link.weight].shape):
                    masks[link.weight][index] = float(draws[index]) < q
    if local == "ordered_dropout":
        lead = {}
        for link, reader in itertools.pairwise(chain):
            if link.layer in pruned or reader.layer in pruned:
                units = retained.get(link.layer, list(range(W[link.weight].shape[0])))
                blocks = len(units) // link.granule
                lead[link.layer] = units[: ceil_share(q, blocks) * link.granule]
        masks = unit_masks(W, chain, lead, {link.layer: lead for link in chain})
    return masks


# --------------------------------------------------------------------------- Algorithm 2


def batches(samples: int, local: LocalSettings, rng: torch.Generator) -> list[list[int]]:
    """Positions of every local batch: shuffled epochs until there are K batches."""
    drawn: list[list[int]] = []
    per_epoch = -(-samples // local.batch)
    K = local.epochs * per_epoch if local.epochs else local.steps
    while len(drawn) < K:
        order = torch.randperm(samples, generator=rng).tolist()
        epoch = [order[b : b + local.batch] for b in range(0, samples, local.batch)]
        # A batch of one sample has no variance.
        if len(epoch) > 1 and len(epoch[-1]) == 1 and local.batch > 2:
            epoch[-1].insert(0, epoch[-2].pop())
        drawn += epoch
    return drawn[:K]


def local_update(
    net: nn.Module,
    W: Values,
    trained: Sequence[str],
    active: Mapping[str, Tensor],
    draw: "Draw",
    data: Sequence[tuple[Tensor, Tensor]],
    local: LocalSettings,
    lr: float,
) -> dict[str, Tensor]:
    """K steps of SGD from W (Alg. 2).

    Only coordinates of `active` are trained, and in step k only those of `draw(k)`.
    Running statistics are updated, except those of units that step k leaves out.
    """
    W = {n: w.clone() for n, w in W.items()}
    velocity = {n: torch.zeros_like(W[n]) for n in trained}
    parameters = {n for n, _ in net.named_parameters()}
    for k, (x, y) in enumerate(data):
        step = draw(k)
        used = {
            n: w * step[n] if n in step and n in parameters else w.clone() for n, w in W.items()
        }
        for n in trained:
            used[n] = used[n].detach().requires_grad_()
        loss = cross_entropy(functional_call(net, used, (x,)), y)
        grads = torch.autograd.grad(loss, [used[n] for n in trained], allow_unused=True)
        g = {
            n: torch.zeros_like(W[n]) if v is None else v
            for n, v in zip(trained, grads, strict=True)
        }
        on = {n: torch.ones(W[n].shape, dtype=torch.bool) for n in trained}
        for n in trained:
            for masks in (active, step):
                on[n] = on[n] & masks[n] if n in masks else on[n]
            g[n] = g[n] * on[n]
        length = math.sqrt(math.fsum(v * v for n in trained for v in g[n].flatten().tolist()))
        if local.clip_norm and length > local.clip_norm:
            g = {n: v * (local.clip_norm / (length + 1e-6)) for n, v in g.items()}
        for n in trained:
            v = local.momentum * velocity[n] + g[n] + local.weight_decay * W[n]
            velocity[n] = torch.where(on[n], v, velocity[n])
            W[n] = torch.where(on[n], torch.add(W[n], v, alpha=-lr), W[n])
        for n in W.keys() - parameters:
            W[n] = torch.where(step[n], used[n], W[n]) if n in step else used[n]
    return W


# --------------------------------------------------------------------------- Algorithm 3


@dataclass(frozen=True)
class Sent:
    """One upload: values, and the coordinates of each tensor that count (absent: all)."""

    client: int
    values: Values
    counts: Mapping[str, Tensor]
    layers: int  # |L_i|
    examples: int


def mean(old: float, values: Sequence[tuple[float, float]]) -> float:
    """sum a w / sum a of (a, w); `old` where there is none."""
    return math.fsum(a * w for a, w in values) / math.fsum(a for a, _ in values) if values else old


def aggregate(
    W: Values, members: Mapping[str, Sequence[str]], sent: Sequence[Sent], weigh: "Weigh"
) -> Values:
    """Layer by layer, tensor by tensor, coordinate by coordinate (Alg. 3)."""
    new = {n: w.clone() for n, w in W.items()}
    for names in members.values():
        who = [s for s in sorted(sent, key=lambda s: s.client) if names[0] in s.values]
        a = weigh(W, names, who) if who else []
        for n in names:
            for index in coordinates(W[n].shape):
                given = [
                    (a_i, float(s.values[n][index]))
                    for a_i, s in zip(a, who, strict=True)
                    if n not in s.counts or s.counts[n][index]
                ]
                new[n][index] = mean(float(W[n][index]), given)
    return new


Weigh = Callable[[Values, Sequence[str], Sequence[Sent]], list[float]]


def distance(tau: float) -> Weigh:
    """exp(-||W_i^l - W_t^l|| / tau), over what i uploaded."""

    def weigh(W: Values, names: Sequence[str], who: Sequence[Sent]) -> list[float]:
        far = [math.sqrt(math.fsum(v * v for v in difference(W, names, s))) for s in who]
        # At least exp(-600), which is above the smallest double: no weight is zero.
        return [math.exp(max(-600, (min(far) - f) / tau)) for f in far]

    return weigh


WEIGH: Mapping[str, Weigh] = {
    "simple": lambda W, names, who: [1.0 for _ in who],
    "examples": lambda W, names, who: [float(s.examples) for s in who],
    "weighted": lambda W, names, who: [float(s.layers) for s in who],
    "distance": distance(1.0),
    "attention": lambda W, names, who: [1.0 for _ in who],  # its first round: all logits are zero
}


def difference(base: Values, names: Sequence[str], s: Sent) -> list[float]:
    """W_i^l - base^l as one vector, zero where i uploaded nothing."""
    changes = []
    for n in names:
        for index in coordinates(base[n].shape):
            uploaded = n not in s.counts or s.counts[n][index]
            change = float(s.values[n][index]) - float(base[n][index])
            changes.append(change if uploaded else 0.0)
    return changes


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(a: Sequence[float]) -> list[float]:
    length = math.sqrt(dot(a, a))
    return [x / length if length else x for x in a]


@dataclass
class Attention:
    """Learned logits from complete uploads: the package's formula without its sketches.

    s_i += clip(step * mean over l of n_l a_i cos(D^l, W_i^l - W_t^l)), where W_i^l was uploaded
    when l was last averaged, W_t^l is that average, and D^l is the plain mean of the directions of
    this round's uploads of l.
    """

    step: float
    limit: float
    start: Callable[[Sent], float]

    def __post_init__(self) -> None:
        self.logits: dict[int, float] = {}
        self.last: dict[tuple[str, ...], dict[int, tuple[float, list[float]]]] = {}

    def __call__(
        self, W: Values, members: Mapping[str, Sequence[str]], sent: Sequence[Sent]
    ) -> Values:
        """One round: judge the last uploads, then average these."""
        terms: dict[int, list[float]] = {}
        for names in members.values():
            who = [s for s in sent if names[0] in s.values]
            for s in who:
                self.logits.setdefault(s.client, self.start(s))
            if who:
                moves = [unit(difference(W, names, s)) for s in who]
                D = [math.fsum(column) / len(who) for column in zip(*moves, strict=True)]
                last = self.last.get(tuple(names), {})
                for i, (a_i, delta) in last.items():
                    terms.setdefault(i, []).append(len(last) * a_i * dot(unit(D), unit(delta)))
        for i, summands in terms.items():
            change = self.step * math.fsum(summands) / len(summands)
            self.logits[i] += max(-self.limit, min(self.limit, change))
        new = aggregate(
            W, members, sent, lambda W, names, who: [math.exp(self.logits[s.client]) for s in who]
        )
        for names in members.values():
            who = [s for s in sent if names[0] in s.values]
            total = math.fsum(math.exp(self.logits[s.client]) for s in who)
            if who:
                self.last[tuple(names)] = {
                    s.client: (math.exp(self.logits[s.client]) / total, difference(new, names, s))
                    for s in who
                }
        return new


# --------------------------------------------------------------------------- Algorithm 1


@dataclass(frozen=True)
class Fleet:
    """Everything that the reference implementation of a run needs."""

    net: nn.Module
    chain: Chain
    members: Mapping[str, Sequence[str]]  # layer -> tensors
    x: Tensor
    y: Tensor
    shards: Mapping[int, Sequence[int]]  # client -> its training samples
    local: LocalSettings
    pruning: PruneSettings
    seed: int


Draw = Callable[[int], Values]  # the masks of local step k


def dispatched(fleet: Fleet, W: Values, plan: ClientPlan, t: int) -> Values:
    """What client i is sent in round t, zero where it is sent nothing (Alg. 1, ll. 5-6)."""
    P = pruned_masks(W, fleet.chain, plan, fleet.pruning.selector, t, fleet.seed)
    abstains = {
        n: fleet.pruning.unfed_columns == "abstain" or plan.layers[l].send == "pruned"
        for l, n in _owned(fleet)
    }
    return {n: w * P[n] if abstains[n] else w for n, w in W.items()}


def client(fleet: Fleet, W: Values, plan: ClientPlan, t: int, draw: Draw | None = None) -> Sent:
    """What client i uploads in round t: dispatch, K steps, upload (Alg. 1, ll. 5-12).

    `draw` replaces the step masks of `step_masks`.
    """
    pruning, seed, i = fleet.pruning, fleet.seed, plan.client
    P = pruned_masks(W, fleet.chain, plan, pruning.selector, t, seed)
    start = dispatched(fleet, W, plan, t)
    trained = [n for n, _ in fleet.net.named_parameters() if plan.layers[_layer(fleet, n)].train]
    free = []
    if not pruning.freeze_pruned:
        free = [n for l, n in _owned(fleet) if plan.layers[l].send == "pruned"]
    retained = {}
    if pruning.selector in (*UNITS, "dealt"):
        retained = kept_units(W, fleet.chain, plan, pruning.selector, t, seed)
    rng = stream(seed, Stream.LOCAL_PRUNE, t, i)

    def draw_masks(k: int) -> Values:
        q = draw_q(pruning, rng)
        return step_masks(pruning.local_pruner, q, W, fleet.chain, plan, retained, rng)

    shard = torch.tensor(fleet.shards[i])
    rows = batches(len(shard), fleet.local, stream(seed, Stream.BATCHES, t, i))
    data = [(fleet.x[shard[r]], fleet.y[shard[r]]) for r in rows]
    active = {n: P[n] for n in trained if n not in free}
    fleet.net.train()
    for link in fleet.chain:
        for n in link.buffers:  # frozen statistics are used, not updated
            fleet.net.get_submodule(n.rpartition(".")[0]).train(plan.layers[link.layer].train)
    end = local_update(
        fleet.net, start, trained, active, draw or draw_masks, data, fleet.local, fleet.local.lr
    )
    values, counts = {}, {}
    for l, n in _owned(fleet):
        kind = plan.layers[l].upload
        if kind != "none":
            dense = kind == "all" and pruning.unfed_columns == "vote"
            values[n] = end[n] if dense else end[n] * P[n]
            if kind != "zeros" and not dense:
                counts[n] = P[n]
    # Layers that are uploaded pruned are not in L_i.
    L_i = [l for l, p in plan.layers.items() if p.train and p.upload == "all"]
    return Sent(i, values, counts, layers=len(L_i) or 1, examples=len(shard))


def federated_round(
    fleet: Fleet, W: Values, plans: Sequence[ClientPlan], t: int, rule: str
) -> Values:
    """W_{t+1} from W_t, every plan's client taking part (Alg. 1, ll. 4-14)."""
    return aggregate(W, fleet.members, [client(fleet, W, plan, t) for plan in plans], WEIGH[rule])


def _owned(fleet: Fleet) -> list[tuple[str, str]]:
    return [(l, n) for l, names in fleet.members.items() for n in names]


def _layer(fleet: Fleet, name: str) -> str:
    return next(l for l, n in _owned(fleet) if n == name)


def fedavg(
    net: nn.Module,
    W: Values,
    data: Mapping[int, Sequence[tuple[Tensor, Tensor]]],
    examples: Mapping[int, int],
    lr: float,
) -> Values:
    """Plain FedAvg: clients run SGD on all weights, the server averages by examples."""
    net.train()
    ends = {}
    for i, steps in data.items():
        w = {n: v.clone().requires_grad_() for n, v in W.items()}
        for x, y in steps:
            loss = cross_entropy(functional_call(net, w, (x,)), y)
            grads = torch.autograd.grad(loss, list(w.values()))
            stepped = {
                n: torch.add(w[n].detach(), g, alpha=-lr) for n, g in zip(w, grads, strict=True)
            }
            w = {n: v.requires_grad_() for n, v in stepped.items()}
        ends[i] = {n: v.detach() for n, v in w.items()}
    new = {}
    for n in W:
        new[n] = torch.zeros_like(W[n])
        for index in coordinates(W[n].shape):
            given = [(examples[i], float(w[n][index])) for i, w in ends.items()]
            new[n][index] = mean(0.0, given)
    return new


# --------------------------------------------------------------------------- client-level DP


def client_level_release(
    W: Values,
    members: Mapping[str, Sequence[str]],
    plans: Sequence[ClientPlan],
    uploads: Sequence[tuple[Sent, Values]],
    rate: float,
    clip: float,
    noise: Values,
) -> Values:
    """One release of a trusted server: clip every client once, sum, add noise, divide.

    Args:
        W: W_t.
        members: layer -> tensors.
        plans: those of all clients, whoever takes part.
        uploads: each participant's upload, and what it was sent.
        rate: q.
        clip: C.
        noise: on the sum, full-shaped.
    """
    changes = []
    for upload, start in uploads:
        change = {}
        for n, w in upload.values.items():
            for index in coordinates(w.shape):
                counts = n not in upload.counts or bool(upload.counts[n][index])
                change[n, index] = float(w[index]) - float(start[n][index]) if counts else 0.0
        length = math.sqrt(math.fsum(v * v for v in change.values()))
        factor = clip / length if length > clip else 1.0
        changes.append({place: factor * v for place, v in change.items()})
    new = {n: w.clone() for n, w in W.items()}
    for layer, names in members.items():
        uploaders = len([plan for plan in plans if plan.layers[layer].upload != "none"])
        for n in names if uploaders else ():
            for index in coordinates(W[n].shape):
                total = math.fsum(change.get((n, index), 0.0) for change in changes)
                step = (total + float(noise[n][index])) / (rate * uploaders)
                value = float(W[n][index]) + step
                new[n][index] = max(value, 0.0) if n.endswith("running_var") else value
    return new
