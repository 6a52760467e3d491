"""A synchronous round in virtual time: whose updates count, and when it ends.

Clients that are late in virtual time are not computed at all.  They got the model, under LDP they
were charged, and their updates are not in the aggregate: the same as if they had been computed and
left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedp3.core.types import ClientPlan
from fedp3.devices.clock import RoundClock, recorded
from fedp3.devices.round_ends import USED
from fedp3.devices.run_fleet import visits
from fedp3.devices.traces import MICRO
from fedp3.server.context import ServerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRound:
    """A round in virtual time.

    Args:
        used: the clients whose updates count.
        late: the other participants, ascending.
        ended: when the round ended, in microseconds.
        record: what the run records; None where devices are not described.
    """

    used: frozenset[int]
    late: tuple[int, ...] = ()
    ended: int = 0
    record: RoundClock | None = field(default=None)


def timed_round(context: ServerContext, plans: Sequence[ClientPlan], start: int) -> TimedRound:
    """The round of these plans, which begins at `start`."""
    fleet = context.fleet
    clients = frozenset(plan.client for plan in plans)
    if fleet is None:
        return TimedRound(used=clients)
    end = fleet.mode.end
    assert end is not None  # rounds that overlap are not synchronous
    parts = visits(fleet, plans, start)
    deadline = round(MICRO * fleet.settings.round_seconds)
    round_end = end(parts, start, deadline, context.participants)
    ended, outcomes = round_end.ended, round_end.outcomes
    used = frozenset(
        v.client for v, outcome in zip(parts, outcomes, strict=True) if outcome == USED
    )
    return TimedRound(
        used=used,
        late=tuple(sorted(clients - used)),
        ended=ended,
        record=recorded(parts, outcomes, fleet.timings, start, ended),
    )
