"""Asynchronous rounds in virtual time: clients start and arrive at any moment (FedBuff).

A fixed number of clients compute at any time.  When one arrives, another one starts from the newest
model.  The round ends when enough updates have arrived.  A client that has arrived rests until the
round ends, since there is no newer model for it.

Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from fedp3.devices.clock import Timing, waiting
from fedp3.devices.round_ends import LEFT, USED, Visit

# (client, when it starts) -> its part of the run from then on
Start = Callable[[int, int], Visit]


@dataclass(frozen=True, slots=True)
class Flight:
    """A client that computes: which model it started from, and its visit."""

    version: int
    visit: Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """An asynchronous round.

    Args:
        ended: when it ended, in microseconds.
        arrived: the flights that ended in it, in order of arrival.
        outcomes: for each of them used, or left if its device became unavailable.
        flying: the flights that go on.
    """

    ended: int
    arrived: tuple[Flight, ...]
    outcomes: tuple[str, ...]
    flying: tuple[Flight, ...]


def fill_buffer(
    flying: Sequence[Flight],
    order: Sequence[int],
    timings: Sequence[Timing],
    start: Start,
    *,
    version: int,
    now: int,
    concurrency: int,
    size: int,
) -> Buffer:
    """One asynchronous round.

    Args:
        flying: the clients that compute when it begins.
        order: the clients that may start, in the order in which they are asked.
        timings: every client's device over virtual time.
        start: computes a client's visit.
        version: the model from which clients start in this round.
        now: when it begins, in microseconds.
        concurrency: how many clients compute at any time, as far as enough are available.
        size: the number of updates that end the round.
    """
    heap = [(f.visit.ended, f.visit.client, f) for f in flying]
    heapify(heap)
    busy = {f.visit.client for f in flying}
    queue = _Queue(timings, [i for i in order if i not in busy])
    arrived: list[Flight] = []
    outcomes: list[str] = []
    used = 0
    while used < size:
        while len(heap) < concurrency:
            client = queue.first_available(now)
            if client is None and heap:
                break  # the next arrival looks again
            if client is None:
                wakes = queue.next_wake()
                if wakes is None:
                    break
                now = wakes
                continue
            flight = Flight(version, start(client, now))
            heappush(heap, (flight.visit.ended, client, flight))
        if not heap:
            break  # everybody rests: the round ends with fewer updates
        ended, _, flight = heappop(heap)
        now = max(now, ended)
        arrived.append(flight)
        outcomes.append(LEFT if flight.visit.left >= 0 else USED)
        used += flight.visit.left < 0
    return Buffer(
        ended=now,
        arrived=tuple(arrived),
        outcomes=tuple(outcomes),
        flying=tuple(f for _, _, f in sorted(heap, key=lambda item: item[:2])),
    )


class _Queue:
    """Clients that may start, in order; those that are not available sleep until they are.

    A client is looked at only when it comes first or wakes, so that a long queue costs little.
    """

    def __init__(self, timings: Sequence[Timing], order: Sequence[int]) -> None:
        self.timings = timings
        self.awake = list(enumerate(order))  # a heap by position
        self.asleep: list[tuple[int, int, int]] = []  # a heap by the time at which they wake

    def first_available(self, now: int) -> int | None:
        """Take the first client that is available at this moment; None if there is none."""
        while self.asleep and self.asleep[0][0] <= now:
            _, position, client = heappop(self.asleep)
            heappush(self.awake, (position, client))
        while self.awake:
            position, client = heappop(self.awake)
            wait = waiting(self.timings[client], now)
            if wait == 0:
                return client
            heappush(self.asleep, (now + wait, position, client))
        return None

    def next_wake(self) -> int | None:
        """When the next client becomes available; None if nobody is left."""
        return self.asleep[0][0] if self.asleep else None
