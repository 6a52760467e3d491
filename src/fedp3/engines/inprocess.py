"""Clients on this machine: one after another, or over worker processes.

Every client trains on one torch thread, so that its bits do not depend on how many work at once.
"""

import math
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import torch

from fedp3.client import Job, local_update, stacked_updates
from fedp3.recipe import Recipe, Shard
from fedp3.stacked import alike, most
from fedp3.types import ClientState, Failure, Reply, Task


@dataclass(frozen=True, slots=True)
class States:
    """What clients keep between rounds: for each the state its next task starts from, and the newest."""

    of: dict[int, dict[int, ClientState]] = field(default_factory=dict)  # client -> round -> state

    def start(self, task: Task) -> ClientState | None:
        """The state this task starts from; older ones will not be asked for again."""
        mine = self.of.get(task.plan.client, {})
        if task.kind == "train":
            self.of[task.plan.client] = {t: s for t, s in mine.items() if t == task.state_from}
        return mine.get(task.state_from)

    def keep(self, client: int, state: ClientState | None) -> None:
        """Remember what a client ended with."""
        if state is not None and state.tensors:
            self.of.setdefault(client, {})[state.t] = state


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attempt(recipe: Recipe, shard: Shard, task: Task, state: ClientState | None) -> tuple[Reply, ClientState | None]:
    """One client's answer; whatever goes wrong in it is its own failure, not the round's."""
    try:
        with one_thread():
            return local_update(recipe, shard, task, state)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.name}, line {last.lineno}"
        return Failure(task.plan.client, task.t, f"{type(error).__name__}: {error} ({where})"), None


def attempt_all(recipe: Recipe, jobs: Sequence[Job]) -> list[tuple[Reply, ClientState | None]]:
    """The answers of clients that go together; if they fail together, each alone, so that no other pays for one."""
    if len(jobs) > 1:
        with suppress(Exception), one_thread():
            return list(stacked_updates(recipe, jobs))
    return [attempt(recipe, job.shard, job.task, job.state) for job in jobs]


def together(recipe: Recipe, jobs: Sequence[Job], workers: int = 1) -> list[list[Job]]:
    """Jobs sorted into those that are computed as one: stacks of clients that are alike, else each on its own."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        key = alike(recipe, job.shard, job.task)
        groups.setdefault(job.task.plan.client if key is None else key, []).append(job)
    pieces = []
    for group in groups.values():
        size = min(most(recipe), math.ceil(len(group) / workers))
        pieces += [group[k : k + size] for k in range(0, len(group), size)]
    return pieces


def too_late(task: Task, deadline: float) -> Failure:
    """The reply of a client that did not make it in time."""
    return Failure(task.plan.client, task.t, f"no answer within {deadline:g} s", late=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """An `Execute`, the client states behind it, and how to shut it down."""

    execute: Callable[[Sequence[Task]], Iterator[Reply]]
    states: States
    close: Callable[[], None]
    away: bool = False  # clients keep their state where no checkpoint has it, and only of the last round asked for


def sequential(
    recipe: Recipe, shards: Mapping[int, Shard], states: States | None = None, deadline: float = 0
) -> Engine:
    """Clients one after another in this process; those whose turn comes after the deadline are late."""
    kept = states or States()

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        end = monotonic() + deadline
        jobs = [Job(shards[task.plan.client], task, kept.start(task)) for task in tasks]
        for some in together(recipe, jobs):
            if deadline > 0 and some[0].task.kind == "train" and monotonic() > end:
                yield from (too_late(job.task, deadline) for job in some)
                continue
            for job, (reply, state) in zip(some, attempt_all(recipe, some), strict=True):
                kept.keep(job.task.plan.client, state)
                yield reply

    return Engine(execute, kept, lambda: None)
