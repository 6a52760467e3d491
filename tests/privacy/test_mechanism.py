"""One private step: who is in it, what noise is on it, what it is divided by; without noise it is the plain step."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedp3.client import local_update
from fedp3.privacy.mechanism import fill_with_noise, local_steps, poisson, private_gradient
from fedp3.rng import os_stream
from fedp3.types import ClientUpdate, Local, Params, Private
from worlds import World, same, world

SEEDED = Private(randomness="seeded")


def update(w: World, private: Private | None, client: int = 0, t: int = 0, **plan: object) -> ClientUpdate:
    task = w.tasks([w.plans(**plan)[client]], t)[0]  # type: ignore[arg-type]
    return local_update(replace(w.recipe, private=private), w.shards[client], task, None)[0]


def near(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=0, atol=1e-6) for n in a)


# --------------------------------------------------------------------------- the limit: no clip, no noise, everybody


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
    kind: str, selector: str, physical: bool, others: str, local: str, momentum: float, decay: float, chunk: int
) -> None:
    w = world(kind, selector=selector, physical=physical, Q=local, momentum=momentum, weight_decay=decay, batch=100)
    m = len(w.shards[0].train)
    plain = update(w.but(batch=m), None, others=others)
    limit = Private(math.inf, 0.0, 1.0, "seeded")  # every record in every step, in any order
    assert near(update(w.but(batch=chunk), limit, others=others).tensors, plain.tensors)


def test_the_same_batches_and_denominator_give_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world("mlp", sizes=[20])  # batch 4: a fifth
    batches = [[0, 5, 9, 19], [1, 2, 3, 4], [7, 6, 8, 10]]
    drawn = lambda *_: iter(map(torch.tensor, batches))  # noqa: E731
    monkeypatch.setattr("fedp3.steps.batches", drawn)
    monkeypatch.setattr("fedp3.privacy.mechanism.poisson", drawn)
    assert near(update(w, Private(math.inf, 0.0, 0.2)).tensors, update(w, None).tensors)


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
    assert local_steps(Local(steps=7), Private(rate=0.1)) == 7
    assert local_steps(Local(steps=7, epochs=3), Private(rate=0.1)) == 30
    assert local_steps(Local(epochs=1), Private(rate=0.3)) == 4


# --------------------------------------------------------------------------- noise


def residual(w: World, private: Private, t: int = 0, client: int = 0, **plan: object) -> dict[str, Tensor]:
    """What noise one step put on the sum of gradients."""
    w = w.but(steps=1, lr=1.0)
    quiet, loud = (update(w, replace(private, noise=z), client, t, **plan) for z in (0.0, private.noise))
    b = private.rate * len(w.shards[client].train)
    return {n: (quiet.tensors[n] - loud.tensors[n]) * b for n in loud.tensors}


def test_noise_has_deviation_z_times_c_on_every_trained_coordinate() -> None:
    noise = residual(world("cnn"), Private(0.5, 3.0, 0.5, "seeded"), layers="full")
    for n, r in noise.items():
        s = float(r.square().mean().sqrt()) / 1.5
        assert abs(s - 1) < 5 / math.sqrt(2 * r.numel()), n
        assert bool(r.all()), f"a coordinate of {n} has none"


def test_an_empty_batch_is_noised_and_counted_like_any_other() -> None:
    w = world("mlp")
    private = Private(1.0, 2.0, 1e-12, "seeded")
    net = copy.deepcopy(w.net)
    W = dict(net.named_parameters())
    gradient = private_gradient(private, w.local, 10, 0, 0, 0)
    empty = torch.empty(0, *w.data.x.shape[1:])
    _, g = gradient(net, empty, torch.empty(0, dtype=torch.int64), W, {})
    flat = torch.cat([each.flatten() for each in g]) * 1e-12 * 10
    assert abs(float(flat.std()) - 2.0) < 10 / math.sqrt(2 * len(flat))
    moved = update(w.but(lr=1e-11), private, layers="full").tensors
    assert all(bool((moved[n] != w.W[n]).all()) for n in moved)


def test_frozen_layers_are_neither_moved_nor_noised_and_pruned_coordinates_stay_zero() -> None:
    w = world("mlp")
    task = w.tasks([w.plans(others="train", upload="kept", keep=0.4)[0]])[0]
    out = local_update(replace(w.recipe, private=SEEDED), w.shards[0], task, None)[0]
    for n, mask in task.masks.weights.items():
        assert not bool(out.tensors[n][~mask].any()) and bool((out.tensors[n] != task.weights[n])[mask].all())
    frozen = update(w, SEEDED, others="freeze")
    trained = {n for l in w.plans()[0].whole for n in w.layers.layers[l]}
    assert set(frozen.tensors) == trained


def test_steps_rounds_and_clients_have_noise_of_their_own() -> None:
    w = world("mlp", sizes=[10, 10])
    each = [residual(w, SEEDED, t, i, layers="full")["fc2.weight"].flatten() for t in (0, 1) for i in (0, 1)]
    two = update(w.but(steps=2, lr=1.0), replace(SEEDED, rate=1e-9), layers="full").tensors["fc2.weight"].flatten()
    one = update(w.but(steps=1, lr=1.0), replace(SEEDED, rate=1e-9), layers="full").tensors["fc2.weight"].flatten()
    first, second = one - w.W["fc2.weight"].flatten(), two - one
    for a, b in [*pairwise(each), (each[0], each[2]), (first, second)]:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(len(a))


def test_seeded_noise_repeats_and_the_operating_systems_does_not() -> None:
    w = world("mlp")
    assert same(update(w, SEEDED).tensors, update(w, SEEDED).tensors)
    a, b = (update(w, Private()).tensors for _ in range(2))
    assert all(not torch.equal(a[n], b[n]) for n in a)


def test_a_generator_of_the_operating_system_draws_uniformly_and_from_its_whole_state() -> None:
    states = [os_stream().get_state() for _ in range(3)]
    assert all(int((a != b).sum()) > 2000 for a, b in pairwise(states)), "all 624 words differ, not a seed"
    u = torch.rand(200_000, generator=os_stream())
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * len(u)) and abs(float(u.var()) * 12 - 1) < 0.02
    out = torch.empty(100_000)
    fill_with_noise(out, Private(2.0, 1.5), os_stream())
    assert abs(float(out.std()) / 3 - 1) < 5 / math.sqrt(2 * len(out))


def test_noise_reaches_beyond_what_one_draw_of_32_bits_can() -> None:
    """A single draw ends at sqrt(48 ln 2) = 5.77 deviations; an upload beyond would have to hold a record."""
    out = torch.empty(1 << 20)
    fill_with_noise(out, Private(1.0, 1.0), torch.Generator().manual_seed(105))
    assert float(out.abs().max()) > 5.8
    one = torch.empty(1 << 20).normal_(generator=torch.Generator().manual_seed(105))
    assert abs(float(out.var()) - 1) < 0.01 and not torch.equal(out, one)


@pytest.mark.parametrize("randomness", ["os", "seeded"])
def test_crops_are_secret_where_the_noise_is(randomness: str) -> None:
    w = world("cnn")
    w = replace(w, data=replace(w.data, crop=1, flip=True), local=replace(w.local, augment=True))
    quiet = Private(1.0, 0.0, 1.0, randomness)
    a, b = (update(w, quiet).tensors for _ in range(2))
    assert same(a, b) == (randomness == "seeded")


# --------------------------------------------------------------------------- what leaves


def test_the_loss_of_its_records_does_not_leave_the_client() -> None:
    w = world("mlp")
    assert "loss" in update(w, None).metrics
    assert set(update(w, SEEDED).metrics) == {"density"}


def test_how_much_is_held_at_a_time_changes_nothing() -> None:
    w = world("cnn")
    whole, parts = (update(w.but(batch=b), replace(SEEDED, rate=0.9)).tensors for b in (100, 2))
    assert near(whole, parts)
