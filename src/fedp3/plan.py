"""Who trains what: the layer sets L_i and the plan of every client (Alg. 1, l. 2).

OPUk gives a client k neighbouring hidden layers and the head: with H hidden layers and n clients, the client of
rank r owns {g, g+1, ..., g+k-1} mod H, g = floor(r H / n), so each hidden layer is trained by n k / H clients.
Ranks are a seeded permutation of the clients: ids often follow the classes, and a layer must see all classes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedp3.errors import PlanError
from fedp3.lookup import pick
from fedp3.rng import Use, stream
from fedp3.types import ClientPlan, Layer, LayerMap, LayerPlan, Upload

LayerSets = tuple[tuple[Layer, ...], ...]  # L_i for every client i
Assign = Callable[[LayerMap, int, torch.Generator], LayerSets]


@dataclass(frozen=True, slots=True)
class PlanRules:
    """The run's rules for plans."""

    layers: str = "opu2"  # how L_i is chosen
    redraw: bool = False  # anew each round, or once for the run
    others: Literal["train", "freeze"] = "train"  # layers outside L_i
    head: Literal["shared", "personal", "personal_uploaded"] = "shared"
    upload: Upload = "none"  # what comes back of pruned layers


def _ranks(n: int, rng: torch.Generator) -> list[int]:
    rank = [0] * n
    for r, i in enumerate(torch.randperm(n, generator=rng).tolist()):
        rank[i] = r
    return rank


def _ordered(layers: LayerMap, chosen: Iterable[Layer]) -> tuple[Layer, ...]:
    chosen = {*chosen, layers.head}  # A1: the head is in every L_i
    return tuple(l for l in layers.layers if l in chosen)


