"""One private step: its records, noise and denominator; without noise it is the plain step."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedp3.client.batching import LocalSettings
from fedp3.client.context import ClientContext
from fedp3.client.update import local_update
from fedp3.core.randomness import os_stream
from fedp3.core.types import ClientUpdate, Params
from fedp3.privacy.mechanism import PrivateSteps, fill_with_noise, poisson, private_gradient
from fedp3.privacy.settings import Mechanism
from worlds import World, same, world

SEEDED = Mechanism(randomness="seeded")


def update(
    w: World, mechanism: Mechanism | None, client: int = 0, t: int = 0, **plan: object
) -> ClientUpdate:
    task = w.tasks([w.plans(**plan)[client]], t)[0]  # type: ignore[arg-type]
    return local_update(with_mechanism(w, mechanism), w.shards[client], task, None)[0]


def with_mechanism(w: World, mechanism: Mechanism | None) -> ClientContext:
    """The context of this world's clients under this mechanism; without one they train plainly."""
    return w.context if mechanism is None else replace(w.context, steps=PrivateSteps(mechanism))


def near(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=0, atol=1e-6) for n in a)


# --------------------------------------------------------------------------- without noise


@given(
    kind=st.sampled_from(["mlp", "cnn", "groupnorm"]),
    selector=st.sampled_from(["magnitude", "random", "neuron", "rolling"]),
    physical=st.booleans(),
    others=st.sampled_from(["train", "freeze"]),
    local=st.sampled_from(["fixed", "uniform", "ordered_dropout"]),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    chunk=st.sampled_from([3, 100]),
)
def test_without_clip_and_noise_it_is_the_plain_step(
    kind: str,
    selector: str,
    physical: bool,
    others: str,
    local: str,
    momentum: float,
    decay: float,
    chunk: int,
) -> None:
    w = world(
        kind,
        selector=selector,
        physical=physical,
        local_pruner=local,
        momentum=momentum,
        weight_decay=decay,
        batch=100,
    )
    m = len(w.shards[0].train)
    plain = update(w.but(batch=m), None, others=others)
    limit = Mechanism(
        clip=math.inf, noise_multiplier=0.0, sample_rate=1.0, randomness="seeded"
    )  # every record in every step, in any order
    assert near(update(w.but(batch=chunk), limit, others=others).tensors, plain.tensors)


def test_the_same_batches_and_denominator_give_the_plain_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = world("mlp", sizes=[20])  # batch 4: a fifth
    batches = [[0, 5, 9, 19], [1, 2, 3, 4], [7, 6, 8, 10]]
    drawn = lambda *_: iter(map(torch.tensor, batches))  # noqa: E731
    monkeypatch.setattr("fedp3.client.step_source.batches", drawn)
    monkeypatch.setattr("fedp3.privacy.mechanism.poisson", drawn)
    assert near(
        update(w, Mechanism(clip=math.inf, noise_multiplier=0.0, sample_rate=0.2)).tensors,
        update(w, None).tensors,
    )


def test_the_gradient_clip_of_plain_training_stays_out_of_it() -> None:
    w = world("mlp")
    assert same(update(w.but(clip_norm=1e-3), SEEDED).tensors, update(w, SEEDED).tensors)


# --------------------------------------------------------------------------- records


def test_every_record_has_its_own_coin() -> None:
    rng, T, m, q = torch.Generator().manual_seed(1), 4000, 50, 0.15
    steps = list(poisson(m, q, T, rng))
    sizes = torch.tensor([len(s) for s in steps], dtype=torch.float64)
    counts = torch.bincount(torch.cat(steps), minlength=m).double()
    assert abs(float(sizes.mean()) - m * q) < 5 * math.sqrt(m * q * (1 - q) / T)
    assert abs(float(sizes.var()) / (m * q * (1 - q)) - 1) < 5 * math.sqrt(2 / T)
    assert abs(float(counts.var()) / (T * q * (1 - q)) - 1) < 5 * math.sqrt(2 / m)
    assert all(len(s.unique()) == len(s) for s in steps)


def test_an_epoch_sees_each_record_once_on_average() -> None:
    assert Mechanism(sample_rate=0.1).steps_per_task(LocalSettings(steps=7)) == 7
    assert Mechanism(sample_rate=0.1).steps_per_task(LocalSettings(steps=7, epochs=3)) == 30
    assert Mechanism(sample_rate=0.3).steps_per_task(LocalSettings(epochs=1)) == 4


# --------------------------------------------------------------------------- noise


def residual(
    w: World, mechanism: Mechanism, t: int = 0, client: int = 0, **plan: object
) -> dict[str, Tensor]:
    """What noise one step put on the sum of gradients."""
    w = w.but(steps=1, lr=1.0)
    quiet, loud = (
        update(w, replace(mechanism, noise_multiplier=z), client, t, **plan)
        for z in (0.0, mechanism.noise_multiplier)
    )
    b = mechanism.sample_rate * len(w.shards[client].train)
    return {n: (quiet.tensors[n] - loud.tensors[n]) * b for n in loud.tensors}


def test_noise_has_deviation_z_times_c_on_every_trained_coordinate() -> None:
    noise = residual(
        world("cnn"),
        Mechanism(clip=0.5, noise_multiplier=3.0, sample_rate=0.5, randomness="seeded"),
        layers="full",
    )
    for n, r in noise.items():
        s = float(r.square().mean().sqrt()) / 1.5
        assert abs(s - 1) < 5 / math.sqrt(2 * r.numel()), n
        assert bool(r.all()), f"a coordinate of {n} has none"


