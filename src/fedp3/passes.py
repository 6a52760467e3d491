"""A client's training as a sequence of passes, with what a method hooks in around them.

One pass is K steps on some layers of one model: the one that was sent (what is uploaded comes from it), or a whole
one of the client's own, which starts at W_0 and stays with it.  P is measured on whatever the last pass trained.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedp3.data import batch
from fedp3.hooks import Pass, Pull, Trained
from fedp3.privacy.mechanism import draws
from fedp3.recipe import EVAL_BATCH, Recipe, Shard, dealt, rate, steps_of
from fedp3.rng import Use, layers_draw_from
from fedp3.steps import load, named, train
from fedp3.types import ClientPlan, Group, LayerMap, Local, Params, Task

OWN, METHOD = "own/", "method/"  # names of what stays with a client: its own model, an exchange's tensors
WHICH: Mapping[str, Callable[[str, LayerMap], bool]] = {
    "all": lambda l, layers: True,
    "body": lambda l, layers: l != layers.head,
    "head": lambda l, layers: l == layers.head,
}
Kept = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a client's passes leave."""

    tensors: Params  # of the model that was sent
    metrics: Mapping[str, float]
    stays: Params  # on the client, under names that no tensor of the net has
    extra: Params  # for the server


def run_passes(recipe: Recipe, shard: Shard, task: Task, start: Params, kept: Kept) -> Ended:
    """Train as the hooks say, from `start`; `kept` is what the client kept of its last round."""
    tensors, exchange = named(recipe.net), recipe.hooks.exchange
    stretches = recipe.hooks.stretches(task.kind)
    models = {False: start}
    if any(p.own for p in stretches):
        models[True] = dict(recipe.initial) | _under(OWN, kept)
    metrics: Mapping[str, float] = {}
    shift = exchange.shift(task.extra, _under(METHOD, kept)) if exchange and exchange.shift else {}
    for j, p in enumerate(stretches):
        at = (task.t, task.plan.client, *([j] if j else []))
        load(tensors, models[p.own])
        here = replace(recipe, local=stretched(recipe.local, len(shard.train), p.share))
        asked = replace(task, plan=only(task.plan, p, recipe.layers))
        with layers_draw_from(draws(recipe.private, Use.LAYER, recipe.seed, *at)):
            done = train(here, shard, asked, tensors, _pull(recipe, p, start, shift), at)
            if recipe.hooks.static_norm:
                settle(recipe, shard)
        models[p.own] = {n: _plain(tensors[n]) for n in recipe.layers.shapes}
        metrics = metrics if p.own else done
    stays = {f"{OWN}{n}": w for n, w in models.get(True, {}).items()}
    extra: Params = {}
    if exchange is not None and task.kind == "train":
        extra, mine = exchange.reply(_trained(recipe, shard, task, start, models[False], kept))
        stays |= {f"{METHOD}{n}": w for n, w in mine.items()}
    return Ended(models[False], metrics, stays, extra)


def _plain(w: Tensor) -> Tensor:
    """A copy in host memory, laid out as its shape says: sums over it must not depend on how the net likes it."""
    return w.detach().cpu().clone(memory_format=torch.contiguous_format)


def only(plan: ClientPlan, p: Pass, layers: LayerMap) -> ClientPlan:
    """The plan with nothing training but the layers of this pass."""
    if p.layers == "all":
        return plan
    trains = WHICH[p.layers]
    return replace(plan, layers={l: replace(x, train=x.train and trains(l, layers)) for l, x in plan.layers.items()})


def stretched(local: Local, samples: int, share: float) -> Local:
    """Local training over this share of its steps."""
    return local if share == 1 else replace(local, steps=steps_of(local, samples, share), epochs=0)


def _under(prefix: str, kept: Kept) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): w for n, w in kept.items() if n.startswith(prefix)}


def _pull(recipe: Recipe, p: Pass, start: Params, shift: Params) -> Pull:
    anchor = {n: w.to(recipe.device) for n, w in start.items()} if p.mu else {}
    return Pull(p.mu, anchor, {n: w.to(recipe.device) for n, w in shift.items()})


def _trained(recipe: Recipe, shard: Shard, task: Task, start: Params, end: Params, kept: Kept) -> Trained:
    steps = sum(steps_of(recipe.local, len(shard.train), p.share) for p in recipe.hooks.passes if not p.own)
    load(named(recipe.net), end)
    reach = steps * rate(recipe.local, task.t)
    return Trained(
        recipe.net, start, end, reach, task.extra, _under(METHOD, kept), lambda: in_order(recipe, shard.train)
    )


def in_order(recipe: Recipe, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples and labels, batch by batch, not augmented."""
    for at in torch.split(samples, dealt(len(samples), EVAL_BATCH)):
        yield batch(recipe.data, at).to(recipe.device), recipe.data.y[at].to(recipe.device)


# --------------------------------------------------------------------------- HeteroFL's two aids


@torch.no_grad()
def settle(recipe: Recipe, shard: Shard) -> None:
    """Static batch norm: the running statistics of layers that trained become averages over the client's samples."""
    own = [m for m in recipe.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    before = [m.momentum for m in own]
    for m in own:
        m.reset_running_stats()
        m.momentum = None  # torch's word for a cumulative average
    if own:
        for x, _ in in_order(recipe, shard.train):
            recipe.net(x)
    for m, momentum in zip(own, before, strict=True):
        m.momentum = momentum


@contextmanager
def scaling(net: nn.Module, shares: Mapping[Group, float]) -> Iterator[None]:
    """Inside, what these units say is divided by the share of them that is there."""
    modules = dict(net.named_modules())

    def divide(share: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda m, _, out: out / share

    handles = [modules[g].register_forward_hook(divide(share)) for g, share in shares.items() if share < 1]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
