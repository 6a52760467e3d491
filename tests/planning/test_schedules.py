"""Schedules of layers: who trains which layers of L_i in which round."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.types import LayerMap
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.client_plans import PlanSettings, client_plans, layer_sets
from fedp3.planning.coverage import coverage
from fedp3.planning.revised_plans import without_layers
from fedp3.planning.schedules import SCHEDULES, paced_slots

from .layer_maps import deep, depths, fleets, seeds

CHANGING = [name for name in SCHEDULES if name != "always"]
rounds = st.integers(0, 60)


def sized(*sizes: int) -> LayerMap:
    """Layers with these numbers of values; the last one is the head."""
    names = [*(f"h{j}" for j in range(len(sizes) - 1)), "out"]
    layers = deep(len(sizes) - 1)
    return replace(
        layers, shapes={f"{l}.weight": (1, n) for l, n in zip(names, sizes, strict=True)}
    )


def values(layers: LayerMap, l: str) -> int:
    return math.prod(layers.shapes[f"{l}.weight"])


# --------------------------------------------------------------------------- every schedule


@pytest.mark.parametrize("name", SCHEDULES)
@given(n=fleets, H=depths, seed=seeds, t=rounds)
def test_a_client_gets_layers_of_its_layer_set_in_model_order(
    name: str, n: int, H: int, seed: int, t: int
) -> None:
    layers, settings = deep(H), PlanSettings(layers="opu2", schedule=name, dealt=seed % 2 == 0)
    whole = layer_sets(PlanSettings(layers="opu2"), layers, n, seed, t)
    order = list(layers.layers)
    for L_i, base in zip(layer_sets(settings, layers, n, seed, t), whole, strict=True):
        assert set(L_i) <= set(base)
        assert list(L_i) == sorted(set(L_i), key=order.index)


@pytest.mark.parametrize("name", ["cycle", "paced"])
@given(n=fleets, H=depths, seed=seeds, dealt=st.booleans(), t=rounds)
def test_in_a_turn_every_client_gets_every_layer_and_then_the_schedule_begins_again(
    name: str, n: int, H: int, seed: int, dealt: bool, t: int
) -> None:
    layers = deep(H)
    settings = PlanSettings(layers="full", schedule=name, warm=0, stretch=2, period=3, dealt=dealt)
    turn = settings.turn(layers)
    sets = [layer_sets(settings, layers, n, seed, k) for k in range(turn)]
    for i in range(n):
        assert {l for round_sets in sets for l in round_sets[i]} == set(layers.layers)
    assert layer_sets(settings, layers, n, seed, t + turn) == layer_sets(
        settings, layers, n, seed, t
    )


@pytest.mark.parametrize("name", CHANGING)
def test_plans_that_follow_a_schedule_change(name: str) -> None:
    assert PlanSettings(schedule=name).changes
    assert not PlanSettings().changes and PlanSettings(redraw=True).changes


@pytest.mark.parametrize("name", CHANGING)
@given(n=fleets, t=rounds, seed=seeds)
def test_the_head_rests_where_it_is_not_due(name: str, n: int, t: int, seed: int) -> None:
    layers = deep(4)
    settings = PlanSettings(layers="full", schedule=name, others="freeze")
    sets = layer_sets(settings, layers, n, seed, t)
    for plan, L_i in zip(client_plans(settings, layers, [1.0] * n, seed, t), sets, strict=True):
        assert plan.full_layers == L_i == plan.uploaded
        assert all(p.train == (l in L_i) for l, p in plan.layers.items())


def test_a_personal_head_trains_in_every_round() -> None:
    settings = PlanSettings(layers="full", schedule="cycle", warm=0, head="personal")
    for t in range(10):
        (plan,) = client_plans(settings, deep(4), [1.0], 0, t)
        head = plan.layers["out"]
        assert (head.send, head.train, head.upload) == ("none", True, "none")


# --------------------------------------------------------------------------- cycle


@given(H=depths, warm=st.integers(0, 6), stretch=st.integers(1, 4), t=rounds)
def test_a_cycle_is_all_layers_and_then_one_after_the_other(
    H: int, warm: int, stretch: int, t: int
) -> None:
    layers = deep(H)
    settings = PlanSettings(layers="full", schedule="cycle", warm=warm, stretch=stretch)
    everything = tuple(layers.layers)
    written_out = [everything] * warm + [(l,) for l in everything for _ in range(stretch)]
    assert settings.turn(layers) == len(written_out)
    want = written_out[t % len(written_out)]
    assert layer_sets(settings, layers, 3, 0, t) == (want,) * 3


def test_dealt_cycles_train_every_layer_in_every_round() -> None:
    settings = PlanSettings(layers="full", schedule="cycle", warm=0, stretch=1, dealt=True)
    layers = deep(4)
    for t in range(5):
        counts = Counter(L_i for L_i in layer_sets(settings, layers, 20, 7, t))
        assert counts == {(l,): 4 for l in layers.layers}


# --------------------------------------------------------------------------- paced


def test_the_two_large_layers_of_the_papers_cnn_take_turns() -> None:
    net = build(ModelSpec((1, 32, 32), 10, ModelSettings(name="cnn", width=0.25)), 0)
    layers = layer_map(net)
    small = [l for l in layers.hidden if "conv" in l]
    large = [l for l in layers.hidden if l not in small]
    assert len(small) == len(large) == 2
    slots = paced_slots(PlanSettings(schedule="paced"), layers)
    every_round = {*small, layers.head}
    assert [set(slot) - every_round for slot in slots] == [{large[0]}, set(), {large[1]}, set()]
    assert all(every_round <= set(slot) for slot in slots)


def test_on_resnet18_several_layers_share_a_round_and_rounds_are_balanced() -> None:
    """No layer dominates ResNet18: its three largest hold a fifth of it each."""
    net = build(ModelSpec((3, 32, 32), 10, ModelSettings(name="resnet18", width=0.25)), 0)
    layers = layer_map(net)
    size = {
        l: sum(math.prod(layers.shapes[n]) for n in names) for l, names in layers.layers.items()
    }
    slots = paced_slots(PlanSettings(schedule="paced"), layers)
    often = set.intersection(*map(set, slots))
    assert sum(size[l] for l in often - {layers.head}) <= 0.1 * sum(size.values())
    loads = [sum(size[l] for l in slot if l not in often) for slot in slots]
    assert min(loads) > 0.75 * max(loads)
    assert sum(len(set(slot) - often) for slot in slots) == len(size) - len(often) > len(slots)


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    share=st.floats(0.01, 1),
    period=st.integers(1, 6),
)
def test_paced_rounds_are_fair_and_balanced(sizes: list[int], share: float, period: int) -> None:
    layers = sized(*sizes)
    slots = paced_slots(PlanSettings(schedule="paced", share=share, period=period), layers)
    counts = Counter(l for slot in slots for l in slot)
    often = [l for l in layers.hidden if counts[l] == period]
    seldom = [l for l in layers.hidden if counts[l] != period]
    assert len(slots) == period and counts[layers.head] == period
    assert all(counts[l] == 1 for l in seldom), "a large layer is due once in a period"
    if period > 1:
        assert sum(values(layers, l) for l in often) <= share * sum(sizes)
        if seldom:  # the next larger layer would not fit
            grown = [*often, min(seldom, key=lambda l: values(layers, l))]
            assert sum(values(layers, l) for l in grown) > share * sum(sizes)
    loads = [sum(values(layers, l) for l in slot if l in seldom) for slot in slots]
    # Greedy filling: the fullest round has at most its last layer more than the emptiest one.
    largest = max((values(layers, l) for l in seldom), default=0)
    if len(seldom) >= period:
        assert max(loads) - min(loads) <= largest
    else:  # single layers, with gaps between them that differ by at most one round
        at = [j for j, load in enumerate(loads) if load]
        gaps = [(b - a) % period or period for a, b in zip(at, at[1:] + at[:1], strict=True)]
        assert len(at) == len(seldom) and max(gaps, default=0) - min(gaps, default=0) <= 1


def test_dealt_turns_are_disjoint_over_a_period_and_common_ones_the_same() -> None:
    layers = sized(10, 1000, 1000, 1000, 1000, 5)
    common = PlanSettings(layers="full", schedule="paced")
    dealt = replace(common, dealt=True)
    for t in range(4):
        assert len(set(layer_sets(common, layers, 8, 0, t))) == 1
        counts = Counter(layer_sets(dealt, layers, 8, 0, t))
        assert sorted(counts.values()) == [2, 2, 2, 2], "two of eight clients at every place"
    assert layer_sets(dealt, layers, 8, 0, 0) != layer_sets(dealt, layers, 8, 1, 0)


# --------------------------------------------------------------------------- random


def test_a_layer_is_due_as_often_as_its_probability_says() -> None:
    settings = PlanSettings(layers="full", schedule="random", probability=0.3)
    layers = deep(3)
    drawn = [layer_sets(settings, layers, 50, 0, t) for t in range(40)]
    assert len(set(drawn)) == 40, "drawn anew in every round"
    counts = Counter(l for sets in drawn for L_i in sets for l in L_i)
    for l in layers.layers:  # 600 of 2000 are expected; the standard deviation is 20
        assert 500 < counts[l] < 700


# --------------------------------------------------------------------------- weak clients


@given(H=depths, depth=st.floats(0.01, 1), keep=st.sampled_from([0.25, 0.5, 1.0]))
def test_weak_clients_train_only_the_upper_layers(H: int, depth: float, keep: float) -> None:
    layers = deep(H)
    settings = PlanSettings(
        layers="full", others="freeze", weak_below=0.5, weak_depth=depth, weak_steps=2
    )
    (plan,) = client_plans(settings, layers, [keep], 0, 0)
    names = tuple(layers.layers)
    lowest = len(names) - math.ceil(depth * len(names) - 1e-9) if keep < 0.5 else 0
    assert plan.full_layers == names[lowest:]
    assert plan.full_layers[-1] == layers.head
    assert plan.steps == (2 if keep < 0.5 else 0)
    assert not any(plan.layers[l].train for l in names[:lowest])


# --------------------------------------------------------------------------- layers left out


@given(n=fleets, seed=seeds, left_out=st.sets(st.sampled_from(["h0", "h1", "h2", "out"])))
def test_layers_that_are_left_out_are_outside_every_set_and_others_are_as_before(
    n: int, seed: int, left_out: set[str]
) -> None:
    layers, settings = deep(3), PlanSettings(layers="opu2", others="train")
    keep = [0.5 if i % 2 else 1.0 for i in range(n)]
    plans = client_plans(settings, layers, keep, seed, 0)
    changed = without_layers(plans, left_out, settings, keep)
    for before, after in zip(plans, changed, strict=True):
        assert set(after.full_layers) == set(before.full_layers) - left_out
        for l, p in after.layers.items():
            if l not in left_out or l not in before.full_layers:
                assert p == before.layers[l]
            else:
                assert (p.send, p.keep, p.upload) == ("pruned", keep[after.client], "none")
    assert all(not coverage(changed)[l] for l in left_out)


def test_a_personal_head_cannot_be_left_out() -> None:
    settings = PlanSettings(layers="full", head="personal_uploaded")
    plans = client_plans(settings, deep(2), [1.0], 0, 0)
    assert without_layers(plans, {"out"}, settings, [1.0])[0].layers == plans[0].layers


def test_under_ldp_a_schedule_warns_that_more_rounds_cost_privacy() -> None:
    from fedp3 import config
    from fedp3.experiment.assemble import assemble
    from fedp3.runs.description import warnings_of

    ldp = ["privacy.enabled=true", "model.width=0.05", "run.rounds=4", "privacy.epsilon=50"]
    paced = assemble(config.parse({"method": "fedp3-paced"}, ldp))
    assert "once in 4 rounds" in warnings_of(paced)["M4"]
    assert "M4" not in warnings_of(assemble(config.parse({"method": "fedp3"}, ldp)))
