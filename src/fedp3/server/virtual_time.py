"""A synchronous round in virtual time: whose updates count, and when it ends.

Clients that are late in virtual time are not computed at all.  They got the model, under LDP they
were charged, and their updates are not in the aggregate: the same as if they had been computed and
left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedp3.core.types import ClientUpdate, Execute, Reply, Task
from fedp3.costs.traffic import exchange_bytes
from fedp3.devices.clock import RoundClock, Work, recorded, visit
from fedp3.devices.round_ends import USED
from fedp3.devices.run_fleet import RunFleet
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


def in_virtual_time(
    context: ServerContext, tasks: Sequence[Task], start: int, execute: Execute
) -> tuple[TimedRound, Iterable[Reply]]:
    """A round that begins at `start`, and the replies of the clients whose updates count.

    Where an entropy code decides how long an upload is, clients are computed before it is known who
    is late.
    """
    if context.fleet is None or not context.spec.compression.entropy:
        timed = timed_round(context, tasks, start)
        return timed, execute([task for task in tasks if task.plan.client in timed.used])
    replies = list(execute(tasks))
    written = {r.client: r.bytes for r in replies if isinstance(r, ClientUpdate)}
    timed = timed_round(context, tasks, start, written)
    return timed, [reply for reply in replies if reply.client in timed.used]


def timed_round(
    context: ServerContext,
    tasks: Sequence[Task],
    start: int,
    written: Mapping[int, int] | None = None,
) -> TimedRound:
    """The round of these tasks, which begins at `start`.

    Args:
        context: the run.
        tasks: the tasks of all participants.
        start: when the round begins, in microseconds.
        written: the bytes of uploads, where they are not what the plan says.
    """
    fleet = context.fleet
    clients = frozenset(task.plan.client for task in tasks)
    if fleet is None:
        return TimedRound(used=clients)
    end = fleet.mode.end
    assert end is not None  # rounds that overlap are not synchronous
    parts = [
        visit(
            task.plan.client,
            fleet.timings[task.plan.client],
            _work(fleet, task, written or {}),
            start,
        )
        for task in tasks
    ]
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


def _work(fleet: RunFleet, task: Task, written: Mapping[int, int]) -> Work:
    """What a task takes by its plan, but with the bytes that are really sent."""
    work, exchanged = fleet.work_of(task.plan), exchange_bytes(task.extra)
    if task.download is not None:
        work = replace(work, down=task.download.bytes + exchanged)
    up = written.get(task.plan.client, 0)
    return replace(work, up=up + exchanged) if up else work
