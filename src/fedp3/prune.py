"""Pruning: what the server sends (P_i), what a client trains under at each step (Q_i), and the dispatch.

P_i ⊙ W^l keeps a share r of a layer outside L_i (Alg. 1, l. 6).  Unstructured selectors keep floor(r d) weights
of each tensor and never touch biases or normalisation; structured ones keep ceil(r u) of the u output units of
a layer, with everything those units own and the columns of later layers they feed.
q_{i,k} ⊙ P_i ⊙ W^l is what step k trains (Alg. 2, l. 3); q is relative to what P_i kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.errors import PlanError
from fedp3.lookup import pick
from fedp3.rng import Use, stream
from fedp3.types import ClientPlan, Layer, LayerMap, Masks, Params, Pruning, UnitGroup

# --------------------------------------------------------------------------- P: selectors


def kept_weights(keep: float, n: int) -> int:
    """How many of n weights an unstructured selector keeps."""
    return max(1, math.floor(keep * n + 1e-9))


def kept_units(keep: float, units: int, granule: int = 1) -> int:
    """How many of these units a structured selector keeps, in whole granules."""
    return granule * max(1, math.ceil(keep * (units // granule) - 1e-9))


def magnitude(w: Tensor, k: int, rng: torch.Generator | None) -> Tensor:
    """The k largest |w| of the tensor; among equals the first."""
    size = w.abs().flatten()
    threshold = size.kthvalue(size.numel() - k + 1).values
    mask = size > threshold
    ties = (size == threshold).nonzero().flatten()
    mask[ties[: k - int(mask.sum())]] = True
    return mask.view_as(w)


def random_weights(w: Tensor, k: int, rng: torch.Generator | None) -> Tensor:
    """Any k coordinates: the biased sketch of Definition 1."""
    mask = torch.zeros(w.numel(), dtype=torch.bool)
    mask[torch.randperm(w.numel(), generator=rng)[:k]] = True
    return mask.view_as(w)


def neuron(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """Any k units."""
    return torch.randperm(len(norms), generator=rng)[:k].sort().values


def neuron_norm(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """The k units with the largest incoming weights; among equals the first."""
    return norms.argsort(descending=True, stable=True)[:k].sort().values


def ordered(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """The leading k units."""
    return torch.arange(k)


def rolling(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """A window of k units that moves on by one each round."""
    return ((t + torch.arange(k)) % len(norms)).sort().values


def dealt(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """All units in an order drawn for the round; `part` says which of them a client gets."""
    return torch.randperm(len(norms), generator=rng)


def part(units: int, deal: tuple[int, int]) -> tuple[int, int]:
    """Where part j of m of these units begins and ends: disjoint, all of them, and at least one unit in each."""
    j, m = deal
    return j * units // m, max(j * units // m + 1, (j + 1) * units // m)


SelectWeights = Callable[[Tensor, int, torch.Generator | None], Tensor]  # (w, k, rng) -> bool mask
SelectUnits = Callable[[Tensor, int, int, torch.Generator | None], Tensor]  # (norms, k, t, rng) -> indices


@dataclass(frozen=True, slots=True)
class Selector:
    """A way to choose what P_i keeps: of weights or of units."""

    weights: SelectWeights | None = None
    units: SelectUnits | None = None
    draws: bool = False  # differs between clients of the same keep
    deals: bool = False  # the round's clients share the units out among themselves
    together: bool = False  # one choice over all tensors that are cut, instead of one per tensor
    derivable: bool = True  # the client can compute the mask itself, so it costs no bytes


SELECTORS: Mapping[str, Selector] = {
    "magnitude": Selector(weights=magnitude, derivable=False),
    "random": Selector(weights=random_weights, draws=True),
    "neuron": Selector(units=neuron, draws=True),
    "neuron_norm": Selector(units=neuron_norm, derivable=False),
    "ordered": Selector(units=ordered),
    "rolling": Selector(units=rolling),
    "magnitude_all": Selector(weights=magnitude, together=True, derivable=False),
    "dealt": Selector(units=dealt, deals=True),
}


def masks_for(
    plan: ClientPlan,
    W: Params,
    layers: LayerMap,
    pruning: Pruning,
    t: int,
    seed: int,
    memo: dict[tuple[object, ...], Tensor] | None = None,
) -> Masks:
    """P_i of one client in round t; `memo` holds this round's masks where clients share them.

    Where the selector is derivable only the shapes of W matter, so that a client can call this itself.
    """
    s = pick(SELECTORS, pruning.selector, "selector")
    rng = stream(seed, Use.GLOBAL_PRUNE, t, plan.client) if s.draws else None
    if s.units is not None:
        rng = stream(seed, Use.DEAL, t) if s.deals else rng
        return Masks(units=_unit_masks(s, plan, W, layers, t, rng))
    assert s.weights is not None
    chosen: dict[tuple[object, ...], Tensor] = {} if memo is None or s.draws else memo
    cut = cut_weights(plan, layers)
    if s.together:
        return Masks(weights=_weights_together(s.weights, cut, W, rng, chosen))
    for n, r in cut.items():
        if (n, r) not in chosen:
            chosen[n, r] = s.weights(W[n], kept_weights(r, W[n].numel()), rng)
    return Masks(weights={n: chosen[n, r] for n, r in cut.items()})


def cut_weights(plan: ClientPlan, layers: LayerMap) -> dict[str, float]:
    """The tensors an unstructured selector cuts at this client, and how much it keeps of each."""
    return {n: plan.layers[l].keep for l in _cut_layers(plan) for n in layers.layers[l] if n in layers.prunable}


def kept_together(cut: Mapping[str, float], sizes: Mapping[str, int]) -> int:
    """How many weights a selector keeps that chooses among all tensors at once."""
    return max(1, math.floor(math.fsum(r * sizes[n] for n, r in cut.items()) + 1e-6))


def _weights_together(
    choose: SelectWeights,
    cut: Mapping[str, float],
    W: Params,
    rng: torch.Generator | None,
    chosen: dict[tuple[object, ...], Tensor],
) -> dict[str, Tensor]:
    if not cut:
        return {}
    which = tuple(cut.items())
    if (*which[0], which) not in chosen:
        every = torch.cat([W[n].flatten() for n in cut])
        mask = choose(every, kept_together(cut, {n: W[n].numel() for n in cut}), rng)
        for (n, r), piece in zip(which, torch.split(mask, [W[n].numel() for n in cut]), strict=True):
            chosen[n, r, which] = piece.view_as(W[n])
    return {n: chosen[n, r, which] for n, r in which}


def _cut_layers(plan: ClientPlan) -> list[Layer]:
    return [l for l, p in plan.layers.items() if p.send == "pruned" and p.keep < 1]


def _unit_masks(
    s: Selector, plan: ClientPlan, W: Params, layers: LayerMap, t: int, rng: torch.Generator | None
) -> dict[str, Tensor]:
    assert s.units is not None
    units = {}
    cut = set(_cut_layers(plan))
    for g, u in layers.groups.items():
        if u.layer in cut and not u.fixed:
            norms = W[f"{g}.weight"].reshape(u.units // u.granule, -1).norm(dim=1)
            at = s.units(norms, units_left(s, plan, u) // u.granule, t, rng)
            at = at[slice(*part(len(norms), plan.deal))].sort().values if s.deals else at
            units[g] = (at[:, None] * u.granule + torch.arange(u.granule)).flatten()
    return units


def units_left(s: Selector, plan: ClientPlan, u: UnitGroup) -> int:
    """How many of these units a structured selector keeps at this client."""
    if not s.deals:
        return kept_units(plan.layers[u.layer].keep, u.units, u.granule)
    begin, end = part(u.units // u.granule, plan.deal)
    return u.granule * (end - begin)


def dealt_out(plans: Sequence[ClientPlan], selector: str, parts: int) -> list[ClientPlan]:
    """Plans that share the units out among so many clients, where the selector does; else as they are."""
    if not pick(SELECTORS, selector, "selector").deals:
        return list(plans)
    once = {id(plan.layers): plan.layers for plan in plans}
    dealt = {
        at: {l: replace(p, keep=1 / parts) if p.send == "pruned" else p for l, p in of.items()}
        for at, of in once.items()
    }
    return [ClientPlan(plan.client, dealt[id(plan.layers)], (j % parts, parts)) for j, plan in enumerate(plans)]


# --------------------------------------------------------------------------- dispatch


def dispatch(
    W: Params, plans: Sequence[ClientPlan], layers: LayerMap, pruning: Pruning, t: int, seed: int
) -> list[tuple[Params, Masks]]:
    """What each client is sent: W_t^l for l in L_i, P_i ⊙ W_t^l elsewhere (Alg. 1, ll. 5-6).

    Clients with equal masks share the pruned tensors, so a fleet costs no more memory than its variety.
    """
    s = pick(SELECTORS, pruning.selector, "selector")
    memo: dict[tuple[object, ...], Tensor] = {}
    pruned: dict[tuple[str, int], Tensor] = {}  # (tensor, identity of its mask) -> P ⊙ W; `memo` keeps masks alive

    def made(plan: ClientPlan) -> tuple[Params, Masks]:
        masks = masks_for(plan, W, layers, pruning, t, seed, memo)
        weights = {}
        for l, p in plan.layers.items():
            for n in layers.layers[l] if p.send in ("dense", "pruned") else ():
                kept = M.sent(n, l, plan, masks, layers, pruning.stale)
                at = (n, id(kept))
                if not memo or kept is None:
                    weights[n] = M.zero_pruned(W[n], kept)
                else:
                    weights[n] = pruned[at] = pruned[at] if at in pruned else M.zero_pruned(W[n], kept)
        return weights, masks

    if s.draws or s.deals:
        return [made(plan) for plan in plans]
    once = {id(plan.layers): plan for plan in plans}  # plans of a fleet share their layers
    same = {at: made(plan) for at, plan in once.items()}
    return [same[id(plan.layers)] for plan in plans]


# --------------------------------------------------------------------------- Q: one draw per local step


def draw_q(pruning: Pruning, rng: torch.Generator, plan: ClientPlan | None = None) -> float:
    """q_{i,k}: a constant, one of a grid, or U[q_min, 1] (Alg. 2, l. 2)."""
    grid = q_grid(pruning, plan)
    if isinstance(pruning.q, float | int):
        return grid[0]
    u = float(torch.rand((), generator=rng))
    return grid[int(u * len(grid))] if grid else pruning.q_min + (1 - pruning.q_min) * u


def q_grid(pruning: Pruning, plan: ClientPlan | None = None) -> tuple[float, ...]:
    """The values, equally likely, that q is drawn from; empty: all of [q_min, 1].

    Where they are shares of the whole net, a client draws among those that it can carry.
    """
    if isinstance(pruning.q, float | int):
        return (float(pruning.q),)
    if not pruning.q or pruning.q_of == "kept" or plan is None:
        return pruning.q
    most = max((plan.layers[l].keep for l in pruned_layers(plan)), default=1.0)
    return tuple(p / most for p in pruning.q if p <= most) or (1.0,)


def fixed(q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator) -> Masks:
    """No local pruning."""
    return Masks()


def uniform(q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator) -> Masks:
    """Each weight outside L_i with probability q; the operators of the paper are not rescaled by 1/q."""
    names = [n for l in pruned_layers(plan) for n in layers.layers[l] if n in layers.prunable]
    return Masks(weights={n: torch.rand(layers.shapes[n], generator=rng) < q for n in names})


def ordered_dropout(q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator) -> Masks:
    """The leading ceil(q u) of the units that a layer outside L_i writes or reads, by channel after a flatten.

    A q x q block keeps q^2 of a layer where `uniform` keeps q: see `ordered_matched`.
    """
    pruned = set(pruned_layers(plan))
    touched = {a.group for l in pruned for n in layers.layers[l] for a in layers.axes.get(n, ()) if a is not None}
    cut = [g for g, u in layers.groups.items() if g in touched and not u.fixed]
    return Masks(units={g: _leading(q, g, masks, layers) for g in cut})


def ordered_matched(q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator) -> Masks:
    """Ordered dropout with blocks so wide that its density is that of `uniform`.

    The side is sqrt(q) where both sides of every weight can be cut, less where the first layer or a residual
    stream cannot; whole units come as near to q as they can.
    """
    low, high = 0.0, 1.0
    for _ in range(12):  # finer than one unit of the widest layer of the paper's nets
        side = (low + high) / 2
        low, high = (side, high) if _block_density(side, plan, masks, layers) < q else (low, side)
    near = min(low, high, key=lambda side: abs(_block_density(side, plan, masks, layers) - q))
    return ordered_dropout(near, plan, masks, layers, rng)


def _block_density(side: float, plan: ClientPlan, masks: Masks, layers: LayerMap) -> float:
    """The share of the weights outside L_i that leading blocks of this side keep."""
    names = [n for l in pruned_layers(plan) for n in layers.layers[l] if n in layers.prunable]
    units = {g: _units_left(g, masks, layers) for g, u in layers.groups.items() if not u.fixed}
    share = {g: kept_units(side, m, layers.groups[g].granule) / m for g, m in units.items()}
    on = total = 0.0
    for n in names:
        size = M.count(M.block(n, dict(masks.units), layers), layers.shapes[n])
        total += size
        on += size * math.prod(share.get(a.group, 1.0) for a in layers.axes.get(n, ()) if a is not None)
    return on / total if total else 1.0


def _units_left(g: str, masks: Masks, layers: LayerMap) -> int:
    return len(masks.units[g]) if g in masks.units else layers.groups[g].units


def _leading(q: float, g: str, masks: Masks, layers: LayerMap) -> Tensor:
    u = layers.groups[g]
    at = masks.units.get(g)
    at = torch.arange(u.units) if at is None else at
    return at[: kept_units(q, len(at), u.granule)]


LocalPruner = Callable[[float, ClientPlan, Masks, LayerMap, torch.Generator], Masks]  # what step k trains under
LOCAL_PRUNERS: Mapping[str, LocalPruner] = {
    "fixed": fixed,
    "uniform": uniform,
    "ordered_dropout": ordered_dropout,
    "ordered_matched": ordered_matched,
}
BY_UNITS = frozenset({"ordered_dropout", "ordered_matched"})  # local pruning that cuts whole units


def pruned_layers(plan: ClientPlan) -> tuple[Layer, ...]:
    """The layers outside L_i, which P_i and Q_i act on."""
    return tuple(l for l, p in plan.layers.items() if p.send == "pruned")


# --------------------------------------------------------------------------- checks before training


def check_pruning(pruning: Pruning, layers: LayerMap, plans: Sequence[ClientPlan]) -> None:
    """Refuse what cannot be carried out, and coordinates that nobody can ever train."""
    s = pick(SELECTORS, pruning.selector, "selector")
    pick(LOCAL_PRUNERS, pruning.local, "local pruning")
    structured = s.units is not None or pruning.local in BY_UNITS
    if structured and layers.note and any(pruned_layers(p) for p in plans):
        raise PlanError(f"pruning by units needs to follow them through the net, but {layers.note}")
    if s.units is not None and pruning.physical and not pruning.hold:
        raise PlanError(
            f"the {pruning.selector} selector trains a smaller net, in which pruned weights cannot grow back: "
            "set prune.hold=true, or prune.physical=false to train the whole net masked"
        )
    if pruning.selector == "ordered":
        _check_ordered(pruning, layers, plans)


def _check_ordered(pruning: Pruning, layers: LayerMap, plans: Sequence[ClientPlan]) -> None:
    """`ordered` never moves, so what no client's leading units reach stays untrained for ever."""
    zeros = {n: torch.zeros(shape) for n, shape in layers.shapes.items()}
    reached: dict[str, Tensor] = {}
    for plan in {tuple(p.layers.items()): p for p in plans}.values():  # equal plans have equal masks
        masks = masks_for(plan, zeros, layers, pruning, 0, 0)
        for l in plan.uploaded:
            for n in layers.layers[l]:
                mask = M.as_bool(M.active(n, masks, layers), layers.shapes[n])
                reached[n] = reached[n] | mask if n in reached else mask
    dark = {n: 1 - float(m.float().mean()) for n, m in reached.items() if not bool(m.all())}
    if dark:
        worst = max(dark, key=lambda n: dark[n])
        raise PlanError(
            f"the ordered selector never moves, so {dark[worst]:.0%} of {worst} (and parts of {len(dark) - 1} other "
            "tensors) would be trained by no client; use 'rolling' or 'neuron', or give some clients keep = 1"
        )
