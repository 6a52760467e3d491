"""Training small clients as one stacked computation.

A step of a small network spends its time in calls, not in arithmetic.  Clients of a round that
train the same shapes are therefore stacked along a new first dimension and step together, with the
backward pass of an MLP written out:

    z_l = h_{l-1} W_l' + b_l;  h_l = max(z_l, 0);  dz_L = (softmax(z_L) - onehot(y)) / n
    dW_l = dz_l' h_{l-1};  db_l = sum dz_l;  dz_{l-1} = dz_l W_l where h_{l-1} > 0

Which networks are stacked follows from their sizes and the settings alone (`can_stack`).  A client
that trains alone is a stack of one.  Every dimension is padded with zeros to a multiple of ALIGNED.
The memory layout of a client's matrices is then the same whatever else is in the stack, and matrix
products give it the same bits in any stack.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from fedp3.client.batching import (
    EVAL_BATCH,
    LocalSettings,
    batch_sizes,
    has_constant_rate,
    learning_rate,
    step_count,
)
from fedp3.client.context import ClientContext, RunSpec
from fedp3.client.hooks import NO_HOOKS
from fedp3.client.objectives import CLASSIFICATION
from fedp3.client.sgd import task_masks
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import Chain, LayerMap, Params, Task
from fedp3.data import Dataset, batch
from fedp3.data.shards import Shard

ALIGNED = 16  # floats in a cache line
SMALL = 1 << 18  # parameters of a network, up to which calls take longer than arithmetic
STACK_SIZE = 1 << 20  # parameters of one stack; more would not fit into the cache


@dataclass(frozen=True, slots=True)
class Member:
    """One client of a stack: its samples, its task, and the tensors of its (smaller) network."""

    shard: Shard
    task: Task
    start: Params


Stack = dict[str, Tensor]  # tensor name -> (clients, rows, columns), padded; a bias is one row


# -------------------------------------------------------------------- which networks, which clients


def can_stack(spec: RunSpec, data: Dataset, local: LocalSettings, device: str) -> bool:
    """Whether clients of this network train stacked.

    They do if it is a small MLP that classifies, steps are plain SGD, and nothing is drawn per
    sample or per step.
    """
    layers, pruning = spec.layers, spec.pruning
    chain = layers.chain
    if spec.objective is not CLASSIFICATION or not isinstance(data.x, Tensor):
        return False
    if data.rows is not None:  # a data set may draw while it reads a sample
        return False
    if local.optimizer != "sgd" or local.optimizer_state != "round" or not has_constant_rate(local):
        return False
    if chain is None or _parameters(layers) > SMALL or device != "cpu":
        return False
    augments = local.augment and bool(data.crop or data.flip)
    if augments or pruning.local_pruner != "fixed":
        return False
    if not chain.flattens and data.x.dim() != 2:
        return False
    named = {n for pair in chain.layers for n in pair if n}
    if named != layers.shapes.keys():  # there is a buffer, which the written-out pass does not use
        return False
    # With more outputs than classes, only as many as there are classes would be in the softmax.
    return layers.shapes[chain.layers[-1][0]][0] == data.classes


def batch_key(context: ClientContext, shard: Shard, task: Task) -> Hashable:
    """The key of a client's stack: clients with the same key may be stacked; None if it may not be.

    Plans are compared by identity, since clients with equal plans share one object.
    """
    samples = shard.train.shape[0]
    plain = context.hooks is NO_HOOKS or context.hooks.is_plain(task.kind)
    if not context.stacked or not plain or not context.steps.is_plain or not samples:
        return None
    if task.plan.steps or task.plan.split > 1:
        return None  # such networks are large, and a stack gains nothing
    units = task.masks.units
    counts = tuple(sorted((g, len(indices)) for g, indices in units.items())) if units else ()
    shape = step_count(context.local, samples), _rows(samples, context.local)
    return task.t, task.kind, task.evaluate, id(task.plan.layers), counts, shape


def stack_limit(context: ClientContext) -> int:
    """The largest number of clients in one stack."""
    return max(1, STACK_SIZE // _parameters(context.layers))


def _parameters(layers: LayerMap) -> int:
    return sum(math.prod(shape) for shape in layers.shapes.values())


def _chain(context: ClientContext) -> Chain:
    assert context.layers.chain is not None
    return context.layers.chain


def _rows(samples: int, local: LocalSettings) -> int:
    """The rows of a padded batch; they do not depend on other clients."""
    return min(local.batch, _padded(samples))


# --------------------------------------------------------------------------- in and out of a stack


def _padded(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED


def stack(context: ClientContext, members: Sequence[Member]) -> Stack:
    """The members' tensors side by side."""
    names = [n for pair in _chain(context).layers for n in pair if n]
    stacks = {n: _stacked([m.start[n] for m in members]) for n in names}
    return {n: w.expand(len(members), -1, -1).contiguous() for n, w in stacks.items()}


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Padded values, (clients, rows, columns); one row of clients if all are the same object."""
    first = values[0]
    if all(w is first for w in values):
        values = [first]
    matrices = torch.stack([w if w.dim() == 2 else w[None] for w in values])
    rows, columns = matrices.shape[1:]
    padded_rows = _padded(rows) if first.dim() == 2 else 1
    padded = matrices.new_zeros(len(values), padded_rows, _padded(columns))
    padded[:, :rows, :columns] = matrices
    return padded


def unstack(W: Stack, layers: LayerMap) -> list[dict[str, Tensor]]:
    """The tensors of each member."""
    plain = {n: _without_padding(w, layers.shapes[n]) for n, w in W.items()}
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


def _without_padding(w: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    return w[:, :rows, :columns].reshape(-1, *shape).clone().unbind()


# --------------------------------------------------------------------------- training


def train(context: ClientContext, members: Sequence[Member], W: Stack) -> list[dict[str, float]]:
    """K steps of SGD on all members together, in place; returns the metrics of each."""
    local, plan, t = context.local, members[0].task.plan, members[0].task.t
    trained = [n for l, p in plan.layers.items() if p.train for n in context.layers.layers[l]]
    member_masks = [task_masks(context, m.task, trained) for m in members]
    masks = {n: _stacked([masks[n] for masks in member_masks]) for n in member_masks[0]}
    lr = learning_rate(local, t, context.spec.rounds)
    velocity = {n: torch.zeros_like(W[n]) for n in trained} if local.momentum else {}
    losses = []
    for samples, weight in _batches(context, members):
        h = _forward(context, W, samples)
        loss, dz = _loss(h[-1], context.data.y[samples], weight, context.data.classes)
        grads = _backward(_chain(context), W, h, dz, set(trained))
        _sgd(W, grads, velocity, masks, local, lr)
        losses.append(loss)
    means = torch.stack(losses).double().mean(0).tolist() if losses else []
    return [{"loss": loss, "density": 1.0} for loss in means] or [{} for _ in members]


def _batches(context: ClientContext, members: Sequence[Member]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step, the samples of every member, (clients, rows), and their weights.

    A weight is 1/n in a batch of n samples, and 0 where a row is padding.
    """
    local, t = context.local, members[0].task.t
    counts = [len(m.shard.train) for m in members]
    K, rows = step_count(local, counts[0]), _rows(counts[0], local)
    epoch_steps = [math.ceil(n / rows) for n in counts]
    positions = torch.full((len(members), max(K + e for e in epoch_steps) * rows), -1)
    for line, m, n, e in zip(positions, members, counts, epoch_steps, strict=True):
        rng = stream(context.seed, Stream.BATCHES, t, m.task.plan.client)
        places = _places(n, rows)
        for k in range(0, K, e):
            line[k * rows + places] = torch.randperm(n, generator=rng)
    positions = positions[:, : K * rows].view(len(members), K, rows)
    real = positions >= 0
    weight = real / real.sum(2, keepdim=True)
    offsets = torch.tensor([0, *counts]).cumsum(0)[:-1, None, None]
    samples = torch.cat([m.shard.train for m in members])[offsets + positions.clamp(min=0)]
    yield from zip(samples.unbind(1), weight.unbind(1), strict=True)


