"""Plans that prune everything but the head, and the package's masks of them."""

import pytest
from hypothesis import strategies as st
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.types import ClientPlan, LayerMap, LayerPlan
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS, PruneSettings
from fedp3.planning.pruning import masks_for
from worlds import KINDS, World

CHAINS = [kind for kind, k in KINDS.items() if k.chain]
WEIGHTS = [name for name, s in SELECTORS.items() if s.weights and not s.across_tensors]
UNITS = [name for name, s in SELECTORS.items() if s.units and not s.deals]
every_selector = pytest.mark.parametrize("selector", SELECTORS)
every_pruner = pytest.mark.parametrize("local", LOCAL_PRUNERS)
Masked = dict[str, Tensor]
keeps = st.integers(1, 100).map(lambda k: k / 100)


def masks_of(here: World, plan: ClientPlan, selector: str, t: int = 0) -> Masked:
    """P_i of the package, as one bool mask per tensor."""
    masks = masks_for(plan, here.W, here.layers, PruneSettings(selector=selector), t, here.seed)
    return {n: M.as_bool(M.active(n, masks, here.layers), s) for n, s in here.layers.shapes.items()}


def everything_pruned(layers: LayerMap, keep: float, client: int = 0) -> ClientPlan:
    """All layers but the head pruned."""
    return ClientPlan(
        client,
        dict.fromkeys(layers.hidden, LayerPlan(send="pruned", keep=keep))
        | {layers.head: LayerPlan()},
    )
