"""Who trains what: the layer sets L_i and the plan of every client (Alg. 1, l. 2).

OPUk gives a client k neighbouring hidden layers and the head: with H hidden layers and n clients, the client of
rank r owns {g, g+1, ..., g+k-1} mod H, g = floor(r H / n), so each hidden layer is trained by n k / H clients.
Ranks are a seeded permutation of the clients: ids often follow the classes, and a layer must see all classes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

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
    others: Literal["train", "freeze", "personal", "skip"] = "train"  # layers outside L_i
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


def windows(sizes: Sequence[int], always: int = 0) -> Assign:
    """Cyclic windows of k hidden layers; k is drawn per client where several sizes are given.

    The last `always` hidden layers are in no window and in every L_i.
    """

    def assign(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
        H = len(layers.hidden) - always
        if always and H < 1:
            raise PlanError(f"this plan needs {always + 1} layers before the head, the net has {len(layers.hidden)}")
        hidden, last = layers.hidden[:H], layers.hidden[H:]

        @cache
        def window(g: int, k: int) -> tuple[Layer, ...]:
            return _ordered(layers, (*(hidden[(g + j) % H] for j in range(min(k, H))), *last))

        rank = _ranks(n, rng)
        return tuple(window(r * H // n, k) for r, k in zip(rank, _draw_sizes(sizes, n, rng), strict=True))

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
            raise PlanError(
                f"this plan is made for model resnet18: it leaves out block {block!r}, which this net lacks"
            )
        k = int(size or len(inside))
        return set(inside[:k] if k > 0 else inside[k:])

    def assign(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
        out = [members(layers, part) for part in parts]
        return tuple(tuple(l for l in layers.layers if l not in out[r * len(out) // n]) for r in _ranks(n, rng))

    return assign


def blocks(sizes: Sequence[int]) -> Assign:
    """All layers but residual blocks: of those that can be skipped, k stay, dealt out in an order drawn each time."""

    def assign(layers: LayerMap, n: int, rng: torch.Generator) -> LayerSets:
        idle = _skippable(layers)
        if not idle:
            raise PlanError("this plan skips residual blocks with an identity shortcut; take model.name=resnet18")
        order, B = torch.randperm(len(idle), generator=rng).tolist(), len(idle)
        rank = _ranks(n, rng)
        kept = [
            {idle[order[(r * k + j) % B]] for j in range(k)}
            for r, k in zip(rank, _draw_sizes(sizes, n, rng), strict=True)
        ]
        return tuple(tuple(l for l in layers.layers if _block(l) not in set(idle) - stay) for stay in kept)

    return assign


def _block(l: Layer) -> str:
    """The residual block of a layer of resnet18; empty if it is in none."""
    match = re.match(r"b\d+\.\d+(?=\.)", l)
    return match[0] if match else ""


def _skippable(layers: LayerMap) -> list[str]:
    """Residual blocks whose shortcut is the identity, so that the net works without them."""
    inside: dict[str, list[str]] = {}
    for l, names in layers.layers.items():
        inside.setdefault(_block(l), []).extend(names)
    return [b for b, names in inside.items() if b and not any(".shortcut." in n for n in names)]


LAYER_SETS: Mapping[str, Assign] = {
    "full": full,
    "head": prune_all,
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
FAMILIES: Mapping[str, Callable[[Sequence[int]], Assign]] = {
    "opu": windows,
    "opu+1": lambda sizes: windows(sizes, always=1),
    "random-": random_layers,
    "blocks-": blocks,
}


def find(name: str) -> Assign:
    """The named rule; `opu4`, `opu1-4`, `opu2+1`, `random-5` and `blocks-2` work for any numbers."""
    match = re.fullmatch(r"(opu|random-|blocks-)([1-9]\d*(?:-[1-9]\d*)*)(\+1)?", name)
    family = match[1] + (match[3] or "") if match else ""
    if match and name not in LAYER_SETS and family in FAMILIES:
        return FAMILIES[family]([int(k) for k in match[2].split("-")])
    return pick(LAYER_SETS, name, "choice of layers")


def layer_sets(rules: PlanRules, layers: LayerMap, clients: int, seed: int, t: int) -> LayerSets:
    """L_i of every client in round t."""
    return find(rules.layers)(layers, clients, stream(seed, Use.PLAN, t if rules.redraw else 0))


HEADS: Mapping[str, LayerPlan] = {
    "shared": LayerPlan(),
    "personal": LayerPlan(send="none", upload="none"),
    "personal_uploaded": LayerPlan(send="none", upload="all"),  # what the authors' code does
}
OTHERS: Mapping[str, LayerPlan] = {  # layers outside L_i
    "train": LayerPlan("pruned"),
    "freeze": LayerPlan("pruned", train=False),
    "personal": LayerPlan("none", upload="none"),
    "skip": LayerPlan("skip", train=False, upload="none"),
}


def client_plans(
    rules: PlanRules, layers: LayerMap, keep: Sequence[float], seed: int, t: int, clients: Sequence[int] | None = None
) -> tuple[ClientPlan, ...]:
    """The plans of these clients, or of all, in round t; `keep` has one share per client of the fleet."""
    head = pick(HEADS, rules.head, "kind of head")
    other = pick(OTHERS, rules.others, "way to treat layers outside L_i")

    @cache  # a fleet has few different plans
    def plan(L_i: tuple[Layer, ...], r: float) -> Mapping[Layer, LayerPlan]:
        pruned = LayerPlan("pruned", r, other.train or rules.upload != "none", rules.upload)
        rest = pruned if other.send == "pruned" else other
        return {l: LayerPlan() if l in L_i else rest for l in layers.layers} | {layers.head: head}

    sets = layer_sets(rules, layers, len(keep), seed, t)
    return tuple(ClientPlan(i, plan(sets[i], keep[i])) for i in (range(len(keep)) if clients is None else clients))


T = TypeVar("T")


def per_layers(make: Callable[[ClientPlan], T]) -> Callable[[ClientPlan], T]:
    """`make`, computed once for all plans that share their layers, as those of a fleet do."""
    known: dict[tuple[int, tuple[int, int]], tuple[ClientPlan, T]] = {}

    def of(plan: ClientPlan) -> T:
        at = id(plan.layers), plan.deal
        if at not in known:
            known[at] = plan, make(plan)  # the plan is held, so that its id lasts
        return known[at][1]

    return of


def devices(keep: float | Sequence[float] | Mapping[float, float], clients: int, seed: int) -> tuple[float, ...]:
    """One keep per client: a number for all, one per client, or device classes dealt out in equal or given shares."""
    if isinstance(keep, Mapping):
        return _mixed(keep, clients, seed)
    classes = [float(keep)] if isinstance(keep, int | float) else [float(k) for k in keep]
    bad = [k for k in classes if not 0 < k <= 1]
    if bad or not classes:
        raise PlanError(f"keep is a share in (0, 1], got {bad or 'none'}")
    if len(classes) == clients:
        return tuple(classes)
    if len(classes) > clients:
        raise PlanError(f"{len(classes)} device classes for {clients} clients; name at most one per client")
    return tuple(classes[r * len(classes) // clients] for r in _ranks(clients, stream(seed, Use.DEVICES)))


def _mixed(shares: Mapping[float, float], clients: int, seed: int) -> tuple[float, ...]:
    """Device classes by their share of the fleet: each gets the whole number of clients nearest to it."""
    total = sum(shares.values())
    if not shares or abs(total - 1) > 1e-6:
        raise PlanError(f"the shares of the device classes add up to {total:g}, want 1")
    ends = [round(clients * sum(list(shares.values())[: k + 1]) / total) for k in range(len(shares))]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    missing = [k for k, size in zip(shares, sizes, strict=True) if not size]
    if missing:
        raise PlanError(f"no client of {clients} would be of device class {missing[0]:g}; take more clients")
    each = [float(k) for k, size in zip(shares, sizes, strict=True) for _ in range(size)]
    return devices([each[r] for r in _ranks(clients, stream(seed, Use.DEVICES))], clients, seed)


def coverage(plans: Iterable[ClientPlan]) -> dict[Layer, list[int]]:
    """Layer -> the clients that train it and send something of it back."""
    out: dict[Layer, list[int]] = {}
    for plan in plans:
        for l, p in plan.layers.items():
            out.setdefault(l, []).extend([plan.client] if p.train and p.upload != "none" else [])
    return out


def check_coverage(rules: PlanRules, layers: LayerMap, keep: Sequence[float], seed: int, rounds: int) -> None:
    """Refuse a plan that leaves a layer to nobody in every round; a personal head is declared, not forgotten."""
    orphans = set(layers.layers)
    for t in range(rounds if rules.redraw else 1):
        plans = client_plans(rules, layers, keep, seed, t)
        _check_skips(plans, layers)
        orphans -= {l for l, who in coverage(plans).items() if who}
        orphans -= {l for l in orphans if all(p.layers[l].send == p.layers[l].upload == "none" for p in plans)}
        if not orphans:
            return
    raise PlanError(
        f"no client trains and uploads {', '.join(sorted(orphans))} under layers={rules.layers!r}: they would keep "
        "their initial values for ever; widen [plan] layers, add clients, or set [prune] upload to 'kept'"
    )


def _check_skips(plans: Iterable[ClientPlan], layers: LayerMap) -> None:
    """A net without a layer must still compute something."""
    idle = _skippable(layers)
    skipped = {l for plan in plans for l, p in plan.layers.items() if p.send == "skip"}
    needed = sorted(l for l in skipped if _block(l) not in idle)
    if needed:
        raise PlanError(
            f"others='skip' would leave layer {needed[0]!r} out of the net, and no shortcut leads around it; only "
            "residual blocks of resnet18 with an identity shortcut can be skipped"
        )