def test_an_empty_batch_is_noised_and_counted_like_any_other() -> None:
    w = world("mlp")
    mechanism = Mechanism(clip=1.0, noise_multiplier=2.0, sample_rate=1e-12, randomness="seeded")
    net = copy.deepcopy(w.net)
    W = dict(net.named_parameters())
    gradient = private_gradient(mechanism, w.local, 10, 0, 0, 0)
    empty = torch.empty(0, *w.data.x.shape[1:])
    _, g = gradient(net, empty, torch.empty(0, dtype=torch.int64), W, {})
    flat = torch.cat([tensor.flatten() for tensor in g]) * 1e-12 * 10
    assert abs(float(flat.std()) - 2.0) < 10 / math.sqrt(2 * len(flat))
    moved = update(w.but(lr=1e-11), mechanism, layers="full").tensors
    assert all(bool((moved[n] != w.W[n]).all()) for n in moved)


def test_frozen_layers_are_neither_moved_nor_noised_and_pruned_coordinates_stay_zero() -> None:
    w = world("mlp")
    task = w.tasks([w.plans(others="train", upload="retained", keep=0.4)[0]])[0]
    out = local_update(with_mechanism(w, SEEDED), w.shards[0], task, None)[0]
    for n, mask in task.masks.weights.items():
        assert not bool(out.tensors[n][~mask].any()) and bool(
            (out.tensors[n] != task.weights[n])[mask].all()
        )
    frozen = update(w, SEEDED, others="freeze")
    trained = {n for l in w.plans()[0].full_layers for n in w.layers.layers[l]}
    assert set(frozen.tensors) == trained


def test_steps_rounds_and_clients_have_noise_of_their_own() -> None:
    w = world("mlp", sizes=[10, 10])
    noises = [
        residual(w, SEEDED, t, i, layers="full")["fc2.weight"].flatten()
        for t in (0, 1)
        for i in (0, 1)
    ]
    two = (
        update(w.but(steps=2, lr=1.0), replace(SEEDED, sample_rate=1e-9), layers="full")
        .tensors["fc2.weight"]
        .flatten()
    )
    one = (
        update(w.but(steps=1, lr=1.0), replace(SEEDED, sample_rate=1e-9), layers="full")
        .tensors["fc2.weight"]
        .flatten()
    )
    first, second = one - w.W["fc2.weight"].flatten(), two - one
    for a, b in [*pairwise(noises), (noises[0], noises[2]), (first, second)]:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(len(a))


def test_seeded_noise_repeats_and_the_operating_systems_does_not() -> None:
    w = world("mlp")
    assert same(update(w, SEEDED).tensors, update(w, SEEDED).tensors)
    a, b = (update(w, Mechanism()).tensors for _ in range(2))
    assert all(not torch.equal(a[n], b[n]) for n in a)


def test_a_generator_of_the_operating_system_draws_uniformly_and_from_its_whole_state() -> None:
    states = [os_stream().get_state() for _ in range(3)]
    assert all(int((a != b).sum()) > 2000 for a, b in pairwise(states)), (
        "all 624 words differ, not a seed"
    )
    u = torch.rand(200_000, generator=os_stream())
    assert (
        abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * len(u))
        and abs(float(u.var()) * 12 - 1) < 0.02
    )
    out = torch.empty(100_000)
    fill_with_noise(out, Mechanism(clip=2.0, noise_multiplier=1.5), os_stream())
    assert abs(float(out.std()) / 3 - 1) < 5 / math.sqrt(2 * len(out))


def test_noise_reaches_beyond_what_one_draw_of_32_bits_can() -> None:
    """A single draw ends at sqrt(48 ln 2) = 5.77 deviations; only a record could go beyond them."""
    out = torch.empty(1 << 20)
    fill_with_noise(
        out, Mechanism(clip=1.0, noise_multiplier=1.0), torch.Generator().manual_seed(105)
    )
    assert float(out.abs().max()) > 5.8
    one = torch.empty(1 << 20).normal_(generator=torch.Generator().manual_seed(105))
    assert abs(float(out.var()) - 1) < 0.01 and not torch.equal(out, one)


@pytest.mark.parametrize("randomness", ["os", "seeded"])
def test_crops_are_secret_where_the_noise_is(randomness: str) -> None:
    w = world("cnn")
    w = replace(w, data=replace(w.data, crop=1, flip=True), local=replace(w.local, augment=True))
    quiet = Mechanism(clip=1.0, noise_multiplier=0.0, sample_rate=1.0, randomness=randomness)
    a, b = (update(w, quiet).tensors for _ in range(2))
    assert same(a, b) == (randomness == "seeded")


# --------------------------------------------------------------------------- what leaves


def test_the_loss_of_its_records_does_not_leave_the_client() -> None:
    w = world("mlp")
    assert "loss" in update(w, None).metrics
    assert set(update(w, SEEDED).metrics) == {"density"}


def test_how_much_is_held_at_a_time_changes_nothing() -> None:
    w = world("cnn")
    at_once, parts = (
        update(w.but(batch=b), replace(SEEDED, sample_rate=0.9)).tensors for b in (100, 2)
    )
    assert near(at_once, parts)