@lru_cache(maxsize=1024)
def _places(samples: int, size: int) -> Tensor:
    """The places of an epoch's samples in rows of `size`, one row per batch.

    The order of samples is that of `batching.batches`.
    """
    return torch.cat([torch.arange(n) + k * size for k, n in enumerate(batch_sizes(samples, size))])


def _forward(context: ClientContext, W: Stack, samples: Tensor) -> list[Tensor]:
    """The inputs of every layer for these samples, and the logits: (clients, rows, units)."""
    x = batch(context.data, samples.flatten()).flatten(1)
    x = F.pad(x, (0, -x.shape[1] % ALIGNED))
    h = [x.view(*samples.shape, x.shape[1])]
    chain = _chain(context).layers
    for w, b in chain:
        z = torch.bmm(h[-1], W[w].mT) if b is None else torch.baddbmm(W[b], h[-1], W[w].mT)
        h.append(z if w == chain[-1][0] else z.relu_())
    return h


def _loss(logits: Tensor, y: Tensor, weight: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Each member's mean cross-entropy, and its derivative by the logits."""
    logp = torch.log_softmax(logits[..., :classes], 2)
    labels = y[..., None]
    loss = -(logp.gather(2, labels).squeeze(2) * weight).sum(1)
    dz = torch.zeros_like(logits)
    dz[..., :classes] = logp.exp_()
    dz.scatter_add_(2, labels, torch.full_like(labels, -1, dtype=dz.dtype))
    return loss, dz.mul_(weight[..., None])


def _backward(chain: Chain, W: Stack, h: list[Tensor], dz: Tensor, trained: set[str]) -> Stack:
    """The gradients of the trained tensors, from the last layer down to the lowest one trained."""
    grads = {}
    lowest = min(l for l, pair in enumerate(chain.layers) if trained & set(pair))
    for l in range(len(chain.layers) - 1, lowest - 1, -1):
        w, b = chain.layers[l]
        if w in trained:
            grads[w] = torch.bmm(dz.mT, h[l])
        if b in trained:
            grads[b] = dz.sum(1, keepdim=True)
        if l > lowest:
            dz = torch.bmm(dz, W[w]).mul_(h[l] > 0)
    return grads


def _sgd(
    W: Stack, grads: Stack, velocity: Stack, masks: Stack, local: LocalSettings, lr: float
) -> None:
    """`sgd.sgd_step` for every member.

    Masks do not change during a task, so that velocity stays zero where they prune.
    """
    for n, mask in masks.items():
        grads[n].mul_(mask)
    if local.clip_norm:
        squares = [torch.linalg.vector_norm(g, dim=(1, 2)).square() for g in grads.values()]
        norm = reduce(torch.add, squares).sqrt()  # the same order for any number of members
        factor = torch.where(norm > local.clip_norm, local.clip_norm / (norm + 1e-6), 1.0)
        if bool((factor < 1).any()):  # a factor of one changes no bit
            for g in grads.values():
                g.mul_(factor[:, None, None])
    for n, g in grads.items():
        if local.weight_decay:
            g.add_(W[n] * masks[n] if n in masks else W[n], alpha=local.weight_decay)
        if local.momentum:
            g = velocity[n].mul_(local.momentum).add_(g)
        W[n].add_(g, alpha=-lr)


# --------------------------------------------------------------------------- scoring


@torch.inference_mode()
def score(context: ClientContext, members: Sequence[Member], W: Stack) -> list[dict[str, float]]:
    """Correct predictions, summed loss and number of samples, on each member's test set."""
    tests = [m.shard.test for m in members]
    width = -(-max(len(test) for test in tests) // EVAL_BATCH) * EVAL_BATCH
    padded = torch.stack([F.pad(test, (0, width - len(test)), value=-1) for test in tests])
    correct = torch.zeros(len(members), dtype=torch.int64)
    loss = torch.zeros(len(members), dtype=torch.float64)
    for indices in torch.split(padded, EVAL_BATCH, dim=1):
        real, samples = indices >= 0, indices.clamp(min=0)
        y = context.data.y[samples]
        logits = _forward(context, W, samples)[-1][..., : context.data.classes]
        correct += ((logits.argmax(2) == y) & real).sum(1)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        loss += losses.view(y.shape).mul(real).sum(1)
    return [
        {"correct": c, "tested": len(test), "test_loss": l}
        for c, test, l in zip(correct.tolist(), tests, loss.tolist(), strict=True)
    ]
