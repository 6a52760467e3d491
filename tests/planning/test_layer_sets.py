"""Every entry of `LAYER_SETS` is tested for the same claims, so a new entry is covered at once."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError, PlanError
from fedp3.data.partition import partition
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.client_plans import PlanSettings, layer_sets
from fedp3.planning.coverage import check_coverage
from fedp3.planning.layer_sets import LAYER_SETS

from .layer_maps import WINDOWS, chosen, deep, depths, fitting, fleets, resnet, seeds, senders


@pytest.mark.parametrize("name", LAYER_SETS)
@given(n=fleets, H=depths, seed=seeds)
def test_every_client_gets_layers_of_the_network_in_order_and_the_head(
    name: str, n: int, H: int, seed: int
) -> None:
    layers = fitting(name, H)
    sets = layer_sets(PlanSettings(layers=name), layers, n, seed, 0)
    assert len(sets) == n
    order = list(layers.layers)
    for L_i in sets:
        assert L_i[-1] == layers.head
        assert list(L_i) == sorted(set(L_i), key=order.index)


@pytest.mark.parametrize("name", LAYER_SETS)
@given(n=fleets, H=depths, seed=seeds)
def test_layer_sets_are_a_function_of_the_seed(name: str, n: int, H: int, seed: int) -> None:
    layers = fitting(name, H)
    before = torch.random.get_rng_state()
    assert chosen(name, layers, n, seed) == chosen(name, layers, n, seed)
    assert torch.equal(torch.random.get_rng_state(), before)


DRAWN = [name for name in LAYER_SETS if name not in ("full", "prune-all")]


@pytest.mark.parametrize("name", DRAWN)
def test_another_seed_assigns_other_layers(name: str) -> None:
    layers = fitting(name, 6)
    assert chosen(name, layers, 40, 0) != chosen(name, layers, 40, 1)


@pytest.mark.parametrize("name", DRAWN)
def test_layers_stay_for_the_run_or_are_redrawn_each_round(name: str) -> None:
    layers = fitting(name, 6)
    fixed = [chosen(name, layers, 40, 0, t) for t in range(4)]
    moving = [chosen(name, layers, 40, 0, t, redraw=True) for t in range(4)]
    assert all(sets == fixed[0] for sets in fixed)
    assert all(a != b for i, a in enumerate(moving) for b in moving[:i])
    assert moving[0] == fixed[0], "a run without redraw keeps the first round's draw"


# --------------------------------------------------------------------------- each kind


@given(n=fleets, H=depths, seed=seeds)
def test_full_gives_everything_and_prune_all_the_head_alone(n: int, H: int, seed: int) -> None:
    assert chosen("full", deep(H), n, seed) == [list(range(H))] * n
    assert chosen("prune-all", deep(H), n, seed) == [[]] * n


@pytest.mark.parametrize("name", WINDOWS)
@given(n=fleets, H=depths, seed=seeds)
def test_windows_are_neighbours_on_a_circle(name: str, n: int, H: int, seed: int) -> None:
    for L_i in chosen(name, deep(H), n, seed):
        k = len(L_i)
        assert k in {min(k, H) for k in WINDOWS[name]}
        assert k == 0 or any(set(L_i) == {(g + j) % H for j in range(k)} for g in range(H))


@pytest.mark.parametrize("name", [name for name, k in WINDOWS.items() if len(k) == 1])
@given(n=fleets, H=st.integers(1, 20), seed=seeds)
def test_each_hidden_layer_is_trained_by_its_share_of_clients(
    name: str, n: int, H: int, seed: int
) -> None:
    share = n * min(WINDOWS[name][0], H) / H
    assert all(abs(m - share) < 1 for m in senders(chosen(name, deep(H), n, seed), H))


def test_a_hundred_clients_and_four_hidden_layers_are_the_papers_groups() -> None:
    for name, want in (("lowerb", 25), ("opu2", 50), ("opu3", 75)):
        sets = chosen(name, deep(4), 100)
        assert senders(sets, 4) == [want] * 4
        assert sorted(Counter(map(tuple, sets)).values()) == [25] * 4


@pytest.mark.parametrize("name", ["opu1-2-3", "opu2-3"])
def test_mixed_sizes_are_drawn_evenly_and_every_size_has_every_start(name: str) -> None:
    sets = chosen(name, deep(8), 2400)
    sizes = Counter(len(L_i) for L_i in sets)
    assert set(sizes) == set(WINDOWS[name])
    expected = 2400 / len(sizes)
    assert all(abs(m - expected) < 4 * math.sqrt(expected) for m in sizes.values())
    starts = Counter(tuple(L_i) for L_i in sets)
    assert len(starts) == 8 * len(sizes)


@pytest.mark.parametrize(("name", "k"), [("random-1", 1), ("random-2", 2)])
def test_random_layers_are_any_layers(name: str, k: int) -> None:
    sets = chosen(name, deep(5), 1000)
    assert {len(L_i) for L_i in sets} == {k}
    assert len(set(map(tuple, sets))) == math.comb(5, k)
    share = 1000 * k / 5
    assert all(abs(m - share) < 5 * math.sqrt(share) for m in senders(sets, 5))


def inside(block: str, *residuals: int) -> frozenset[str]:
    return frozenset(f"{block}.{r}.conv{c}" for r in residuals for c in (1, 2))


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("resnet-no-b2-b3", (inside("b2", 0, 1), inside("b3", 0, 1))),
        ("resnet-b2-part", (inside("b2", 0), inside("b2", 1))),
        ("resnet-b3-part", (inside("b3", 0), inside("b3", 1))),
    ],
)
@pytest.mark.parametrize("n", [2, 7, 100])
def test_each_half_of_the_clients_leaves_out_its_part_of_the_resnet(
    name: str, left_out: tuple[frozenset[str], frozenset[str]], n: int
) -> None:
    layers = resnet()
    gone = [
        frozenset(layers.layers) - set(L_i)
        for L_i in layer_sets(PlanSettings(layers=name), layers, n, 0, 0)
    ]
    assert Counter(gone) == {left_out[0]: math.ceil(n / 2), left_out[1]: n // 2}
    check_coverage(PlanSettings(layers=name), layers, [0.9] * n, 0, 1)


def test_the_resnet_of_the_package_has_the_layers_these_plans_name() -> None:
    with torch.device("meta"):
        settings = ModelSettings(name="resnet18", width=1 / 16)
        net = build(ModelSpec((3, 32, 32), 10, settings), 0)
    assert list(layer_map(net).layers) == list(resnet().layers)


@pytest.mark.parametrize("name", [name for name in LAYER_SETS if name.startswith("resnet")])
def test_a_plan_for_a_resnet_names_the_block_that_another_network_lacks(name: str) -> None:
    with pytest.raises(
        PlanError, match=r"leaves out block 'b[23]', which this network does not have"
    ):
        layer_sets(PlanSettings(layers=name), deep(4), 10, 0, 0)


# --------------------------------------------------------------------------- names


@given(k=st.integers(1, 9), n=fleets, H=st.integers(1, 20), seed=seeds)
def test_opu_takes_any_number_of_layers(k: int, n: int, H: int, seed: int) -> None:
    sets = chosen(f"opu{k}", deep(H), n, seed)
    assert {len(L_i) for L_i in sets} == {min(k, H)}
    assert all(abs(m - n * min(k, H) / H) < 1 for m in senders(sets, H))


def test_opu1_is_lowerb() -> None:
    assert chosen("opu1", deep(6), 50, 3) == chosen("lowerb", deep(6), 50, 3)


@pytest.mark.parametrize(
    ("name", "want"),
    [("opu1-4", {1, 4}), ("opu5", {5}), ("random-5", {5}), ("random-2-3", {2, 3}), ("opu12", {8})],
)
def test_families_take_any_sizes(name: str, want: set[int]) -> None:
    assert {len(L_i) for L_i in chosen(name, deep(8), 200)} == want


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("opu0", "did you mean 'opu"),
        ("lowrb", "did you mean 'lowerb'"),
        ("opu2-", "did you mean 'opu2"),
        ("OPU2 ", "known: .*lowerb"),
        ("random-0", "did you mean 'random-"),
        ("", "known: "),
        ("everything", "known: .*full"),
    ],
)
def test_an_unknown_choice_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=rf"unknown layer set '{name}' \({hint}"):
        LAYER_SETS.pick(name)


# --------------------------------------------------------------------------- classes per layer


def distance_to_global(
    sets: Sequence[Sequence[int]], labels: np.ndarray, H: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each layer's share of each class in its training samples, and its distance to equal ones."""
    pooled = np.array(
        [sum(labels[i] for i, L_i in enumerate(sets) if j in L_i) for j in range(H)], dtype=float
    )
    pooled /= pooled.sum(1, keepdims=True)
    return pooled, np.abs(pooled - 1 / pooled.shape[1]).sum(1) / 2


