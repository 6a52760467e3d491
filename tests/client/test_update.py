"""Algorithm 2 on one client equals the reference implementation and has no side effects."""

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import reference as ref
from fedp3.client.batching import EVAL_BATCH, SCHEDULES, LocalSettings, batches
from fedp3.client.update import local_update
from fedp3.core import masks as M
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import ClientPlan, ClientState, ClientUpdate, LayerPlan, Params, Task, Upload
from fedp3.data.shards import Shard
from fedp3.models.layer_map import layer_map
from fedp3.planning.local_pruning import draw_q
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS
from worlds import CLASSES, KINDS, World, same, world

every_pruner = pytest.mark.parametrize("pruner", LOCAL_PRUNERS)
every_selector = pytest.mark.parametrize("selector", SELECTORS)
CHAINS = [kind for kind, k in KINDS.items() if k.chain and kind != "dropout"]


def train(here: World, task: Task, state: ClientState | None = None) -> ClientUpdate:
    return local_update(here.context, here.shards[task.plan.client], task, state)[0]


def end_of(here: World) -> Params:
    """What the scratch network holds after a task: the client's full model."""
    return {
        n: w.detach().clone() for n, w in here.net.state_dict().items() if n in here.layers.shapes
    }


def package_draw(here: World, task: Task) -> Callable[[int], Params]:
    """The package's own step masks, for the reference implementation."""
    rng = stream(here.seed, Stream.LOCAL_PRUNE, task.t, task.plan.client)

    def draw(k: int) -> Params:
        q = draw_q(here.pruning, rng)
        drawn = LOCAL_PRUNERS[here.pruning.local_pruner].draw(
            q, task.plan, task.masks, here.layers, rng
        )
        return {
            n: M.as_bool(M.active(n, drawn, here.layers), s) for n, s in here.layers.shapes.items()
        }

    return draw


# --------------------------------------------------------------------- the reference implementation


def plan_uploading(upload: Upload, plan: ClientPlan) -> ClientPlan:
    """The plan with this upload of its pruned layers, which then train."""
    if upload == "none":
        return plan
    layers = {
        l: replace(p, train=True, upload=upload) if p.send == "pruned" else p
        for l, p in plan.layers.items()
    }
    return replace(plan, layers=layers)


@every_pruner
@settings(max_examples=30)
@given(
    kind=st.sampled_from(CHAINS),
    selector=st.sampled_from(list(SELECTORS)),
    sets=st.sampled_from(("full", "prune-all", "lowerb", "opu2")),
    others=st.sampled_from(("train", "freeze")),
    upload=st.sampled_from(("none", "all", "retained", "zeros")),
    keep=st.integers(1, 10).map(lambda k: k / 10),
    freeze_pruned=st.booleans(),
    unfed_columns=st.sampled_from(("abstain", "vote")),
    local=st.builds(
        LocalSettings,
        steps=st.integers(0, 5),
        epochs=st.integers(0, 1),
        batch=st.integers(1, 12),
        lr=st.just(0.1),
        momentum=st.sampled_from((0.0, 0.9)),
        weight_decay=st.sampled_from((0.0, 0.1)),
        clip_norm=st.sampled_from((0.0, 0.3, 100.0)),
        augment=st.just(False),
    ),
    t=st.integers(0, 3),
)
def test_an_upload_is_that_of_the_reference_implementation(
    pruner, kind, selector, sets, others, upload, keep, freeze_pruned, unfed_columns, local, t
):
    here = world(
        kind,
        2,
        local_pruner=pruner,
        selector=selector,
        freeze_pruned=freeze_pruned,
        unfed_columns=unfed_columns,
        local=local,
    )
    plan = plan_uploading(upload, here.plans(sets, keep, others=others)[1])
    task = here.tasks([plan], t)[0]
    got = train(here, task)
    want = ref.client(here.fleet, here.W, task.plan, t, package_draw(here, task))
    assert got.examples == want.examples and got.tensors.keys() == want.values.keys()
    plain = not (local.momentum or local.weight_decay or local.clip_norm == 0.3)
    for n, w in want.values.items():
        torch.testing.assert_close(
            got.tensors[n], w, rtol=0 if plain else 1e-5, atol=0 if plain else 2e-6
        )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["mlp", "batchnorm"])
