"""Who trains what: every row of `LAYER_SETS` is held to the same claims, so a new row is tested at birth."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedp3.errors import InputError, PlanError
from fedp3.layermap import layer_map
from fedp3.models import MODELS, Spec, build
from fedp3.partition import partition
from fedp3.plan import (
    HEADS,
    LAYER_SETS,
    OTHERS,
    PlanRules,
    check_coverage,
    client_plans,
    coverage,
    devices,
    find,
    layer_sets,
    per_layers,
)
from fedp3.types import LayerMap, LayerPlan

WINDOWS = {"lowerb": (1,), "opu2": (2,), "opu3": (3,), "opu1-2-3": (1, 2, 3), "opu2-3": (2, 3)}
seeds = st.integers(0, 10_000)
fleets = st.integers(1, 60)
depths = st.integers(0, 20)


def named(*layers: str) -> LayerMap:
    shapes = {f"{l}.weight": (2, 2) for l in layers}
    return LayerMap({l: (f"{l}.weight",) for l in layers}, shapes, {}, {}, frozenset(shapes), frozenset())


def deep(H: int) -> LayerMap:
    """H hidden layers and a head."""
    return named(*(f"h{j}" for j in range(H)), "out")


def resnet() -> LayerMap:
    return named("conv0", *(f"b{b}.{r}.conv{c}" for b in (1, 2, 3, 4) for r in (0, 1) for c in (1, 2)), "ffc")


def fitting(name: str, H: int) -> LayerMap:
    return resnet() if name.startswith("resnet") else deep(H)


def chosen(name: str, layers: LayerMap, n: int, seed: int = 0, t: int = 0, *, redraw: bool = False) -> list[list[int]]:
    """The hidden layers of every client, by number."""
    sets = layer_sets(PlanRules(name, redraw=redraw), layers, n, seed, t)
    return [[layers.hidden.index(l) for l in L_i if l != layers.head] for L_i in sets]


def senders(sets: Sequence[Sequence[int]], H: int) -> list[int]:
    """How many clients train each hidden layer."""
    return [sum(j in L_i for L_i in sets) for j in range(H)]


# --------------------------------------------------------------------------- all layer sets


@pytest.mark.parametrize("name", LAYER_SETS)
@given(n=fleets, H=depths, seed=seeds)
def test_every_client_gets_layers_of_the_net_in_order_and_the_head(name: str, n: int, H: int, seed: int) -> None:
    layers = fitting(name, H)
    sets = layer_sets(PlanRules(name), layers, n, seed, 0)
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


DRAWN = [name for name in LAYER_SETS if name not in ("full", "head", "prune-all")]


@pytest.mark.parametrize("name", DRAWN)
def test_another_seed_deals_other_layers(name: str) -> None:
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
def test_each_hidden_layer_is_trained_by_its_share_of_clients(name: str, n: int, H: int, seed: int) -> None:
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
    gone = [frozenset(layers.layers) - set(L_i) for L_i in layer_sets(PlanRules(name), layers, n, 0, 0)]
    assert Counter(gone) == {left_out[0]: math.ceil(n / 2), left_out[1]: n // 2}
    check_coverage(PlanRules(name), layers, [0.9] * n, 0, 1)


def test_the_resnet_of_the_package_has_the_layers_these_plans_name() -> None:
    with torch.device("meta"):
        net = MODELS["resnet18"](Spec((3, 32, 32), 10, 1 / 16))
    assert list(layer_map(net).layers) == list(resnet().layers)


@pytest.mark.parametrize("name", [name for name in LAYER_SETS if name.startswith("resnet")])
def test_a_plan_for_a_resnet_says_which_block_another_net_lacks(name: str) -> None:
    with pytest.raises(PlanError, match=r"leaves out block 'b[23]', which this net lacks"):
        layer_sets(PlanRules(name), deep(4), 10, 0, 0)


# --------------------------------------------------------------------------- names


@given(k=st.integers(1, 9), n=fleets, H=st.integers(1, 20), seed=seeds)
def test_opu_takes_any_number_of_layers(k: int, n: int, H: int, seed: int) -> None:
    sets = chosen(f"opu{k}", deep(H), n, seed)
    assert {len(L_i) for L_i in sets} == {min(k, H)}
    assert all(abs(m - n * min(k, H) / H) < 1 for m in senders(sets, H))


def test_opu1_is_lowerb() -> None:
    assert chosen("opu1", deep(6), 50, 3) == chosen("lowerb", deep(6), 50, 3)


@pytest.mark.parametrize(
    ("name", "want"), [("opu1-4", {1, 4}), ("opu5", {5}), ("random-5", {5}), ("random-2-3", {2, 3}), ("opu12", {8})]
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
    with pytest.raises(InputError, match=rf"unknown choice of layers '{name}' \({hint}"):
        find(name)


# --------------------------------------------------------------------------- layers must see all classes


def distance_to_global(sets: Sequence[Sequence[int]], labels: np.ndarray, H: int) -> tuple[np.ndarray, np.ndarray]:
    """Each layer's share of each class among the samples it is trained on, and the distance to equal shares."""
    pooled = np.array([sum(labels[i] for i, L_i in enumerate(sets) if j in L_i) for j in range(H)], dtype=float)
    pooled /= pooled.sum(1, keepdims=True)
    return pooled, np.abs(pooled - 1 / pooled.shape[1]).sum(1) / 2


