"""Clients over worker processes, with one torch thread each.

Workers start once and hold the network, the shards and the shared data.  Messages between processes
are pickled with their tensors in shared memory, each tensor once.  The server's tensors are in one
block that lasts as long as the engine, so that a model is copied once per round and not once per
client.  The workers' answers use a few blocks that are passed back and forth, because touching new
shared memory for the first time costs ten times as much as a copy.

A worker that dies (killed, or out of memory) is replaced, and its clients are tried once more, each
alone.  A worker that is still busy long after its round ended without it hangs, and is killed.
"""

import multiprocessing
import os
import pickle  # between processes of this program; nothing from outside is unpickled
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Event
from time import monotonic

import torch
from torch import Tensor, nn

from fedp3.client.context import ClientContext
from fedp3.client.update import Job
from fedp3.config.plugins import Plugin, load_plugin
from fedp3.core.errors import InputError
from fedp3.core.types import Failure, RejectionCode, Reply, Task
from fedp3.data.inputs import map_tensors
from fedp3.data.shards import Shard
from fedp3.engines.base import Answer, Engine, States, attempt_all, group_jobs, too_late
from fedp3.engines.shared_memory import (
    Packed,
    growing_block,
    in_shared_memory,
    new_block,
    pack,
    unpack,
)
from fedp3.models.frozen import copy_network

AHEAD = 2  # groups that wait at the workers, so that no worker waits
CANNOT_START = (
    "no worker process could start. Each begins by importing your script again: "
    "put what the script does under `if __name__ == '__main__':`, or use workers=1"
)
DIED = "its process died twice (killed, or out of memory)"
NOT_REPEATED = (
    "a process died (killed, or out of memory), "
    "and a second try would draw noise that is not charged"
)

_Group = Sequence[Job]  # jobs that are computed as one
# Groups at work, each with the block for its answers, which must not be freed meanwhile.
_Running = dict[Future[Packed], tuple[_Group, Tensor | None]]


def pool(
    context: ClientContext,
    shards: Mapping[int, Shard],
    workers: int,
    states: States | None = None,
    deadline: float = 0,
    plugins: Sequence[Plugin] = (),
) -> Engine:
    """An engine over worker processes.

    Args:
        context: what all clients of the run share.
        shards: every client's samples.
        workers: the number of processes.
        states: the clients' states, from a checkpoint.
        deadline: seconds after which clients that still train are late; 0 means no limit.
        plugins: files that the workers import.
    """
    store = states or States()
    data = context.data  # in shared memory, workers map it instead of copying it
    x = map_tensors(in_shared_memory, data.x)
    data = replace(data, x=x, y=in_shared_memory(data.y))
    context = replace(context, data=data)
    processes = _Workers(_WorkerSetup(tuple(plugins), context, shards), workers)
    rounds = _Rounds(processes, at_once=workers + AHEAD, deadline=deadline)
    get_block = growing_block()

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        jobs = [Job(shards[task.plan.client], task, store.start(task)) for task in tasks]
        unfinished = {job.task.plan.client: job for job in jobs}
        groups = group_jobs(context, jobs, workers)
        rounds.replace_hanging_workers()

        def take(group: _Group, answers: Sequence[Answer]) -> Iterator[Reply]:
            for job, (reply, state) in zip(group, answers, strict=True):
                del unfinished[job.task.plan.client]
                store.keep(job.task.plan.client, state)
                yield reply

        try:
            messages = [[(job.task, job.state) for job in group] for group in groups]
            packed = pack(messages, get_block)
            for group, answers in rounds.answers(deque(zip(groups, packed, strict=True))):
                yield from take(group, answers)
        except BrokenProcessPool:
            if not processes.started.is_set():
                raise InputError(CANNOT_START) from None
            processes.replace()
            for job in list(unfinished.values()):
                repeatable = context.steps.repeatable
                answer = _try_alone(processes, job) if repeatable else _lost(job, NOT_REPEATED)
                yield from take([job], [answer])

    return Engine(execute=execute, states=store, close=rounds.close)


# --------------------------------------------------------------------------- in the main process


@dataclass(frozen=True, slots=True)
class _WorkerSetup:
    """What every worker is started with.

    The plugins come first: unpickling them imports the files that define parts of the context.
    """

    plugins: tuple[Plugin, ...]
    context: ClientContext
    shards: Mapping[int, Shard]


def _check_picklable(what: str, part: object) -> None:
    try:
        pickle.dumps(part)
    except Exception as error:
        raise InputError(
            f"workers > 1 need {what} that can be pickled: {error}; "
            "define its parts at the top level of a module, or use workers=1"
        ) from None