def test_one_client_with_the_full_model_is_local_sgd(kind, momentum, weight_decay, clip_norm):
    """All layers, keep 1, Q fixed: torch.optim.SGD on a copy of the network."""
    here = world(
        kind, 1, steps=6, momentum=momentum, weight_decay=weight_decay, clip_norm=clip_norm
    )
    net = (
        copy.deepcopy(here.net).train().requires_grad_(True)
    )  # worlds share nets: a test before may have frozen it
    net.load_state_dict(here.W, strict=False)
    optimiser = torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay
    )
    for rows in ref.batches(10, here.local, stream(0, Stream.BATCHES, 0, 0)):
        optimiser.zero_grad()
        cross_entropy(net(here.data.x[rows]), here.data.y[rows]).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimiser.step()
    got = train(here, here.tasks(here.plans("full", 1.0))[0]).tensors
    assert got.keys() == here.layers.shapes.keys()
    for n, w in net.state_dict().items():
        if n in got:
            exact = not (momentum or weight_decay or clip_norm)
            torch.testing.assert_close(
                got[n], w, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
            )


def test_no_local_steps_return_what_was_sent_and_claim_no_loss():
    here = world(steps=0)
    task = here.tasks(here.plans())[0]
    update = train(here, task)
    assert same(
        update.tensors,
        {n: task.weights[n] for l in task.plan.full_layers for n in here.layers.layers[l]},
    )
    assert "loss" not in update.metrics and "density" not in update.metrics


