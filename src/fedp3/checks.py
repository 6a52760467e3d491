"""What P_i and Q_i cannot carry out is refused before anything is trained."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.errors import PlanError
from fedp3.local_prune import BY_UNITS, LOCAL_PRUNERS
from fedp3.lookup import pick
from fedp3.prune import SELECTORS, masks_for, pruned_layers
from fedp3.types import ClientPlan, LayerMap, Pruning


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
