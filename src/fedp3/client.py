"""The client's side of a round: from a task to an update (Algorithm 2 and Alg. 1, ll. 8-12)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedp3 import masks as M
from fedp3 import stacked, submodel
from fedp3.compress import RESIDUAL, WAYS, pack
from fedp3.data import batch
from fedp3.errors import RunError
from fedp3.passes import METHOD, OWN, Ended, run_passes, scaling
from fedp3.recipe import EVAL_BATCH, Recipe, Shard, smaller
from fedp3.steps import labels_of, load, named
from fedp3.types import ClientState, ClientUpdate, Group, Masks, Params, Task

Answer = tuple[ClientUpdate, ClientState | None]  # what leaves a client, and what stays


@dataclass(frozen=True, slots=True)
class Job:
    """One client's part of a round: its samples, its task, and what it kept from an earlier round."""

    shard: Shard
    task: Task
    state: ClientState | None = None


def local_update(recipe: Recipe, shard: Shard, task: Task, state: ClientState | None) -> Answer:
    """Algorithm 2 for one client.  Writes to `recipe.net` only."""
    job = Job(shard, task, state)
    if stacked.alike(recipe, shard, task) is not None:
        return stacked_updates(recipe, [job])[0]
    start = _start(recipe, task, state)
    here, asked, small = _cut(recipe, task, start)
    ended = Ended(small, {}, {}, {})
    with scaling(here.net, _shares(recipe, task)):
        if task.kind == "evaluate":
            load(named(here.net), small)
        else:
            ended = run_passes(here, shard, asked, small, state.tensors if state else {})
        scores = _score(here, shard, trained=task.kind != "evaluate") if task.evaluate else {}
    return _answer(recipe, job, start, replace(ended, metrics={**ended.metrics, **scores}))


def stacked_updates(recipe: Recipe, jobs: Sequence[Job]) -> list[Answer]:
    """The same for clients that `stacked.alike` finds alike, in one computation and with the same bits."""
    starts = [_start(recipe, job.task, job.state) for job in jobs]
    cuts = [_cut(recipe, job.task, start) for job, start in zip(jobs, starts, strict=True)]
    here, first = cuts[0][0], jobs[0].task
    members = [stacked.Member(job.shard, asked, small) for job, (_, asked, small) in zip(jobs, cuts, strict=True)]
    W = stacked.stack(here, members)
    metrics: list[dict[str, float]] = [{} for _ in jobs]
    if first.kind != "evaluate":
        metrics = stacked.train(here, members, W)
    if first.evaluate:
        metrics = [m | s for m, s in zip(metrics, stacked.score(here, members, W), strict=True)]
    ends = stacked.unstack(W, here.layers)
    ended = [Ended(end, m, {}, {}) for end, m in zip(ends, metrics, strict=True)]
    return [_answer(recipe, *each) for each in zip(jobs, starts, ended, strict=True)]


def _cut(recipe: Recipe, task: Task, start: Params) -> tuple[Recipe, Task, Params]:
    """Recipe, task and tensors of the net that is really trained: smaller where whole units are pruned."""
    units = _units(recipe, task)
    if not units:
        return recipe, task, start
    return smaller(recipe, units), replace(task, masks=Masks()), submodel.cut(start, units, recipe.layers)


def _units(recipe: Recipe, task: Task) -> Mapping[Group, Tensor]:
    return task.masks.units if submodel.physical(recipe.pruning) else {}


def _shares(recipe: Recipe, task: Task) -> dict[Group, float]:
    """The share of each group's units that this client has, where its hooks ask for it."""
    units = task.masks.units if recipe.hooks.scale else {}
    return {g: len(at) / recipe.layers.groups[g].units for g, at in units.items()}


def _answer(recipe: Recipe, job: Job, start: Params, ended: Ended) -> Answer:
    """What a client sends and keeps, from what its training left (Alg. 1, l. 12)."""
    task, examples, units = job.task, len(job.shard.train), _units(recipe, job.task)
    if task.kind != "train":
        return ClientUpdate(task.plan.client, task.t, {}, examples, ended.metrics), None

    def end(names: Iterable[str]) -> Params:
        mine = {n: ended.tensors[n] for n in names}
        return submodel.write_back(start, mine, units, recipe.layers) if units else mine

    kept = job.state.tensors if job.state else {}
    whole, stale = _upload(recipe, task, end), recipe.pruning.stale
    packed = pack(whole, task, recipe.layers, stale, recipe.compression, recipe.seed, kept)
    extra = {**ended.extra, **packed.scales}
    update = ClientUpdate(task.plan.client, task.t, packed.tensors, examples, ended.metrics, extra)
    personal = [n for l, p in task.plan.layers.items() if p.send == "none" for n in recipe.layers.layers[l]]
    return update, ClientState(task.t, {**end(personal), **ended.stays, **packed.residual})


def _start(recipe: Recipe, task: Task, state: ClientState | None) -> Params:
    """W_{t,0}: what was sent, and the client's own layers where nothing was (Alg. 1, l. 8)."""
    personal = [l for l, p in task.plan.layers.items() if p.send == "none"]
    kept = [*personal, *_keeps(recipe, task)]
    if kept and state is None and task.state_from >= 0:
        raise RunError(f"what this client kept of {kept[0]!r} after round {task.state_from + 1} is gone")
    own = recipe.initial if state is None else {**recipe.initial, **state.tensors}
    skipped = {n for l, p in task.plan.layers.items() if p.send == "skip" for n in recipe.layers.layers[l]}
    return {
        n: torch.zeros(recipe.layers.shapes[n]) if n in skipped else (own if p.send == "none" else task.weights)[n]
        for l, p in task.plan.layers.items()
        for n in recipe.layers.layers[l]
    }


def _keeps(recipe: Recipe, task: Task) -> list[str]:
    """What hooks make a client keep from round to round, besides layers."""
    own = any(p.own for p in recipe.hooks.stretches(task.kind))
    method = recipe.hooks.exchange is not None and recipe.hooks.exchange.shift is not None and task.kind != "evaluate"
    how = WAYS[recipe.compression.kind] if task.kind == "train" else None
    found = {OWN: own, METHOD: method, RESIDUAL: how is not None and how.remembers}
    return [name.rstrip("/") for name, needed in found.items() if needed]


def _upload(recipe: Recipe, task: Task, end: Callable[[Iterable[str]], Params]) -> Params:
    """The uploaded layers, zero at the coordinates that do not count (Alg. 1, l. 12)."""
    out = {}
    for l in task.plan.uploaded:
        for n, w in end(recipe.layers.layers[l]).items():
            if task.plan.layers[l].upload == "all":
                kept = M.uploaded(n, l, task.plan, task.masks, recipe.layers, recipe.pruning.stale)
            else:
                kept = M.active(n, task.masks, recipe.layers)
            out[n] = M.zero_pruned(w, kept)
    return out


@torch.inference_mode()
def _score(recipe: Recipe, shard: Shard, *, trained: bool) -> dict[str, float]:
    """Correct answers, loss and size on the client's own test part."""
    recipe.net.eval()
    correct, loss = 0, 0.0
    answer, labels = recipe.hooks.answer if trained else None, labels_of(recipe, shard)
    for at in torch.split(shard.test, EVAL_BATCH) if len(shard.test) else ():  # of nothing it makes one empty batch
        y = recipe.data.y[at].to(recipe.device)
        logits = recipe.net(batch(recipe.data, at).to(recipe.device))
        logits = logits if answer is None else answer(logits, labels)
        correct += int((logits.argmax(1) == y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return {"correct": correct, "tested": len(shard.test), "test_loss": loss}
