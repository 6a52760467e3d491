"""The local steps of Algorithm 2: what a client does with one batch, on the whole net or on a smaller one.

Step k draws q_{i,k}, lays it on the layers outside L_i, and takes one SGD step on the local data:
    g = grad of the loss at q ⊙ W, masked;  g <- g min(1, C / ||g||);  v <- mu v + g + lambda W;  W <- W - gamma v
Masked coordinates get neither gradient, decay nor momentum.  Everything drawn is addressed by (round, client).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3 import masks as M
from fedp3 import submodel
from fedp3.data import Dataset, batch
from fedp3.lookup import pick
from fedp3.masks import Kept
from fedp3.prune import LOCAL_PRUNERS, draw_q, pruned_layers
from fedp3.rng import Use, stream
from fedp3.types import Group, LayerMap, Local, Masks, Params, Pruning, Task


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


def smaller(recipe: Recipe, units: Mapping[Group, Tensor]) -> Recipe:
    """The recipe on the net that is left when only these units are kept."""
    if not units:
        return recipe
    counts = submodel.counts_of(units)
    net = submodel.small_net(recipe.net, recipe.layers, counts)
    return replace(recipe, net=net, layers=submodel.shrink_map(recipe.layers, counts))


def named(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def load(tensors: Mapping[str, Tensor], W: Params) -> None:
    """Fill the workbench; what never travels (BatchNorm's counter) begins at zero, so no client sees another's."""
    with torch.no_grad():
        for n, w in tensors.items():
            if n in W:
                w.copy_(W[n])
            elif n.endswith("num_batches_tracked"):
                w.zero_()


def batches(samples: int, local: Local, rng: torch.Generator) -> Iterator[Tensor]:
    """Positions of the K batches: shuffled epochs, the last batch of each as short as it comes."""
    per_epoch = math.ceil(samples / local.batch)
    for k in range(local.epochs * per_epoch if local.epochs else local.steps):
        if k % per_epoch == 0:
            order = torch.randperm(samples, generator=rng)
        j = k % per_epoch * local.batch
        yield order[j : j + local.batch]


def train(recipe: Recipe, shard: Shard, task: Task, tensors: dict[str, Tensor]) -> dict[str, float]:
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
        if step.units and submodel.physical(pruning):
            loss = _small_step(recipe, task, x, y, step.units, hold, velocity, lr)
        else:
            loss, grads = _gradients(recipe, x, y, tensors, trained, step)  # Alg. 2, l. 3
            _sgd({n: tensors[n] for n in trained}, grads, velocity, _combine(hold, step, trained, recipe), local, lr)
        losses.append(loss)
        density.append(_density(step, task, recipe.layers))
    K = len(losses)
    return {"loss": math.fsum(losses) / K, "density": math.fsum(density) / K} if K else {}


def _passed(t: int, rounds: int) -> float:
    """The share of the run that has passed; a probe after the last round still learns as the last round did."""
    return min(t, max(rounds, 1) - 1) / max(rounds, 1)


def _small_step(
    recipe: Recipe,
    task: Task,
    x: Tensor,
    y: Tensor,
    units: Mapping[Group, Tensor],
    hold: Mapping[str, Tensor],
    velocity: dict[str, Tensor],
    lr: float,
) -> float:
    """One step on the net that ordered dropout leaves, written back into the whole one."""
    units = {g: at.to(recipe.device) for g, at in units.items()}
    here, layers = smaller(recipe, units), recipe.layers
    small, whole = named(here.net), {n: named(recipe.net)[n].detach() for n in layers.shapes}
    load(small, submodel.cut(whole, units, layers))
    trained = _prepare(here, task)
    loss, grads = _gradients(here, x, y, small, trained, Masks())
    part = submodel.cut({n: v for n, v in velocity.items() if n in trained}, units, layers)
    _sgd({n: small[n] for n in trained}, grads, part, submodel.cut(hold, units, layers), recipe.local, lr)
    submodel.put_back(whole, {n: small[n].detach() for n in layers.shapes}, units, layers)
    if part:
        for n in trained:
            velocity.setdefault(n, torch.zeros_like(whole[n]))
        submodel.put_back(velocity, part, units, layers)
    return loss


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


def _combine(hold: Mapping[str, Tensor], step: Masks, trained: list[str], recipe: Recipe) -> dict[str, Tensor]:
    """What is active at this step: held coordinates that the step also uses."""
    active = dict(hold)
    for n in trained:
        kept = M.active(n, step, recipe.layers)
        if kept is not None:
            mask = M.as_bool(kept, recipe.layers.shapes[n]).to(recipe.device)
            active[n] = active[n] & mask if n in active else mask
    return active


def _gradients(
    recipe: Recipe, x: Tensor, y: Tensor, tensors: Mapping[str, Tensor], trained: list[str], step: Masks
) -> tuple[float, list[Tensor]]:
    """The loss and its gradient at q ⊙ W; W itself is put back afterwards."""
    kept = {n: M.active(n, step, recipe.layers) for n in recipe.layers.shapes} if step.units or step.weights else {}
    on = {n: M.as_bool(k, recipe.layers.shapes[n]).to(recipe.device) for n, k in kept.items() if k is not None}
    whole = {n: tensors[n].data for n in on}
    statistics = {n: w.clone() for n, w in whole.items() if n in recipe.layers.buffers}
    for n in whole.keys() - statistics.keys():
        tensors[n].data = whole[n] * on[n]
    try:
        loss = F.cross_entropy(recipe.net(x), y)
        grads = torch.autograd.grad(loss, [tensors[n] for n in trained], materialize_grads=True)
    finally:
        for n, w in whole.items():
            tensors[n].data = w
    for n, before in statistics.items():  # units that were away leave no trace in running statistics
        tensors[n].copy_(torch.where(on[n], tensors[n], before))
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


def _density(step: Masks, task: Task, layers: LayerMap) -> float:
    """The share of weights outside L_i that a step trains under, relative to what P_i kept."""
    names = [n for l in pruned_layers(task.plan) for n in layers.layers[l] if n in layers.prunable]
    if not (step.units or step.weights) or not names:
        return 1.0
    total = on = 0
    for n in names:
        kept, used = M.active(n, task.masks, layers), M.active(n, step, layers)
        total += M.count(kept, layers.shapes[n])
        both = kept if used is None else used if kept is None else _both(kept, used, layers.shapes[n])
        on += M.count(both, layers.shapes[n])
    return on / total


def _both(a: Kept, b: Kept, shape: tuple[int, ...]) -> Tensor:
    return M.as_bool(a, shape) & M.as_bool(b, shape)
