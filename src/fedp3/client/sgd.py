"""The local steps of Algorithm 2, on a client's full network or on a smaller one.

Step k draws q_{i,k}, applies it to the layers outside L_i, and takes one step on local data:

    g <- grad of the loss at q ⊙ W, masked
    g <- g min(1, C / ||g||)
    v <- mu v + g + lambda W
    W <- W - gamma v

or a step of another optimizer in place of the last two lines.
Masked coordinates get neither gradient, decay nor momentum.  Every random draw is addressed by
(round, client).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedp3.client.batching import learning_rate, step_rate
from fedp3.client.context import ClientContext, shrink_context
from fedp3.client.hooks import NO_PROXIMAL_TERM, LossInputs, ProximalTerm
from fedp3.client.optimizers import OPTIMIZERS, OptimizerState
from fedp3.client.scoring import present_labels
from fedp3.client.step_source import Gradient
from fedp3.core import masks as M
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import ClientPlan, Group, LayerMap, Mask, Masks, Params, Task
from fedp3.data import Batch, records
from fedp3.data.inputs import Inputs, call, chunks, to_device
from fedp3.data.shards import Shard
from fedp3.models import shrinking
from fedp3.models.buffers import initial_value
from fedp3.models.frozen import frozen_tensors, has_frozen_statistics
from fedp3.planning.local_pruning import draw_q
from fedp3.planning.prune_settings import LOCAL_PRUNERS
from fedp3.planning.pruning import pruned_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPass:
    """What all steps of one pass share."""

    context: ClientContext
    task: Task
    masks: Mapping[str, Tensor]  # active coordinates of the trained tensors, in every step
    optimizer: OptimizerState
    gradient: Gradient
    proximal: ProximalTerm
    lr: float  # of the round
    steps: int


def named_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, without frozen ones."""
    frozen = frozen_tensors(net)
    buffers = {n: w for n, w in net.named_buffers() if n not in frozen}
    return {**dict(net.named_parameters()), **buffers}


def load_weights(tensors: Mapping[str, Tensor], W: Params) -> None:
    """Copy W into a network's tensors.

    Buffers that are not in W start from their initial value (BatchNorm's counter from zero), so
    that no client sees the values of another one.
    """
    with torch.no_grad():
        for n, w in tensors.items():
            if n in W:
                w.copy_(W[n])
            elif n.endswith("num_batches_tracked"):
                w.zero_()
            elif (initial := initial_value(n, tensors)) is not None:
                w.data = initial  # copy_ would broadcast into a buffer that has grown


def train(
    context: ClientContext,
    shard: Shard,
    task: Task,
    tensors: dict[str, Tensor],
    proximal: ProximalTerm = NO_PROXIMAL_TERM,
    address: tuple[int, ...] = (),
    optimizer: OptimizerState | None = None,
) -> dict[str, float]:
    """K steps on `context.net`; returns the mean loss and the realised density of Q.

    Args:
        context: the network and what clients share.
        shard: the client's samples.
        task: what the server requests.
        tensors: the network's parameters and buffers by name.
        proximal: added to every gradient.
        address: the address of random draws; (round, client) by default.
        optimizer: what the optimizer remembers, which is updated; None begins at zero.
    """
    address = address or (task.t, task.plan.client)
    local, pruning, source = context.local, context.pruning, context.steps
    trained = prepare(context.net, task.plan, context.layers)
    if not trained:
        return {}
    masks = task_masks(context, task, trained)
    samples = len(shard.train)
    plain = _in_parts(_loss_gradient(context, shard, task), task.plan.split)
    if context.hooks.gradient is not None:
        plain = context.hooks.gradient(plain, {n: tensors[n] for n in trained}, masks)
    at_once = replace(local, batch=math.ceil(local.batch / task.plan.split))
    gradient = source.gradient(
        plain, context.objective.loss, at_once, samples, context.seed, *address
    )
    batches = list(source.batches(local, samples, context.seed, *address))
    local_pass = LocalPass(
        context=context,
        task=task,
        masks=masks,
        optimizer=OptimizerState() if optimizer is None else optimizer,
        gradient=gradient,
        proximal=proximal,
        lr=learning_rate(local, task.t, context.spec.rounds),
        steps=len(batches),
    )
    local_pruner = LOCAL_PRUNERS.pick(pruning.local_pruner)
    rng = stream(context.seed, Stream.LOCAL_PRUNE, *address)
    augment = source.generator(Stream.AUGMENT, context.seed, *address) if local.augment else None
    losses, densities = [], []
    for k, rows in enumerate(batches):
        indices = shard.train[rows]
        draws = partial(source.generator, Stream.ROW, context.seed, *address, k)
        drawn = records(context.data, indices, augment, draws)
        x, y = to_device(drawn.x, context.device), drawn.y.to(context.device)
        q = draw_q(pruning, rng, task.plan)  # Alg. 2, l. 2
        step_masks = local_pruner.draw(q, task.plan, task.masks, context.layers, rng)
        if step_masks.units and pruning.shrinks:
            run = _small_step if context.hooks.step is None else context.hooks.step.run
            loss = run(local_pass, k, x, y, step_masks.units)
        else:
            W, active = (
                {n: tensors[n] for n in trained},
                _step_masks(masks, step_masks, trained, context),
            )
            with _masked_weights(context, tensors, step_masks):
                loss, grads = gradient(context.net, x, y, W, active)
            # Alg. 2, l. 3
            take_step(local_pass, k, W, grads, local_pass.optimizer, active, proximal)
        losses.append(loss)
        densities.append(_density(step_masks, task, context.layers))
    values = {"loss": losses, "density": densities} if source.is_plain else {"density": densities}
    return {name: math.fsum(steps) / len(steps) for name, steps in values.items() if steps}


