"""Clients over worker processes, one torch thread each.

Workers start once and hold the net and the shared data.  A round's distinct tensors are laid into one block of shared
memory that tasks point into, so a model is copied once per round and not once per client.  A worker that dies
(out of memory, killed) is replaced and its task tried once more alone; if that fails too, that client failed.
"""

import contextlib
import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pickle import dumps  # how processes pass things to each other; nothing from outside comes this way
from time import monotonic
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors pass between processes
from torch import Tensor

from fedp3.client import Recipe, Shard
from fedp3.engines.inprocess import Engine, States, attempt, too_late
from fedp3.errors import InputError
from fedp3.types import ClientState, ClientUpdate, Failure, Reply, Task

Place = tuple[int, tuple[int, ...]]  # where a tensor begins in the block, and its shape
_here: dict[str, Any] = {}  # what a worker process holds


@dataclass(frozen=True, slots=True)
class _Packed:
    """A task whose tensors lie in a shared block of float32."""

    task: Task  # without weights
    block: Tensor
    places: Mapping[str, Place]


def pool(
    recipe: Recipe, shards: Mapping[int, Shard], workers: int, states: States | None = None, deadline: float = 0
) -> Engine:
    """An engine over `workers` processes; `deadline` seconds after a round began, those still training are late."""
    kept = states or States()
    recipe = _shared(recipe)
    executor = _start(recipe, shards, workers)

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        nonlocal executor
        unfinished = {task.plan.client: task for task in tasks}
        packed = _pack(tasks)
        starts = {task.plan.client: kept.start(task) for task in tasks}
        try:
            futures = [executor.submit(_work, p, starts[p.task.plan.client]) for p in packed]
            for i, (reply, state) in _finished(futures, tasks, deadline):
                del unfinished[i]
                kept.keep(i, state)
                yield reply
        except BrokenProcessPool:
            for p in packed:
                if p.task.plan.client in unfinished:
                    executor.shutdown(cancel_futures=True)
                    executor = _start(recipe, shards, workers)
                    reply, state = _alone(executor, p, starts[p.task.plan.client])
                    kept.keep(p.task.plan.client, state)
                    yield reply

    def close() -> None:
        executor.shutdown(wait=True, cancel_futures=True)

    return Engine(execute, kept, close)


def _shared(recipe: Recipe) -> Recipe:
    """The recipe with its data in shared memory, so that workers map it instead of copying it."""
    data = replace(recipe.data, x=_in_shared_memory(recipe.data.x), y=_in_shared_memory(recipe.data.y))
    return replace(recipe, data=data)


def _in_shared_memory(w: Tensor) -> Tensor:
    shared: Tensor = w.share_memory_()  # type: ignore[no-untyped-call]
    return shared


def _start(recipe: Recipe, shards: Mapping[int, Shard], workers: int) -> ProcessPoolExecutor:
    try:
        dumps(recipe.net)
    except Exception as error:
        raise InputError(f"workers > 1 need a net that can be pickled; this one cannot: {error}") from None
    context = multiprocessing.get_context("spawn")  # fork would copy locks that other threads hold
    return ProcessPoolExecutor(workers, context, _prepare, (recipe, shards))


def _prepare(recipe: Recipe, shards: Mapping[int, Shard]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = copy.deepcopy(recipe.net)  # tensors arrive in shared memory, and a workbench must not be shared
    _here.update(recipe=replace(recipe, net=own), shards=shards)


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its workers to stop."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(packed: _Packed, state: ClientState | None) -> tuple[Reply, ClientState | None]:
    weights = {n: packed.block[at : at + _numel(shape)].view(shape) for n, (at, shape) in packed.places.items()}
    task = replace(packed.task, weights=weights)
    return attempt(_here["recipe"], _here["shards"][task.plan.client], task, state)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _pack(tasks: Sequence[Task]) -> list[_Packed]:
    """Lay every distinct tensor of these tasks into one shared block."""
    known: dict[int, tuple[int, Tensor]] = {}
    end = 0
    for task in tasks:
        for w in task.weights.values():
            if id(w) not in known:
                known[id(w)] = (end, w)
                end += w.numel()
    block = _in_shared_memory(torch.empty(end))
    for at, w in known.values():
        block[at : at + w.numel()] = w.flatten()
    return [
        _Packed(
            replace(task, weights={}),
            block,
            {n: (known[id(w)][0], tuple(w.shape)) for n, w in task.weights.items()},
        )
        for task in tasks
    ]


Answer = tuple[Reply, ClientState | None]


def _finished(
    futures: Sequence["Future[Answer]"], tasks: Sequence[Task], deadline: float
) -> Iterator[tuple[int, Answer]]:
    """Answers as they come; those that miss the deadline are late."""
    task_of = dict(zip(futures, tasks, strict=True))
    timed = deadline > 0 and all(task.kind == "train" for task in tasks)
    end = monotonic() + deadline
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, max(0.0, end - monotonic()) if timed else None, FIRST_COMPLETED)
        for f in done:
            yield task_of[f].plan.client, _own(f.result())
        if not done:
            for f in waiting:
                f.cancel()
                yield task_of[f].plan.client, (too_late(task_of[f], deadline), None)
            return


def _own(answer: Answer) -> Answer:
    """The answer in this process's own memory: shared tensors hold a file open each."""
    reply, state = answer
    if isinstance(reply, ClientUpdate):
        reply = replace(reply, tensors={n: w.clone() for n, w in reply.tensors.items()})
    if state is not None:
        state = replace(state, tensors={n: w.clone() for n, w in state.tensors.items()})
    return reply, state


def _alone(executor: ProcessPoolExecutor, packed: _Packed, state: ClientState | None) -> Answer:
    with contextlib.suppress(BrokenProcessPool):
        return _own(executor.submit(_work, packed, state).result())
    i, t = packed.task.plan.client, packed.task.t
    return Failure(i, t, "its process died twice (out of memory, or killed)"), None
