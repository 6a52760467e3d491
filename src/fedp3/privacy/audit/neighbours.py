"""Neighbouring data sets for an audit: made-up records with and without one canary record.

The canary has a huge gradient.  In the data set without it, a record that counts as zero takes its
place, so that sizes and denominators are equal.  Some settings only process a noised gradient
further: the learning rate and its schedule, momentum, weight decay, compression.  They are set to
values that leave the gradient readable.  An adversary can apply whatever they do to the uploads
that are attacked here.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedp3.client.batching import LocalSettings
from fedp3.client.context import ClientContext, RunSpec
from fedp3.client.objectives import RecordLoss
from fedp3.client.sgd import named_tensors
from fedp3.client.step_source import Gradient
from fedp3.client.update import local_update
from fedp3.core import masks as M
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import ClientPlan, Masks, Params, Task
from fedp3.data import Dataset
from fedp3.data.inputs import Inputs, only_tensor
from fedp3.data.shards import Shard
from fedp3.messages.compression import UNCOMPRESSED
from fedp3.models.layer_map import layer_map
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Mechanism

RECORDS, INPUTS, CLASSES = 24, 20, 4
NEVER = 1e-12  # a sample rate at which no record is drawn, so that an upload is noise alone


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
        shift: how many places the records are moved, so that the canary is elsewhere in a batch.
        serial: the number of the last round; every update is a new round.
    """

    context: ClientContext
    plan: ClientPlan
    weights: Params
    masks: Masks
    with_canary: Tensor
    without: Tensor
    shift: int = 0
    serial: list[int] = field(default_factory=lambda: [0])

    def update(
        self,
        mechanism: Mechanism,
        canary: bool,
        steps: int = 1,
        *,
        client: int | None = None,
        t: int | None = None,
        probe: bool = False,
        lr: float = 0.0,
    ) -> dict[str, Tensor]:
        """W - u of one upload u, in units in which a record's clipped gradient has norm C.

        Args:
            mechanism: the mechanism under which the client trains.
            canary: whether the canary is among its records.
            steps: number of local steps.
            client: the number of the client; that of the plan by default.
            t: the round; a new one by default.
            probe: read the trained weights of a probe, which uploads nothing, from its network.
            lr: the learning rate; by default a single record moves the weights by 1.
        """
        self.serial[0] += 1
        x = self.with_canary if canary else self.without
        # A step is about as large as the weights: after a small step, 32 bits would lose much of
        # the difference.
        lr = lr or mechanism.sample_rate * len(x) / mechanism.clip
        context = replace(
            self.context,
            spec=replace(self.context.spec, compression=UNCOMPRESSED),
            data=replace(self.context.data, x=x),
            local=readable(self.context.local, lr, steps),
            stacked=False,
            steps=PrivateSteps(mechanism),
        )
        plan = self.plan if client is None else replace(self.plan, client=client)
        task = Task(
            t=self.serial[0] if t is None else t,
            plan=plan,
            weights=self.weights,
            masks=self.masks,
            kind="probe" if probe else "train",
        )
        shard = Shard(torch.arange(len(x)).roll(self.shift), torch.arange(1))
        if probe:
            start, end = weights_around(context, shard, task)
        else:
            start, end = self.weights, local_update(context, shard, task, None)[0].tensors
        scale = mechanism.sample_rate * len(x) / lr
        return {n: (start[n] - w) * scale for n, w in end.items()}

    def steps(self, mechanism: Mechanism, canary: bool, steps: int) -> Tensor:
        """(steps, coordinates): the gradients of all steps of one task, in the units of `update`.

        The learning rate is so small that the weights stay what they are.
        """
        recorder = Recorder(PrivateSteps(mechanism))
        x = self.with_canary if canary else self.without
        context = replace(
            self.context,
            data=replace(self.context.data, x=x),
            local=readable(self.context.local, 1e-12, steps),
            stacked=False,
            steps=recorder,
        )
        self.serial[0] += 1
        task = Task(t=self.serial[0], plan=self.plan, weights=self.weights, masks=self.masks)
        shard = Shard(torch.arange(len(x)), torch.arange(1))
        local_update(context, shard, task, None)
        gradients = torch.stack([flat(g) for g in recorder.gradients])
        return gradients * (mechanism.sample_rate * len(x))

    def trained(self) -> dict[str, Tensor]:
        """The coordinates that train and are uploaded, as a bool tensor for each tensor."""
        layers = self.context.layers
        return {
            n: M.as_bool(M.active(n, self.masks, layers), layers.shapes[n])
            for l in self.plan.uploaded
            if self.plan.layers[l].train
            for n in layers.layers[l]
            if n not in layers.buffers
        }

    def with_batch(self, batch: int) -> "Bench":
        """The same client, with so many records in memory at once."""
        local = replace(self.context.local, batch=batch)
        return replace(self, context=replace(self.context, local=local))

    def without_local_pruning(self) -> "Bench":
        """The same client, with every trained coordinate in every step."""
        return replace(self, context=unpruned_steps(self.context))


def readable(local: LocalSettings, lr: float, steps: int) -> LocalSettings:
    """Local settings under which an upload is the sum of its gradients times the learning rate."""
    plain = replace(local, schedule="constant", momentum=0.0, weight_decay=0.0)
    return replace(plain, lr=lr, steps=steps, epochs=0)


def unpruned_steps(context: ClientContext) -> ClientContext:
    """The context without local pruning, because a unit that a step leaves out gets no noise."""
    pruning = replace(context.pruning, local_pruner="fixed")
    return replace(context, spec=replace(context.spec, pruning=pruning))