def test_layers_see_all_classes_because_ranks_are_shuffled() -> None:
    """Client i has classes i..i+4; if ranks were ids, similar clients would share a layer."""
    n, H, classes = 20, 4, 10
    y = np.tile(np.arange(classes), 200)
    labels = np.array(
        [np.bincount(y[part], minlength=classes) for part in partition("classes", y, n, seed=0)]
    )
    by_id = [[i * H // n] for i in range(n)]
    stuck, far = distance_to_global(by_id, labels, H)
    assert (stuck == 0).any(1).all(), "under rank = id every layer misses some class"
    assert far == pytest.approx(0.26)
    drawn = [
        distance_to_global(chosen("lowerb", deep(H), n, seed), labels, H) for seed in range(50)
    ]
    assert all(near.mean() < far.mean() for _, near in drawn)
    assert np.mean([near for _, near in drawn]) < 0.65 * far.mean()
    assert np.abs(np.mean([pooled for pooled, _ in drawn], 0) - 0.1).max() < 0.025, (
        "no layer leans to any class"
    )


def test_redrawn_layers_see_the_global_mix_over_the_rounds() -> None:
    n, H, rounds = 20, 4, 60
    labels = np.array([[1 if (c - i) % 10 < 5 else 0 for c in range(10)] for i in range(n)])
    seen = sum(
        distance_to_global(chosen("lowerb", deep(H), n, 0, t, redraw=True), labels, H)[0]
        for t in range(rounds)
    )
    assert np.abs(np.asarray(seen) / rounds - 0.1).max() < 0.02
