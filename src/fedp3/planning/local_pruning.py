"""Q_i: local pruning, drawn anew at every step (Alg. 2, l. 2).

q is a share of what P_i retained, or of the full layer (`q_relative_to = "layer"`).
"""

import math

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.types import ClientPlan, LayerMap, Masks
from fedp3.planning.prune_settings import LOCAL_PRUNERS, LocalPruner, PruneSettings
from fedp3.planning.pruning import pruned_layers
from fedp3.planning.selectors import retained_units


def draw_q(settings: PruneSettings, rng: torch.Generator, plan: ClientPlan | None = None) -> float:
    """q_{i,k}: a constant, one of a grid, or U[q_min, 1] (Alg. 2, l. 2)."""
    grid = q_grid(settings, plan)
    if isinstance(settings.q, float | int):
        return grid[0]
    u = float(torch.rand((), generator=rng))
    if grid:
        return grid[int(u * len(grid))]
    return settings.q_min + (1 - settings.q_min) * u


def q_grid(settings: PruneSettings, plan: ClientPlan | None = None) -> tuple[float, ...]:
    """The equally likely values of q; empty means all of [q_min, 1].

    If they are shares of the full layer, a client draws among those up to its `keep`.
    """
    if isinstance(settings.q, float | int):
        return (float(settings.q),)
    if not settings.q or settings.q_relative_to == "retained" or plan is None:
        return settings.q
    keep = max((plan.layers[l].keep for l in pruned_layers(plan)), default=1.0)
    return tuple(share / keep for share in settings.q if share <= keep) or (1.0,)


def fixed(
    q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator
) -> Masks:
    """No local pruning."""
    return Masks()


def uniform(
    q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator
) -> Masks:
    """Each weight outside L_i is retained with probability q; as in the paper, none is rescaled."""
    names = _prunable_tensors(plan, layers)
    return Masks(weights={n: torch.rand(layers.shapes[n], generator=rng) < q for n in names})


def _prunable_tensors(plan: ClientPlan, layers: LayerMap) -> list[str]:
    """The weights of the layers outside L_i."""
    return [n for l in pruned_layers(plan) for n in layers.layers[l] if n in layers.prunable]


def ordered_dropout(
    q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator
) -> Masks:
    """The first ceil(q u) of the units that a layer outside L_i writes or reads.

    After a flatten, units are entire channels.  A q x q block retains q^2 of a layer where
    `uniform` retains q: see `ordered_matched`.
    """
    touched = set()
    for l in pruned_layers(plan):
        for n in layers.layers[l]:
            touched |= {axis.group for axis in layers.axes.get(n, ()) if axis is not None}
    prunable = [g for g, group in layers.groups.items() if g in touched and not group.fixed]
    return Masks(units={g: _leading_units(q, g, masks, layers) for g in prunable})


def ordered_matched(
    q: float, plan: ClientPlan, masks: Masks, layers: LayerMap, rng: torch.Generator
) -> Masks:
    """Ordered dropout with wider blocks, so that it retains as many weights as `uniform`.

    The share of units is sqrt(q) if both sides of every weight can be pruned, and less if the
    inputs of the first layer or a residual stream cannot be.  The share of retained weights comes
    as near to q as whole units allow.
    """

    def density(side: float) -> float:
        return _block_density(side, plan, masks, layers)

    low, high = 0.0, 1.0
    for _ in range(12):  # finer than one unit of the widest layer of the paper's networks
        side = (low + high) / 2
        if density(side) < q:
            low = side
        else:
            high = side
    nearest = min(low, high, key=lambda side: abs(density(side) - q))
    return ordered_dropout(nearest, plan, masks, layers, rng)


def _block_density(side: float, plan: ClientPlan, masks: Masks, layers: LayerMap) -> float:
    """The share of the weights outside L_i that is retained with this share of each group."""
    shares = {}
    for g, group in layers.groups.items():
        if not group.fixed:
            units = len(masks.units[g]) if g in masks.units else group.units
            shares[g] = retained_units(side, units, group.granule) / units
    retained = total = 0.0
    for n in _prunable_tensors(plan, layers):
        size = M.count(M.block(n, masks.units, layers), layers.shapes[n])
        axes = [axis for axis in layers.axes.get(n, ()) if axis is not None]
        total += size
        retained += size * math.prod(shares.get(axis.group, 1.0) for axis in axes)
    return retained / total if total else 1.0


def _leading_units(q: float, g: str, masks: Masks, layers: LayerMap) -> Tensor:
    """The first units of a group, among those that P_i retained."""
    group = layers.groups[g]
    units = masks.units[g] if g in masks.units else torch.arange(group.units)
    return units[: retained_units(q, len(units), group.granule)]


LOCAL_PRUNERS.add("fixed", LocalPruner(draw=fixed))
LOCAL_PRUNERS.add("uniform", LocalPruner(draw=uniform))
LOCAL_PRUNERS.add("ordered_dropout", LocalPruner(draw=ordered_dropout, by_units=True))
LOCAL_PRUNERS.add("ordered_matched", LocalPruner(draw=ordered_matched, by_units=True))
