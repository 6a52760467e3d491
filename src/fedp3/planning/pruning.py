"""The masks of P_i for one client in one round (Alg. 1, l. 6)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedp3.core.memo import once_per_plan
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import ClientPlan, Group, Layer, LayerMap, LayerPlan, Masks, Params, UnitGroup
from fedp3.planning.prune_settings import SELECTORS, PruneSettings, Selector, SelectWeights
from fedp3.planning.selectors import retained_units, retained_weights

Memo = dict[tuple[object, ...], Tensor]  # masks that clients of one round share


def masks_for(
    plan: ClientPlan,
    W: Params,
    layers: LayerMap,
    settings: PruneSettings,
    t: int,
    seed: int,
    memo: Memo | None = None,
) -> Masks:
    """P_i of one client in round t.

    If the selector is derivable, only the shapes of W matter, so that a client can call this too.

    Args:
        plan: the client's plan.
        W: the server's model.
        layers: the model's layers.
        settings: the run's pruning.
        t: the round, from 0.
        seed: the run's seed.
        memo: stores masks that clients of this round share; None to share nothing.
    """
    selector = SELECTORS.pick(settings.selector)
    rng = stream(seed, Stream.GLOBAL_PRUNE, t, plan.client) if selector.draws else None
    if selector.units is not None:
        rng = stream(seed, Stream.DEAL, t) if selector.deals else rng
        return Masks(units=_unit_masks(selector, plan, W, layers, t, rng))
    assert selector.weights is not None
    chosen: Memo = {} if memo is None or selector.draws else memo
    shares = pruned_tensors(plan, layers)
    if selector.across_tensors:
        return Masks(weights=_masks_across_tensors(selector.weights, shares, W, rng, chosen))
    for n, share in shares.items():
        if (n, share) not in chosen:
            chosen[n, share] = selector.weights(W[n], retained_weights(share, W[n].numel()), rng)
    return Masks(weights={n: chosen[n, share] for n, share in shares.items()})


def pruned_layers(plan: ClientPlan) -> tuple[Layer, ...]:
    """The layers outside L_i that P_i and Q_i act on."""
    return tuple(l for l, p in plan.layers.items() if p.send == "pruned")


def pruned_tensors(plan: ClientPlan, layers: LayerMap) -> dict[str, float]:
    """The tensors that an unstructured selector prunes, and the share it retains of each."""
    return {
        n: plan.layers[l].keep
        for l in _reduced_layers(plan)
        for n in layers.layers[l]
        if n in layers.prunable
    }


def retained_across_tensors(shares: Mapping[str, float], sizes: Mapping[str, int]) -> int:
    """How many weights a selector that chooses across tensors retains."""
    return max(1, math.floor(math.fsum(share * sizes[n] for n, share in shares.items()) + 1e-6))


def _masks_across_tensors(
    select: SelectWeights,
    shares: Mapping[str, float],
    W: Params,
    rng: torch.Generator | None,
    chosen: Memo,
) -> dict[str, Tensor]:
    """The masks of a selector that chooses across tensors."""
    if not shares:
        return {}
    key = tuple(shares.items())
    if (*key[0], key) not in chosen:
        weights = torch.cat([W[n].flatten() for n in shares])
        sizes = {n: W[n].numel() for n in shares}
        mask = select(weights, retained_across_tensors(shares, sizes), rng)
        for (n, share), piece in zip(key, torch.split(mask, list(sizes.values())), strict=True):
            chosen[n, share, key] = piece.view_as(W[n])
    return {n: chosen[n, share, key] for n, share in key}


def _reduced_layers(plan: ClientPlan) -> list[Layer]:
    """The layers of which P_i retains less than everything."""
    return [l for l, p in plan.layers.items() if p.send == "pruned" and p.keep < 1]


def _unit_masks(
    selector: Selector,
    plan: ClientPlan,
    W: Params,
    layers: LayerMap,
    t: int,
    rng: torch.Generator | None,
) -> dict[str, Tensor]:
    """The retained units of every group that a structured selector prunes."""
    assert selector.units is not None
    units = {}
    reduced = set(_reduced_layers(plan))
    for g, group in layers.groups.items():
        if group.layer not in reduced or group.fixed:
            continue
        granules = group.units // group.granule
        norms = _by_unit(g, W, layers).reshape(granules, -1).norm(dim=1)
        retained = units_left(selector, plan, group) // group.granule
        indices = selector.units(norms, retained, t, rng)
        if selector.deals:
            begin, end = disjoint_slice(granules, plan.deal)
            indices = indices[begin:end].sort().values
        units[g] = (indices[:, None] * group.granule + torch.arange(group.granule)).flatten()
    return units


def _by_unit(group: Group, W: Params, layers: LayerMap) -> Tensor:
    """The weights of each unit of a group, one unit after the other.

    They are the weights that write it, and of a rank-1 pair both of its sides.
    """
    if f"{group}.weight" not in W:
        return torch.cat(
            [
                W[n].movedim(side, 0).flatten(1)
                for n, axes in layers.axes.items()
                for side, axis in enumerate(axes)
                if n in W and axis is not None and axis.group == group
            ],
            1,
        )
    w, axes = W[f"{group}.weight"], layers.axes[f"{group}.weight"]
    side = next(j for j, axis in enumerate(axes) if axis is not None and axis.group == group)
    axis = axes[side]
    if side == 0 and (axis is None or axis.parts == 1):
        return w
    parts = 1 if axis is None else axis.parts
    in_order = w.movedim(side, 0).reshape(parts, layers.groups[group].units, -1)
    return in_order.transpose(0, 1).flatten(1)


def units_left(selector: Selector, plan: ClientPlan, group: UnitGroup) -> int:
    """How many of these units a structured selector retains at this client."""
    if not selector.deals:
        return retained_units(plan.layers[group.layer].keep, group.units, group.granule)
    begin, end = disjoint_slice(group.units // group.granule, plan.deal)
    return group.granule * (end - begin)


# --------------------------------------------------------------------------- disjoint units (IST)


def disjoint_slice(units: int, deal: tuple[int, int]) -> tuple[int, int]:
    """Begin and end of one of m slices of all units.

    The slices are disjoint if there are enough units; each has at least one.

    Args:
        units: the number of units.
        deal: (j, m), the j-th slice of m.
    """
    j, m = deal
    begin, end = j * units // m, (j + 1) * units // m
    return begin, max(begin + 1, end)


def deal_units(plans: Sequence[ClientPlan], selector: str, parts: int) -> list[ClientPlan]:
    """The plans, with one of `parts` disjoint parts of the units for each client.

    Plans are unchanged if the selector does not divide units among clients.
    """
    if not SELECTORS.pick(selector).deals:
        return list(plans)

    @once_per_plan
    def with_share(plan: ClientPlan) -> Mapping[Layer, LayerPlan]:
        return {
            l: replace(p, keep=1 / parts) if p.send == "pruned" else p
            for l, p in plan.layers.items()
        }

    return [
        replace(plan, layers=with_share(plan), deal=(j % parts, parts))
        for j, plan in enumerate(plans)
    ]
