"""Q_i: local pruning, drawn anew at every step (Alg. 2, l. 2).

q is a share of what P_i kept (or of the whole net, `q_of = "whole"`), so a step trains under the share q r at least.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.prune import kept_units, pruned_layers
from fedp3.types import ClientPlan, LayerMap, Masks, Pruning


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
    units = {g: _still_there(g, masks, layers) for g, u in layers.groups.items() if not u.fixed}
    share = {g: kept_units(side, m, layers.groups[g].granule) / m for g, m in units.items()}
    on = total = 0.0
    for n in names:
        size = M.count(M.block(n, masks.units, layers), layers.shapes[n])
        total += size
        on += size * math.prod(share.get(a.group, 1.0) for a in layers.axes.get(n, ()) if a is not None)
    return on / total if total else 1.0


def _still_there(g: str, masks: Masks, layers: LayerMap) -> int:
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
