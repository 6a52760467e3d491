"""What every aggregator must satisfy, as one table: a name of a claim -> a function that checks it.

Each check takes the settings that make the aggregator, and raises AssertionError if the claim does
not hold.  An aggregator of your own is put through the same table:

    @pytest.mark.parametrize("claim", CONFORMANCE)
    def test_my_aggregator(claim):
        CONFORMANCE[claim](AggregateSettings(rule="mine", options={"trim": 0.1}))
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedp3 import config
from fedp3.core import masks as M
from fedp3.core.trees import flatten, unflatten
from fedp3.core.types import AcceptedUpdate, ClientUpdate, Execute, Params, Reply, Task
from fedp3.engines.base import Engine, States
from fedp3.engines.catalogue import make_engine
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.runs import session
from fedp3.server.aggregators import AggregateSettings, uploaded_mask
from fedp3.server.context import RoundRecord, ServerState
from fedp3.server.rounds import run
from worlds import CLASSES, World, make_aggregator, same, world

ROUNDS = 4
VILLAIN = 1  # the client that sends what is rejected
# unstructured masks, and masks of units; layers are pruned, uploaded pruned, or not uploaded at all
SELECTORS = ("random", "neuron")
UPLOADS = ("none", "retained", "zeros")


# --------------------------------------------------------------------------- a small run


def experiment(settings: AggregateSettings) -> Experiment:
    """Four clients with two layers each, redrawn every round; the others are pruned to a half."""
    c = config.parse(
        {"aggregate": asdict(settings)},
        [
            "partition.clients=4", "run.clients_per_round=3", f"run.rounds={ROUNDS}", "run.seed=5",
            "run.eval_every=0", "plan.layers=lowerb", "plan.redraw=true", "plan.upload=retained",
            "prune.keep=0.5", "prune.selector=random", "local.steps=2", "local.batch=4",
            "local.lr=0.1", "local.augment=false",
        ],
    )  # fmt: skip
    fleet = world("mlp", 4, seed=5)
    net = build(ModelSpec((1, 3, 3), CLASSES, ModelSettings(name="mlp", width=0.006)), 7)
    return assemble_from(c, net, fleet.data, shards=fleet.shards)


def last_state(e: Experiment, execute: Execute) -> ServerState:
    *_, (state, record) = run(e.server, e.start, execute)
    assert all(isinstance(value, float) for value in record.aggregator.values())
    return state


def assert_same(a: ServerState, b: ServerState, why: str) -> None:
    """Equal weights and equal state of the aggregator, to the bit."""
    assert same(a.W, b.W), f"{why}: other weights"
    plain_a, tensors_a = flatten(a.aggregator, "")
    plain_b, tensors_b = flatten(b.aggregator, "")
    assert plain_a == plain_b, f"{why}: another state of the aggregator"
    assert tensors_a.keys() == tensors_b.keys()
    for n, w in tensors_a.items():
        assert torch.equal(w, tensors_b[n]), f"{why}: another state of the aggregator"


# --------------------------------------------------------------------------- claims about runs


def check_order(settings: AggregateSettings) -> None:
    """The order in which replies arrive does not change the result."""
    e = experiment(settings)
    engine = sequential(e.client, e.shards)

    def backwards(tasks: Sequence[Task]) -> Iterable[Reply]:
        return list(engine.execute(tasks))[::-1]

    def rotated(tasks: Sequence[Task]) -> Iterable[Reply]:
        replies = list(engine.execute(tasks))
        return replies[1:] + replies[:1]

    in_order = last_state(e, engine.execute)
    assert not same(in_order.W, e.start.W)
    for execute in (backwards, rotated):
        assert_same(last_state(e, execute), in_order, execute.__name__)


@cache
def _two_workers() -> Engine:
    """Two worker processes, for all aggregators: clients do not know how the server aggregates."""
    return make_engine(experiment(AggregateSettings()), 2)


def close_workers() -> None:
    """Stop the worker processes, if there are any."""
    if _two_workers.cache_info().currsize:
        _two_workers().close()
        _two_workers.cache_clear()


def check_workers(settings: AggregateSettings) -> None:
    """One process and two give the same bits."""
    e = experiment(settings)
    alone = last_state(e, make_engine(e, 1).execute)
    assert_same(last_state(e, _two_workers().execute), alone, "two workers")


class _Stop(Exception):
    pass


def check_resume(settings: AggregateSettings) -> None:
    """A run that is stopped after any round, and resumed, ends at the same bits."""
    e = experiment(settings)

    def start_engine(e: Experiment, states: States | None) -> Engine:
        return sequential(e.client, e.shards, states)

    uninterrupted = last_state(e, sequential(e.client, e.shards).execute)
    for stop_after in range(ROUNDS - 1):

        def stop(record: RoundRecord, stop_after: int = stop_after) -> None:
            if record.t == stop_after:
                raise _Stop

        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            with suppress(_Stop):
                session.train(e, folder, start_engine, watch=session.watch_with(stop))
            resumed = session.train(e, folder, start_engine, resume=True)
        assert_same(resumed.state, uninterrupted, f"stopped after round {stop_after + 1}")


def check_rejected(settings: AggregateSettings) -> None:
    """An update with NaN or a wrong shape leaves no trace, in this round or in later ones."""
    e = experiment(replace(settings))
    engine = sequential(e.client, e.shards)

    def nan(w: Tensor) -> Tensor:
        return torch.full_like(w, torch.nan)

    def short(w: Tensor) -> Tensor:
        return w.flatten()[:1].clone()

    def replies(tasks: Sequence[Task], change: Callable[[Tensor], Tensor] | None) -> list[Reply]:
        answers: list[Reply] = []
        for reply in engine.execute(tasks):
            if reply.client != VILLAIN or reply.t > 1 or not isinstance(reply, ClientUpdate):
                answers.append(reply)
            elif change is not None:
                n = next(reversed(reply.tensors))
                broken = {**reply.tensors, n: change(reply.tensors[n])}
                answers.append(replace(reply, tensors=broken))
        return answers

    absent = last_state(e, lambda tasks: replies(tasks, None))
    for change in (nan, short):
        with_it = last_state(e, lambda tasks, change=change: replies(tasks, change))
        assert_same(with_it, absent, f"a rejected update ({change.__name__})")


# --------------------------------------------------------------------------- claims about one round


def _rounds() -> Iterable[tuple[World, list[AcceptedUpdate]]]:
    """One round of four clients, for each selector and each kind of upload of pruned layers."""
    for selector in SELECTORS:
        for upload in UPLOADS:
            here = world("batchnorm", 4, selector=selector)
            plans = here.plans("lowerb", 0.5, upload=upload)
            rng = torch.Generator().manual_seed(3)
            updates = []
            for task in here.tasks(plans):
                values = {n: torch.randn(s, generator=rng) for n, s in here.layers.shapes.items()}
                updates.append(accepted(here, task, values))
            yield here, updates


def accepted(here: World, task: Task, values: Params) -> AcceptedUpdate:
    """The update of a client that has these values; what it does not upload is a large number."""
    empty = ClientUpdate(client=task.plan.client, t=0, tensors={}, examples=10 + task.plan.client)
    update = AcceptedUpdate(empty, task.plan, task.masks)
    tensors = {}
    for layer in task.plan.uploaded:
        for n in here.layers.layers[layer]:
            mask = M.as_bool(uploaded_mask(update, n, layer, here.spec), here.layers.shapes[n])
            tensors[n] = values[n].masked_fill(~mask, 1e6)
    return replace(update, update=replace(empty, tensors=tensors))


def uploaded_anywhere(here: World, updates: Sequence[AcceptedUpdate]) -> dict[str, Tensor]:
    """The coordinates of each tensor that at least one client uploaded."""
    union = {n: torch.zeros(s, dtype=torch.bool) for n, s in here.layers.shapes.items()}
    for u in updates:
        for layer in u.plan.uploaded:
            for n in here.layers.layers[layer]:
                union[n] |= M.as_bool(uploaded_mask(u, n, layer, here.spec), union[n].shape)
    return union


def apply(settings: AggregateSettings, here: World, updates: Sequence[AcceptedUpdate]) -> Params:
    aggregator = make_aggregator(settings, here.spec)
    return aggregator.apply(here.W, iter(updates), aggregator.init())[0]


def check_not_uploaded(settings: AggregateSettings) -> None:
    """A coordinate that nobody uploaded keeps its bits; uploads move the others."""
    untouched = 0
    for here, updates in _rounds():
        for subset in (updates, updates[:1], []):
            new, union = apply(settings, here, subset), uploaded_anywhere(here, subset)
            assert new.keys() == here.W.keys()
            for n, w in here.W.items():
                assert new[n].shape == w.shape and new[n].dtype == w.dtype, n
                old_bits, new_bits = w.view(torch.int32), new[n].view(torch.int32)
                assert torch.equal(new_bits[~union[n]], old_bits[~union[n]]), n
                assert bool(torch.isfinite(new[n]).all()) and bool((new[n].abs() < 1e5).all()), n
                untouched += int((~union[n]).sum())
    assert untouched > 0


def check_equal_uploads(settings: AggregateSettings) -> None:
    """Equal uploads come back bit-equal, whichever layers and coordinates each client uploaded."""
    for here, updates in _rounds():
        rng = torch.Generator().manual_seed(8)
        V = {n: torch.randn(s, generator=rng) for n, s in here.layers.shapes.items()}
        tasks = [Task(t=0, plan=u.plan, weights=here.W, masks=u.masks) for u in updates]
        new = apply(settings, here, [accepted(here, task, V) for task in tasks])
        union = uploaded_anywhere(here, updates)
        assert same(new, {n: torch.where(union[n], V[n], w) for n, w in here.W.items()})


def check_inputs(settings: AggregateSettings) -> None:
    """Neither the weights, nor the uploads, nor the state are written to."""
    for here, updates in _rounds():
        aggregator = make_aggregator(settings, here.spec)
        _, state = aggregator.apply(here.W, iter(updates), aggregator.init())
        inputs = [*here.W.values(), *(w for u in updates for w in u.update.tensors.values())]
        before, (plain, tensors) = [w.clone() for w in inputs], flatten(state, "")
        tensors = {n: w.clone() for n, w in tensors.items()}
        aggregator.apply(here.W, iter(updates), state)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
        plain_after, tensors_after = flatten(state, "")
        assert plain_after == plain
        assert all(torch.equal(w, tensors_after[n]) for n, w in tensors.items())


def check_state(settings: AggregateSettings) -> None:
    """The state survives being saved, and a restored one leads to the same bits."""
    for here, updates in _rounds():
        aggregator = make_aggregator(settings, here.spec)
        W, state = aggregator.apply(here.W, iter(updates), aggregator.init())
        restored = unflatten(*flatten(state, "state"))
        a, b = (aggregator.apply(W, iter(updates), s) for s in (state, restored))
        assert same(a[0], b[0]) and flatten(a[1], "")[0] == flatten(b[1], "")[0]


CONFORMANCE: Mapping[str, Callable[[AggregateSettings], None]] = {
    "the order of replies does not change the result": check_order,
    "one and two workers give the same bits": check_workers,
    "a resumed run ends at the same bits": check_resume,
    "an update with NaN or a wrong shape leaves no trace": check_rejected,
    "a coordinate that nobody uploaded keeps its bits": check_not_uploaded,
    "equal uploads come back bit-equal": check_equal_uploads,
    "inputs are not written to": check_inputs,
    "its state can be saved and restored": check_state,
}
