"""The client's side of a round: from a task to an update (Algorithm 2 and Alg. 1, ll. 8-12)."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from fedp3 import masks as M
from fedp3 import submodel
from fedp3.data import batch
from fedp3.rng import Use, layers_draw_from
from fedp3.steps import SCHEDULES, Recipe, Shard, batches, load, named, smaller, train
from fedp3.types import ClientState, ClientUpdate, Masks, Params, Task

__all__ = ["EVAL_BATCH", "SCHEDULES", "Recipe", "Shard", "batches", "local_update"]

EVAL_BATCH = 48  # larger ones are slower on a CPU: their activations leave the cache


def local_update(
    recipe: Recipe, shard: Shard, task: Task, state: ClientState | None
) -> tuple[ClientUpdate, ClientState | None]:
    """Algorithm 2 for one client: (what leaves it, what stays).  Writes to `recipe.net` only."""
    start = _start(recipe, task, state)
    units = task.masks.units if submodel.physical(recipe.pruning) else {}
    here, asked = smaller(recipe, units), replace(task, masks=Masks()) if units else task
    tensors = named(here.net)
    load(tensors, submodel.cut(start, units, recipe.layers) if units else start)
    metrics: dict[str, float] = {}
    if task.kind != "evaluate":
        with layers_draw_from(recipe.seed, Use.LAYER, task.t, task.plan.client):
            metrics |= train(here, shard, asked, tensors)
    if task.evaluate:
        metrics |= _score(here, shard)
    if task.kind != "train":
        return ClientUpdate(task.plan.client, task.t, {}, len(shard.train), metrics), None

    def end(names: Iterable[str]) -> Params:
        mine = {n: tensors[n].detach().cpu().clone() for n in names}
        return submodel.write_back(start, mine, units, recipe.layers) if units else mine

    update = ClientUpdate(task.plan.client, task.t, _upload(recipe, task, end), len(shard.train), metrics)
    personal = [n for l, p in task.plan.layers.items() if p.send == "none" for n in recipe.layers.layers[l]]
    return update, ClientState(task.t, end(personal))


def _start(recipe: Recipe, task: Task, state: ClientState | None) -> Params:
    """W_{t,0}: what was sent, and the client's own layers where nothing was (Alg. 1, l. 8)."""
    own = recipe.initial if state is None else {**recipe.initial, **state.tensors}
    return {
        n: (own if p.send == "none" else task.weights)[n]
        for l, p in task.plan.layers.items()
        for n in recipe.layers.layers[l]
    }


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
def _score(recipe: Recipe, shard: Shard) -> dict[str, float]:
    """Correct answers, loss and size on the client's own test part."""
    recipe.net.eval()
    correct, loss = 0, 0.0
    for at in torch.split(shard.test, EVAL_BATCH):
        y = recipe.data.y[at].to(recipe.device)
        logits = recipe.net(batch(recipe.data, at).to(recipe.device))
        correct += int((logits.argmax(1) == y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return {"correct": correct, "tested": len(shard.test), "test_loss": loss}
