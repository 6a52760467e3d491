"""Layer sets without some residual blocks of a ResNet: the paper's ResNet18 table, and ResIST."""

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
        skippable = skippable_blocks(layers)
        if not skippable:
            raise PlanError(
                "this plan skips residual blocks with an identity shortcut; use model.name=resnet18"
            )
        B = len(skippable)
        order = torch.randperm(B, generator=rng).tolist()
        ranks = random_ranks(clients, rng)
        sets = []
        for r, k in zip(ranks, draw_sizes(sizes, clients, rng), strict=True):
            retained = {skippable[order[(r * k + j) % B]] for j in range(k)}
            skipped = set(skippable) - retained
            sets.append(tuple(l for l in layers.layers if block_of(l) not in skipped))
        return tuple(sets)

    return assign


def block_of(layer: Layer) -> str:
    """The residual block of a layer of resnet18; empty if it is in none."""
    match = re.match(r"b\d+\.\d+(?=\.)", layer)
    return match[0] if match else ""


def skippable_blocks(layers: LayerMap) -> list[str]:
    """Residual blocks with an identity shortcut: the network works without them."""
    inside: dict[str, list[str]] = {}
    for l, names in layers.layers.items():
        inside.setdefault(block_of(l), []).extend(names)
    return [
        block
        for block, names in inside.items()
        if block and not any(".shortcut." in n for n in names)
    ]


LAYER_SETS.add("resnet-no-b2-b3", without("b2", "b3"))
LAYER_SETS.add("resnet-b2-part", without("b2:2", "b2:-2"))
LAYER_SETS.add("resnet-b3-part", without("b3:2", "b3:-2"))
FAMILIES["blocks-"] = blocks
