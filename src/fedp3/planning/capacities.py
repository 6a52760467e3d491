"""The capacity of each client's device: the share `keep` of a pruned layer that it can hold."""

from collections.abc import Mapping, Sequence

from fedp3.core.errors import PlanError
from fedp3.core.randomness import Stream, random_ranks, stream


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
        return _by_class_share(keep, clients, seed)
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


def _by_class_share(
    class_shares: Mapping[float, float], clients: int, seed: int
) -> tuple[float, ...]:
    """Device classes with given shares of the clients, rounded to whole clients."""
    shares = list(class_shares.values())
    total = sum(shares)
    if not class_shares or abs(total - 1) > 1e-6:
        raise PlanError(f"the shares of the device classes add up to {total:g}, want 1")
    in_order: list[float] = []
    for k, keep in enumerate(class_shares):
        end = round(clients * sum(shares[: k + 1]) / total)
        size = end - len(in_order)
        if size == 0:
            raise PlanError(
                f"no client of {clients} would be of device class {keep:g}; use more clients"
            )
        in_order += [float(keep)] * size
    ranks = random_ranks(clients, stream(seed, Stream.DEVICES))
    return capacities([in_order[r] for r in ranks], clients, seed)
