"""Clients on this machine: one after another, or over worker processes.

Every client trains on one torch thread, so that its bits do not depend on how many work at once.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import torch

from fedp3.client import Recipe, Shard, local_update
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


def too_late(task: Task, deadline: float) -> Failure:
    """The reply of a client that did not make it in time."""
    return Failure(task.plan.client, task.t, f"no answer within {deadline:g} s", late=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """An `Execute`, the client states behind it, and how to shut it down."""

    execute: Callable[[Sequence[Task]], Iterator[Reply]]
    states: States
    close: Callable[[], None]


def sequential(
    recipe: Recipe, shards: Mapping[int, Shard], states: States | None = None, deadline: float = 0
) -> Engine:
    """Clients one after another in this process; those whose turn comes after the deadline are late."""
    kept = states or States()

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        end = monotonic() + deadline
        for task in tasks:
            i = task.plan.client
            if deadline > 0 and task.kind == "train" and monotonic() > end:
                yield too_late(task, deadline)
                continue
            reply, state = attempt(recipe, shards[i], task, kept.start(task))
            kept.keep(i, state)
            yield reply

    return Engine(execute, kept, lambda: None)
