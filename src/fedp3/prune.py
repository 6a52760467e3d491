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
from fedp3.lookup import pick
from fedp3.plan import per_layers
from fedp3.rng import Use, stream
from fedp3.types import ClientPlan, Layer, LayerMap, LayerPlan, Masks, Params, Pruning, UnitGroup

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

    @per_layers
    def a_share(plan: ClientPlan) -> Mapping[Layer, LayerPlan]:
        return {l: replace(p, keep=1 / parts) if p.send == "pruned" else p for l, p in plan.layers.items()}

    return [ClientPlan(plan.client, a_share(plan), (j % parts, parts)) for j, plan in enumerate(plans)]


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

    each = made if s.draws or s.deals else per_layers(made)
    return [each(plan) for plan in plans]


def pruned_layers(plan: ClientPlan) -> tuple[Layer, ...]:
    """The layers outside L_i, which P_i and Q_i act on."""
    return tuple(l for l, p in plan.layers.items() if p.send == "pruned")
