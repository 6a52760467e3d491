"""Virtual time: how long a client's part of a round takes on its device, from a given moment on.

All times are whole microseconds.  Sums and comparisons are exact, so that the same clients are in
time on every machine and after every resume.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, stream
from fedp3.devices.round_ends import Visit
from fedp3.devices.table import Device
from fedp3.devices.traces import (
    DAY,
    MICRO,
    Trace,
    constant,
    duration,
    mean,
    read_availability,
    read_bandwidth,
    share_of_day,
)

ALWAYS = "always"
# Availability by name: device -> when it can take part.
PRESENCES: Mapping[str, Callable[[Device], Trace]] = {
    ALWAYS: lambda device: constant(1),
    "daily": lambda device: share_of_day(device.available),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan takes: bytes in both directions, and GFLOP of local training."""

    down: int
    up: int
    gflop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One client's device over virtual time.

    Args:
        down: bits per second that it receives.
        up: bits per second that it sends.
        gflops: GFLOP/s of its training.
        watts: what it draws while it computes; None if nobody knows.
        presence: 1 where it is available and 0 where it is not.
        absence: the opposite; None if it is always available.
        phase: where its traces are when the run begins.
    """

    down: Trace
    up: Trace
    gflops: float
    watts: float | None
    presence: Trace
    absence: Trace | None
    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientClock:
    """One client's part of a round in seconds of virtual time, as a run records it."""

    began: float
    down: float
    compute: float
    up: float
    outcome: str  # used, late, surplus or left


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClock:
    """One round in virtual time, as a run records it."""

    began: float
    ended: float
    joules: float | None  # of the computation; None if some device's watts are not known
    clients: Mapping[int, ClientClock] = field(default_factory=dict)


def make_timings(
    devices: Sequence[Device], seed: int, availability: str = ALWAYS, bandwidth: str = ""
) -> tuple[Timing, ...]:
    """The devices of a run over virtual time.

    Args:
        devices: the device of every client.
        seed: the run's seed, from which the trace of a client and its phase are drawn.
        availability: always, daily, or a trace file that all devices follow.
        bandwidth: a trace file, or a folder of them; empty means constant links.
    """
    shapes = _read_shapes(Path(bandwidth)) if bandwidth else []
    presence = PRESENCES.get(availability)
    if presence is None:
        trace = read_availability(Path(availability))
        presence = lambda device: trace  # noqa: E731
    return tuple(
        _timing(device, presence(device), shapes, stream(seed, Stream.FLEET, client, 1))
        for client, device in enumerate(devices)
    )


def _timing(
    device: Device, presence: Trace, shapes: Sequence[Trace], rng: torch.Generator
) -> Timing:
    phase = int(torch.randint(DAY, (), generator=rng)) * MICRO
    shape = int(torch.randint(len(shapes), (), generator=rng)) if shapes else 0
    absent = tuple(1 - value for value in presence.values)
    links = [
        _scaled(shapes[shape], mbps) if shapes else constant(round(mbps * MICRO))
        for mbps in (device.mbps_down, device.mbps_up)
    ]
    return Timing(
        down=links[0],
        up=links[1],
        gflops=device.gflops,
        watts=device.watts,
        presence=presence,
        absence=Trace(presence.starts, absent, presence.period) if any(absent) else None,
        phase=phase,
    )


def _scaled(shape: Trace, mbps: float) -> Trace:
    """A link that varies as a trace does, with this mean."""
    factor = mbps * MICRO / mean(shape)
    return Trace(shape.starts, tuple(round(v * factor) for v in shape.values), shape.period)


def _read_shapes(path: Path) -> list[Trace]:
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise InputError(f"[devices] bandwidth: {path} contains no trace file")
    return [read_bandwidth(file) for file in files]


def visit(client: int, timing: Timing, work: Work, start: int) -> Visit:
    """One client's part of a round that it begins at `start`, when it is available."""
    down = duration(timing.down, 8 * MICRO * work.down, timing.phase + start)
    compute = math.ceil(MICRO * work.gflop / timing.gflops)
    up = duration(timing.up, 8 * MICRO * work.up, timing.phase + start + down + compute)
    left = -1
    if timing.absence is not None:
        # It leaves in the last microsecond of the time that it takes to be absent for one.
        away = duration(timing.absence, 1, timing.phase + start) - 1
        left = start + away if away < down + compute + up else -1
    return Visit(client=client, began=start, down=down, compute=compute, up=up, left=left)


def waiting(timing: Timing, now: int) -> int:
    """Microseconds until a device is available; 0 if it is."""
    return duration(timing.presence, 1, timing.phase + now) - 1


def next_available(
    timings: Sequence[Timing], clients: Sequence[int], now: int
) -> tuple[int, list[int]]:
    """The first moment from `now` on at which some client is available, and who is then."""
    waits = {i: waiting(timings[i], now) for i in clients}
    least = min(waits.values(), default=0)
    return now + least, [i for i in clients if waits[i] <= least]


def joules(visits: Sequence[Visit], timings: Sequence[Timing]) -> float | None:
    """The energy that these clients compute with; None if the watts of one are not known."""
    watts = [timings[v.client].watts for v in visits]
    if any(w is None for w in watts):
        return None
    return math.fsum(
        w * phases(v)[1] / MICRO for w, v in zip(watts, visits, strict=True) if w is not None
    )


def phases(v: Visit) -> tuple[int, int, int]:
    """Microseconds of download, computation and upload until a client ended or left."""
    rest = v.ended - v.began
    down = min(v.down, rest)
    compute = min(v.compute, rest - down)
    return down, compute, rest - down - compute


def recorded(
    visits: Sequence[Visit],
    outcomes: Sequence[str],
    timings: Sequence[Timing],
    began: int,
    ended: int,
) -> RoundClock:
    """A round as its run records it; the phases of a client that left end when it did."""
    clients = {}
    for v, outcome in zip(visits, outcomes, strict=True):
        down, compute, up = phases(v)
        clients[v.client] = ClientClock(
            began=v.began / MICRO,
            down=down / MICRO,
            compute=compute / MICRO,
            up=up / MICRO,
            outcome=outcome,
        )
    return RoundClock(
        began=began / MICRO, ended=ended / MICRO, joules=joules(visits, timings), clients=clients
    )
