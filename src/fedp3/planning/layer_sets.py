"""Which layers each client trains in full and uploads: the layer sets L_i (Alg. 1, l. 2).

OPUk gives a client k adjacent hidden layers and the head.  With H hidden layers and n clients, the
client of rank r gets {g, g+1, ..., g+k-1} mod H with g = floor(r H / n), so n k / H clients train
each hidden layer.

Ranks are a seeded permutation of the clients.  Neighbouring client ids often have similar classes,
and with rank = id a layer would be trained on few classes only.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch

from fedp3.core.errors import PlanError
from fedp3.core.randomness import random_ranks
from fedp3.core.registry import Registry
from fedp3.core.types import Layer, LayerMap

LayerSets = tuple[tuple[Layer, ...], ...]  # L_i for every client i
# (layers, number of clients, generator) -> layer sets
AssignLayers = Callable[[LayerMap, int, torch.Generator], LayerSets]
# Prefix of a name, with its "+1" if it has one -> (sizes -> rule)
FAMILIES: dict[str, Callable[[Sequence[int]], AssignLayers]] = {}


def _find_in_family(name: str) -> AssignLayers | None:
    """The rule of a name such as opu4, opu1-4, opu2+1, random-5 or blocks-2, for any numbers."""
    match = re.fullmatch(r"([a-z]+-?)([1-9]\d*(?:-[1-9]\d*)*)(\+1)?", name)
    if match is None:
        return None
    family = match[1] + (match[3] or "")
    if family not in FAMILIES:
        return None
    sizes = [int(k) for k in match[2].split("-")]
    return FAMILIES[family](sizes)


AUTO = "auto"  # the layer set and the share `keep` that are chosen for each device
LAYER_SETS: Registry[AssignLayers] = Registry("layer set", _find_in_family)


def with_head(layers: LayerMap, chosen: Iterable[Layer]) -> tuple[Layer, ...]:
    """The chosen layers and the head, in model order (A1: the head is in every L_i)."""
    members = {*chosen, layers.head}
    return tuple(l for l in layers.layers if l in members)


def draw_sizes(sizes: Sequence[int], clients: int, rng: torch.Generator) -> list[int]:
    """One of `sizes` for every client, drawn at random."""
    return [sizes[j] for j in torch.randint(len(sizes), (clients,), generator=rng).tolist()]


@LAYER_SETS.register("full")
def full(layers: LayerMap, clients: int, rng: torch.Generator) -> LayerSets:
    """Every layer at every client: FedAvg's plan."""
    return (tuple(layers.layers),) * clients


@LAYER_SETS.register("prune-all")
def prune_all(layers: LayerMap, clients: int, rng: torch.Generator) -> LayerSets:
    """Only the head is in L_i; every other layer is pruned (the setting of Algorithm 4)."""
    return ((layers.head,),) * clients


def windows(sizes: Sequence[int], always: int = 0) -> AssignLayers:
    """Cyclic windows of k hidden layers; with several sizes, k is drawn per client.

    Args:
        sizes: the sizes k.
        always: the number of last hidden layers that are in every L_i instead of in windows.
    """

    def assign(layers: LayerMap, clients: int, rng: torch.Generator) -> LayerSets:
        H = len(layers.hidden) - always
        if always and H < 1:
            raise PlanError(
                f"this plan needs {always + 1} layers before the head, "
                f"the network has {len(layers.hidden)}"
            )
        hidden, last = layers.hidden[:H], layers.hidden[H:]

        @cache
        def window(g: int, k: int) -> tuple[Layer, ...]:
            members = [hidden[(g + j) % H] for j in range(min(k, H))]
            return with_head(layers, (*members, *last))

        ranks = random_ranks(clients, rng)
        return tuple(
            window(r * H // clients, k)
            for r, k in zip(ranks, draw_sizes(sizes, clients, rng), strict=True)
        )

    return assign


def random_layers(sizes: Sequence[int]) -> AssignLayers:
    """Any k hidden layers, drawn per client; with several sizes, k is drawn too."""

    def assign(layers: LayerMap, clients: int, rng: torch.Generator) -> LayerSets:
        hidden = layers.hidden
        chosen = (
            torch.randperm(len(hidden), generator=rng)[:k].tolist()
            for k in draw_sizes(sizes, clients, rng)
        )
        return tuple(with_head(layers, (hidden[j] for j in indices)) for indices in chosen)

    return assign


def smallest_cover(hidden: int, clients: int) -> str:
    """The layer set with the smallest windows under which these clients train every layer.

    It is opu2, the default, unless there are too few clients for it.
    """
    return f"opu{max(2, math.ceil(hidden / clients))}"


# The names of the paper; it calls opu1 "lowerb".
NAMED_SIZES: Mapping[str, Sequence[int]] = {
    "lowerb": [1],
    "opu2": [2],
    "opu3": [3],
    "opu1-2-3": [1, 2, 3],
    "opu2-3": [2, 3],
}
for _name, _sizes in NAMED_SIZES.items():
    LAYER_SETS.add(_name, windows(_sizes))
LAYER_SETS.add("random-1", random_layers([1]))
LAYER_SETS.add("random-2", random_layers([2]))
FAMILIES["opu"] = windows
FAMILIES["opu+1"] = lambda sizes: windows(sizes, always=1)
FAMILIES["random-"] = random_layers