def test_layers_see_all_classes_because_ranks_are_shuffled() -> None:
    """Client i owns classes i..i+4: with rank = id a layer is trained by neighbours and misses a class for ever."""
    n, H, classes = 20, 4, 10
    y = np.tile(np.arange(classes), 200)
    labels = np.array([np.bincount(y[part], minlength=classes) for part in partition("classes", y, n, seed=0)])
    by_id = [[i * H // n] for i in range(n)]
    stuck, far = distance_to_global(by_id, labels, H)
    assert (stuck == 0).any(1).all(), "under rank = id every layer misses some class"
    assert far == pytest.approx(0.26)
    drawn = [distance_to_global(chosen("lowerb", deep(H), n, seed), labels, H) for seed in range(50)]
    assert all(near.mean() < far.mean() for _, near in drawn)
    assert np.mean([near for _, near in drawn]) < 0.65 * far.mean()
    assert np.abs(np.mean([pooled for pooled, _ in drawn], 0) - 0.1).max() < 0.025, "no layer leans to any class"


def test_redrawn_layers_see_the_global_mix_over_the_rounds() -> None:
    n, H, rounds = 20, 4, 60
    labels = np.array([[1 if (c - i) % 10 < 5 else 0 for c in range(10)] for i in range(n)])
    seen = sum(distance_to_global(chosen("lowerb", deep(H), n, 0, t, redraw=True), labels, H)[0] for t in range(rounds))
    assert np.abs(np.asarray(seen) / rounds - 0.1).max() < 0.02


# --------------------------------------------------------------------------- plans


@pytest.mark.parametrize("name", LAYER_SETS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("upload", ["none", "kept", "zeros"])
def test_a_plan_trains_its_layers_whole_and_prunes_the_rest(name: str, head: str, others: str, upload: str) -> None:
    layers = fitting(name, 5)
    keep = (0.9, 0.7, 0.5, 1.0)
    rules = PlanRules(name, others=others, head=head, upload=upload)
    plans = client_plans(rules, layers, keep, 0, 0)
    sets = layer_sets(rules, layers, len(keep), 0, 0)
    assert [p.client for p in plans] == [0, 1, 2, 3]
    for plan, L_i, r in zip(plans, sets, keep, strict=True):
        assert list(plan.layers) == list(layers.layers)
        assert plan.layers[layers.head] == HEADS[head]
        for l in layers.hidden:
            trains = others == "train" or upload != "none"
            rest = {"personal": LayerPlan("none", upload="none"), "skip": LayerPlan("skip", train=False, upload="none")}
            pruned = LayerPlan("pruned", r, trains, upload)
            assert plan.layers[l] == (LayerPlan() if l in L_i else rest.get(others, pruned))
        if head != "personal":
            assert plan.whole == L_i
        assert set(plan.uploaded) >= set(plan.whole)


def test_heads_are_sent_and_uploaded_as_their_name_says() -> None:
    assert {h: (p.send, p.upload, p.train) for h, p in HEADS.items()} == {
        "shared": ("dense", "all", True),
        "personal": ("none", "none", True),
        "personal_uploaded": ("none", "all", True),
    }


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (PlanRules(head="persnal"), "unknown kind of head 'persnal' .*did you mean 'personal'"),
        (PlanRules(others="freze"), "unknown way .*'freze' .*did you mean 'freeze'"),
        (PlanRules("oqu2"), "unknown choice of layers 'oqu2' .*did you mean 'opu2'"),
    ],
)
def test_unknown_rules_are_refused(rules: PlanRules, text: str) -> None:
    with pytest.raises(InputError, match=text):
        client_plans(rules, deep(3), [0.9], 0, 0)


# --------------------------------------------------------------------------- coverage


@given(n=fleets, H=st.integers(1, 20), seed=seeds, name=st.sampled_from(sorted(WINDOWS)))
def test_coverage_lists_who_trains_and_uploads_each_layer(n: int, H: int, seed: int, name: str) -> None:
    layers = deep(H)
    plans = client_plans(PlanRules(name), layers, [0.5] * n, seed, 0)
    want = {l: [p.client for p in plans if l in p.whole] for l in layers.layers}
    assert coverage(plans) == want


@given(n=st.integers(1, 30), H=st.integers(1, 12), seed=seeds, name=st.sampled_from(["lowerb", "opu2", "random-1"]))
def test_a_layer_left_to_nobody_is_refused_by_name(n: int, H: int, seed: int, name: str) -> None:
    layers = deep(H)
    orphans = sorted(f"h{j}" for j, m in enumerate(senders(chosen(name, layers, n, seed), H)) if m == 0)
    if not orphans:
        check_coverage(PlanRules(name), layers, [0.5] * n, seed, 10)
        return
    with pytest.raises(PlanError, match=rf"no client trains and uploads {', '.join(orphans)} under layers='{name}'"):
        check_coverage(PlanRules(name), layers, [0.5] * n, seed, 10)
    check_coverage(PlanRules(name, upload="kept"), layers, [0.5] * n, seed, 10)


def test_prune_all_is_refused_unless_pruned_layers_come_back() -> None:
    with pytest.raises(PlanError, match="h0, h1, h2"):
        check_coverage(PlanRules("prune-all"), deep(3), [0.9] * 5, 0, 10)
    check_coverage(PlanRules("prune-all", upload="kept"), deep(3), [0.9] * 5, 0, 10)


def test_a_personal_head_is_declared_not_forgotten() -> None:
    for head in HEADS:
        check_coverage(PlanRules("opu2", head=head), deep(3), [0.9] * 5, 0, 1)


def test_redrawn_layers_are_covered_over_the_rounds_of_the_run() -> None:
    """Two clients cannot train six hidden layers in one round; redrawn, they do in time."""
    layers, keep = deep(6), [0.9] * 2
    with pytest.raises(PlanError):
        check_coverage(PlanRules("lowerb"), layers, keep, 0, 100)
    with pytest.raises(PlanError):
        check_coverage(PlanRules("random-1", redraw=True), layers, keep, 0, 2)
    check_coverage(PlanRules("random-1", redraw=True), layers, keep, 0, 100)


# --------------------------------------------------------------------------- devices


def test_one_number_is_for_every_client_and_a_list_for_each() -> None:
    assert devices(0.7, 3, 0) == (0.7, 0.7, 0.7)
    assert devices(1, 2, 0) == (1.0, 1.0)
    assert devices([0.9, 0.5, 0.7], 3, 0) == (0.9, 0.5, 0.7)


@given(classes=st.lists(st.floats(0.01, 1), min_size=1, max_size=6, unique=True), n=st.integers(1, 60), seed=seeds)
def test_device_classes_are_dealt_out_in_equal_shares(classes: list[float], n: int, seed: int) -> None:
    if len(classes) > n:
        with pytest.raises(PlanError, match=f"{len(classes)} device classes for {n} clients"):
            devices(classes, n, seed)
        return
    dealt = devices(classes, n, seed)
    assert dealt == devices(classes, n, seed)
    count = Counter(dealt)
    assert set(count) == set(classes) and max(count.values()) - min(count.values()) <= 1


def test_which_client_is_which_device_depends_on_the_seed_and_not_on_its_layers() -> None:
    assert devices([0.5, 1], 40, 0) != devices([0.5, 1], 40, 1)
    groups = [L_i[0] for L_i in chosen("lowerb", deep(2), 40, 0)]
    pairs = Counter(zip(groups, devices([0.5, 1], 40, 0), strict=True))
    assert len(pairs) == 4, "one permutation for both would give every group a single class of device"


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, math.nan, math.inf, [0.5, 0], [0.5, -1, 2], []])
def test_a_share_outside_0_to_1_is_refused(keep: float | list[float]) -> None:
    with pytest.raises(PlanError, match=r"keep is a share in \(0, 1\], got"):
        devices(keep, 5, 0)


def test_what_plans_share_is_made_once_and_shares_of_one_deal_apart():
    layers = layer_map(build("mlp", Spec((1, 8, 8), 10, 0.05), 0))
    plans = client_plans(PlanRules("lowerb"), layers, [0.5] * 12, 0, 0)
    made = []
    of = per_layers(lambda plan: made.append(plan.client) or plan.whole)
    assert [of(plan) for plan in plans] == [plan.whole for plan in plans]
    assert len(made) == len({plan.whole for plan in plans}) == 3
    assert of(replace(plans[0], deal=(1, 2))) == plans[0].whole and len(made) == 4
