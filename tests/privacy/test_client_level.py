"""The release of client-level DP: held equal to plain loops, bounded for each client, noised."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference as ref
from fedp3.core import masks as M
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import (
    AcceptedUpdate,
    ClientUpdate,
    Failure,
    Params,
    RejectionCode,
    Task,
)
from fedp3.planning.client_plans import PlanSettings
from fedp3.privacy.client_level.mechanism import (
    clipped_change,
    clipped_sum,
    poisson_clients,
    release,
    uploaders,
)
from fedp3.privacy.settings import Budget, Mechanism
from fedp3.server.aggregators import AggregateSettings
from fedp3.server.client_level import ClientLevel, private_step
from fedp3.server.context import ServerContext
from fedp3.server.optimizer import optimize
from fedp3.server.rounds import run_round
from worlds import World, judge, same, world

SEEDED = Mechanism(clip=0.2, noise_multiplier=0.7, sample_rate=0.6, randomness="seeded")
QUIET = replace(SEEDED, noise_multiplier=0.0)
NO_OPTIMIZER = AggregateSettings()


def mode(mechanism: Mechanism, optimizer: AggregateSettings = NO_OPTIMIZER) -> ClientLevel:
    budget = Budget(
        mechanism=mechanism,
        steps_per_task=1,
        epsilon=math.inf,
        delta=1e-5,
        allowed_steps=1 << 62,
    )
    return ClientLevel(budget=budget, optimizer=optimizer)


def server_of(
    here: World, plan: PlanSettings, mechanism: Mechanism, **fields: Any
) -> ServerContext:
    return here.server(plan, 0.5, client_level=mode(mechanism), **fields)


def noise_of(here: World, mechanism: Mechanism, t: int) -> dict[str, Tensor]:
    """Two draws per number, tensor after tensor in the order of the layers."""
    rng = stream(here.seed, Stream.NOISE, t)
    deviation = mechanism.noise_multiplier * mechanism.clip / math.sqrt(2)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape).normal_(0, deviation, generator=rng)

    names = [n for names in here.layers.layers.values() for n in names]
    return {n: draw(here.layers.shapes[n]) + draw(here.layers.shapes[n]) for n in names}


# --------------------------------------------------------------------------- the reference

ROUNDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "layer subsets": ("mlp", {"layers": "opu2"}, {}),
    "one layer and the head": ("mlp", {"layers": "opu1"}, {"selector": "random"}),
    "buffers": ("batchnorm", {"layers": "full"}, {}),
    "buffers and pruned units": ("batchnorm", {"layers": "lowerb"}, {"selector": "neuron"}),
    "pruned layers where retained": ("mlp", {"layers": "opu1", "upload": "retained"}, {}),
    "pruned layers with zeros": ("mlp", {"layers": "opu1", "upload": "zeros"}, {}),
    "weights that grow again": (
        "mlp",
        {"layers": "opu1", "upload": "zeros"},
        {"freeze_pruned": False},
    ),
    "columns that vote": (
        "mlp",
        {"layers": "lowerb"},
        {"selector": "neuron", "unfed_columns": "vote"},
    ),
}


@pytest.mark.parametrize("clip", [0.05, 100.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_equals_the_reference_by_plain_loops(case: str, clip: float) -> None:
    kind, plan, pruning = ROUNDS[case]
    here, mechanism = world(kind, 5, **pruning), replace(SEEDED, clip=clip)
    server = server_of(here, PlanSettings(**plan), mechanism)
    state, t = replace(here.state(server), t=3), 3
    new, record = run_round(server, state, here.engine().execute)
    coins = torch.rand(5, generator=stream(0, Stream.SAMPLE, t), dtype=torch.float64).tolist()
    who = [i for i in range(5) if coins[i] < mechanism.sample_rate]
    assert record.sampled == record.accepted == tuple(who) and 0 < len(who) < 5
    plans, fleet = here.plans(**plan), here.fleet
    uploads = [
        (ref.client(fleet, here.W, plans[i], t), ref.dispatched(fleet, here.W, plans[i], t))
        for i in who
    ]
    want = ref.client_level_release(
        here.W, here.layers.layers, plans, uploads, 0.6, clip, noise_of(here, mechanism, t)
    )
    assert new.W.keys() == want.keys()
    for n, w in want.items():
        torch.testing.assert_close(
            new.W[n], w, rtol=1e-5, atol=2e-6, msg=lambda m, n=n: f"{n}: {m}"
        )


# --------------------------------------------------------------------------- sensitivity


def upload_of(here: World, task: Task, size: float, seed: int) -> ClientUpdate:
    """Any numbers, also where the plan says that nothing is uploaded."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        n: size * torch.randn(here.layers.shapes[n], generator=rng)
        for l in task.plan.uploaded
        for n in here.layers.layers[l]
    }
    return ClientUpdate(client=task.plan.client, t=task.t, tensors=tensors, examples=1)


