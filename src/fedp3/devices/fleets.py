"""The fleet of a run: one device for every client.

Equal inputs give the same fleet on every machine: what is drawn comes from addressed streams.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, stream
from fedp3.core.registry import suggestion
from fedp3.devices.fleet_file import SUFFIX, read_fleet
from fedp3.devices.table import BOARDS, DEVICES, PHONES, Device, find
from fedp3.planning.capacities import by_share

# Fleets with a name.  The devices of a client are drawn uniformly among these.
FLEETS: Mapping[str, tuple[Device, ...]] = {"phones": PHONES, "boards": BOARDS}


def make_fleet(fleet: str | Mapping[str, float], clients: int, seed: int) -> tuple[Device, ...]:
    """The device of every client.

    Args:
        fleet: the name of a fleet, whose devices are drawn client by client; a table from names of
            devices to their shares of the clients; or the path of a fleet file, which ends in .csv.
        clients: the number of clients.
        seed: the run's seed.
    """
    if clients < 1:
        raise InputError(f"a fleet has at least 1 client, got {clients}")
    if isinstance(fleet, Mapping):
        return _by_share(fleet, clients, seed)
    if fleet in FLEETS:
        return tuple(_draw(FLEETS[fleet], i, seed) for i in range(clients))
    if Path(fleet).suffix.lower() == SUFFIX:
        return read_fleet(Path(fleet), clients)
    raise InputError(
        f"unknown fleet {fleet!r} ({suggestion(fleet, FLEETS)}); a fleet file ends in {SUFFIX}, "
        "and devices with shares are written as in 'Pixel 3=0.3,raspberry-pi-4=0.7'"
    )


def _draw(devices: tuple[Device, ...], client: int, seed: int) -> Device:
    """One device, which depends on the client and the seed but not on the number of clients."""
    rng = stream(seed, Stream.FLEET, client)
    return devices[int(torch.randint(len(devices), (), generator=rng))]


def _by_share(shares: Mapping[str, float], clients: int, seed: int) -> tuple[Device, ...]:
    wrong = [
        f"the share of {name!r} is {share:g}, want a number in (0, 1]"
        for name, share in shares.items()
        if not 0 < share <= 1
    ]
    wrong += [
        f"unknown device {name!r} ({suggestion(name, DEVICES)})"
        for name in shares
        if find(name) is None
    ]
    if wrong:
        raise InputError("; ".join(wrong))
    names = by_share(shares, clients, stream(seed, Stream.FLEET))
    return tuple(DEVICES.pick(name) for name in names)
