"""The local steps of Algorithm 2: what a client does with one batch, on the whole net or on a smaller one.

Step k draws q_{i,k}, lays it on the layers outside L_i, and takes one SGD step on the local data:
    g = grad of the loss at q ⊙ W, masked;  g <- g min(1, C / ||g||);  v <- mu v + g + lambda W;  W <- W - gamma v
Masked coordinates get neither gradient, decay nor momentum.  Everything drawn is addressed by (round, client).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3 import masks as M
from fedp3 import submodel
from fedp3.data import batch
from fedp3.hooks import NO_PULL, Given, Pull
from fedp3.local_prune import LOCAL_PRUNERS, draw_q
from fedp3.lookup import pick
from fedp3.masks import Kept
from fedp3.privacy.mechanism import Gradient, draws, private_batches, private_gradient
from fedp3.prune import pruned_layers
from fedp3.recipe import Recipe, Shard, batches, rate, smaller
from fedp3.rng import Use, stream
from fedp3.types import Group, LayerMap, Masks, Params, Task
from fedp3.unsaved import given


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What all steps of one pass share."""

    recipe: Recipe
    task: Task
    hold: Mapping[str, Tensor]
    velocity: dict[str, Tensor]
    gradient: Gradient
    pull: Pull
    lr: float


def named(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def load(tensors: Mapping[str, Tensor], W: Params) -> None:
    """Fill the workbench; what never travels begins as given (BatchNorm's counter: at zero): nobody sees another's."""
    with torch.no_grad():
        for n, w in tensors.items():
            if n in W:
                w.copy_(W[n])
            elif n.endswith("num_batches_tracked"):
                w.zero_()
            elif (first := given(n, tensors)) is not None:
                w.data = first  # not by copy_: a buffer that grew would take it in any shape


def train(
    recipe: Recipe, shard: Shard, task: Task, tensors: dict[str, Tensor], pull: Pull = NO_PULL, at: tuple[int, ...] = ()
) -> dict[str, float]:
    """K steps of SGD on `recipe.net`; returns the mean loss and the realised density of Q.

    `at` addresses what is drawn: (round, client) unless said otherwise.
    """
    local, pruning, at = recipe.local, recipe.pruning, at or (task.t, task.plan.client)
    drawn, gradient = _source(recipe, shard, task, at)
    trained = _prepare(recipe, task)
    if not trained:
        return {}
    hold = held(recipe, task, trained)
    local_prune = pick(LOCAL_PRUNERS, pruning.local, "local pruning")
    draw = stream(recipe.seed, Use.LOCAL_PRUNE, *at)
    augment = draws(recipe.private, Use.AUGMENT, recipe.seed, *at) if local.augment else None
    here = _Stretch(recipe, task, hold, {}, gradient, pull, rate(local, task.t))
    losses, density = [], []
    for rows in drawn:
        where = shard.train[rows]
        x = batch(recipe.data, where, augment).to(recipe.device)
        y = recipe.data.y[where].to(recipe.device)
        step = local_prune(draw_q(pruning, draw, task.plan), task.plan, task.masks, recipe.layers, draw)  # Alg. 2, l. 2
        if step.units and submodel.physical(pruning):
            loss = (_distilled_step if recipe.hooks.distil else _small_step)(here, x, y, step.units)
        else:
            W, active = {n: tensors[n] for n in trained}, _combine(hold, step, trained, recipe)
            with _laid_on(recipe, tensors, step):
                loss, grads = gradient(recipe.net, x, y, W, active)  # Alg. 2, l. 3
            _sgd(here, W, grads, here.velocity, active, pull)
        losses.append(loss)
        density.append(_density(step, task, recipe.layers))
    means = {"loss": losses, "density": density} if recipe.private is None else {"density": density}
    return {name: math.fsum(each) / len(each) for name, each in means.items() if each}


def _source(recipe: Recipe, shard: Shard, task: Task, at: tuple[int, ...]) -> tuple[Iterator[Tensor], Gradient]:
    """Where the batches of a task come from, and its gradients: all that differs under LDP."""
    local, private, samples = recipe.local, recipe.private, len(shard.train)
    if private is None:
        return batches(samples, local, stream(recipe.seed, Use.BATCHES, *at)), _gradient(recipe, shard, task)
    where = (recipe.seed, *at)
    return private_batches(private, local, samples, *where), private_gradient(private, local, samples, *where)


def _small_step(s: _Stretch, x: Tensor, y: Tensor, units: Mapping[Group, Tensor]) -> float:
    """One step on the net that ordered dropout leaves, written back into the whole one."""
    recipe, velocity, layers = s.recipe, s.velocity, s.recipe.layers
    units = {g: at.to(recipe.device) for g, at in units.items()}
    here, small, whole = _lifted_out(recipe, units)
    trained = _prepare(here, s.task)
    W, active = {n: small[n] for n in trained}, submodel.cut(s.hold, units, layers)
    loss, grads = s.gradient(here.net, x, y, W, active)
    part = submodel.cut({n: v for n, v in velocity.items() if n in trained}, units, layers)
    pull = s.pull
    if pull:
        anchor, shift = (submodel.cut(of, units, layers) for of in (pull.anchor, pull.shift))
        pull = Pull(pull.mu, anchor, shift)
    _sgd(s, W, grads, part, active, pull)
    submodel.put_back(whole, {n: w.detach() for n, w in small.items()}, units, layers)
    if part:
        for n in trained:
            velocity.setdefault(n, torch.zeros_like(whole[n]))
        submodel.put_back(velocity, part, units, layers)
    return loss


def _lifted_out(recipe: Recipe, units: Mapping[Group, Tensor]) -> tuple[Recipe, dict[str, Tensor], dict[str, Tensor]]:
    """The recipe of the net with only these units, its tensors filled from the whole net's, and those."""
    here, layers = smaller(recipe, units), recipe.layers
    small, tensors = named(here.net), named(recipe.net)
    whole = {n: w.detach() for n, w in tensors.items()}  # what never travels goes on from step to step as well
    load(small, submodel.cut(whole, units, layers))
    return here, small, whole


def _distilled_step(s: _Stretch, x: Tensor, y: Tensor, units: Mapping[Group, Tensor]) -> float:
    """FjORD's step with self-distillation: all widths of the client on y, the drawn one on what they say of x."""
    recipe, layers = s.recipe, s.recipe.layers
    tensors = named(recipe.net)
    W = {n: tensors[n] for n in _prepare(recipe, s.task)}
    logits = recipe.net(x)
    loss = F.cross_entropy(logits, y)
    grads = list(torch.autograd.grad(loss, list(W.values()), materialize_grads=True))
    units = {g: at.to(recipe.device) for g, at in units.items()}
    here, small, _ = _lifted_out(recipe, units)
    mine = {n: small[n] for n in _prepare(here, s.task)}
    taught = F.cross_entropy(here.net(x), logits.detach().softmax(1))
    by_name = dict(zip(W, grads, strict=True))
    for n, g in zip(mine, torch.autograd.grad(taught, list(mine.values()), materialize_grads=True), strict=True):
        M.add_at(by_name[n], g, M.block(n, units, layers))
    _sgd(s, W, grads, s.velocity, s.hold, s.pull)
    return float(loss.detach())


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


def held(recipe: Recipe, task: Task, trained: list[str]) -> dict[str, Tensor]:
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


def _mean_gradient(net: nn.Module, x: Tensor, y: Tensor, W: Params, active: Params) -> tuple[float, list[Tensor]]:
    """The batch's mean loss and its gradient."""
    loss = F.cross_entropy(net(x), y)
    return float(loss.detach()), list(torch.autograd.grad(loss, list(W.values()), materialize_grads=True))


def labels_of(recipe: Recipe, shard: Shard) -> Tensor:
    """(classes,) bool: the labels among a client's training samples."""
    labels = torch.zeros(recipe.data.classes, dtype=torch.bool)
    labels[recipe.data.y[shard.train]] = True
    return labels.to(recipe.device)


def _gradient(recipe: Recipe, shard: Shard, task: Task) -> Gradient:
    """The gradient of the method's loss, or of the mean cross-entropy."""
    of = recipe.hooks.loss
    if of is None:
        return _mean_gradient
    given = Given(labels_of(recipe, shard), {n: w.to(recipe.device) for n, w in task.extra.items()})

    def gradient(net: nn.Module, x: Tensor, y: Tensor, W: Params, active: Params) -> tuple[float, list[Tensor]]:
        loss = of(net, x, y, given)
        return float(loss.detach()), list(torch.autograd.grad(loss, list(W.values()), materialize_grads=True))

    return gradient


@contextmanager
def _laid_on(recipe: Recipe, tensors: Mapping[str, Tensor], step: Masks) -> Iterator[None]:
    """Inside, the net is at q ⊙ W; W itself is put back afterwards."""
    kept = {n: M.active(n, step, recipe.layers) for n in recipe.layers.shapes} if step.units or step.weights else {}
    on = {n: M.as_bool(k, recipe.layers.shapes[n]).to(recipe.device) for n, k in kept.items() if k is not None}
    whole = {n: tensors[n].data for n in on}
    statistics = {n: w.clone() for n, w in whole.items() if n in recipe.layers.buffers}
    for n in whole.keys() - statistics.keys():
        tensors[n].data = whole[n].clone().mul_(on[n].to(whole[n].dtype))  # a product would lose channels-last
    try:
        yield
    finally:
        for n, w in whole.items():
            tensors[n].data = w
    for n, before in statistics.items():  # units that were away leave no trace in running statistics
        tensors[n].copy_(torch.where(on[n], tensors[n], before))


@torch.no_grad()
def _sgd(
    s: _Stretch,
    W: Mapping[str, Tensor],
    grads: list[Tensor],
    velocity: dict[str, Tensor],
    active: Mapping[str, Tensor],
    pull: Pull,
) -> None:
    """One step in place; coordinates that are not active stay as they are, with their velocity."""
    local = s.recipe.local
    for (n, w), g in zip(W.items(), grads, strict=True):
        if pull.mu:
            g.add_(w - pull.anchor[n], alpha=pull.mu)
        if n in pull.shift:
            g.add_(pull.shift[n])
    for n, g in zip(W, grads, strict=True):
        if n in active:
            g.mul_(active[n].to(g.dtype))  # mixed types are slower by more than the copy
    if local.clip_norm and s.recipe.private is None:  # else clipped already, by record
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
    torch._foreach_add_(list(W.values()), grads, alpha=-s.lr)


def _density(step: Masks, task: Task, layers: LayerMap) -> float:
    """The share of weights outside L_i that a step trains under, relative to what P_i kept."""
    names = [n for l in pruned_layers(task.plan) for n in layers.layers[l] if n in layers.prunable]
    if not (step.units or step.weights) or not names:
        return 1.0
    total = on = 0
    for n in names:
        kept, used = M.active(n, task.masks, layers), M.active(n, step, layers)
        total += M.count(kept, layers.shapes[n])
        on += _overlap(kept, used, layers.shapes[n])
    return on / total


def _overlap(a: Kept, b: Kept, shape: tuple[int, ...]) -> int:
    """How many coordinates both keep."""
    if a is None or b is None:
        return M.count(b if a is None else a, shape)
    if isinstance(a, Tensor) and not isinstance(b, Tensor):
        return int(M.take(a, b).count_nonzero())
    return int((M.as_bool(a, shape) & M.as_bool(b, shape)).count_nonzero())
