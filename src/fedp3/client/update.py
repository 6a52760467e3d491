"""The client's side of a round: from a task to an update (Algorithm 2 and Alg. 1, ll. 8-12)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedp3.client import stacked
from fedp3.client.context import ClientContext, shrink_context
from fedp3.client.passes import METHOD, OPTIMIZER, PERSONAL, LocalResult, run_passes
from fedp3.client.scoring import score
from fedp3.client.sgd import load_weights, named_tensors
from fedp3.core import masks as M
from fedp3.core.errors import RunError
from fedp3.core.types import ClientState, ClientUpdate, Group, Masks, Params, Task
from fedp3.data.shards import Shard
from fedp3.messages.codec import encode_tensors
from fedp3.messages.compression import RESIDUAL, coding_of, pack
from fedp3.messages.compressors import COMPRESSORS
from fedp3.models import shrinking
from fedp3.models.skipping import blocks_left_out, left_out

ClientAnswer = tuple[ClientUpdate, ClientState | None]  # what leaves a client, and what stays


@dataclass(frozen=True, slots=True)
class Job:
    """One client's part of a round: its samples, its task, and its state from an earlier round."""

    shard: Shard
    task: Task
    state: ClientState | None = None


def local_update(
    context: ClientContext, shard: Shard, task: Task, state: ClientState | None
) -> ClientAnswer:
    """Algorithm 2 for one client.  It writes to `context.net` only.

    Args:
        context: what all clients of the run share.
        shard: the client's samples.
        task: what the server requests.
        state: the client's state after round `task.state_from`.
    """
    job = Job(shard, task, state)
    if stacked.batch_key(context, shard, task) is not None:
        return stacked_updates(context, [job])[0]
    start = _start(context, task, state)
    trained_context, trained_task, small = _shrink(context, task, start)
    result = LocalResult(tensors=small, metrics={}, state={}, extra={})
    skipped = blocks_left_out(task.plan, context.layers)
    with _forward_context(context, trained_context, task), left_out(trained_context.net, skipped):
        if task.kind == "evaluate":
            load_weights(named_tensors(trained_context.net), small)
        else:
            earlier = state.tensors if state else {}
            result = run_passes(trained_context, shard, trained_task, small, earlier)
        scores: Mapping[str, float] = {}
        if task.evaluate:
            scores = score(trained_context, shard, trained=task.kind != "evaluate")
    return _outcome(context, job, start, replace(result, metrics={**result.metrics, **scores}))


def stacked_updates(context: ClientContext, jobs: Sequence[Job]) -> list[ClientAnswer]:
    """`local_update` for clients with the same `stacked.batch_key`, in one computation.

    The result is bit-identical to running each client alone.
    """
    _, starts, results = _train_stacked(context, jobs)
    return [_outcome(context, *parts) for parts in zip(jobs, starts, results, strict=True)]


def _train_stacked(
    context: ClientContext, jobs: Sequence[Job]
) -> tuple[ClientContext, list[Params], list[LocalResult]]:
    """The context of the (smaller) network of these clients, their W_{t,0}, and their results."""
    starts = [_start(context, job.task, job.state) for job in jobs]
    shrunk = [_shrink(context, job.task, start) for job, start in zip(jobs, starts, strict=True)]
    small_context, first = shrunk[0][0], jobs[0].task
    members = [
        stacked.Member(job.shard, task, small)
        for job, (_, task, small) in zip(jobs, shrunk, strict=True)
    ]
    W = stacked.stack(small_context, members)
    metrics: list[dict[str, float]] = [{} for _ in jobs]
    if first.kind != "evaluate":
        metrics = stacked.train(small_context, members, W)
    if first.evaluate:
        scores = stacked.score(small_context, members, W)
        metrics = [m | s for m, s in zip(metrics, scores, strict=True)]
    ends = stacked.unstack(W, small_context.layers)
    results = [
        LocalResult(tensors=end, metrics=m, state={}, extra={})
        for end, m in zip(ends, metrics, strict=True)
    ]
    return small_context, starts, results


def local_network(context: ClientContext, job: Job) -> tuple[nn.Module, Mapping[str, float]]:
    """The network that a task ends with and is scored on, and the scores if the task wants them.

    It is one that later tasks compute with, so that the caller copies it.  It has no pruned units,
    but it still has the blocks that the task skips.
    """
    if stacked.batch_key(context, job.shard, job.task) is None:
        update, _ = local_update(context, job.shard, job.task, job.state)
        return shrink_context(context, _pruned_units(context, job.task)).net, update.metrics
    trained, _, (result,) = _train_stacked(context, [job])
    load_weights(named_tensors(trained.net), result.tensors)
    return trained.net, result.metrics


# --------------------------------------------------------------------------- before training


