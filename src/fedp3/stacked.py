"""Small clients as one stacked computation.

A step of a small net spends its time in calls, not in arithmetic.  Clients of a round that train the same shapes are
therefore stacked along a new first side and step together, with the backward pass of an MLP written out:
    z_l = h_{l-1} W_l' + b_l;  h_l = max(z_l, 0);  dz_L = (softmax(z_L) - onehot(y)) / n
    dW_l = dz_l' h_{l-1};  db_l = sum dz_l;  dz_{l-1} = dz_l W_l where h_{l-1} > 0
Which nets go this way follows from sizes alone (`choose`), and a client that trains alone is a stack of one: every
side is padded with zeros to a multiple of ALIGNED, so that each client's matrices lie alike in memory whoever its
neighbours are, and matrix products give each client the same bits in any company.
"""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedp3.data import Dataset, batch
from fedp3.hooks import NONE
from fedp3.recipe import EVAL_BATCH, Recipe, Shard, dealt, rate, steps_of
from fedp3.rng import Use, stream
from fedp3.steps import held
from fedp3.types import Chain, LayerMap, Local, Params, Pruning, Task
from fedp3.unsaved import untouched

ALIGNED = 16  # floats in a cache line
SMALL = 1 << 18  # parameters up to which stacking pays; beyond, arithmetic outweighs calls
TOGETHER = 1 << 20  # parameters of one stack: more leave the cache


@dataclass(frozen=True, slots=True)
class Member:
    """One client of a stack: its task, and the tensors it starts from as cut to its net."""

    shard: Shard
    task: Task
    start: Params


Stack = dict[str, Tensor]  # tensor name -> (clients, rows, columns), padded; a bias is one row
STEPS = {
    nn.Linear: "linear", nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", "relu": "relu",
    nn.Flatten: "flatten", torch.flatten: "flatten", "flatten": "flatten", nn.Identity: "nothing",
}  # fmt: skip
MLP = r"placeholder (nothing )*(flatten )?(linear relu (nothing )*)*linear (nothing )*output"


# --------------------------------------------------------------------------- which nets, which clients


def choose(net: nn.Module, layers: LayerMap, data: Dataset, local: Local, pruning: Pruning, device: str) -> Chain:
    """The net's chain of layers if its clients are to be stacked; empty if not."""
    draws = local.augment and bool(data.crop or data.flip)  # batches drawn image by image
    small = sum(math.prod(s) for s in layers.shapes.values()) <= SMALL
    if not small or draws or pruning.local != "fixed" or device != "cpu":
        return ()
    found = chain(net, flat=data.x.dim() == 2)
    everything = {n for pair in found for n in pair if n} == layers.shapes.keys()  # no buffer that only `forward` knows
    # Of a head with more outputs only as many as there are classes would be in the softmax.
    return found if everything and layers.shapes[found[-1][0]][0] == data.classes else ()


def chain(net: nn.Module, flat: bool) -> Chain:
    """The (weight, bias) names of an MLP with ReLU between its layers; empty if the net is anything else."""
    modules = dict(net.named_modules())
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules.values()):
        return ()
    try:
        with untouched(net):
            nodes = list(fx.symbolic_trace(net).graph.nodes)
    except Exception:  # fx raises many kinds, all meaning: this net cannot be traced
        return ()
    found = re.fullmatch(MLP, " ".join(_step(node, modules) for node in nodes))
    in_line = all(b.all_input_nodes == [a] for a, b in pairwise(nodes))
    if not (found and in_line and (flat or found[2])):
        return ()
    linear = {str(node.target): modules[str(node.target)] for node in nodes if _step(node, modules) == "linear"}
    names = tuple((f"{p}.weight", f"{p}.bias" if m.bias is not None else None) for p, m in linear.items())
    used_once = len(linear) == sum(_step(node, modules) == "linear" for node in nodes)
    whole = {n for pair in names for n in pair if n} == {n for n, _ in net.named_parameters()}
    return names if used_once and whole else ()


