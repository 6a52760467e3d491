"""The client's side: K local steps from what the server sent (Algorithm 2).

Step k draws q_{i,k}, lays it on the layers outside L_i, and takes one SGD step on the local data:
    g = grad of the loss at q ⊙ W, masked;  g <- g min(1, C / ||g||);  v <- mu v + g + lambda W;  W <- W - gamma v
Masked coordinates get neither gradient, decay nor momentum.  Everything drawn is addressed by (round, client).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3 import masks as M
from fedp3.data import Dataset, batch
from fedp3.lookup import pick
from fedp3.prune import LOCAL_PRUNERS, StepMasks, draw_q, pruned_layers
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.types import ClientState, ClientUpdate, LayerMap, Local, Params, Pruning, Task

EVAL_BATCH = 48  # larger ones are slower on a CPU: their activations leave the cache


@dataclass(frozen=True, slots=True)
class Shard:
    """One client's samples, as indices into the pool."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all clients share and know before the first task."""

    net: nn.Module  # a workbench: its values mean nothing between two tasks
    layers: LayerMap
    data: Dataset
    local: Local
    pruning: Pruning
    initial: Params  # W_0, where personal layers begin
    seed: int
    device: str = "cpu"


SCHEDULES: Mapping[str, Callable[[float], float]] = {  # share of the run that has passed -> factor on lr
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def local_update(
    recipe: Recipe, shard: Shard, task: Task, state: ClientState | None
) -> tuple[ClientUpdate, ClientState | None]:
    """Algorithm 2 for one client: (what leaves it, what stays).  Writes to `recipe.net` only."""
    tensors = _named(recipe.net)
    _load(tensors, _start(recipe, task, state))
    metrics: dict[str, float] = {}
    if task.kind != "evaluate":
        with layers_draw_from(recipe.seed, Use.LAYER, task.t, task.plan.client):
            metrics |= _train(recipe, shard, task, tensors)
    if task.evaluate:
        metrics |= _score(recipe, shard)
    if task.kind != "train":
        return ClientUpdate(task.plan.client, task.t, {}, len(shard.train), metrics), None
    update = ClientUpdate(task.plan.client, task.t, _upload(recipe, task, tensors), len(shard.train), metrics)
    personal = [n for l, p in task.plan.layers.items() if p.send == "none" for n in recipe.layers.layers[l]]
    return update, ClientState(task.t, {n: tensors[n].detach().cpu().clone() for n in personal})


def _named(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _start(recipe: Recipe, task: Task, state: ClientState | None) -> Params:
    """W_{t,0}: what was sent, and the client's own layers where nothing was (Alg. 1, l. 8)."""
    own = recipe.initial if state is None else {**recipe.initial, **state.tensors}
    return {
        n: (own if p.send == "none" else task.weights)[n]
        for l, p in task.plan.layers.items()
        for n in recipe.layers.layers[l]
    }


def _load(tensors: Mapping[str, Tensor], W: Params) -> None:
    """Fill the workbench; what never travels (BatchNorm's counter) begins at zero, so no client sees another's."""
    with torch.no_grad():
        for n, w in tensors.items():
            if n in W:
                w.copy_(W[n])
            elif n.endswith("num_batches_tracked"):
                w.zero_()


def _upload(recipe: Recipe, task: Task, tensors: Mapping[str, Tensor]) -> Params:
    """The uploaded layers, zero at the coordinates that do not count (Alg. 1, l. 12)."""
    out = {}
    for l in task.plan.uploaded:
        for n in recipe.layers.layers[l]:
            w = tensors[n].detach().cpu().clone()
            if task.plan.layers[l].upload == "all":
                kept = M.uploaded(n, l, task.plan, task.masks, recipe.layers, recipe.pruning.stale)
            else:
                kept = M.active(n, task.masks, recipe.layers)
            out[n] = M.zero_pruned(w, kept)
    return out


# --------------------------------------------------------------------------- training


def batches(samples: int, local: Local, rng: torch.Generator) -> Iterator[Tensor]:
    """Positions of the K batches: shuffled epochs, the last batch of each as short as it comes."""
    per_epoch = math.ceil(samples / local.batch)
    for k in range(local.epochs * per_epoch if local.epochs else local.steps):
        if k % per_epoch == 0:
            order = torch.randperm(samples, generator=rng)
        j = k % per_epoch * local.batch
        yield order[j : j + local.batch]


def _train(recipe: Recipe, shard: Shard, task: Task, tensors: dict[str, Tensor]) -> dict[str, float]:
    """K steps of SGD on `recipe.net`; returns the mean loss and the realised density of Q."""
    local, pruning, at = recipe.local, recipe.pruning, (task.t, task.plan.client)
    trained = _prepare(recipe, task)
    hold = _hold(recipe, task, trained)
    local_prune = pick(LOCAL_PRUNERS, pruning.local, "local pruning")
    draw = stream(recipe.seed, Use.LOCAL_PRUNE, *at)
    augment = stream(recipe.seed, Use.AUGMENT, *at) if local.augment else None
    lr = local.lr * pick(SCHEDULES, local.schedule, "schedule")(_passed(task.t, local.rounds))
    velocity: dict[str, Tensor] = {}
    losses, density = [], []
    for rows in batches(len(shard.train), local, stream(recipe.seed, Use.BATCHES, *at)):
        where = shard.train[rows]
        x = batch(recipe.data, where, augment).to(recipe.device)
        y = recipe.data.y[where].to(recipe.device)
        step = local_prune(draw_q(pruning, draw), task.plan, task.masks, recipe.layers, draw)  # Alg. 2, l. 2
        loss, grads = _gradients(recipe.net, x, y, tensors, trained, step)  # Alg. 2, l. 3
        active = _combine(hold, step, trained, recipe.device)
        _sgd({n: tensors[n] for n in trained}, grads, velocity, active, local, lr)
        losses.append(loss)
        density.append(_density(step, task, recipe.layers))
    K = len(losses)
    return {"loss": math.fsum(losses) / K, "density": math.fsum(density) / K} if K else {}


def _passed(t: int, rounds: int) -> float:
    """The share of the run that has passed; a probe after the last round still learns as the last round did."""
    return min(t, max(rounds, 1) - 1) / max(rounds, 1)


def _prepare(recipe: Recipe, task: Task) -> list[str]:
    """Set the net up for this plan; returns the parameters that train.

    A frozen layer's BatchNorm uses its statistics and does not update them.
    """
    train = {n for l, p in task.plan.layers.items() if p.train for n in recipe.layers.layers[l]}
    recipe.net.train()
    for path, module in recipe.net.named_modules():
        own = [f"{path}.{n}" if path else n for n, _ in module.named_buffers(recurse=False)]
        if any(n in recipe.layers.buffers and n not in train for n in own):
            module.training = False  # not eval(): its children may train
    names = []
    for n, p in recipe.net.named_parameters():
        p.requires_grad_(n in train)
        if n in train:
            names.append(n)
    return names


def _hold(recipe: Recipe, task: Task, trained: list[str]) -> dict[str, Tensor]:
    """The masks that hold for the whole task: pruned coordinates stay zero."""
    dense = set() if recipe.pruning.hold else {n for l in pruned_layers(task.plan) for n in recipe.layers.layers[l]}
    kept = {n: M.active(n, task.masks, recipe.layers) for n in trained if n not in dense}
    return {n: M.as_bool(k, recipe.layers.shapes[n]).to(recipe.device) for n, k in kept.items() if k is not None}


def _combine(hold: Mapping[str, Tensor], step: StepMasks, trained: list[str], device: str) -> dict[str, Tensor]:
    active = dict(hold)
    for n in trained:
        if n in step.active:
            mask = step.active[n].to(device)
            active[n] = active[n] & mask if n in active else mask
    return active


def _gradients(
    net: nn.Module, x: Tensor, y: Tensor, tensors: Mapping[str, Tensor], trained: list[str], step: StepMasks
) -> tuple[float, list[Tensor]]:
    """The loss and its gradient at q ⊙ W; W itself is put back afterwards."""
    whole = {n: tensors[n].data for n in step.active}
    statistics = {n: w.clone() for n, w in whole.items() if not isinstance(tensors[n], nn.Parameter)}
    for n, w in whole.items():
        if n not in statistics:
            tensors[n].data = w * step.active[n].to(w.device)
    try:
        loss = F.cross_entropy(net(x), y)
        grads = torch.autograd.grad(loss, [tensors[n] for n in trained], materialize_grads=True)
    finally:
        for n, w in whole.items():
            tensors[n].data = w
    for n, before in statistics.items():  # units that were away leave no trace in running statistics
        tensors[n].copy_(torch.where(step.active[n].to(before.device), tensors[n], before))
    return float(loss.detach()), list(grads)


@torch.no_grad()
def _sgd(
    W: Mapping[str, Tensor],
    grads: list[Tensor],
    velocity: dict[str, Tensor],
    active: Mapping[str, Tensor],
    local: Local,
    lr: float,
) -> None:
    """One step in place; coordinates that are not active stay as they are, with their velocity."""
    for n, g in zip(W, grads, strict=True):
        if n in active:
            g.mul_(active[n])
    if local.clip_norm:
        norm = float(torch.stack(torch._foreach_norm(grads)).norm())
        if norm > local.clip_norm:
            torch._foreach_mul_(grads, local.clip_norm / (norm + 1e-6))
    if local.weight_decay:
        for (n, w), g in zip(W.items(), grads, strict=True):
            g.add_(w * active[n] if n in active else w, alpha=local.weight_decay)
    if local.momentum:
        for (n, w), g in zip(W.items(), grads, strict=True):
            v = velocity.setdefault(n, torch.zeros_like(w))
            new = local.momentum * v + g
            velocity[n] = torch.where(active[n], new, v) if n in active else new
            g.copy_(new * active[n] if n in active else new)
    torch._foreach_add_(list(W.values()), grads, alpha=-lr)


def _density(step: StepMasks, task: Task, layers: LayerMap) -> float:
    """The share of weights outside L_i that a step trains under, relative to what P_i kept."""
    names = [n for l in pruned_layers(task.plan) for n in layers.layers[l] if n in layers.prunable]
    if not step.active or not names:
        return 1.0
    kept = {n: M.active(n, task.masks, layers) for n in names}
    total = sum(M.count(kept[n], layers.shapes[n]) for n in names)
    on = sum(
        int((M.as_bool(kept[n], layers.shapes[n]) & step.active[n]).sum())
        if n in step.active
        else M.count(kept[n], layers.shapes[n])
        for n in names
    )
    return on / total


# --------------------------------------------------------------------------- scoring


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