def _start(context: ClientContext, task: Task, state: ClientState | None) -> Params:
    """W_{t,0}: the layers that were sent, and the client's personal ones (Alg. 1, l. 8)."""
    personal = [l for l, p in task.plan.layers.items() if p.send == "none"]
    needed = [*personal, *_needed_state(context, task)]
    if needed and state is None and task.state_from >= 0:
        raise RunError(
            f"this client's state of {needed[0]!r} after round {task.state_from + 1} is gone"
        )
    stored = context.initial if state is None else {**context.initial, **state.tensors}
    start = {}
    for l, p in task.plan.layers.items():
        for n in context.layers.layers[l]:
            if p.send == "skip":
                start[n] = torch.zeros(context.layers.shapes[n])
            elif p.send == "none":
                start[n] = stored[n]
            else:
                start[n] = task.weights[n]
    return start


def _needed_state(context: ClientContext, task: Task) -> list[str]:
    """The parts of a client's state that this task needs, besides personal layers."""
    exchange = context.hooks.exchange
    compressor = COMPRESSORS.pick(coding_of(task.plan, context.spec.compression).compress)
    needed = []
    if any(p.personal for p in context.hooks.passes_of(task.kind)):
        needed.append(PERSONAL)
    if exchange is not None and exchange.shift is not None and task.kind != "evaluate":
        needed.append(METHOD)
    if task.kind == "train" and compressor is not None and compressor.feedback:
        needed.append(RESIDUAL)
    if context.local.optimizer_state == "client" and task.kind != "evaluate":
        needed.append(OPTIMIZER)
    return [prefix.rstrip("/") for prefix in needed]


def _shrink(
    context: ClientContext, task: Task, start: Params
) -> tuple[ClientContext, Task, Params]:
    """Context, task and tensors of the network that is trained, which has no pruned units."""
    units = _pruned_units(context, task)
    if not units:
        return context, task, start
    small = shrinking.take_units(start, units, context.layers)
    return shrink_context(context, units), replace(task, masks=Masks()), small


def _pruned_units(context: ClientContext, task: Task) -> Mapping[Group, Tensor]:
    return task.masks.units if context.pruning.shrinks else {}


def _forward_context(
    context: ClientContext, trained: ClientContext, task: Task
) -> AbstractContextManager[None]:
    """The context in which the client's network runs, if the method has one."""
    forward, groups = context.hooks.forward, context.layers.groups
    if forward is None:
        return nullcontext()
    shares = {g: len(indices) / groups[g].units for g, indices in task.masks.units.items()}
    return forward(trained.net, shares)


# --------------------------------------------------------------------------- after training


def _outcome(context: ClientContext, job: Job, start: Params, result: LocalResult) -> ClientAnswer:
    """A client's update, and the state that stays (Alg. 1, l. 12)."""
    task, examples, units = job.task, len(job.shard.train), _pruned_units(context, job.task)
    if task.kind != "train":
        update = ClientUpdate(
            client=task.plan.client, t=task.t, tensors={}, examples=examples, metrics=result.metrics
        )
        return update, None

    def full_shaped(names: Iterable[str]) -> Params:
        trained = {n: result.tensors[n] for n in names}
        return shrinking.write_back(start, trained, units, context.layers) if units else trained

    packed = pack(
        _upload(context, task, full_shaped),
        task,
        context.layers,
        context.pruning.unfed_columns,
        context.spec.compression,
        context.seed,
        job.state.tensors if job.state else {},
    )
    update = ClientUpdate(
        client=task.plan.client,
        t=task.t,
        tensors=packed.tensors,
        examples=examples,
        metrics=result.metrics,
        extra={**result.extra, **packed.scales},
    )
    update = replace(update, bytes=_written_bytes(context, update, task))
    staying = [
        n
        for l, p in task.plan.layers.items()
        if p.send == "none" or (context.spec.continues and p.train and p.upload == "none")
        for n in context.layers.layers[l]
    ]
    return update, ClientState(task.t, {**full_shaped(staying), **result.state, **packed.residual})


def _written_bytes(context: ClientContext, update: ClientUpdate, task: Task) -> int:
    """The bytes of an update's tensors, where an entropy code decides; else 0."""
    spec = context.spec
    if not spec.compression.entropy:
        return 0
    unfed = spec.pruning.unfed_columns
    return len(encode_tensors(update, task, spec.layers, unfed, spec.compression))


def _upload(
    context: ClientContext, task: Task, full_shaped: Callable[[Iterable[str]], Params]
) -> Params:
    """The uploaded layers, zero at the coordinates that are not uploaded (Alg. 1, l. 12)."""
    upload = {}
    for l in task.plan.uploaded:
        for n, w in full_shaped(context.layers.layers[l]).items():
            if task.plan.layers[l].upload == "all":
                unfed = context.pruning.unfed_columns
                mask = M.uploaded(n, l, task.plan, task.masks, context.layers, unfed)
            else:
                mask = M.active(n, task.masks, context.layers)
            upload[n] = M.zero_pruned(w, mask)
    return upload