def _step(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    m = modules[str(node.target)] if node.op == "call_module" else None
    kind = STEPS.get(node.target if m is None else type(m), node.op)
    sides = (m.start_dim, m.end_dim) if isinstance(m, nn.Flatten) else (*node.args[1:], -1)
    return "other" if kind == "flatten" and sides != (1, -1) else kind


def alike(recipe: Recipe, shard: Shard, task: Task) -> Hashable:
    """Clients that agree in this can be stacked; None: this one cannot.  Plans of a fleet share their layers."""
    samples = shard.train.shape[0]
    hooked = recipe.private is not None or not (recipe.hooks is NONE or recipe.hooks.plain(task.kind))
    if not recipe.chain or hooked or not samples:
        return None
    units = task.masks.units
    counts = tuple(sorted((g, len(at)) for g, at in units.items())) if units else ()
    shape = steps_of(recipe.local, samples), _rows(samples, recipe.local)
    return task.t, task.kind, task.evaluate, id(task.plan.layers), counts, shape


def most(recipe: Recipe) -> int:
    """How many clients one stack takes."""
    return max(1, TOGETHER // sum(math.prod(s) for s in recipe.layers.shapes.values()))


def _rows(samples: int, local: Local) -> int:
    """Rows of a padded batch: they follow from the client's own data, never from its company's."""
    return min(local.batch, _padded(samples))


# --------------------------------------------------------------------------- in and out of a stack


def _padded(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED


def stack(recipe: Recipe, members: Sequence[Member]) -> Stack:
    """The members' tensors side by side."""
    each = {n: _stacked([m.start[n] for m in members]) for pair in recipe.chain for n in pair if n}
    return {n: w.expand(len(members), -1, -1).contiguous() for n, w in each.items()}


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Padded values, (clients, rows, columns); one for all where they are one and the same."""
    first = values[0]
    if all(w is first for w in values):
        values = [first]
    together = torch.stack([w if w.dim() == 2 else w[None] for w in values])
    rows, columns = together.shape[1:]
    out = together.new_zeros(len(values), _padded(rows) if first.dim() == 2 else 1, _padded(columns))
    out[:, :rows, :columns] = together
    return out


def unstack(W: Stack, layers: LayerMap) -> list[dict[str, Tensor]]:
    """Each member's own tensors."""
    plain = {n: _plain(w, layers.shapes[n]) for n, w in W.items()}
    return [dict(zip(plain, own, strict=True)) for own in zip(*plain.values(), strict=True)]


def _plain(w: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    return w[:, :rows, :columns].reshape(-1, *shape).clone().unbind()


# --------------------------------------------------------------------------- training


def train(recipe: Recipe, members: Sequence[Member], W: Stack) -> list[dict[str, float]]:
    """K steps of SGD on every member at once, in place; returns each one's metrics."""
    local, plan, t = recipe.local, members[0].task.plan, members[0].task.t
    trained = [n for l, p in plan.layers.items() if p.train for n in recipe.layers.layers[l]]
    masks = [held(recipe, m.task, trained) for m in members]
    hold = {n: _stacked([of[n] for of in masks]) for n in masks[0]}
    lr = rate(local, t)
    velocity = {n: torch.zeros_like(W[n]) for n in trained} if local.momentum else {}
    losses = []
    for at, weight in _batches(recipe, members):
        h = _forward(recipe, W, at)
        loss, dz = _loss(h[-1], recipe.data.y[at], weight, recipe.data.classes)
        grads = _backward(recipe.chain, W, h, dz, set(trained))
        _sgd(W, grads, velocity, hold, local, lr)
        losses.append(loss)
    means = torch.stack(losses).double().mean(0).tolist() if losses else []
    return [{"loss": loss, "density": 1.0} for loss in means] or [{} for _ in members]


def _batches(recipe: Recipe, members: Sequence[Member]) -> Iterator[tuple[Tensor, Tensor]]:
    """Per step the samples of every member, (clients, rows), and what each counts: 1/n, or 0 where it only pads."""
    local, t = recipe.local, members[0].task.t
    K, rows = steps_of(local, len(members[0].shard.train)), _rows(len(members[0].shard.train), local)
    own = [len(m.shard.train) for m in members]
    per_epoch = [math.ceil(n / rows) for n in own]  # rows: the batch, or less where all of a client's samples are less
    at = torch.full((len(members), max(K + e for e in per_epoch) * rows), -1)
    for line, m, n, e in zip(at, members, own, per_epoch, strict=True):
        rng = stream(recipe.seed, Use.BATCHES, t, m.task.plan.client)
        where = _places(n, rows)
        for k in range(0, K, e):
            line[k * rows + where] = torch.randperm(n, generator=rng)
    at = at[:, : K * rows].view(len(members), K, rows)
    real = at >= 0
    weight = real / real.sum(2, keepdim=True)
    begins = torch.tensor([0, *own]).cumsum(0)[:-1, None, None]
    samples = torch.cat([m.shard.train for m in members])[begins + at.clamp(min=0)]
    yield from zip(samples.unbind(1), weight.unbind(1), strict=True)


@lru_cache(maxsize=1024)
def _places(samples: int, size: int) -> Tensor:
    """Where an epoch's samples lie in lines of `size`, a line a batch, as `recipe.batches` deals them."""
    return torch.cat([torch.arange(n) + k * size for k, n in enumerate(dealt(samples, size))])


def _forward(recipe: Recipe, W: Stack, at: Tensor) -> list[Tensor]:
    """The inputs of every layer, and the logits, of these samples: each (clients, rows, units)."""
    x = batch(recipe.data, at.flatten()).flatten(1)
    x = F.pad(x, (0, -x.shape[1] % ALIGNED))
    h = [x.view(*at.shape, x.shape[1])]
    for w, b in recipe.chain:
        z = torch.bmm(h[-1], W[w].mT) if b is None else torch.baddbmm(W[b], h[-1], W[w].mT)
        h.append(z if w == recipe.chain[-1][0] else z.relu_())
    return h


def _loss(logits: Tensor, y: Tensor, weight: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Each member's mean cross-entropy, and its derivative by the logits."""
    logp = torch.log_softmax(logits[..., :classes], 2)
    hit = y[..., None]
    loss = -(logp.gather(2, hit).squeeze(2) * weight).sum(1)
    dz = torch.zeros_like(logits)
    dz[..., :classes] = logp.exp_()
    dz.scatter_add_(2, hit, torch.full_like(hit, -1, dtype=dz.dtype))
    return loss, dz.mul_(weight[..., None])


def _backward(chain: Chain, W: Stack, h: list[Tensor], dz: Tensor, trained: set[str]) -> Stack:
    """The gradients of what is trained, from the last layer down to the lowest that trains."""
    grads = {}
    lowest = min(l for l, pair in enumerate(chain) if trained & set(pair))
    for l in range(len(chain) - 1, lowest - 1, -1):
        w, b = chain[l]
        if w in trained:
            grads[w] = torch.bmm(dz.mT, h[l])
        if b in trained:
            grads[b] = dz.sum(1, keepdim=True)
        if l > lowest:
            dz = torch.bmm(dz, W[w]).mul_(h[l] > 0)
    return grads


def _sgd(W: Stack, grads: Stack, velocity: Stack, hold: Stack, local: Local, lr: float) -> None:
    """`steps._sgd` for every member; masks hold throughout a task, so velocity stays zero where they cut."""
    for n, mask in hold.items():
        grads[n].mul_(mask)
    if local.clip_norm:
        squares = [torch.linalg.vector_norm(g, dim=(1, 2)).square() for g in grads.values()]
        norm = reduce(torch.add, squares).sqrt()  # a sum over a side of a tensor adds up by how many members there are
        factor = torch.where(norm > local.clip_norm, local.clip_norm / (norm + 1e-6), 1.0)
        if bool((factor < 1).any()):  # times one changes no bit
            for g in grads.values():
                g.mul_(factor[:, None, None])
    for n, g in grads.items():
        if local.weight_decay:
            g.add_(W[n] * hold[n] if n in hold else W[n], alpha=local.weight_decay)
        if local.momentum:
            g = velocity[n].mul_(local.momentum).add_(g)
        W[n].add_(g, alpha=-lr)


# --------------------------------------------------------------------------- scoring


@torch.inference_mode()
def score(recipe: Recipe, members: Sequence[Member], W: Stack) -> list[dict[str, float]]:
    """Correct answers, loss and size on each member's own test part."""
    tests = [m.shard.test for m in members]
    longest = max(len(at) for at in tests)
    at = torch.stack([F.pad(own, (0, -(-longest // EVAL_BATCH) * EVAL_BATCH - len(own)), value=-1) for own in tests])
    correct = torch.zeros(len(members), dtype=torch.int64)
    loss = torch.zeros(len(members), dtype=torch.float64)
    for some in torch.split(at, EVAL_BATCH, dim=1):
        real, some = some >= 0, some.clamp(min=0)
        y = recipe.data.y[some]
        logits = _forward(recipe, W, some)[-1][..., : recipe.data.classes]
        correct += ((logits.argmax(2) == y) & real).sum(1)
        loss += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mul(real).sum(1)
    return [
        {"correct": c, "tested": len(own), "test_loss": l}
        for c, own, l in zip(correct.tolist(), tests, loss.tolist(), strict=True)
    ]