def flat(tensors: Params) -> Tensor:
    """All coordinates in one vector."""
    return torch.cat([w.flatten().double() for w in tensors.values()])


# --------------------------------------------------------------------------- a client's network


@dataclass(frozen=True, slots=True)
class Watch:
    """The weights of clients' networks after each task, also of tasks that upload nothing."""

    ends: list[Mapping[str, Tensor]] = field(default_factory=list)

    def on(self, context: ClientContext) -> ClientContext:
        """The context whose networks are watched."""

        @contextmanager
        def forward(net: nn.Module, shares: Mapping[str, float]) -> Iterator[None]:
            yield
            tensors = named_tensors(net).items()
            self.ends.append({n: w.detach().cpu().clone() for n, w in tensors})

        hooks = replace(context.hooks, forward=forward)
        return replace(context, spec=replace(context.spec, hooks=hooks))


def weights_around(context: ClientContext, shard: Shard, task: Task) -> tuple[Params, Params]:
    """The weights of a client's network before and after a task; pruned units are left out."""
    watch = Watch()
    watched = watch.on(context)
    for one in (replace(task, kind="evaluate"), task):
        local_update(watched, shard, one, None)
    start, end = watch.ends
    names = [n for l, p in task.plan.layers.items() if p.train for n in context.layers.layers[l]]
    return start, {n: end[n] for n in names}


# --------------------------------------------------------------------------- single steps


@dataclass(frozen=True, slots=True)
class Recorder:
    """The private step source, with a record of every gradient that it returns."""

    source: PrivateSteps
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    is_plain: bool = False

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of the source."""
        return self.source.mechanism

    @property
    def repeatable(self) -> bool:
        """As the source."""
        return self.source.repeatable

    def batches(
        self, local: LocalSettings, samples: int, seed: int, *address: int
    ) -> Iterator[Tensor]:
        """As the source."""
        return self.source.batches(local, samples, seed, *address)

    def gradient(
        self,
        plain: Gradient,
        loss: RecordLoss,
        local: LocalSettings,
        samples: int,
        seed: int,
        *address: int,
    ) -> Gradient:
        """The source's gradient, recorded."""
        private = self.source.gradient(plain, loss, local, samples, seed, *address)

        def gradient(
            net: nn.Module, x: Inputs, y: Tensor, W: Params, masks: Params
        ) -> tuple[float, list[Tensor]]:
            loss, grads = private(net, x, y, W, masks)
            masked = {
                n: g.detach() * masks[n] if n in masks else g.detach().clone()
                for n, g in zip(W, grads, strict=True)
            }
            self.gradients.append(masked)
            return loss, grads

        return gradient

    def generator(self, use: Stream, seed: int, *address: int) -> torch.Generator:
        """As the source."""
        return self.source.generator(use, seed, *address)


# --------------------------------------------------------------------------- small networks


def tiny(others: str, upload: Literal["none", "retained"] = "none", seed: int = 0) -> Bench:
    """An MLP 20-32-16-4, whose last two layers are uploaded and whose first layer is pruned.

    Args:
        others: what happens to the first layer (`plan.others`).
        upload: "retained" uploads the first layer too.
        seed: of weights and records.
    """
    context = _small_context(
        lambda: nn.Sequential(
            nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES)
        ),
        seed=seed,
    )
    settings = PlanSettings(
        layers="opu1", others="train" if others == "noise" else "freeze", upload=upload
    )
    plans = client_plans(settings, context.layers, [0.5] * 2, 0, 0)
    return bench(context, next(plan for plan in plans if "2" in plan.full_layers), seed=seed)


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
    return bench(context, _full_plan(context))


def coins(records: int) -> Bench:
    """A client whose uploads show how often each record was drawn.

    Record j has a one in place j and zeros elsewhere, so that it has a column of the only weight
    for itself.  All weights are zero and there are two classes, so that its clipped gradient is
    (C, -C) / sqrt(2) in that column whenever it is drawn.
    """
    context = _small_context(lambda: nn.Sequential(nn.Linear(records, 2, bias=False)), (records,))
    initial = {n: torch.zeros_like(w) for n, w in context.initial.items()}
    context = replace(context, initial=initial)
    made = bench(context, _full_plan(context), records)
    data = replace(made.context.data, y=torch.zeros(records, dtype=torch.int64), classes=2)
    one_hot = torch.eye(records)
    return replace(
        made, context=replace(made.context, data=data), with_canary=one_hot, without=one_hot
    )


def _full_plan(context: ClientContext) -> ClientPlan:
    return client_plans(PlanSettings(layers="full"), context.layers, [1.0], 0, 0)[0]


def _small_context(
    build: Callable[[], nn.Module], shape: tuple[int, ...] = (INPUTS,), seed: int = 0
) -> ClientContext:
    with layers_draw_from(stream(seed, Stream.INIT)):
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


def bench(context: ClientContext, plan: ClientPlan, records: int = RECORDS, seed: int = 0) -> Bench:
    """A client with a copy of this network and this plan, on made-up records."""
    context = replace(context, net=copy.deepcopy(context.net))
    ((weights, masks),) = dispatch(
        context.initial, [plan], context.layers, context.pruning, 0, context.seed
    )
    shape = only_tensor(context.data.x, "an audit").shape[1:]
    x = torch.randn((records, *shape), generator=stream(seed, Stream.AUDIT, 0))
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
