"""What all clients of a run share and know before the first task: net, data, and how long and fast they train."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedp3 import submodel
from fedp3.data import Dataset
from fedp3.hooks import NONE, Hooks
from fedp3.lookup import pick
from fedp3.types import AS_IS, Chain, Compression, Group, LayerMap, Local, Params, Private, Pruning


@dataclass(frozen=True, slots=True)
class Shard:
    """One client's samples, as indices into the pool."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all clients share and know before the first task."""

    net: nn.Module  # a workbench: its values mean nothing between two tasks
    layers: LayerMap
    data: Dataset
    local: Local
    pruning: Pruning
    initial: Params  # W_0, where personal layers begin
    seed: int
    device: str = "cpu"
    chain: Chain = ()  # the layers of a net so small that its clients train stacked
    private: Private | None = None
    hooks: Hooks = NONE  # what the method adds
    compression: Compression = AS_IS


EVAL_BATCH = 48  # samples scored at once: larger batches are slower on a CPU, their activations leave the cache
SCHEDULES: Mapping[str, Callable[[float], float]] = {  # share of the run that has passed -> factor on lr
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def smaller(recipe: Recipe, units: Mapping[Group, Tensor]) -> Recipe:
    """The recipe on the net that is left when only these units are kept."""
    if not units:
        return recipe
    counts = submodel.counts_of(units)
    net = submodel.small_net(recipe.net, recipe.layers, counts)
    return replace(recipe, net=net, layers=submodel.shrink_map(recipe.layers, counts))


def rate(local: Local, t: int) -> float:
    """The learning rate of round t; a probe after the last round still learns as the last round did."""
    rounds = max(local.rounds, 1)
    return local.lr * pick(SCHEDULES, local.schedule, "schedule")(min(t, rounds - 1) / rounds)


def steps_of(local: Local, samples: int, share: float = 1.0) -> int:
    """How many steps a pass takes: at least one, unless none are asked for at all."""
    whole = local.epochs * math.ceil(samples / local.batch) or local.steps
    return min(whole, 1) if share * whole < 1 else round(share * whole)


def dealt(samples: int, size: int) -> list[int]:
    """The sizes of an epoch's batches: a single last sample takes one more from before, as BatchNorm needs two."""
    sizes = [min(size, samples - j) for j in range(0, samples, size)]
    if size > 2 and sizes[1:] and sizes[-1] == 1:
        sizes[-2:] = [size - 1, 2]
    return sizes


def batches(samples: int, local: Local, rng: torch.Generator) -> Iterator[Tensor]:
    """Positions of the K batches: shuffled epochs, the last batch of each as short as it comes."""
    sizes = dealt(samples, local.batch)
    for k in range(local.epochs * len(sizes) if local.epochs else local.steps):
        if k % len(sizes) == 0:
            epoch = torch.split(torch.randperm(samples, generator=rng), sizes)
        yield epoch[k % len(sizes)]