def _process_context() -> BaseContext:
    """How workers are started.

    A fork of this process would copy locks of its other threads.  Where the system can, workers are
    forks of a process that has imported torch and has no other threads: importing it takes longer
    than all else that a worker does at its start.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class _Workers:
    """The worker processes, which can be killed and replaced by new ones at any time."""

    def __init__(self, setup: _WorkerSetup, workers: int) -> None:
        _check_picklable("a network", setup.context.net)
        _check_picklable("a data set that is read lazily", setup.context.data.rows)
        _check_picklable("hooks", setup.context.hooks)
        self._setup, self._count = setup, workers
        self._processes = _process_context()
        self.started = self._processes.Event()  # set by every worker ready for its first task
        # One block of shared memory: a process cannot be sent a file for each of many tensors.
        context = setup.context
        (self._held,) = pack([(context.net, context.initial, setup.shards)], new_block)
        self._executor = self._new_executor()

    def _new_executor(self) -> ProcessPoolExecutor:
        setup = self._setup
        for plugin in setup.plugins:
            load_plugin(plugin.path, plugin.sha256)  # refuses a file that was changed meanwhile
        context = replace(setup.context, net=nn.Identity(), initial={})
        arguments = (setup.plugins, context, self._held, self.started)
        return ProcessPoolExecutor(self._count, self._processes, _start_worker, arguments)

    def submit(self, packed: Packed, block: Tensor | None) -> Future[Packed]:
        """Have a group of jobs computed; the block may be used for the answers."""
        return self._executor.submit(_compute, packed, block)

    def replace(self) -> None:
        """Kill all workers and start new ones."""
        self.close(wait=False)
        self._executor = self._new_executor()

    def close(self, wait: bool) -> None:
        """End the workers, after they have finished what they do or, without `wait`, now."""
        if not wait:  # Python 3.14 has `kill_workers` for this
            for process in list((self._executor._processes or {}).values()):
                process.kill()
        self._executor.shutdown(cancel_futures=True)


class _Rounds:
    """Hands groups of jobs to the workers, and collects their answers."""

    def __init__(self, workers: _Workers, at_once: int, deadline: float) -> None:
        self._workers, self._at_once, self._deadline = workers, at_once, deadline
        self._spare_blocks: list[Tensor] = []  # for answers
        self._overdue: dict[Future[Packed], float] = {}  # at work when its round ended -> when

    def replace_hanging_workers(self) -> None:
        """Kill workers that are busy with a round that ended long ago."""
        now = monotonic()
        for future, ended in self._overdue.items():
            if not future.done() and now > ended + self._deadline:
                self._workers.replace()
                self._overdue.clear()
                return

    def answers(
        self, waiting: deque[tuple[_Group, Packed]]
    ) -> Iterator[tuple[_Group, Sequence[Answer]]]:
        """The answers of these groups, as they are ready; those after the deadline are late."""
        training = all(job.task.kind == "train" for group, _ in waiting for job in group)
        timed = self._deadline > 0 and training
        end = monotonic() + self._deadline
        running: _Running = {}
        while waiting or running:
            while waiting and len(running) < self._at_once:
                group, packed = waiting.popleft()
                block = self._spare_blocks.pop() if self._spare_blocks else None
                running[self._workers.submit(packed, block)] = group, block
            seconds = max(0.0, end - monotonic()) if timed else None
            done, _ = wait(running, seconds, FIRST_COMPLETED)
            for future in done:
                packed = future.result()
                answers = unpack(packed, copied=True)
                self._spare_blocks.append(packed[1])
                group, _ = running.pop(future)
                yield group, answers
            if timed and monotonic() >= end:
                late = [group for group, _ in running.values()] + [group for group, _ in waiting]
                for group in late:
                    yield group, [(too_late(job.task, self._deadline), None) for job in group]
                self._overdue.update((future, end) for future in running if not future.cancel())
                return

    def close(self) -> None:
        """End the workers; the answer of a client that is late is not waited for."""
        self._workers.close(wait=all(future.done() for future in self._overdue))


def _try_alone(workers: _Workers, job: Job) -> Answer:
    """The answer of a client that was at work, or about to be, when a process died."""
    (packed,) = pack([[(job.task, job.state)]], new_block)
    try:
        answers: list[Answer] = unpack(workers.submit(packed, None).result())
    except BrokenProcessPool:
        workers.replace()
        return _lost(job, DIED)
    return answers[0]


def _lost(job: Job, reason: str) -> Answer:
    task = job.task
    failure = Failure(client=task.plan.client, t=task.t, reason=reason, code=RejectionCode.LOST)
    return failure, None


# --------------------------------------------------------------------------- in a worker


@dataclass(frozen=True, slots=True)
class _Worker:
    """What a worker process holds."""

    context: ClientContext
    shards: Mapping[int, Shard]
    # Blocks that are referred to from here need not be mapped again when they are used again.
    mapped: deque[Tensor]


_worker: _Worker | None = None  # set by `_start_worker`, in a worker process only


def _start_worker(
    plugins: Sequence[Plugin], context: ClientContext, held: Packed, started: Event
) -> None:
    global _worker
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    net, initial, shards = unpack(held)
    # Its tensors arrive in shared memory.  Workers share what is frozen and nothing else.
    context = replace(context, net=copy_network(net), initial=initial)
    _worker = _Worker(context, shards, deque(maxlen=4 * AHEAD))
    started.set()


def _end_with_parent() -> None:
    """End this process when its parent has ended; a parent that was killed cannot end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _compute(packed: Packed, block: Tensor | None) -> Packed:
    """The answers of a group of jobs, in the given block if they fit into it."""
    assert _worker is not None
    jobs = [Job(_worker.shards[task.plan.client], task, state) for task, state in unpack(packed)]

    def get_block(size: int) -> Tensor:
        return block if block is not None and size <= len(block) else new_block(size)

    (answers,) = pack([attempt_all(_worker.context, jobs)], get_block)
    _worker.mapped.extend([packed[1], answers[1]])
    return answers
