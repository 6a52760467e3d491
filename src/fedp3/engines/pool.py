"""Clients over worker processes, one torch thread each.

Workers start once and hold the net, the shards and the shared data.  What travels is pickled with its tensors laid
into shared memory, each once: the server's into one block that lasts as long as the engine, so that a model is copied
once per round and not once per client; a worker's answers into one of a few blocks that go back and forth, for the
first touch of new shared memory costs ten times a copy.  A worker that dies (out of memory, killed) is replaced and
its clients tried once more, each alone.  One that is busy long after its round closed without it hangs: it is ended.
"""

import copy
import multiprocessing
import os
import pickle  # to ask whether a net can travel; nothing from outside comes this way
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Event
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from fedp3.client import Job
from fedp3.engines.inprocess import Engine, States, attempt_all, together, too_late
from fedp3.engines.parcels import Parcel, in_shared_memory, lay, lift, new_block
from fedp3.errors import InputError
from fedp3.recipe import Recipe, Shard
from fedp3.types import ClientState, Failure, Reply, Task

Answer = tuple[Reply, ClientState | None]
_Waiting = deque[tuple[Sequence[Job], Parcel]]
_Late = dict[Future[Parcel], float]  # at work when its round closed -> when that was
AHEAD = 2  # tasks that wait at the workers, so that none of them does
NO_START = (
    "no worker process could start. They begin by importing your script again: put what it does under "
    "`if __name__ == '__main__':`, or take workers=1"
)
DIED = "its process died twice (out of memory, or killed)"
NOT_AGAIN = "a process died (out of memory, or killed), and a second try would draw noise that is not charged"
_here: dict[str, Any] = {}  # what a worker process holds


def pool(
    recipe: Recipe, shards: Mapping[int, Shard], workers: int, states: States | None = None, deadline: float = 0
) -> Engine:
    """An engine over `workers` processes; `deadline` seconds after a round began, those still training are late."""
    kept = states or States()
    recipe = _shared(recipe)
    crew = _Crew(recipe, shards, workers)
    room = _growing()
    spare: list[Tensor] = []  # blocks for answers
    late: _Late = {}

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        jobs = [Job(shards[task.plan.client], task, kept.start(task)) for task in tasks]
        unfinished = {job.task.plan.client: job for job in jobs}
        groups = together(recipe, jobs, workers)
        if any(monotonic() > since + deadline for f, since in late.items() if not f.done()):
            crew.replace()
            late.clear()

        def take(some: Sequence[Job], answers: Sequence[Answer]) -> Iterator[Reply]:
            for job, (reply, state) in zip(some, answers, strict=True):
                del unfinished[job.task.plan.client]
                kept.keep(job.task.plan.client, state)
                yield reply

        try:
            parcels = lay([[(job.task, job.state) for job in some] for some in groups], room)
            waiting: _Waiting = deque(zip(groups, parcels, strict=True))
            for some, answers in _finished(crew, waiting, workers + AHEAD, spare, deadline, late):
                yield from take(some, answers)
        except BrokenProcessPool:
            if not crew.started.is_set():
                raise InputError(NO_START) from None
            crew.replace()
            drawn = recipe.private is not None and recipe.private.randomness == "os"
            for job in list(unfinished.values()):
                yield from take([job], [_lost(job, NOT_AGAIN) if drawn else _alone(crew, job)])

    def close() -> None:
        crew.close(wait=all(f.done() for f in late))  # nobody waits for the answer of one that is late

    return Engine(execute, kept, close)


class _Crew:
    """The worker processes, which can be ended and replaced by new ones at any time."""

    def __init__(self, recipe: Recipe, shards: Mapping[int, Shard], workers: int) -> None:
        context = multiprocessing.get_context("spawn")  # fork would copy locks that other threads hold
        self.started = context.Event()  # set by every worker that is ready for its first task
        self._new = partial(_start, context, recipe, shards, workers, self.started)
        self._executor = self._new()

    def submit(self, parcel: Parcel, spare: Tensor | None) -> Future[Parcel]:
        return self._executor.submit(_work, parcel, spare)

    def replace(self) -> None:
        self.close(wait=False)
        self._executor = self._new()

    def close(self, wait: bool) -> None:
        """Once they have finished what they do or, without waiting, now (Python 3.14 has `kill_workers`)."""
        for process in [] if wait else list((self._executor._processes or {}).values()):
            process.kill()
        self._executor.shutdown(cancel_futures=True)