def total_of(here: World, tasks: Sequence[Task], updates: Sequence[Any]) -> dict[str, Tensor]:
    """The sum before the noise of what passes the gate."""
    passed, _ = judge(updates, tasks, here.spec, dict.fromkeys(range(9), 50))
    return clipped_sum(here.W, passed, here.W, here.spec, SEEDED.clip)


def distance(a: Params, b: Params) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(a[n] - b[n])) for n in a))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["mlp", "batchnorm"]),
    layers=st.sampled_from(["opu1", "opu2", "full", "random-2", "prune-all"]),
    upload=st.sampled_from(["none", "retained", "zeros"]),
    selector=st.sampled_from(["magnitude", "random", "neuron", "ordered"]),
    who=st.sets(st.integers(0, 4), min_size=1),
    sizes=st.lists(st.sampled_from([0.0, 1e-4, 1.0, 1e4, 1e37]), min_size=5, max_size=5),
    seed=st.integers(0, 1 << 20),
)
def test_one_client_moves_the_sum_by_at_most_the_clip_over_all_layers_together(
    kind: str,
    layers: str,
    upload: str,
    selector: str,
    who: set[int],
    sizes: list[float],
    seed: int,
) -> None:
    here = world(kind, 5, selector=selector)
    upload = "retained" if layers == "prune-all" and upload == "none" else upload
    layers = "lowerb" if kind == "batchnorm" and layers == "random-2" else layers
    tasks = here.tasks(here.plans(layers, 0.5, upload=upload))
    updates = {i: upload_of(here, tasks[i], sizes[i], seed + i) for i in sorted(who)}
    together = total_of(here, tasks, list(updates.values()))
    for i in who:
        others = total_of(here, tasks, [u for j, u in updates.items() if j != i])
        moved = distance(together, others)
        # the sum of the others may be larger, so that adding to it rounds
        assert moved <= SEEDED.clip * (1 + 1e-12)
        if sizes[i] >= 1:
            assert moved >= SEEDED.clip * (1 - 1e-6), "a large upload is scaled to the clip"
    broken = {n: w.clone() for n, w in updates[min(who)].tensors.items()}
    next(iter(broken.values())).view(-1)[0] = math.nan
    rejected = replace(updates[min(who)], tensors=broken)
    without = [u for j, u in updates.items() if j != min(who)]
    late = Failure(client=min(who), t=0, reason="late", late=True)
    for answer in (rejected, late):
        assert same_bits(total_of(here, tasks, [answer, *without]), total_of(here, tasks, without))


