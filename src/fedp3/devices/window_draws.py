"""Which of the windows that a device can train a client gets in a round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fedp3.core.randomness import Stream, random_ranks, stream
from fedp3.core.registry import Registry
from fedp3.core.types import ClientPlan, Layer
from fedp3.devices.options import Option
from fedp3.devices.table import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Clients with equal devices and batches, and what they can do.

    Args:
        device: what each of them has.
        clients: their numbers, ascending.
        options: what they can do; none if they cannot take part.
        counts: for each option, how many of these clients get it in a round.
        binding: the limit that keeps them from training everything; empty if there is none.
        least: the smallest plan of all, with which clients that cannot take part are evaluated.
    """

    device: Device
    clients: tuple[int, ...]
    options: tuple[Option, ...]
    counts: tuple[int, ...]
    binding: str
    least: ClientPlan


# (class, its position in the fleet, seed, round) -> the option of each of its clients
DrawWindows = Callable[[DeviceClass, int, int, int], Sequence[int]]
WINDOW_DRAWS: Registry[DrawWindows] = Registry("draw of windows")


@WINDOW_DRAWS.register("balanced")
def balanced(group: DeviceClass, position: int, seed: int, t: int) -> list[int]:
    """As many clients for each option as the fleet pass decided; who gets which is redrawn."""
    return _dealt(group, stream(seed, Stream.PLAN, t, position))


@WINDOW_DRAWS.register("fixed")
def fixed(group: DeviceClass, position: int, seed: int, t: int) -> list[int]:
    """As balanced, but drawn once: a client trains the same layers for ever."""
    return _dealt(group, stream(seed, Stream.PLAN, 0, position))


@WINDOW_DRAWS.register("random")
def random(group: DeviceClass, position: int, seed: int, t: int) -> list[int]:
    """Any option of the device, whatever the other clients train."""
    rng = stream(seed, Stream.PLAN, t, position)
    drawn: list[int] = torch.randint(
        len(group.options), (len(group.clients),), generator=rng
    ).tolist()
    return drawn


def _dealt(group: DeviceClass, rng: torch.Generator) -> list[int]:
    in_order = [j for j, count in enumerate(group.counts) for _ in range(count)]
    return [in_order[rank] for rank in random_ranks(len(group.clients), rng)]


def class_plans(
    classes: Sequence[DeviceClass], draw: str, seed: int, t: int
) -> dict[int, ClientPlan]:
    """The plan of every client in round t."""
    plans: dict[int, ClientPlan] = {}
    for position, group in enumerate(classes):
        if not group.options:
            plans |= {i: replace(group.least, client=i) for i in group.clients}
            continue
        templates = [option.plan for option in group.options]
        drawn = WINDOW_DRAWS.pick(draw)(group, position, seed, t)
        for client, j in zip(group.clients, drawn, strict=True):
            plans[client] = replace(templates[j], client=client)
    return plans


def possible_trainers(classes: Sequence[DeviceClass], draw: str) -> dict[Layer, list[int]]:
    """For each layer the clients that train and upload it in some round.

    With windows that are dealt once, the clients that could have got such a window count too.
    """
    trainers: dict[Layer, list[int]] = {}
    for group in classes:
        used = [
            option
            for option, count in zip(group.options, group.counts, strict=True)
            if count or draw == "random"
        ]
        for l in group.least.layers:
            clients = trainers.setdefault(l, [])
            if any(l in option.plan.full_layers for option in used):
                clients += group.clients
    return trainers
