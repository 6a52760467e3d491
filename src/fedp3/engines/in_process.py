"""Clients one after another in this process.

Every client trains on one torch thread, so that its bits do not depend on how many train at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic

from fedp3.client.context import ClientContext
from fedp3.client.update import Job, local_update
from fedp3.core.threads import one_thread
from fedp3.core.types import Reply, Task
from fedp3.data.shards import Shard
from fedp3.engines.base import Engine, States, attempt_all, group_jobs, too_late


def sequential(
    context: ClientContext,
    shards: Mapping[int, Shard],
    states: States | None = None,
    deadline: float = 0,
) -> Engine:
    """An engine that trains clients one after another, small ones as a stack.

    Args:
        context: what all clients of the run share.
        shards: every client's samples.
        states: the clients' states, from a checkpoint.
        deadline: seconds after which the clients that have not begun are late; 0 means no limit.
    """
    store = states or States()

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        end = monotonic() + deadline
        jobs = [Job(shards[task.plan.client], task, store.start(task)) for task in tasks]
        for group in group_jobs(context, jobs):
            if deadline > 0 and group[0].task.kind == "train" and monotonic() > end:
                yield from (too_late(job.task, deadline) for job in group)
                continue
            for job, (reply, state) in zip(group, attempt_all(context, group), strict=True):
                store.keep(job.task.plan.client, state)
                yield reply

    return Engine(execute=execute, states=store, close=lambda: None)


def debug(
    context: ClientContext, shards: Mapping[int, Shard], states: States | None = None
) -> Engine:
    """An engine for finding errors in a client's code, e.g. in a loss or a hook.

    Clients train one after another by autograd, never stacked.  An exception in their code is
    raised with its traceback; in other engines it becomes the failure of one client.
    """
    store = states or States()
    plain = replace(context, stacked=False)

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        for task in tasks:
            with one_thread():
                update, state = local_update(
                    plain, shards[task.plan.client], task, store.start(task)
                )
            store.keep(task.plan.client, state)
            yield update

    return Engine(execute=execute, states=store, close=lambda: None)
