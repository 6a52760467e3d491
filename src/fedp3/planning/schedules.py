"""Schedules: which layers of a client's L_i are due in a round.

A layer set says what a client may train in full and upload; a schedule says when.  In round t the
client trains and uploads the layers of L_i that are due, and the others are outside L_i for this
round, the head included.  What becomes of them is what `plan.others` says.

    always   all layers in every round: FedP3, FedAvg
    cycle    `warm` rounds of all layers, then one layer after the other, from the input to the
             head, for `stretch` rounds each; then again (FedPart)
    paced    the head and the small layers, which together hold at most `share` of the values, in
             every round; the large layers take turns in a period
    random   each layer with a probability, drawn for every client and round (FedLP)

Schedules depend on the config alone, so that server and nodes compute the same plans.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedp3.core.randomness import Stream, random_ranks, stream
from fedp3.core.registry import Registry
from fedp3.core.types import Layer, LayerMap
from fedp3.planning.layer_sets import LayerSets, with_head

if TYPE_CHECKING:
    from fedp3.planning.client_plans import PlanSettings

# (settings, layers, number of clients, seed, round) -> the layers that are due at every client
DueLayers = Callable[["PlanSettings", LayerMap, int, int, int], LayerSets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which layers are due in which round.

    Args:
        due: from settings, layers, number of clients, seed and round to the layers that are due
            at every client, in model order.
        turn: from settings and layers to the number of rounds after which the schedule begins
            again; 1 also where it is drawn anew every round and never repeats.
        changes: whether some rounds differ from others.
        freezes: whether `plan.others = "auto"` means that layers which are not due are frozen.
    """

    due: DueLayers
    turn: Callable[["PlanSettings", LayerMap], int] = lambda settings, layers: 1
    changes: bool = True
    freezes: bool = False


SCHEDULES: Registry[Schedule] = Registry("schedule of layers")


def _always(
    settings: "PlanSettings", layers: LayerMap, clients: int, seed: int, t: int
) -> LayerSets:
    return (tuple(layers.layers),) * clients


# --------------------------------------------------------------------------- cycle


def _cycle(
    settings: "PlanSettings", layers: LayerMap, clients: int, seed: int, t: int
) -> LayerSets:
    everything = tuple(layers.layers)
    at = t % _cycle_length(settings, layers) - settings.warm
    if at < 0:
        return (everything,) * clients
    group = at // settings.stretch
    phases = _phases(settings, len(everything), clients, seed)
    return tuple((everything[(group + phase) % len(everything)],) for phase in phases)


def _cycle_length(settings: "PlanSettings", layers: LayerMap) -> int:
    return settings.warm + settings.stretch * len(layers.layers)


# --------------------------------------------------------------------------- paced


def _paced(
    settings: "PlanSettings", layers: LayerMap, clients: int, seed: int, t: int
) -> LayerSets:
    slots = paced_slots(settings, layers)
    phases = _phases(settings, settings.period, clients, seed)
    return tuple(slots[(t + phase) % settings.period] for phase in phases)


def paced_slots(settings: "PlanSettings", layers: LayerMap) -> list[tuple[Layer, ...]]:
    """The layers that are due in each round of the period.

    Large layers are dealt to the rounds largest first, each to the round with the fewest values so
    far.  If there are fewer large layers than rounds, their rounds lie evenly in the period.
    """
    sizes = {l: _values(layers, l) for l in layers.layers}
    small = _small_layers(layers, sizes, settings.share)
    large = [l for l in layers.hidden if l not in small]
    bins: list[list[Layer]] = [[] for _ in range(min(len(large), settings.period))]
    for l in sorted(large, key=lambda l: -sizes[l]):  # equal sizes in model order
        min(bins, key=lambda members: sum(sizes[m] for m in members)).append(l)
    order = list(layers.layers)
    bins.sort(key=lambda members: min(map(order.index, members)))
    slots: list[Sequence[Layer]] = [()] * settings.period
    for j, members in enumerate(bins):
        slots[j * settings.period // len(bins)] = members
    return [with_head(layers, (*small, *members)) for members in slots]


def _small_layers(layers: LayerMap, sizes: dict[Layer, int], share: float) -> set[Layer]:
    """The smallest hidden layers that together hold at most this share of all values."""
    room = share * sum(sizes.values())
    small: set[Layer] = set()
    for l in sorted(layers.hidden, key=lambda l: sizes[l]):
        room -= sizes[l]
        if room < 0:
            break
        small.add(l)
    return small


def _values(layers: LayerMap, l: Layer) -> int:
    return sum(math.prod(layers.shapes[n]) for n in layers.layers[l])


def _phases(settings: "PlanSettings", parts: int, clients: int, seed: int) -> Iterable[int]:
    """By how many parts of a turn each client is ahead: 0 for all, unless turns are dealt out."""
    if not settings.dealt:
        return (0,) * clients
    ranks = random_ranks(clients, stream(seed, Stream.SCHEDULE))
    return (rank * parts // clients for rank in ranks)


# --------------------------------------------------------------------------- random


def _random(
    settings: "PlanSettings", layers: LayerMap, clients: int, seed: int, t: int
) -> LayerSets:
    names = tuple(layers.layers)
    rng = stream(seed, Stream.SCHEDULE, t)
    coins = torch.rand(clients, len(names), generator=rng) < settings.probability
    return tuple(
        tuple(l for l, heads in zip(names, row, strict=True) if heads) for row in coins.tolist()
    )


SCHEDULES.add("always", Schedule(due=_always, changes=False))
SCHEDULES.add("cycle", Schedule(due=_cycle, turn=_cycle_length, freezes=True))
SCHEDULES.add(
    "paced", Schedule(due=_paced, turn=lambda settings, layers: settings.period, freezes=True)
)
SCHEDULES.add("random", Schedule(due=_random))
