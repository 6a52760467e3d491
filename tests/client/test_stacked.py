"""Small clients as one stacked computation: which are stacked, and that it is the same training."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedp3.client import stacked
from fedp3.client.batching import LocalSettings, batches
from fedp3.client.context import ClientContext, RunSpec
from fedp3.client.update import Job, local_update, stacked_updates
from fedp3.core.randomness import Stream, stream
from fedp3.data import Dataset, from_tensors
from fedp3.data.shards import Shard
from fedp3.models.layer_map import layer_map
from fedp3.planning.dispatch import global_tasks
from fedp3.planning.prune_settings import PruneSettings
from worlds import same, world

LOCAL = LocalSettings()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(F.relu(self.a(x.flatten(1))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(F.relu(self.a(F.relu(self.a(x)))))


class Skips(Functional):
    def forward(self, x):
        h = F.relu(self.a(x))
        return self.b(h + h)


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), *between, nn.Linear(3, 2))


def hooked() -> nn.Module:
    net = mlp(nn.ReLU())
    net[0].register_forward_hook(lambda m, args, out: out * 2)
    return net


# --------------------------------------------------------------------------- which networks


@pytest.mark.parametrize(
    ("net", "want"),
    [
        (mlp(nn.ReLU()), (("0.weight", "0.bias"), ("2.weight", "2.bias"))),
        (nn.Sequential(nn.Linear(4, 2)), (("0.weight", "0.bias"),)),
        (mlp(nn.ReLU(), nn.Identity()), (("0.weight", "0.bias"), ("3.weight", "3.bias"))),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (("1.weight", "1.bias"),)),
        (Functional(), (("a.weight", None), ("b.weight", "b.bias"))),
    ],
)
def test_a_chain_of_layers_with_relu_between_is_found(net, want):
    chain = layer_map(net).chain
    assert chain is not None and chain.layers == want


@pytest.mark.parametrize(
    "net",
    [
        mlp(),
        mlp(nn.Tanh()),
        mlp(nn.ReLU6()),
        mlp(nn.ReLU(), nn.Dropout()),
        mlp(nn.BatchNorm1d(3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 2), nn.ReLU()),
        nn.Sequential(nn.Flatten(0), nn.Linear(4, 2)),
        Twice(),
        Skips(),
        hooked(),
        nn.Linear(4, 2),  # it has no module inside it to trace
    ],
)
def test_anything_else_is_left_to_autograd(net):
    assert layer_map(net).chain is None


def can_stack(
    net: nn.Module,
    data: Dataset,
    local: LocalSettings = LOCAL,
    pruner: str = "fixed",
    device: str = "cpu",
) -> bool:
    pruning = PruneSettings(local_pruner=pruner)
    spec = RunSpec(layers=layer_map(net), pruning=pruning)
    return stacked.can_stack(spec, data, local, device)


def test_images_need_a_flatten():
    labels = torch.zeros(4, dtype=torch.int64)
    images = from_tensors(torch.zeros(4, 1, 2, 2), labels, classes=2)
    rows = from_tensors(torch.zeros(4, 4), labels, classes=2)
    flattens = nn.Sequential(nn.Flatten(), *mlp(nn.ReLU()))
    assert not can_stack(mlp(nn.ReLU()), images) and can_stack(mlp(nn.ReLU()), rows)
    assert can_stack(flattens, images) and can_stack(flattens, rows)


def test_a_network_with_more_outputs_than_classes_is_left_to_autograd():
    data = from_tensors(torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64), classes=2)
    assert can_stack(nn.Sequential(nn.Linear(4, 2)), data)
    assert not can_stack(nn.Sequential(nn.Linear(4, 3)), data)


def test_the_choice_follows_from_sizes_and_settings_alone():
    data = from_tensors(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), classes=2)

    def mlp_of(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    most = (stacked.SMALL - 2) // 11  # 8w + w + 2w + 2 parameters
    assert can_stack(mlp_of(most), data) and not can_stack(mlp_of(most + 1), data)
    assert not can_stack(mlp_of(4), data, device="cuda")
    assert not can_stack(mlp_of(4), data, pruner="uniform")
    images = replace(data, x=torch.zeros(4, 1, 2, 4), flip=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    assert not can_stack(net, images)  # flips are drawn image by image
    assert can_stack(net, images, LocalSettings(augment=False))


# --------------------------------------------------------------------------- the same training


def both(here, tasks):
    """The same tasks by autograd, and stacked one by one."""
    plain, small = here.context, replace(here.context, stacked=True)
    return [
        [local_update(r, here.shards[task.plan.client], task, None) for task in tasks]
        for r in (plain, small)
    ]


SETTINGS = {
    "plain": {},
    "momentum, decay and clip": {"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.5},
    "epochs with a short last batch": {"steps": 0, "epochs": 2},
    "batches larger than the data": {"batch": 1000},
    "a schedule": {"schedule": "cosine"},
}


@pytest.mark.parametrize("selector", ["magnitude", "neuron"])
@pytest.mark.parametrize("physical", [True, False])
@pytest.mark.parametrize("others", ["train", "freeze"])
@pytest.mark.parametrize("local", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_stacked_client_trains_as_autograd_does(local, others, physical, selector):
    here = world(selector=selector, physical=physical, **local)
    tasks = here.tasks(here.plans("opu2", 0.5, others=others), t=2, evaluate=True)
    for (a, _), (b, _) in zip(*both(here, tasks), strict=True):
        assert a.tensors.keys() == b.tensors.keys()
        for n, w in a.tensors.items():
            torch.testing.assert_close(b.tensors[n], w, rtol=1e-4, atol=1e-6)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-4)


def test_pruned_coordinates_that_are_not_frozen_grow_again():
    here = world(freeze_pruned=False)
    (a, *_), (b, *_) = both(here, here.tasks(here.plans("lowerb", 0.3, upload="zeros")))
    for n, w in a[0].tensors.items():
        torch.testing.assert_close(b[0].tensors[n], w, rtol=1e-4, atol=1e-6)


def test_layers_without_bias_and_deep_ones_train_too():
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(9, 7, bias=False), nn.ReLU(), nn.Linear(7, 4, bias=False)
    )
    here = world().but(
        net=net,
        layers=layer_map(net),
        W={n: w.detach().clone() for n, w in net.state_dict().items()},
    )
    tasks = here.tasks(here.plans("full", 1.0))
    small = replace(here.context, stacked=True)
    assert small.layers.chain.layers == (("1.weight", None), ("3.weight", None))
    for task in tasks:
        a, b = (
            local_update(r, here.shards[task.plan.client], task, None)[0]
            for r in (here.context, small)
        )
        torch.testing.assert_close(dict(a.tensors), dict(b.tensors), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["evaluate", "probe"])
def test_scores_are_those_of_autograd(kind):
    here = world()
    for (a, s), (b, t) in zip(
        *both(here, here.tasks(here.plans(), kind=kind, evaluate=True)), strict=True
    ):
        assert s is t is None and not a.tensors and not b.tensors
        assert a.metrics == pytest.approx(b.metrics, rel=1e-5)


def test_a_personal_head_stays_and_is_started_from():
    here = world()
    small = replace(here.context, stacked=True)
    (task, *_) = here.tasks(here.plans(head="personal"))
    first, kept = local_update(small, here.shards[0], task, None)
    assert set(kept.tensors) == {"ffc.weight", "ffc.bias"} and "ffc.weight" not in first.tensors
    again, _ = local_update(small, here.shards[0], replace(task, state_from=0), kept)
    assert not same(first.tensors, again.tensors)


@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 20),
    steps=st.integers(1, 12),
    epochs=st.integers(0, 2),
)
def test_a_stack_draws_the_same_batches(samples, batch, steps, epochs):
    local = LocalSettings(steps=steps, epochs=epochs, batch=batch)
    here = world()
    task = here.tasks(here.plans())[1]
    shard = Shard(torch.randperm(200)[:samples], torch.arange(0))
    context = replace(here.context, local=local)
    drawn = list(stacked._batches(context, [stacked.Member(shard, task, {})]))
    want = list(
        batches(samples, local, stream(context.seed, Stream.BATCHES, task.t, task.plan.client))
    )
    assert len(drawn) == len(want)
    for (samples_of_step, weight), rows in zip(drawn, want, strict=True):
        assert samples_of_step[0, : len(rows)].tolist() == shard.train[rows].tolist()
        assert weight[0].tolist() == pytest.approx(
            [1 / len(rows)] * len(rows) + [0.0] * (samples_of_step.shape[1] - len(rows))
        )


# --------------------------------------------------------------------------- the same bits


@st.composite
def fleets(draw):
    """A random MLP, and clients with data of several sizes."""
    sides = [draw(st.integers(1, 70)) for _ in range(draw(st.integers(2, 4)))]
    net = nn.Sequential(
        *[
            m
            for a, b in zip(sides, [*sides[1:], 4], strict=True)
            for m in (nn.Linear(a, b), nn.ReLU())
        ][:-1]
    )
    clients = draw(st.integers(2, 9))
    sizes = [draw(st.sampled_from([5, 17, 30])) for _ in range(clients)]
    return net, sides[0], sizes, draw(st.integers(1, 24)), draw(st.sampled_from([0.0, 0.01, 10.0]))


@settings(max_examples=40, deadline=None)
@given(fleets(), st.integers(0, 2**31), st.data())
def test_stacking_with_others_changes_no_bit(fleet, seed, data):
    net, inputs, sizes, batch, clip = fleet
    rng = torch.Generator().manual_seed(seed)
    pool = from_tensors(
        torch.randn(sum(sizes), inputs, generator=rng),
        torch.randint(4, (sum(sizes),), generator=rng),
    )
    pool = replace(pool, classes=4)
    layers = layer_map(net)
    W = {n: torch.randn(w.shape, generator=rng) for n, w in net.state_dict().items()}
    local = LocalSettings(steps=4, batch=batch, clip_norm=clip, momentum=0.5)
    context = ClientContext(
        spec=RunSpec(layers=layers, seed=seed),
        net=net,
        data=pool,
        local=local,
        initial=W,
        stacked=True,
    )
    assert layers.chain is not None
    parts = torch.split(torch.arange(sum(sizes)), sizes)
    here = replace(
        world(),
        layers=layers,
        W=W,
        seed=seed,
        shards={i: Shard(part, part[:3]) for i, part in enumerate(parts)},
    )
    tasks = here.tasks(here.plans("full", 1.0), evaluate=True)
    jobs = [Job(here.shards[task.plan.client], task) for task in tasks]
    alone = [stacked_updates(context, [job])[0][0] for job in jobs]
    keys = [stacked.batch_key(context, job.shard, job.task) for job in jobs]
    for key in dict.fromkeys(keys):  # in the order of clients: the keys hold addresses
        who = data.draw(st.permutations([i for i, k in enumerate(keys) if k == key]))
        for i, (update, _) in zip(
            who, stacked_updates(context, [jobs[i] for i in who]), strict=True
        ):
            assert same(update.tensors, alone[i].tensors)
            assert update.metrics == alone[i].metrics


@pytest.mark.parametrize("tensors", range(1, 10))
def test_a_clipped_step_is_the_same_in_any_stack(tensors):
    """The norm runs over all tensors; its summation must not depend on the number of members."""
    rng = torch.Generator().manual_seed(tensors)
    grads = {f"w{j}": torch.randn(16, 16, 16 * (j + 1), generator=rng) for j in range(tensors)}
    together = {n: torch.zeros_like(g) for n, g in grads.items()}
    local = LocalSettings(clip_norm=0.3)
    stacked._sgd(together, {n: g.clone() for n, g in grads.items()}, {}, {}, local, 1.0)
    for i in range(16):
        alone = {n: torch.zeros_like(g[:1]) for n, g in grads.items()}
        stacked._sgd(alone, {n: g[i : i + 1].clone() for n, g in grads.items()}, {}, {}, local, 1.0)
        assert same({n: w[0] for n, w in alone.items()}, {n: w[i] for n, w in together.items()})


def test_a_batch_that_no_client_fills_takes_no_room():
    here = world()
    task = here.tasks(here.plans())[1]
    context = replace(here.context, local=LocalSettings(steps=3, batch=10**12))
    drawn = list(
        stacked._batches(
            context, [stacked.Member(Shard(torch.arange(20), torch.arange(0)), task, {})]
        )
    )
    assert [samples.shape for samples, _ in drawn] == [(1, 32)] * 3


def test_a_client_without_a_test_part_is_scored_alone_and_in_a_stack():
    here = world(sizes=[1, 1, 6])
    context = replace(here.context, stacked=True)
    tasks = here.tasks(here.plans("full", 1.0), evaluate=True)
    jobs = [Job(replace(here.shards[i], test=torch.arange(0)), tasks[i]) for i in (0, 1)]
    alone = [stacked_updates(context, [job])[0][0] for job in jobs]
    for (update, _), own in zip(stacked_updates(context, jobs), alone, strict=True):
        assert same(update.tensors, own.tensors) and update.metrics == own.metrics
        assert update.metrics["tested"] == 0
    by_hand, _ = local_update(here.context, jobs[0].shard, tasks[0], None)
    assert by_hand.metrics["tested"] == 0


def test_clients_of_a_fleet_are_scored_together():
    here = world(clients=6, sizes=[10] * 6)
    context = replace(here.context, stacked=True)
    tasks = global_tasks(here.W, here.plans("full", 1.0), 0, {})
    assert (
        len({stacked.batch_key(context, here.shards[task.plan.client], task) for task in tasks})
        == 1
    )


def test_clients_of_other_sizes_or_plans_have_other_keys():
    here = world(sizes=[10, 10, 40], batch=20)
    context = replace(here.context, stacked=True)
    a, b, c = (
        stacked.batch_key(context, here.shards[task.plan.client], task)
        for task in here.tasks(here.plans("full", 1.0))
    )
    assert a == b != c
    other = here.tasks(here.plans("lowerb"))[0]
    assert stacked.batch_key(context, here.shards[0], other) != a
    assert stacked.batch_key(context, Shard(torch.arange(0), torch.arange(3)), other) is None
    assert stacked.batch_key(here.context, here.shards[0], other) is None
