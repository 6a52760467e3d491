"""The capacity of each client's device: the share `keep` of a pruned layer that it can hold."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from fedp3.core.errors import PlanError
from fedp3.core.randomness import Stream, random_ranks, stream

Class = TypeVar("Class")


def capacities(
    keep: float | Sequence[float] | Mapping[float, float], clients: int, seed: int
) -> tuple[float, ...]:
    """The share `keep` of every client.

    Args:
        keep: a number for all clients; a list with one number per client; a shorter list of
            device classes, assigned at random to equally many clients each; or a table from
            device classes to their share of the clients.
        clients: the number of clients.
        seed: the run's seed.
    """
    if isinstance(keep, Mapping):
        drawn = by_share(keep, clients, stream(seed, Stream.DEVICES))
        return capacities(drawn, clients, seed)
    shares = [keep] if isinstance(keep, int | float) else keep
    classes = [float(share) for share in shares]
    invalid = [share for share in classes if not 0 < share <= 1]
    if invalid or not classes:
        raise PlanError(f"keep is a share in (0, 1], got {invalid or 'an empty list'}")
    if len(classes) == clients:
        return tuple(classes)
    if len(classes) > clients:
        raise PlanError(
            f"{len(classes)} device classes for {clients} clients; name at most one per client"
        )
    ranks = random_ranks(clients, stream(seed, Stream.DEVICES))
    return tuple(classes[r * len(classes) // clients] for r in ranks)


def by_share(
    class_shares: Mapping[Class, float], clients: int, rng: torch.Generator
) -> tuple[Class, ...]:
    """The device class of every client.

    Args:
        class_shares: from device classes to their shares of the clients, which are rounded to whole
            clients.
        clients: the number of clients.
        rng: draws which client belongs to which class.
    """
    shares = list(class_shares.values())
    total = sum(shares)
    if not class_shares or abs(total - 1) > 1e-6:
        raise PlanError(f"the shares of the device classes add up to {total:g}, want 1")
    in_order: list[Class] = []
    for k, device_class in enumerate(class_shares):
        end = round(clients * sum(shares[: k + 1]) / total)
        size = end - len(in_order)
        if size == 0:
            raise PlanError(
                f"no client of {clients} would be of device class {device_class}; use more clients"
            )
        in_order += [device_class] * size
    return tuple(in_order[r] for r in random_ranks(clients, rng))
