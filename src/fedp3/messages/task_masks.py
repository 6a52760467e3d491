"""The masks of a task as bytes, where the client cannot derive them."""

import torch
from torch import Tensor

from fedp3.core.types import ClientPlan, LayerMap, Masks
from fedp3.messages.framing import Reader
from fedp3.messages.mask_code import mask_bytes, pack_mask, unpack_mask
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import pruned_tensors, retained_across_tensors


def packed_masks(masks: Masks, layers: LayerMap, pruning: PruneSettings) -> list[bytes]:
    """The masks as bytes; a selector that chooses across tensors has one mask for all weights."""
    weights = [mask.flatten() for mask in masks.weights.values()]
    if SELECTORS.pick(pruning.selector).across_tensors and weights:
        weights = [torch.cat(weights)]
    units = []
    for g, indices in masks.units.items():
        line = torch.zeros(layers.groups[g].units, dtype=torch.bool)
        line[indices] = True
        units.append(line)
    return [pack_mask(mask) for mask in (*weights, *units)]


def read_masks(
    reader: Reader, planned: Masks, plan: ClientPlan, layers: LayerMap, pruning: PruneSettings
) -> Masks:
    """The masks of a task; each retains as many coordinates as the planned one."""
    sizes = {n: mask.numel() for n, mask in planned.weights.items()}
    if SELECTORS.pick(pruning.selector).across_tensors and sizes:
        retained = retained_across_tensors(pruned_tensors(plan, layers), sizes)
        mask_of_all = _read_mask(reader, sum(sizes.values()), retained)
        flat = dict(zip(sizes, torch.split(mask_of_all, list(sizes.values())), strict=True))
    else:
        counts = {n: int(mask.sum()) for n, mask in planned.weights.items()}
        flat = {n: _read_mask(reader, sizes[n], counts[n]) for n in sizes}
    weights = {n: mask.view(layers.shapes[n]) for n, mask in flat.items()}
    units = {}
    for g, indices in planned.units.items():
        mask = _read_mask(reader, layers.groups[g].units, len(indices))
        units[g] = mask.nonzero().flatten()
    return Masks(units=units, weights=weights)


def _read_mask(reader: Reader, n: int, k: int) -> Tensor:
    return unpack_mask(reader.take(mask_bytes(n, k)), n, k)
