"""Neighbouring data for an audit: made-up records with and without one canary of huge gradient.

Where the canary is not, a record that counts as none holds its place, so sizes and denominators are equal.  Settings
that only process a noised gradient further (learning rate and its schedule, momentum, decay, compression) are set to
what leaves it readable: whatever they do to an upload can be done to what is attacked here.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedp3.client import local_update
from fedp3.data import Dataset
from fedp3.layermap import layer_map
from fedp3.plan import PlanRules, client_plans
from fedp3.prune import dispatch
from fedp3.recipe import Recipe, Shard
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.types import AS_IS, ClientPlan, Local, Masks, Params, Private, Pruning, Task, Upload

RECORDS, INPUTS, CLASSES = 24, 20, 4


@dataclass(frozen=True, slots=True)
class Bench:
    """A client on made-up records; the last place is the canary's."""

    recipe: Recipe
    plan: ClientPlan
    weights: Params
    masks: Masks
    with_canary: Tensor
    without: Tensor
    serial: list[int] = field(default_factory=lambda: [0])  # every update is a round of its own

    def update(self, private: Private, canary: bool, steps: int = 1) -> dict[str, Tensor]:
        """One upload's s: W - u, in units in which a record's clipped gradient has norm C."""
        self.serial[0] += 1
        x = self.with_canary if canary else self.without
        data = replace(self.recipe.data, x=x)
        # A single step as large as weights are: under a small rate their 32 bits would swallow what it did.
        lr = private.rate * len(x) / private.clip if steps == 1 else 1.0
        plain = replace(self.recipe.local, lr=lr, schedule="constant", momentum=0.0, weight_decay=0.0)
        local = replace(plain, steps=steps, epochs=0)
        recipe = replace(self.recipe, data=data, local=local, private=private, chain=(), compression=AS_IS)
        task = Task(self.serial[0], self.plan, self.weights, self.masks)
        u = local_update(recipe, Shard(torch.arange(len(x)), torch.arange(1)), task, None)[0].tensors
        scale = private.rate * len(x) / local.lr
        return {n: (self.weights[n] - u[n]) * scale for n in u}

    def without_q(self) -> "Bench":
        """The same client without local pruning, so that every coordinate that trains does so in every step."""
        return replace(self, recipe=replace(self.recipe, pruning=replace(self.recipe.pruning, local="fixed")))


def flat(tensors: Params) -> Tensor:
    """All coordinates in a row."""
    return torch.cat([w.flatten().double() for w in tensors.values()])


def tiny(others: str, upload: Upload = "none") -> Bench:
    """20-16-8-4 with the last two layers uploaded and the first pruned; `upload` makes what it does visible."""
    recipe = _small(
        lambda: nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    )
    rules = PlanRules("opu1", others="train" if others == "noise" else "freeze", upload=upload)
    plan = next(p for p in client_plans(rules, recipe.layers, [0.5] * 2, 0, 0) if "2" in p.whole)
    return bench(recipe, plan)


def drawing(dropout: float = 0.0, crop: int = 0) -> Bench:
    """A net and records that draw for themselves, by Dropout or by crops; all of it is uploaded."""
    recipe = _small(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(INPUTS, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES)
        ),
        (1, 4, INPUTS // 4),
    )
    recipe = replace(recipe, data=replace(recipe.data, crop=crop))
    return bench(recipe, client_plans(PlanRules("full"), recipe.layers, [1.0], 0, 0)[0])


def _small(build: Callable[[], nn.Module], shape: tuple[int, ...] = (INPUTS,)) -> Recipe:
    with layers_draw_from(stream(0, Use.INIT)):
        net = build()
    W = {n: w.detach().clone() for n, w in net.state_dict().items()}
    data = Dataset("made up", torch.zeros(RECORDS, *shape), torch.arange(RECORDS) % CLASSES, CLASSES)
    return Recipe(net, layer_map(net), data, Local(lr=1.0), Pruning(), W, 0)


def bench(recipe: Recipe, plan: ClientPlan, records: int = RECORDS) -> Bench:
    """A copy of this net, and this plan, over made-up records."""
    recipe = replace(recipe, net=copy.deepcopy(recipe.net))
    ((weights, masks),) = dispatch(recipe.initial, [plan], recipe.layers, recipe.pruning, 0, recipe.seed)
    x = torch.randn((records, *recipe.data.x.shape[1:]), generator=stream(0, Use.AUDIT, 0))
    y = torch.arange(records) % recipe.data.classes
    without = x.clone()
    x[-1], without[-1] = 1e3, math.nan  # a saturating record, and one that counts as none
    y[-1] = _least_likely(recipe, {**recipe.initial, **weights}, x[-1:])
    data = replace(recipe.data, x=x, y=y, mean=(), std=())
    return Bench(replace(recipe, data=data), plan, weights, masks, x, without)


def _least_likely(recipe: Recipe, W: Params, x: Tensor) -> int:
    """The label under which a record has the largest gradient: one that the net expects has none."""
    here = {n: w.to(recipe.device) for n, w in W.items()}
    net = recipe.net.eval()
    with torch.no_grad():
        return int(torch.func.functional_call(net, here, (x.to(recipe.device),)).argmin())
