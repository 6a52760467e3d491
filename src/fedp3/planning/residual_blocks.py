"""Layer sets without some residual blocks: the paper's ResNet18 table, ResIST, FedRA."""

import re
from collections.abc import Sequence

import torch

from fedp3.core.errors import PlanError
from fedp3.core.randomness import random_ranks
from fedp3.core.types import Layer, LayerMap
from fedp3.planning.layer_sets import FAMILIES, LAYER_SETS, AssignLayers, LayerSets, draw_sizes


def without(*parts: str) -> AssignLayers:
    """All layers but one of `parts`, each at equally many clients.

    Args:
        parts: names of blocks such as "b2"; "b2:2" is its first two layers, "b2:-2" its last two.
    """

    def members(layers: LayerMap, part: str) -> set[Layer]:
        block, _, size = part.partition(":")
        inside = [l for l in layers.layers if l.startswith(f"{block}.")]
        if not inside:
            raise PlanError(
                f"this plan is made for model resnet18: it leaves out block {block!r}, "
                "which this network does not have"
            )
        k = int(size or len(inside))
        return set(inside[:k] if k > 0 else inside[k:])

    def assign(layers: LayerMap, clients: int, rng: torch.Generator) -> LayerSets:
        left_out = [members(layers, part) for part in parts]
        ranks = random_ranks(clients, rng)
        return tuple(
            tuple(l for l in layers.layers if l not in left_out[r * len(left_out) // clients])
            for r in ranks
        )

    return assign


def blocks(sizes: Sequence[int]) -> AssignLayers:
    """All layers outside skippable residual blocks, and k of those blocks.

    The blocks are shared out among the clients in an order that is drawn for the round.
    """

    def assign(layers: LayerMap, clients: int, rng: torch.Generator) -> LayerSets:
        inside = skippable_blocks(layers)
        if not inside:
            raise PlanError(
                "this plan skips residual blocks, of which this network has none that are known; "
                "use a transformer or model.name=resnet18"
            )
        skippable = list(inside)
        B = len(skippable)
        order = torch.randperm(B, generator=rng).tolist()
        ranks = random_ranks(clients, rng)
        sets = []
        for r, k in zip(ranks, draw_sizes(sizes, clients, rng), strict=True):
            retained = {skippable[order[(r * k + j) % B]] for j in range(k)}
            skipped = {l for block in skippable if block not in retained for l in inside[block]}
            sets.append(tuple(l for l in layers.layers if l not in skipped))
        return tuple(sets)

    return assign


def skippable_blocks(layers: LayerMap) -> dict[str, tuple[Layer, ...]]:
    """The residual blocks without which the network works, each with its layers.

    These are the blocks of a transformer, and those of resnet18 with an identity shortcut.
    """
    if layers.residual:
        return dict(layers.residual)
    inside: dict[str, list[Layer]] = {}
    for l in layers.layers:
        inside.setdefault(_resnet_block(l), []).append(l)
    return {
        block: tuple(members)
        for block, members in inside.items()
        if block and not any(".shortcut." in n for l in members for n in layers.layers[l])
    }


def _resnet_block(layer: Layer) -> str:
    """The residual block of a layer of resnet18; empty if it is in none."""
    match = re.match(r"b\d+\.\d+(?=\.)", layer)
    return match[0] if match else ""


LAYER_SETS.add("resnet-no-b2-b3", without("b2", "b3"))
LAYER_SETS.add("resnet-b2-part", without("b2:2", "b2:-2"))
LAYER_SETS.add("resnet-b3-part", without("b3:2", "b3:-2"))
FAMILIES["blocks-"] = blocks
