"""What all engines share.

An engine carries tasks to clients and their replies back, and decides nothing.
"""

import math
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fedp3.client.context import ClientContext
from fedp3.client.stacked import batch_key, stack_limit
from fedp3.client.update import Job, local_update, stacked_updates
from fedp3.core.threads import one_thread
from fedp3.core.types import ClientState, Failure, Reply, Task
from fedp3.data.shards import Shard

Answer = tuple[Reply, ClientState | None]  # what leaves a client, and the state that stays


@dataclass(frozen=True, slots=True)
class States:
    """The states of clients between rounds.

    Each client has up to two: the one that its next task starts from, and the newest.
    """

    # client -> round -> state
    by_client: dict[int, dict[int, ClientState]] = field(default_factory=dict)

    def start(self, task: Task) -> ClientState | None:
        """The state that a task starts from; before training, the client's others are dropped."""
        states = self.by_client.get(task.plan.client, {})
        state = states.get(task.state_from)
        if task.kind == "train":
            self.by_client[task.plan.client] = {} if state is None else {task.state_from: state}
        return state

    def keep(self, client: int, state: ClientState | None) -> None:
        """Store the state that a client ended with."""
        if state is not None and state.tensors:
            self.by_client.setdefault(client, {})[state.t] = state


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running engine.

    Args:
        execute: takes tasks and yields replies.
        states: the states of its clients between rounds.
        close: shuts it down.
        remote_state: clients store their states on their own machines.  These are in no checkpoint,
            and a client has only the one of its last round.
    """

    execute: Callable[[Sequence[Task]], Iterator[Reply]]
    states: States
    close: Callable[[], None]
    remote_state: bool = False


def attempt(context: ClientContext, shard: Shard, task: Task, state: ClientState | None) -> Answer:
    """Run one client's task on one thread.

    An exception becomes a `Failure` with the reason and no state, so that other clients are not
    affected.
    """
    try:
        with one_thread():
            return local_update(context, shard, task, state)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        return Failure(client=task.plan.client, t=task.t, reason=reason), None


def attempt_all(context: ClientContext, jobs: Sequence[Job]) -> list[Answer]:
    """The answers of clients that are stacked.

    If the stack fails, each client is tried alone, so that one failure costs no other client.
    """
    if len(jobs) > 1:
        with suppress(Exception), one_thread():
            return list(stacked_updates(context, jobs))
    return [attempt(context, job.shard, job.task, job.state) for job in jobs]


def group_jobs(context: ClientContext, jobs: Sequence[Job], workers: int = 1) -> list[list[Job]]:
    """Jobs in groups, each of which is computed as one.

    A group is a stack of clients with the same key, or one client that cannot be stacked.

    Args:
        context: what all clients of the run share.
        jobs: one per client.
        workers: number of processes that the clients of a stack are divided among.
    """
    by_key: dict[Hashable, list[Job]] = {}
    for job in jobs:
        key = batch_key(context, job.shard, job.task)
        by_key.setdefault(job.task.plan.client if key is None else key, []).append(job)
    groups = []
    for alike in by_key.values():
        size = min(stack_limit(context), math.ceil(len(alike) / workers))
        groups += [alike[k : k + size] for k in range(0, len(alike), size)]
    return groups


def too_late(task: Task, deadline: float) -> Failure:
    """The reply of a client that missed the deadline."""
    return Failure(
        client=task.plan.client, t=task.t, reason=f"no answer within {deadline:g} s", late=True
    )
