"""Neighbouring data sets for an audit: made-up records with and without one canary record.

The canary has a huge gradient.  In the data set without it, a record that counts as zero takes its
place, so that sizes and denominators are equal.  Some settings only process a noised gradient
further: the learning rate and its schedule, momentum, weight decay, compression.  They are set to
values that leave the gradient readable.  An adversary can apply whatever they do to the uploads
that are attacked here.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedp3.client.batching import LocalSettings
from fedp3.client.context import ClientContext, RunSpec
from fedp3.client.update import local_update
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import ClientPlan, Masks, Params, Task
from fedp3.data import Dataset
from fedp3.data.shards import Shard
from fedp3.messages.compression import UNCOMPRESSED
from fedp3.models.layer_map import layer_map
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Mechanism

RECORDS, INPUTS, CLASSES = 24, 20, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One client on made-up records, the last of which is the canary or its substitute.

    Args:
        context: the network and settings of the client.
        plan: which layers it trains and uploads.
        weights: what the server sends.
        masks: the masks of what the server sends.
        with_canary: the records with the canary.
        without: the records with a substitute, whose gradient is not finite and counts as zero.
        serial: the number of the last round; every update is a new round.
    """

    context: ClientContext
    plan: ClientPlan
    weights: Params
    masks: Masks
    with_canary: Tensor
    without: Tensor
    serial: list[int] = field(default_factory=lambda: [0])

    def update(self, mechanism: Mechanism, canary: bool, steps: int = 1) -> dict[str, Tensor]:
        """W - u of one upload u, in units in which a record's clipped gradient has norm C.

        Args:
            mechanism: the mechanism under which the client trains.
            canary: whether the canary is among its records.
            steps: number of local steps.
        """
        self.serial[0] += 1
        x = self.with_canary if canary else self.without
        # A single step is as large as the weights: after a small step, 32 bits would lose much of
        # the difference.
        lr = mechanism.sample_rate * len(x) / mechanism.clip if steps == 1 else 1.0
        local = replace(
            self.context.local,
            lr=lr,
            schedule="constant",
            momentum=0.0,
            weight_decay=0.0,
            steps=steps,
            epochs=0,
        )
        context = replace(
            self.context,
            spec=replace(self.context.spec, compression=UNCOMPRESSED),
            data=replace(self.context.data, x=x),
            local=local,
            stacked=False,
            steps=PrivateSteps(mechanism),
        )
        task = Task(t=self.serial[0], plan=self.plan, weights=self.weights, masks=self.masks)
        shard = Shard(torch.arange(len(x)), torch.arange(1))
        upload = local_update(context, shard, task, None)[0].tensors
        scale = mechanism.sample_rate * len(x) / local.lr
        return {n: (self.weights[n] - upload[n]) * scale for n in upload}

    def without_local_pruning(self) -> "Bench":
        """The same client, with every trained coordinate in every step."""
        spec = self.context.spec
        spec = replace(spec, pruning=replace(spec.pruning, local_pruner="fixed"))
        return replace(self, context=replace(self.context, spec=spec))


def flat(tensors: Params) -> Tensor:
    """All coordinates in one vector."""
    return torch.cat([w.flatten().double() for w in tensors.values()])


def tiny(others: str, upload: Literal["none", "retained"] = "none") -> Bench:
    """An MLP 20-16-8-4, whose last two layers are uploaded and whose first layer is pruned.

    Args:
        others: what happens to the first layer (`plan.others`).
        upload: "retained" uploads the first layer too.
    """
    context = _small_context(
        lambda: nn.Sequential(
            nn.Linear(INPUTS, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
    )
    settings = PlanSettings(
        layers="opu1", others="train" if others == "noise" else "freeze", upload=upload
    )
    plans = client_plans(settings, context.layers, [0.5] * 2, 0, 0)
    return bench(context, next(plan for plan in plans if "2" in plan.full_layers))


def drawing(dropout: float = 0.0, crop: int = 0) -> Bench:
    """A small network with Dropout, or records that are cropped at random; it is uploaded in full.

    Args:
        dropout: the probability of Dropout.
        crop: pixels by which images are shifted at most.
    """
    context = _small_context(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(INPUTS, 16),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(16, CLASSES),
        ),
        (1, 4, INPUTS // 4),
    )
    context = replace(context, data=replace(context.data, crop=crop))
    return bench(context, client_plans(PlanSettings(layers="full"), context.layers, [1.0], 0, 0)[0])


def _small_context(
    build: Callable[[], nn.Module], shape: tuple[int, ...] = (INPUTS,)
) -> ClientContext:
    with layers_draw_from(stream(0, Stream.INIT)):
        net = build()
    data = Dataset(
        name="made up",
        x=torch.zeros(RECORDS, *shape),
        y=torch.arange(RECORDS) % CLASSES,
        classes=CLASSES,
    )
    return ClientContext(
        spec=RunSpec(layers=layer_map(net)),
        net=net,
        data=data,
        local=LocalSettings(lr=1.0),
        initial={n: w.detach().clone() for n, w in net.state_dict().items()},
    )


def bench(context: ClientContext, plan: ClientPlan, records: int = RECORDS) -> Bench:
    """A client with a copy of this network and this plan, on made-up records."""
    context = replace(context, net=copy.deepcopy(context.net))
    ((weights, masks),) = dispatch(
        context.initial, [plan], context.layers, context.pruning, 0, context.seed
    )
    x = torch.randn((records, *context.data.x.shape[1:]), generator=stream(0, Stream.AUDIT, 0))
    y = torch.arange(records) % context.data.classes
    without = x.clone()
    x[-1] = 1e3  # the canary has a huge gradient
    without[-1] = math.nan  # its substitute counts as zero
    y[-1] = _least_likely_label(context, {**context.initial, **weights}, x[-1:])
    data = replace(context.data, x=x, y=y, mean=(), std=())
    return Bench(
        context=replace(context, data=data),
        plan=plan,
        weights=weights,
        masks=masks,
        with_canary=x,
        without=without,
    )


def _least_likely_label(context: ClientContext, W: Params, x: Tensor) -> int:
    """The label under which a record has the largest gradient; the expected label gives none."""
    on_device = {n: w.to(context.device) for n, w in W.items()}
    net = context.net.eval()
    with torch.no_grad():
        logits: Tensor = torch.func.functional_call(net, on_device, (x.to(context.device),))
    return int(logits.argmin())