@pytest.mark.parametrize("kind", ["batchnorm", "mlp"])
def test_an_epoch_never_ends_on_a_single_sample_that_batch_norm_could_not_use(kind):
    here = world(kind, sizes=[9, 9], batch=4, steps=0, epochs=1)
    sizes = [len(b) for b in batches(9, here.local, torch.Generator())]
    assert sizes == [4, 3, 2]
    assert math.isfinite(train(here, here.tasks(here.plans("full", 1.0))[0]).metrics["loss"])


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 12),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_batches_are_shuffled_epochs_with_a_short_last_one(samples, batch, steps, epochs, seed):
    local = LocalSettings(steps=steps, epochs=epochs, batch=batch)
    got = [b.tolist() for b in batches(samples, local, torch.Generator().manual_seed(seed))]
    assert got == ref.batches(samples, local, torch.Generator().manual_seed(seed))
    per_epoch = math.ceil(samples / batch)
    assert len(got) == (epochs * per_epoch if epochs else steps)
    for e in range(len(got) // per_epoch):
        epoch = [j for b in got[e * per_epoch : (e + 1) * per_epoch] for j in b]
        assert sorted(epoch) == list(range(samples))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_begins_at_one_and_never_rises_nor_turns_the_step_around(schedule):
    factors = [SCHEDULES[schedule](t / 20) for t in range(21)]
    assert factors[0] == 1 and all(1 >= a >= b >= 0 for a, b in itertools.pairwise(factors))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedule_scales_the_step_and_a_probe_after_the_last_round_still_learns(schedule):
    here = world(steps=1, schedule=schedule, rounds=4)
    plan = here.plans("full", 1.0)[:1]

    def moved(t: int) -> Tensor:
        end = train(here, here.tasks(plan, t)[0]).tensors
        gradient = train(here.but(schedule="constant"), here.tasks(plan, t)[0]).tensors
        n = "ffc.bias"
        return (end[n] - here.W[n]) / (gradient[n] - here.W[n])

    for t in range(4):
        torch.testing.assert_close(
            moved(t), torch.full((CLASSES,), SCHEDULES[schedule](t / 4)), rtol=1e-3, atol=0
        )
    for t in (4, 9):
        torch.testing.assert_close(
            moved(t), torch.full((CLASSES,), SCHEDULES[schedule](3 / 4)), rtol=1e-3, atol=0
        )


# -------------------------------------------------------------------- what trains and what does not


@every_pruner
@every_selector
def test_frozen_layers_stay_as_they_were_sent(pruner, selector):
    here = world(
        "batchnorm", local_pruner=pruner, selector=selector, momentum=0.9, weight_decay=0.1
    )
    for task in here.tasks(here.plans("lowerb", 0.5, others="freeze")):
        train(here, task)
        end = end_of(here)
        for l, p in task.plan.layers.items():
            for n in here.layers.layers[l]:
                moved = not torch.equal(end[n], task.weights[n])
                assert (
                    not moved if not p.train else moved or n == "conv.bias"
                )  # BatchNorm takes a bias's gradient


@every_selector
@every_pruner
def test_frozen_coordinates_stay_zero_through_momentum_and_decay(selector, pruner):
    here = world("cnn", local_pruner=pruner, selector=selector, momentum=0.9, weight_decay=0.1)
    task = here.tasks(here.plans("prune-all", 0.4))[0]
    train(here, task)
    P = ref.pruned_masks(here.W, KINDS["cnn"].chain, task.plan, selector, 0, 0)
    end = end_of(here)
    assert all(not bool(end[n][~P[n]].any()) for n in P)
    assert any(not torch.equal(end[n][P[n]], task.weights[n][P[n]]) for n in P)


def test_coordinates_that_are_not_frozen_grow_back_and_are_not_uploaded_with_the_retained():
    here = world(freeze_pruned=False, selector="random")
    for upload in ("retained", "zeros"):
        task = here.tasks(here.plans("prune-all", 0.4, upload=upload))[0]
        update = train(here, task)
        P = ref.pruned_masks(here.W, KINDS["mlp"].chain, task.plan, "random", 0, 0)
        off = ~P["fc2.weight"]
        assert bool(end_of(here)["fc2.weight"][off].any())
        assert not bool(update.tensors["fc2.weight"][off].any())
        assert torch.equal(update.tensors["fc2.weight"][~off], end_of(here)["fc2.weight"][~off])


@pytest.mark.parametrize("unfed_columns", ["abstain", "vote"])
def test_columns_that_no_retained_unit_feeds_abstain_or_vote_with_their_old_value(unfed_columns):
    here = world(selector="ordered", unfed_columns=unfed_columns, momentum=0.9, weight_decay=0.1)
    task = next(t for t in here.tasks(here.plans("lowerb", 0.5)) if "fc2" in t.plan.full_layers)
    update = train(here, task)
    unfed = update.tensors["fc2.weight"][:, 3:]  # fc1 sends its first three of six units
    old = here.W["fc2.weight"][:, 3:]
    assert torch.equal(unfed, old if unfed_columns == "vote" else torch.zeros_like(old))
    assert not bool((update.tensors["fc2.weight"][:, :3] == here.W["fc2.weight"][:, :3]).all())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pruner", ["uniform", "ordered_dropout", "ordered_matched"])
def test_a_coordinate_that_rests_in_a_step_keeps_its_bits_through_momentum_and_decay(
    pruner, momentum
):
    here = world(
        "cnn", local_pruner=pruner, q=0.5, momentum=momentum, weight_decay=0.5, freeze_pruned=True
    )
    task = here.tasks(here.plans("prune-all", 1.0))[0]
    draw = package_draw(here, task)
    before = dict(task.weights)
    for k in range(3):
        train(here.but(steps=k + 1), task)
        after, step = end_of(here), draw(k)
        for n, mask in step.items():
            assert torch.equal(after[n][~mask], before[n][~mask])
            assert not torch.equal(after[n][mask], before[n][mask])
        before = after


@every_selector
def test_the_gradient_is_clipped_after_masking(selector):
    """A clipped step is exactly as long as the clip allows, however little was sent."""
    here = world("cnn", selector=selector, steps=1, lr=1.0, clip_norm=1e-3)
    task = here.tasks(here.plans("prune-all", 0.2))[0]
    train(here, task)
    end = end_of(here)
    length = math.sqrt(sum(float((end[n].double() - task.weights[n]).square().sum()) for n in end))
    assert length == pytest.approx(1e-3, rel=2e-3)


def test_a_gradient_within_the_clip_is_not_touched():
    here = world()
    task = here.tasks(here.plans())[0]
    assert same(train(here, task).tensors, train(here.but(clip_norm=1e6), task).tensors)


@every_pruner
def test_the_reported_density_is_that_of_the_steps(pruner):
    here = world("cnn", local_pruner=pruner, q=0.5)
    task = here.tasks(here.plans("prune-all", 1.0))[0]
    draw = package_draw(here, task)
    names = [
        n for l in here.layers.hidden for n in here.layers.layers[l] if n in here.layers.prunable
    ]
    total = sum(here.W[n].numel() for n in names)
    on = [
        sum(int(step[n].sum()) if n in step else here.W[n].numel() for n in names)
        for step in map(draw, range(3))
    ]
    assert train(here, task).metrics["density"] == pytest.approx(sum(on) / 3 / total)


# --------------------------------------------------------------------------- the head


def test_a_personal_head_is_never_sent_nor_uploaded_and_stays_with_its_client():
    here = world()
    task = here.tasks(here.plans(head="personal"))[0]
    update, state = local_update(here.context, here.shards[0], task, None)
    head = here.layers.layers["ffc"]
    assert not set(head) & (set(task.weights) | set(update.tensors))
    assert set(state.tensors) == set(head) and state.t == 0
    assert not torch.equal(state.tensors["ffc.weight"], here.W["ffc.weight"])
    resumed = local_update(here.but(steps=0).context, here.shards[0], replace(task, t=1), state)[1]
    assert same(resumed.tensors, state.tensors)


def test_a_personal_uploaded_head_is_uploaded_and_still_begins_from_the_clients_own():
    here = world()
    task = here.tasks(here.plans(head="personal_uploaded"))[0]
    update, state = local_update(here.context, here.shards[0], task, None)
    assert "ffc.weight" not in task.weights
    assert same(state.tensors, {n: update.tensors[n] for n in here.layers.layers["ffc"]})


def test_a_shared_head_leaves_no_state_behind():
    here = world()
    _, state = local_update(here.context, here.shards[0], here.tasks(here.plans())[0], None)
    assert not state.tensors


# --------------------------------------------------------------------------- no side effects


@every_pruner
@every_selector
def test_inputs_and_global_generators_are_left_alone(pruner, selector):
    here = world("batchnorm", local_pruner=pruner, selector=selector, momentum=0.9)
    task = here.tasks(here.plans("lowerb", head="personal"), evaluate=True)[0]
    state = ClientState(0, {n: w.clone() for n, w in here.W.items() if n.startswith("out.")})
    read = [
        here.W,
        task.weights,
        task.masks.weights,
        task.masks.units,
        state.tensors,
        {"x": here.data.x},
    ]
    before = [{n: w.clone() for n, w in some.items()} for some in read]
    draws = torch.random.get_rng_state(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002
    local_update(here.context, here.shards[0], task, state)
    for some, old in zip(read, before, strict=True):
        assert some.keys() == old.keys() and all(torch.equal(some[n], old[n]) for n in some)
    assert torch.equal(draws[0], torch.random.get_rng_state())
    assert draws[1:] == (repr(np.random.get_state()), random.getstate())  # noqa: NPY002


def test_uploads_and_states_are_copies_of_the_scratch_network():
    here = world()
    tasks = here.tasks(here.plans("full", head="personal_uploaded"))
    first, state = local_update(here.context, here.shards[0], tasks[0], None)
    before = {n: w.clone() for n, w in first.tensors.items()}
    kept = {n: w.clone() for n, w in state.tensors.items()}
    train(here, tasks[1])
    assert same(first.tensors, before) and same(state.tensors, kept)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "dropout", "resnet"])