def _alone(crew: _Crew, job: Job) -> Answer:
    """The answer of a client that was at work, or about to be, when a process died."""
    (parcel,) = lay([[(job.task, job.state)]], new_block)
    try:
        answers: list[Answer] = lift(crew.submit(parcel, None).result())
    except BrokenProcessPool:
        crew.replace()
        return _lost(job, DIED)
    return answers[0]


def _lost(job: Job, why: str) -> Answer:
    return Failure(job.task.plan.client, job.task.t, why), None


def _growing() -> Callable[[int], Tensor]:
    """One block that is used again and again, replaced when it is too small."""
    block = new_block(0)

    def room(size: int) -> Tensor:
        nonlocal block
        if size > len(block):
            block = new_block(size)
        return block

    return room


def _shared(recipe: Recipe) -> Recipe:
    """The recipe with its data in shared memory, so that workers map it instead of copying it."""
    data = replace(recipe.data, x=in_shared_memory(recipe.data.x), y=in_shared_memory(recipe.data.y))
    return replace(recipe, data=data)


def _start(
    context: SpawnContext, recipe: Recipe, shards: Mapping[int, Shard], workers: int, started: Event
) -> ProcessPoolExecutor:
    try:
        pickle.dumps(recipe.net)
    except Exception as error:
        raise InputError(f"workers > 1 need a net that can be pickled; this one cannot: {error}") from None
    return ProcessPoolExecutor(workers, context, _prepare, (recipe, shards, started))


def _prepare(recipe: Recipe, shards: Mapping[int, Shard], started: Event) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = copy.deepcopy(recipe.net)  # tensors arrive in shared memory, and a workbench must not be shared
    _here.update(recipe=replace(recipe, net=own), shards=shards, mapped=deque(maxlen=4 * AHEAD))
    started.set()


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its workers to stop."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(parcel: Parcel, spare: Tensor | None) -> Parcel:
    """One group's answers, in the spare block if they fit."""
    shards = _here["shards"]
    jobs = [Job(shards[task.plan.client], task, state) for task, state in lift(parcel)]

    def room(size: int) -> Tensor:
        return spare if spare is not None and size <= len(spare) else new_block(size)

    (answers,) = lay([attempt_all(_here["recipe"], jobs)], room)
    _here["mapped"].extend([parcel[1], answers[1]])  # as long as they are known here they need not be mapped again
    return answers


def _finished(
    crew: _Crew,
    waiting: _Waiting,
    at_once: int,
    spare: list[Tensor],
    deadline: float,
    late: _Late,
) -> Iterator[tuple[Sequence[Job], Sequence[Answer]]]:
    """Answers as they come; those that miss the deadline are late, and `late` has them while they are at work."""
    timed = deadline > 0 and all(job.task.kind == "train" for some, _ in waiting for job in some)
    end = monotonic() + deadline
    running: dict[Future[Parcel], tuple[Sequence[Job], Tensor | None]] = {}  # with the block each was given
    while waiting or running:
        while waiting and len(running) < at_once:
            some, parcel = waiting.popleft()
            given = spare.pop() if spare else None
            running[crew.submit(parcel, given)] = some, given
        done, _ = wait(running, max(0.0, end - monotonic()) if timed else None, FIRST_COMPLETED)
        for f in done:
            text, block = f.result()
            answers = lift((text, block), copied=True)
            spare.append(block)
            yield running.pop(f)[0], answers
        if timed and monotonic() >= end:
            for some, _ in [*running.values(), *waiting]:
                yield some, [(too_late(job.task, deadline), None) for job in some]
            late.update((f, end) for f in running if not f.cancel())
            return