def prepare(net: nn.Module, plan: ClientPlan, layers: LayerMap) -> list[str]:
    """Set the network up for this plan; returns the parameters that train.

    The BatchNorm of a frozen layer uses its statistics and does not update them.
    """
    train = {n for l, p in plan.layers.items() if p.train for n in layers.layers[l]}
    net.train()
    for path, module in net.named_modules():
        buffers = {f"{path}.{n}" if path else n for n, _ in module.named_buffers(recurse=False)}
        if buffers & (layers.buffers - train) or has_frozen_statistics(module):
            module.training = False  # not eval(), because its children may train
    names = []
    for n, p in net.named_parameters():
        p.requires_grad_(n in train)
        if n in train:
            names.append(n)
    return names


# --------------------------------------------------------------------------- smaller networks


def _small_step(
    local_pass: LocalPass, k: int, x: Inputs, y: Tensor, units: Mapping[Group, Tensor]
) -> float:
    """Step k on the network that ordered dropout leaves, written back into the full one."""
    context, state, layers = local_pass.context, local_pass.optimizer, local_pass.context.layers
    units = {g: indices.to(context.device) for g, indices in units.items()}
    small_context, small, full = extract_units(context, units)
    trained = prepare(small_context.net, local_pass.task.plan, small_context.layers)
    W, active = (
        {n: small[n] for n in trained},
        shrinking.take_units(local_pass.masks, units, layers),
    )
    loss, grads = local_pass.gradient(small_context.net, x, y, W, active)
    part = OptimizerState(steps=state.steps)
    for name, slot in state.slots.items():
        of_trained = {n: w for n, w in slot.items() if n in trained}
        part.slots[name] = dict(shrinking.take_units(of_trained, units, layers))
    proximal = local_pass.proximal
    if proximal:
        anchor, shift = (
            shrinking.take_units(tensors, units, layers)
            for tensors in (proximal.anchor, proximal.shift)
        )
        proximal = ProximalTerm(proximal.mu, anchor, shift)
    take_step(local_pass, k, W, grads, part, active, proximal)
    shrinking.put_back(full, {n: w.detach() for n, w in small.items()}, units, layers)
    for name, small_slot in part.slots.items():
        slot = state.slot(name)
        for n in small_slot:
            slot.setdefault(n, torch.zeros_like(full[n]))
        shrinking.put_back(slot, small_slot, units, layers)
    state.steps = part.steps
    return loss


def extract_units(
    context: ClientContext, units: Mapping[Group, Tensor]
) -> tuple[ClientContext, dict[str, Tensor], dict[str, Tensor]]:
    """The context of the network with only these units, its tensors, and those of the full network.

    The small network's tensors have the values of the full one's.
    """
    small_context = shrink_context(context, units)
    small, tensors = named_tensors(small_context.net), named_tensors(context.net)
    full = {n: w.detach() for n, w in tensors.items()}  # with buffers outside W, which steps change
    load_weights(small, shrinking.take_units(full, units, context.layers))
    return small_context, small, full


# --------------------------------------------------------------------------- masks


def task_masks(context: ClientContext, task: Task, trained: list[str]) -> dict[str, Tensor]:
    """The masks of every step of a task, under which pruned coordinates stay zero."""
    regrows: set[str] = set()
    if not context.pruning.freeze_pruned:
        regrows = {n for l in pruned_layers(task.plan) for n in context.layers.layers[l]}
    masks = {n: M.active(n, task.masks, context.layers) for n in trained if n not in regrows}
    return {n: _on_device(mask, n, context) for n, mask in masks.items() if mask is not None}


def _on_device(mask: Mask, name: str, context: ClientContext) -> Tensor:
    return M.as_bool(mask, context.layers.shapes[name]).to(context.device)


def _step_masks(
    masks: Mapping[str, Tensor], step: Masks, trained: list[str], context: ClientContext
) -> dict[str, Tensor]:
    """The active coordinates of one step: those of the task that the step retains too."""
    active = dict(masks)
    for n in trained:
        retained = M.active(n, step, context.layers)
        if retained is not None:
            mask = _on_device(retained, n, context)
            active[n] = active[n] & mask if n in active else mask
    return active