def test_a_client_does_not_see_who_worked_before_it(kind):
    here = world(kind, 3)
    tasks = here.tasks(here.plans("full", 1.0), evaluate=True)
    first = [train(here, task) for task in tasks]
    second = [train(here, task) for task in reversed(tasks)][::-1]
    for a, b in zip(first, second, strict=True):
        assert same(a.tensors, b.tensors) and a.metrics == b.metrics


def test_layers_that_draw_repeat_their_bits_and_differ_between_clients_and_rounds():
    """One step on the same single sample, so that nothing else differs."""
    here = world("dropout", 2, steps=1)
    only = Shard(torch.tensor([0]), torch.tensor([1]))
    here = here.but(shards={0: only, 1: only})
    plans = here.plans("full", 1.0)
    a, again, other, later = (
        train(here, here.tasks(plans, t)[i]).tensors for i, t in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert same(a, again)
    assert not same(a, other) and not same(a, later)


# --------------------------------------------------------------------------- BatchNorm


def _uses(net: nn.Module) -> list[bool]:
    """Whether the BatchNorm of each forward pass took the batch's own statistics."""
    seen: list[bool] = []
    net.norm.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    return seen


def test_a_frozen_batchnorm_uses_its_statistics_and_does_not_update_them():
    here = world("batchnorm")
    net = copy.deepcopy(here.net)
    here, seen = here.but(net=net), _uses(net)
    plan = ClientPlan(
        0, {l: LayerPlan(train=l != "conv", upload="all") for l in here.layers.layers}
    )
    update = train(here, here.tasks([plan])[0])
    assert seen == [False] * 3
    for n in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(update.tensors[n], here.W[n])


def test_a_trained_batchnorm_uploads_the_statistics_of_its_batches_and_never_its_counter():
    here = world("batchnorm", steps=1, batch=64)
    net = copy.deepcopy(here.net)
    here, seen = here.but(net=net), _uses(net)
    update = train(here, here.tasks(here.plans("full", 1.0))[0])
    assert seen == [True]
    with torch.no_grad():
        z = nn.functional.conv2d(
            here.data.x[here.shards[0].train], here.W["conv.weight"], here.W["conv.bias"]
        )
    mean = 0.9 * here.W["norm.running_mean"] + 0.1 * z.mean((0, 2, 3))
    torch.testing.assert_close(update.tensors["norm.running_mean"], mean, rtol=1e-5, atol=1e-6)
    assert not any("num_batches_tracked" in n for n in [*update.tensors, *here.layers.shapes])


def test_statistics_of_units_that_rest_in_every_step_are_not_updated():
    here = world("batchnorm", local_pruner="ordered_dropout", q=0.5)
    plan = ClientPlan(
        0,
        {
            "conv": LayerPlan(send="pruned", keep=1.0, train=True, upload="all"),
            "fc": LayerPlan(),
            "out": LayerPlan(),
        },
    )
    update = train(here, here.tasks([plan])[0])
    for n in ("norm.running_mean", "norm.running_var"):
        moved = update.tensors[n] != here.W[n]
        assert moved.tolist() == [True, True, False, False]


def test_a_batchnorm_that_averages_by_count_begins_its_count_at_every_task():
    """With momentum None the counter weights a batch: another client's must not enter."""
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(9, 4),
        nn.BatchNorm1d(4, momentum=None),
        nn.ReLU(),
        nn.Linear(4, CLASSES),
    )
    here = world()
    W = {n: w.clone() for n, w in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    here = here.but(net=net, layers=layer_map(net), W=W)
    task = here.tasks(here.plans("full", 1.0))[0]
    assert same(train(here, task).tensors, train(here, task).tensors)


class Drift(nn.Module):
    """Subtracts a running mean that is in no state dict.

    With `grows` the buffer is replaced by one of another shape.
    """

    def __init__(self, units: int, grows: bool) -> None:
        super().__init__()
        self.grows = grows
        self.register_buffer("mean", torch.linspace(0, 1, units), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.grows:
            self.mean = torch.cat([0.5 * self.mean[:8] + x.detach().mean(0), self.mean])
        elif self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.mean[:8]


def drifting(grows: bool = False, **changes) -> World:
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(9, 6),
        nn.ReLU(),
        nn.Linear(6, 8),
        Drift(8, grows),
        nn.ReLU(),
        nn.Linear(8, CLASSES),
    )
    here = world(selector="neuron", physical=True, **changes)
    return here.but(
        net=net, layers=layer_map(net), W={n: w.clone() for n, w in net.state_dict().items()}
    )


@pytest.mark.parametrize(
    ("grows", "pruner"), [(False, "fixed"), (False, "ordered_dropout"), (True, "fixed")]
)
def test_a_buffer_that_is_never_saved_begins_every_task_as_it_was_given(grows, pruner):
    here = drifting(grows, local_pruner=pruner)
    one, other = here.tasks(here.plans("lowerb"), evaluate=True)[:2]
    sent = here.but(
        net=copy.deepcopy(here.net)
    )  # as to a worker: the net goes before it has worked
    want = train(sent, other)
    train(here, one)
    assert same(train(here, other).tensors, want.tensors)
    late = here.but(net=copy.deepcopy(here.net))  # and to one that replaces it later
    assert same(train(late, other).tensors, want.tensors)
    evaluate = here.tasks(here.plans("full", 1.0), kind="evaluate", evaluate=True)[0]
    assert train(here, evaluate).metrics == train(sent, evaluate).metrics


def test_a_net_given_again_begins_with_what_it_holds_then():
    here = drifting()
    task = next(task for task in here.tasks(here.plans("lowerb")) if task.masks.units)
    first = train(here, task).tensors
    again = copy.deepcopy(here.net)
    for net in (here.net, again):  # one has smaller networks in a cache, the other none
        net[4].mean.fill_(-1)
        layer_map(net)
    assert same(train(here, task).tensors, train(here.but(net=again), task).tensors)
    assert not same(train(here, task).tensors, first)


def test_what_is_never_saved_goes_on_through_steps_on_smaller_nets():
    here = drifting(local_pruner="ordered_dropout", q=0.5)
    task = here.tasks(here.plans("prune-all", upload="retained"))[0]
    small, masked = train(here, task).tensors, train(here.but(physical=False), task).tensors
    for n, w in masked.items():
        torch.testing.assert_close(small[n], w, rtol=1e-5, atol=1e-6)


class Offset(nn.Module):
    """A block with a buffer of its own around a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(9))
        self.norm = nn.BatchNorm1d(9)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.offset)


def test_freezing_a_block_does_not_freeze_the_statistics_of_a_layer_inside_it():
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("body", Offset())
    net.add_module("out", nn.Linear(9, CLASSES))
    names = {
        "own": ["body.offset"],
        "inside": [f"body.norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")],
    }
    layers = layer_map(net, names | {"out": ["out.weight", "out.bias"]})
    here = world().but(
        net=net,
        layers=layers,
        W={n: w.clone() for n, w in net.state_dict().items() if n in layers.shapes},
    )
    plan = ClientPlan(0, {"own": LayerPlan(train=False), "inside": LayerPlan(), "out": LayerPlan()})
    update = train(here, here.tasks([plan])[0])
    assert torch.equal(update.tensors["body.offset"], here.W["body.offset"])
    assert not torch.equal(
        update.tensors["body.norm.running_mean"], here.W["body.norm.running_mean"]
    )


class Scaled(nn.Module):
    """A net with a parameter of no sides and one of a single entry."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(9, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(x, 1)) * self.scale + self.shift.sum() * torch.arange(CLASSES)


@every_selector
@every_pruner
def test_parameters_without_sides_train_and_are_uploaded(selector, pruner):
    net = Scaled()
    here = world(selector=selector, local_pruner=pruner)
    here = here.but(
        net=net, layers=layer_map(net), W={n: w.clone() for n, w in net.state_dict().items()}
    )
    update = train(here, here.tasks(here.plans("full"))[0])
    assert update.tensors["scale"].shape == () and update.tensors["shift"].shape == (1,)
    assert float(update.tensors["scale"]) != 1 and float(update.tensors["shift"]) != 0


# --------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("tested", [0, 1, EVAL_BATCH, EVAL_BATCH + 7])
def test_the_score_counts_right_answers_and_sums_the_loss(tested):
    here = world()
    shard = Shard(here.shards[0].train, torch.arange(100, 100 + tested))
    task = here.tasks(here.plans("full", 1.0), kind="evaluate", evaluate=True)[0]
    update, state = local_update(here.context, shard, task, None)
    correct, loss = 0, 0.0
    for j in range(100, 100 + tested):
        logits = torch.func.functional_call(here.net, dict(here.W), (here.data.x[j : j + 1],))
        correct += int(logits.argmax()) == int(here.data.y[j])
        loss += float(cross_entropy(logits, here.data.y[j : j + 1]))
    sums = {"correct": correct, "test_loss": pytest.approx(loss, rel=1e-5)} if tested else {}
    assert update.metrics == {"tested": tested, **sums}
    assert not update.tensors and state is None


@pytest.mark.parametrize("head", ["shared", "personal"])
def test_a_probe_scores_what_training_would_end_with_and_leaves_nothing(head):
    here = world("batchnorm")
    plans = here.plans("lowerb", head=head)
    trained = train(here, here.tasks(plans, evaluate=True)[0])
    probe, state = local_update(
        here.context, here.shards[0], here.tasks(plans, kind="probe", evaluate=True)[0], None
    )
    assert probe.metrics == trained.metrics and not probe.tensors and state is None


def test_augmentation_is_drawn_by_address_and_only_where_it_is_asked_for():
    here = world("cnn")
    here = here.but(data=replace(here.data, crop=2, flip=True))
    plain, moved, again = (
        train(here.but(augment=on), here.tasks(here.plans("full", 1.0))[0]).tensors
        for on in (False, True, True)
    )
    assert same(moved, again) and not same(plain, moved)


def test_unknown_names_in_settings_are_refused_with_the_nearest_match():
    for changes, hint in (
        ({"local_pruner": "unifrom"}, "uniform"),
        ({"schedule": "cosin"}, "cosine"),
    ):
        with pytest.raises(ValueError, match=f"did you mean '{hint}'"):
            world(**changes)


# --------------------------------------------------------------------------- plans for devices


def test_a_batch_that_is_computed_in_parts_has_the_same_gradient() -> None:
    here = world("cnn", steps=3, batch=4)
    (plan, *_) = here.plans("opu2", 0.5)
    (whole,) = here.engine().execute(here.tasks([plan]))
    for parts in (2, 3, 4):
        (split,) = here.engine().execute(here.tasks([replace(plan, split=parts)]))
        assert isinstance(whole, ClientUpdate) and isinstance(split, ClientUpdate)
        assert split.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
        for n, w in whole.tensors.items():
            assert torch.allclose(split.tensors[n], w, atol=1e-5), n


def test_a_plan_with_fewer_steps_trains_as_a_run_with_fewer_steps_does() -> None:
    here = world("mlp", steps=5)
    (plan, *_) = here.plans("opu2", 0.5)
    (planned,) = here.engine().execute(here.tasks([replace(plan, steps=2)]))
    short = here.but(steps=2)
    (expected,) = short.engine().execute(short.tasks([plan]))
    assert isinstance(planned, ClientUpdate) and isinstance(expected, ClientUpdate)
    assert same(planned.tensors, expected.tensors)
