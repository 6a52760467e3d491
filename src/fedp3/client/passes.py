"""A client's training as a sequence of passes, with a method's hooks around them.

One pass is a number of steps on some layers of one model.  This is the model that was sent, from
which the upload is taken, or a personal model, which starts at W_0 and stays on the client.  P is
measured on the model that the last pass trained.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3.client import optimizers
from fedp3.client.batching import EVAL_BATCH, LocalSettings, batch_sizes, learning_rate, step_count
from fedp3.client.context import ClientContext
from fedp3.client.hooks import Pass, ProximalTerm, TrainedClient
from fedp3.client.sgd import load_weights, named_tensors, train
from fedp3.core.randomness import Stream, layers_draw_from
from fedp3.core.types import ClientPlan, LayerMap, Params, Task
from fedp3.data import records
from fedp3.data.inputs import Inputs, to_device
from fedp3.data.shards import Shard

# Prefixes of names in a client's state.
PERSONAL = "own/"  # tensors of its personal model
METHOD = "method/"  # tensors of the method's exchange
OPTIMIZER = "optimizer/"  # what the optimizer of each pass remembers
TRAINS: Mapping[str, Callable[[str, LayerMap], bool]] = {
    "all": lambda l, layers: True,
    "body": lambda l, layers: l != layers.head,
    "head": lambda l, layers: l == layers.head,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """What a client's passes result in.

    Args:
        tensors: the model that was sent, after training.
        metrics: of the training.
        state: tensors that stay on the client, under names that no tensor of the network has.
        extra: the method's own tensors, for the server.
    """

    tensors: Params
    metrics: Mapping[str, float]
    state: Params
    extra: Params


def run_passes(
    context: ClientContext, shard: Shard, task: Task, start: Params, state: Params
) -> LocalResult:
    """Train through the passes of a task.

    Args:
        context: the network and what clients share.
        shard: the client's samples.
        task: what the server requests.
        start: the weights that training starts from.
        state: the tensors that stayed on the client after its last round.
    """
    context = replace(context, local=planned_steps(context.local, task.plan))
    tensors, exchange = named_tensors(context.net), context.hooks.exchange
    passes = context.hooks.passes_of(task.kind)
    models = {False: start}  # by whether it is the personal one
    if any(p.personal for p in passes):
        models[True] = dict(context.initial) | _with_prefix(PERSONAL, state)
    metrics: Mapping[str, float] = {}
    new_state: dict[str, Tensor] = {}
    shift: Params = {}
    if exchange is not None and exchange.shift is not None:
        shift = exchange.shift(task.extra, _with_prefix(METHOD, state))
    for j, p in enumerate(passes):
        address: tuple[int, ...] = (task.t, task.plan.client)
        if j > 0:
            address = (*address, j)
        load_weights(tensors, models[p.personal])
        with_steps = replace(context, local=scale_steps(context.local, len(shard.train), p.share))
        restricted = replace(task, plan=restrict_plan(task.plan, p, context.layers))
        proximal = _proximal_term(context, p, start, shift)
        remembered = _with_prefix(f"{OPTIMIZER}{j}/", state)
        optimizer = optimizers.from_tensors(remembered, context.device)
        with layers_draw_from(context.steps.generator(Stream.LAYER, context.seed, *address)):
            trained = train(with_steps, shard, restricted, tensors, proximal, address, optimizer)
            if context.hooks.after_pass is not None:
                context.hooks.after_pass(context.net, in_order(context, shard.train))
        models[p.personal] = {n: _to_host(tensors[n]) for n in context.layers.shapes}
        metrics = metrics if p.personal else trained
        if context.local.optimizer_state == "client":
            remembered = optimizers.to_tensors(optimizer)
            new_state |= {f"{OPTIMIZER}{j}/{n}": w for n, w in remembered.items()}
    new_state |= {f"{PERSONAL}{n}": w for n, w in models.get(True, {}).items()}
    extra: Params = {}
    if exchange is not None and task.kind == "train":
        client = _trained_client(context, shard, task, start, models[False], state)
        extra, staying = exchange.reply(client)
        new_state |= {f"{METHOD}{n}": w for n, w in staying.items()}
    return LocalResult(tensors=models[False], metrics=metrics, state=new_state, extra=extra)


def _to_host(w: Tensor) -> Tensor:
    """A contiguous copy in host memory.

    Sums over it must not depend on the network's memory layout.
    """
    return w.detach().cpu().clone(memory_format=torch.contiguous_format)


def restrict_plan(plan: ClientPlan, p: Pass, layers: LayerMap) -> ClientPlan:
    """The plan with only the layers of this pass training."""
    if p.layers == "all":
        return plan
    trains = TRAINS[p.layers]
    restricted = {
        l: replace(x, train=x.train and trains(l, layers)) for l, x in plan.layers.items()
    }
    return replace(plan, layers=restricted)


def planned_steps(local: LocalSettings, plan: ClientPlan) -> LocalSettings:
    """The local settings with the number of steps that the client's plan names, if it does."""
    return replace(local, steps=plan.steps, epochs=0) if plan.steps else local


def scale_steps(local: LocalSettings, samples: int, share: float) -> LocalSettings:
    """The local settings with this share of their steps."""
    if share == 1:
        return local
    return replace(local, steps=step_count(local, samples, share), epochs=0)


def _with_prefix(prefix: str, state: Params) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, named without it."""
    return {n.removeprefix(prefix): w for n, w in state.items() if n.startswith(prefix)}


def _proximal_term(context: ClientContext, p: Pass, start: Params, shift: Params) -> ProximalTerm:
    anchor = {n: w.to(context.device) for n, w in start.items()} if p.mu else {}
    return ProximalTerm(p.mu, anchor, {n: w.to(context.device) for n, w in shift.items()})


def _trained_client(
    context: ClientContext, shard: Shard, task: Task, start: Params, end: Params, state: Params
) -> TrainedClient:
    samples = len(shard.train)
    steps = sum(
        step_count(context.local, samples, p.share) for p in context.hooks.passes if not p.personal
    )
    load_weights(named_tensors(context.net), end)
    return TrainedClient(
        net=context.net,
        start=start,
        end=end,
        steps_times_lr=steps * learning_rate(context.local, task.t, context.spec.rounds),
        sent=task.extra,
        state=_with_prefix(METHOD, state),
        batches=lambda: in_order(context, shard.train),
    )


def in_order(context: ClientContext, samples: Tensor) -> Iterator[tuple[Inputs, Tensor]]:
    """Samples and targets, batch by batch, not augmented."""
    for indices in torch.split(samples, batch_sizes(len(samples), EVAL_BATCH)):
        read = records(context.data, indices)
        yield to_device(read.x, context.device), read.y.to(context.device)