def same_bits(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_small_change_is_not_scaled() -> None:
    here = world("batchnorm", 2)
    (task, _) = here.tasks(here.plans("full"))
    tensors = {n: w + 1e-4 for n, w in here.W.items()}
    update = ClientUpdate(client=0, t=0, tensors=tensors, examples=1)
    change = clipped_change(AcceptedUpdate(update, task.plan, task.masks), here.W, here.spec, 1.0)
    assert change.keys() == here.W.keys(), "buffers included"
    assert all(torch.equal(change[n], tensors[n].double() - here.W[n]) for n in change)


def test_coordinates_that_are_not_uploaded_count_as_zero() -> None:
    here = world("mlp", 3, selector="random")
    tasks = here.tasks(here.plans("opu1", 0.5, upload="retained"))
    for task in tasks:
        update = AcceptedUpdate(upload_of(here, task, 1e3, 5), task.plan, task.masks)
        change = clipped_change(update, here.W, here.spec, 1.0)
        for l in task.plan.uploaded:
            for n in here.layers.layers[l]:
                place = (n, l, task.plan, task.masks, here.layers, "abstain")
                absent = ~M.as_bool(M.uploaded(*place), here.layers.shapes[n])
                assert not bool(change[n][absent].any())


# --------------------------------------------------------------------------- divisors


def test_divisors_do_not_depend_on_who_answers() -> None:
    here = world("mlp", 5)
    plans = here.plans("opu1")
    tasks, n_l = here.tasks(plans), uploaders(plans)
    assert n_l["ffc"] == 5 and {n_l[l] for l in ("fc1", "fc2", "fc3")} == {1, 2}
    updates, _ = judge(
        [upload_of(here, task, 1.0, 3) for task in tasks],
        tasks,
        here.spec,
        dict.fromkeys(range(5), 9),
    )
    alone = [release(here.W, [u], n_l, here.spec, QUIET, 0) for u in updates]
    together = release(here.W, updates, n_l, here.spec, QUIET, 0)
    for n, w in here.W.items():
        parts = sum((each[n].double() - w for each in alone), torch.zeros(()))
        torch.testing.assert_close(together[n].double() - w, parts, rtol=0, atol=1e-6)
    for u, each in zip(updates, alone, strict=True):
        change = clipped_change(u, here.W, here.spec, QUIET.clip)
        for l in u.plan.uploaded:
            for n in here.layers.layers[l]:
                want = here.W[n] + change[n] / (QUIET.sample_rate * n_l[l])
                torch.testing.assert_close(each[n], want.float(), rtol=0, atol=0)


def test_a_layer_that_no_plan_uploads_is_never_released() -> None:
    here = world("mlp", 4)
    plans = here.plans("full", head="personal")
    assert "ffc" not in uploaders(plans)
    server = server_of(here, PlanSettings(layers="full", head="personal"), SEEDED)
    new, record = run_round(server, here.state(server), here.engine().execute)
    assert record.accepted
    for l, names in here.layers.layers.items():
        for n in names:
            assert torch.equal(new.W[n], here.W[n]) == (l == "ffc"), n


# --------------------------------------------------------------------------- noise


def standardised(
    new: Params, quiet: Params, here: World, n_l: Mapping[str, int], mechanism: Mechanism
) -> dict[str, Tensor]:
    """The noise on every tensor, in units of z C / (q n_l)."""
    of_sum = mechanism.noise_multiplier * mechanism.clip / mechanism.sample_rate
    return {
        n: (new[n].double() - quiet[n]) / (of_sum / n_l[l])
        for l, names in here.layers.layers.items()
        for n in names
    }


@pytest.mark.parametrize("randomness", ["seeded", "os"])
@pytest.mark.parametrize("answers", [0, 1])
def test_every_coordinate_of_every_layer_has_noise_whoever_sent_it(
    answers: int, randomness: str
) -> None:
    here = world("cnn", 4)
    plans = here.plans("opu1")
    tasks, n_l = here.tasks(plans), uploaders(plans)
    updates = [
        AcceptedUpdate(upload_of(here, task, 1.0, 2), task.plan, task.masks)
        for task in tasks[:answers]
    ]
    large = replace(SEEDED, noise_multiplier=50.0, randomness=randomness)
    noises = []
    for t in (0, 1):
        new = release(here.W, updates, n_l, here.spec, large, t)
        quiet = release(here.W, updates, n_l, here.spec, replace(large, noise_multiplier=0.0), t)
        noises.append(standardised(new, quiet, here, n_l, large))
    for noise in noises:
        for n, of_tensor in noise.items():
            assert bool((of_tensor != 0).all()), n
            size = of_tensor.numel()
            energy = float(of_tensor.square().sum())
            assert abs(energy - size) < 6 * math.sqrt(2 * size) + 20, (n, energy / size)
    flat = [torch.cat([w.flatten() for w in noise.values()]) for noise in noises]
    size = len(flat[0])
    assert abs(float(flat[0] @ flat[1])) < 6 * math.sqrt(size), "rounds have their own noise"
    assert abs(float(flat[0][:-1] @ flat[0][1:])) < 6 * math.sqrt(size)
    weights = [w for w in noises[0].values() if w.numel() > 200]
    for a in weights:
        for b in weights:
            if a is not b:
                shared = min(a.numel(), b.numel())
                together = float(a.flatten()[:shared] @ b.flatten()[:shared])
                assert abs(together) < 6 * math.sqrt(shared), "tensors have their own noise"


def test_a_round_without_participants_moves_the_model_by_noise_alone() -> None:
    here = world("cnn", 4)
    never = replace(SEEDED, sample_rate=1e-12, noise_multiplier=1e-10)
    server = server_of(here, PlanSettings(layers="full"), never)
    new, record = run_round(server, here.state(server), here.engine().execute)
    assert record.sampled == () and not record.void and record.loss is None
    noise = standardised(new.W, here.W, here, dict.fromkeys(here.layers.layers, 4), never)
    flat = torch.cat([w.flatten() for w in noise.values()])
    assert abs(float(flat.square().mean()) - 1) < 6 * math.sqrt(2 / len(flat))
    assert new.t == 1 and new.void == 0


def test_clients_that_fail_or_are_late_count_as_zero_and_make_no_round_void() -> None:
    here = world("mlp", 4)
    server = server_of(here, PlanSettings(layers="full"), replace(SEEDED, sample_rate=1.0))

    def nobody(tasks: Sequence[Task]) -> list[Failure]:
        return [
            Failure(client=k.plan.client, t=k.t, reason="no", late=k.plan.client % 2 == 0)
            for k in tasks
        ]

    new, record = run_round(server, here.state(server), nobody)
    assert record.late == (0, 2) and set(record.rejected) == {1, 3} and not record.void
    assert {r.code for r in record.rejected.values()} == {RejectionCode.FAILED}
    plans = here.plans("full")
    mechanism = server.client_level.budget.mechanism if server.client_level else QUIET
    alone = release(here.W, [], uploaders(plans), here.spec, mechanism, 0)
    assert same(new.W, {n: alone[n] for n in new.W})


def test_a_running_variance_stays_a_variance() -> None:
    here = world("batchnorm", 4)
    wild = replace(SEEDED, noise_multiplier=100.0)
    new = release(here.W, [], uploaders(here.plans("full")), here.spec, wild, 0)
    variance = new["norm.running_var"]
    assert bool((variance >= 0).all()) and bool((variance != here.W["norm.running_var"]).all())
    assert bool((new["norm.running_mean"] < 0).any())


def test_a_model_that_overflows_makes_a_void_round_whoever_answered() -> None:
    here = world("mlp", 4)
    wild = replace(SEEDED, clip=1e38, noise_multiplier=1e3)
    server = server_of(here, PlanSettings(layers="full"), wild)
    for execute in (here.engine().execute, lambda tasks: []):
        new, record = run_round(server, here.state(server), execute)
        assert record.void and same(new.W, here.W)


# --------------------------------------------------------------------------- participants


@pytest.mark.parametrize("randomness", ["seeded", "os"])
def test_every_client_takes_part_by_its_own_coin(randomness: str) -> None:
    clients, rounds, q = 12, 2000, 0.3
    mechanism = replace(SEEDED, sample_rate=q, randomness=randomness)
    drawn = torch.zeros(rounds, clients, dtype=torch.float64)
    for t in range(rounds):
        drawn[t, poisson_clients(range(clients), clients, mechanism, 0, t)] = 1
    spread = 6 / math.sqrt(rounds)
    assert bool(((drawn.mean(0) - q).abs() < spread * math.sqrt(q * (1 - q))).all())
    per_round = drawn.sum(1)
    variance = clients * q * (1 - q)
    assert abs(float(per_round.var()) - variance) < 6 * variance * math.sqrt(2 / rounds) * 1.2
    centred = (drawn - q) / math.sqrt(q * (1 - q))
    pairs = (centred.T @ centred / rounds).fill_diagonal_(0)
    assert bool((pairs.abs() < spread).all()), "no two clients share a coin"
    lagged = centred[:-1].flatten() @ centred[1:].flatten() / (clients * rounds)
    assert abs(float(lagged)) < spread


def test_a_client_that_cannot_take_part_changes_nobody_elses_coin() -> None:
    all_of_them = poisson_clients(range(9), 9, SEEDED, 1, 4)
    without_three = poisson_clients([0, 1, 2, 4, 5, 6, 7, 8], 9, SEEDED, 1, 4)
    assert without_three == [i for i in all_of_them if i != 3]
    assert poisson_clients(range(9), 9, replace(SEEDED, sample_rate=1.0), 1, 4) == list(range(9))


# --------------------------------------------------------------------------- server optimizers


@pytest.mark.parametrize("server", ["none", "momentum", "adam"])
def test_a_server_optimizer_sees_the_noised_release_and_nothing_else(server: str) -> None:
    here = world("batchnorm", 4)
    plans = here.plans("lowerb")
    how = AggregateSettings(server=server, server_lr=0.5)
    level = mode(SEEDED, how)
    updates = [
        AcceptedUpdate(upload_of(here, task, 1.0, 2), task.plan, task.masks)
        for task in here.tasks(plans)[:1]
    ]
    released = release(here.W, updates, uploaders(plans), here.spec, SEEDED, 2)
    want = optimize(here.W, released, dict.fromkeys(released), here.layers, how, {})
    W, moments = private_step(level, here.spec, plans, here.W, updates, {}, 2)
    assert same(W, want[0]) and same(moments, want[1])
    trained = here.layers.shapes.keys() - here.layers.buffers
    assert {n.partition("/")[2] for n in moments} == (set() if server == "none" else trained)
    for n in trained:  # also where the only participant sent nothing
        assert bool((W[n] != here.W[n]).all()), n


def test_redrawn_plans_give_public_divisors_of_their_round() -> None:
    here = world("mlp", 4)
    never = replace(SEEDED, sample_rate=1e-12, noise_multiplier=1e-10)
    server = server_of(here, PlanSettings(layers="random-1", redraw=True), never)
    seen = set()
    for t in range(6):
        n_l = uploaders(here.plans("random-1", t=t, redraw=True))
        seen.add(tuple(n_l.items()))
        new, _ = run_round(server, replace(here.state(server), t=t), here.engine().execute)
        want = release(here.W, [], n_l, here.spec, never, t)
        assert same(new.W, {n: want.get(n, w) for n, w in here.W.items()})
    assert len(seen) > 1 and any(len(of_round) < 4 for of_round in seen), (
        "a layer without an uploader in a round is as it was"
    )