@contextmanager
def _masked_weights(
    context: ClientContext, tensors: Mapping[str, Tensor], step: Masks
) -> Iterator[None]:
    """Inside this context, the network's weights are q ⊙ W; afterwards, W is restored."""
    names = context.layers.shapes if step.units or step.weights else ()
    retained = {n: M.active(n, step, context.layers) for n in names}
    masks = {n: _on_device(mask, n, context) for n, mask in retained.items() if mask is not None}
    full = {n: tensors[n].data for n in masks}
    statistics = {n: w.clone() for n, w in full.items() if n in context.layers.buffers}
    for n in full.keys() - statistics.keys():
        # In place, because a product would lose the channels-last layout.
        tensors[n].data = full[n].clone().mul_(masks[n].to(full[n].dtype))
    try:
        yield
    finally:
        for n, w in full.items():
            tensors[n].data = w
    for n, before in statistics.items():  # units pruned in this step do not change statistics
        tensors[n].copy_(torch.where(masks[n], tensors[n], before))


def _density(step: Masks, task: Task, layers: LayerMap) -> float:
    """The share of weights outside L_i that a step trains, relative to those that P_i retained."""
    names = [n for l in pruned_layers(task.plan) for n in layers.layers[l] if n in layers.prunable]
    if not (step.units or step.weights) or not names:
        return 1.0
    total = active = 0
    for n in names:
        by_plan, by_step = M.active(n, task.masks, layers), M.active(n, step, layers)
        total += M.count(by_plan, layers.shapes[n])
        active += _overlap(by_plan, by_step, layers.shapes[n])
    return active / total


def _overlap(a: Mask, b: Mask, shape: tuple[int, ...]) -> int:
    """How many coordinates both masks retain."""
    if a is None or b is None:
        return M.count(b if a is None else a, shape)
    if isinstance(a, Tensor) and not isinstance(b, Tensor):
        return int(M.take(a, b).count_nonzero())
    return int((M.as_bool(a, shape) & M.as_bool(b, shape)).count_nonzero())


# --------------------------------------------------------------------------- gradient and step


def _value_and_gradient(loss: Tensor, W: Params) -> tuple[float, list[Tensor]]:
    grads = torch.autograd.grad(loss, list(W.values()), materialize_grads=True)
    return float(loss.detach()), list(grads)


def _in_parts(whole: Gradient, parts: int) -> Gradient:
    """The same gradient of a mean, added up over parts of the batch, which needs less memory."""
    if parts == 1:
        return whole

    def gradient(
        net: nn.Module, x: Inputs, y: Tensor, W: Params, active: Params
    ) -> tuple[float, list[Tensor]]:
        loss = 0.0
        total: list[Tensor] = []
        for rows, targets in zip(chunks(x, parts), y.chunk(parts), strict=True):
            share = len(targets) / len(y)
            part_loss, grads = whole(net, rows, targets, W, active)
            loss += share * part_loss
            torch._foreach_mul_(grads, share)
            if total:
                torch._foreach_add_(total, grads)
            else:
                total = grads
        return loss, total

    return gradient


def _loss_gradient(context: ClientContext, shard: Shard, task: Task) -> Gradient:
    """The gradient of the method's loss, or of the objective's mean loss."""
    loss_of, objective = context.hooks.loss, context.objective

    def mean_gradient(
        net: nn.Module, x: Inputs, y: Tensor, W: Params, active: Params
    ) -> tuple[float, list[Tensor]]:
        return _value_and_gradient(objective.mean(call(net, x), Batch(x, y)), W)

    if loss_of is None:
        return mean_gradient
    sent = {n: w.to(context.device) for n, w in task.extra.items()}
    inputs = LossInputs(present_labels(context, shard), sent)

    def gradient(
        net: nn.Module, x: Inputs, y: Tensor, W: Params, active: Params
    ) -> tuple[float, list[Tensor]]:
        return _value_and_gradient(loss_of(net, x, y, inputs), W)

    return gradient


@torch.no_grad()
def take_step(
    local_pass: LocalPass,
    k: int,
    W: Mapping[str, Tensor],
    grads: list[Tensor],
    state: OptimizerState,
    active: Mapping[str, Tensor],
    proximal: ProximalTerm,
) -> None:
    """Step k in place; coordinates that are not active stay as they are, with their state."""
    local = local_pass.context.local
    optimizer = OPTIMIZERS.pick(local.optimizer)
    for (n, w), g in zip(W.items(), grads, strict=True):
        if proximal.mu:
            g.add_(w - proximal.anchor[n], alpha=proximal.mu)
        if n in proximal.shift:
            g.add_(proximal.shift[n])
    for n, g in zip(W, grads, strict=True):
        if n in active:
            g.mul_(active[n].to(g.dtype))  # a product of mixed types is slower than this copy
    # Under LDP, every record's gradient was clipped already.
    if local.clip_norm and local_pass.context.steps.is_plain:
        norm = float(torch.stack(torch._foreach_norm(grads)).norm())
        if norm > local.clip_norm:
            torch._foreach_mul_(grads, local.clip_norm / (norm + 1e-6))
    if local.weight_decay and not optimizer.decoupled_decay:
        for (n, w), g in zip(W.items(), grads, strict=True):
            g.add_(w * active[n] if n in active else w, alpha=local.weight_decay)
    lr = step_rate(local, local_pass.lr, k, local_pass.steps)
    optimizer.step(W, grads, state, active, local, lr)
    state.steps += 1