def full(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
    """Every layer at every client: FedAvg's plan."""
    return (tuple(layers.layers),) * n


def prune_all(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
    """Only the head is sent whole; every other layer travels pruned (Algorithm 4's setting)."""
    return ((layers.head,),) * n


def _draw_sizes(sizes: Sequence[int], n: int, rng: torch.Generator) -> list[int]:
    return [sizes[j] for j in torch.randint(len(sizes), (n,), generator=rng).tolist()]


def windows(sizes: Sequence[int]) -> Assign:
    """Cyclic windows of k hidden layers; k is drawn per client where several sizes are given."""

    def assign(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
        hidden, H = layers.hidden, len(layers.hidden)
        rank = _ranks(n, rng)
        return tuple(
            _ordered(layers, (hidden[(r * H // n + j) % H] for j in range(min(k, H))))
            for r, k in zip(rank, _draw_sizes(sizes, n, rng), strict=True)
        )

    return assign


def random_layers(sizes: Sequence[int]) -> Assign:
    """Any k hidden layers, drawn per client; so is k where several sizes are given."""

    def assign(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
        hidden = layers.hidden
        draws = (torch.randperm(len(hidden), generator=rng)[:k].tolist() for k in _draw_sizes(sizes, n, rng))
        return tuple(_ordered(layers, (hidden[j] for j in at)) for at in draws)

    return assign


def without(*parts: str) -> Assign:
    """All layers but one of `parts` (a block "b2", or "b2:2" for its first and "b2:-2" for its last two)."""

    def members(layers: LayerMap, part: str) -> set[Layer]:
        block, _, size = part.partition(":")
        inside = [l for l in layers.layers if l.startswith(f"{block}.")]
        if not inside:
            raise PlanError(f"this plan leaves out layers of block {block!r}, which the model does not have")
        k = int(size or len(inside))
        return set(inside[:k] if k > 0 else inside[k:])

    def assign(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
        out = [members(layers, part) for part in parts]
        return tuple(tuple(l for l in layers.layers if l not in out[r * len(out) // n]) for r in _ranks(n, rng))

    return assign


LAYER_SETS: Mapping[str, Assign] = {
    "full": full,
    "prune-all": prune_all,
    "lowerb": windows([1]),
    "opu2": windows([2]),
    "opu3": windows([3]),
    "opu1-2-3": windows([1, 2, 3]),
    "opu2-3": windows([2, 3]),
    "random-1": random_layers([1]),
    "random-2": random_layers([2]),
    "resnet-no-b2-b3": without("b2", "b3"),
    "resnet-b2-part": without("b2:2", "b2:-2"),
    "resnet-b3-part": without("b3:2", "b3:-2"),
}
FAMILIES: Mapping[str, Callable[[Sequence[int]], Assign]] = {"opu": windows, "random-": random_layers}


def find(name: str) -> Assign:
    """The named rule; `opu4`, `opu1-4` and `random-5` work for any numbers."""
    match = re.fullmatch(r"(opu|random-)([1-9]\d*(?:-[1-9]\d*)*)", name)
    if match and name not in LAYER_SETS:
        return FAMILIES[match[1]]([int(k) for k in match[2].split("-")])
    return pick(LAYER_SETS, name, "choice of layers")


def layer_sets(rules: PlanRules, layers: LayerMap, clients: int, seed: int, t: int) -> LayerSets:
    """L_i of every client in round t."""
    return find(rules.layers)(layers, clients, stream(seed, Use.PLAN, t if rules.redraw else 0))


HEADS: Mapping[str, LayerPlan] = {
    "shared": LayerPlan(),
    "personal": LayerPlan(send="none", upload="none"),
    "personal_uploaded": LayerPlan(send="none", upload="all"),  # what the authors' code does
}
OTHERS: Mapping[str, bool] = {"train": True, "freeze": False}  # do layers outside L_i train?


def client_plans(
    rules: PlanRules, layers: LayerMap, keep: Sequence[float], seed: int, t: int
) -> tuple[ClientPlan, ...]:
    """The plan of every client in round t; `keep` has one share per client."""
    head = pick(HEADS, rules.head, "kind of head")
    train = pick(OTHERS, rules.others, "way to treat layers outside L_i") or rules.upload != "none"
    plans = []
    for i, (L_i, r) in enumerate(zip(layer_sets(rules, layers, len(keep), seed, t), keep, strict=True)):
        pruned = LayerPlan("pruned", r, train, rules.upload)
        plan = {l: LayerPlan() if l in L_i else pruned for l in layers.layers}
        plans.append(ClientPlan(i, plan | {layers.head: head}))
    return tuple(plans)


def devices(keep: float | Sequence[float], clients: int, seed: int) -> tuple[float, ...]:
    """One keep per client: a number for all, one per client, or device classes dealt out in equal shares."""
    classes = [float(keep)] if isinstance(keep, int | float) else [float(k) for k in keep]
    bad = [k for k in classes if not 0 < k <= 1]
    if bad or not classes:
        raise PlanError(f"keep is a share in (0, 1], got {bad or 'none'}")
    if len(classes) == clients:
        return tuple(classes)
    if len(classes) > clients:
        raise PlanError(f"{len(classes)} device classes for {clients} clients; name at most one per client")
    return tuple(classes[r * len(classes) // clients] for r in _ranks(clients, stream(seed, Use.DEVICES)))


def coverage(plans: Iterable[ClientPlan]) -> dict[Layer, list[int]]:
    """Layer -> the clients that train it and send something of it back."""
    out: dict[Layer, list[int]] = {}
    for plan in plans:
        for l, p in plan.layers.items():
            out.setdefault(l, []).extend([plan.client] if p.train and p.upload != "none" else [])
    return out


def check_coverage(rules: PlanRules, layers: LayerMap, keep: Sequence[float], seed: int, rounds: int) -> None:
    """Refuse a plan that leaves a layer to nobody in every round; a personal head is declared, not forgotten."""
    orphans = set(layers.layers) - ({layers.head} if rules.head == "personal" else set())
    for t in range(rounds if rules.redraw else 1):
        orphans -= {l for l, who in coverage(client_plans(rules, layers, keep, seed, t)).items() if who}
        if not orphans:
            return
    raise PlanError(
        f"no client trains and uploads {', '.join(sorted(orphans))} under layers={rules.layers!r}: they would keep "
        "their initial values for ever; widen [plan] layers, add clients, or set [prune] upload to 'kept'"
    )
