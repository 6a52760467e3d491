"""The fleet pass trains every layer, and is what a slow search does, client by client."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3 import config
from fedp3.core.errors import PlanError
from fedp3.devices.fleet_pass import greedy_counts
from fedp3.devices.window_draws import possible_trainers
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.planning.coverage import coverage
from fedp3.runs.description import warnings_of
from fedp3.server.round_plans import plans_for

LAYERS = 3
Case = tuple[list[int], list[list[tuple[bool, ...]]], list[list[float]]]


@st.composite
def fleets(draw: st.DrawFn, clients: int = 6) -> Case:
    """A few classes of devices, each with options that train some layers on some samples."""
    sizes = draw(st.lists(st.integers(1, clients // 2), min_size=1, max_size=2))
    trained, samples = [], []
    for _ in sizes:
        options = draw(st.integers(1, 3))
        masks = st.tuples(*[st.booleans()] * LAYERS)
        trained.append(draw(st.lists(masks, min_size=options, max_size=options)))
        numbers = st.floats(1, 500)
        samples.append(draw(st.lists(numbers, min_size=options, max_size=options)))
    return sizes, trained, samples


def value(case: Case, counts: list[list[int]]) -> float:
    """F, as the module defines it."""
    _, trained, samples = case
    covered = [0.0] * LAYERS
    for masks, numbers, row in zip(trained, samples, counts, strict=True):
        for mask, number, count in zip(masks, numbers, row, strict=True):
            for l in range(LAYERS):
                covered[l] += count * number * mask[l]
    return sum(math.log1p(s) for s in covered)


def naive(case: Case) -> list[list[int]]:
    """One client after another gets the option that adds most to F."""
    sizes, trained, _ = case
    counts = [[0] * len(masks) for masks in trained]
    left = list(sizes)
    while any(left):
        best, choice = -1.0, (0, 0)
        for c in range(len(sizes)):
            for j in range(len(trained[c])):
                if left[c] == 0:
                    continue
                before = value(case, counts)
                counts[c][j] += 1
                gain = round(value(case, counts) - before, 9)
                counts[c][j] -= 1
                if gain > best + 1e-9:
                    best, choice = gain, (c, j)
        counts[choice[0]][choice[1]] += 1
        left[choice[0]] -= 1
    return counts


def fast(case: Case) -> list[list[int]]:
    sizes, trained, samples = case
    masks = [np.array(rows, dtype=bool) for rows in trained]
    return greedy_counts(sizes, masks, [np.array(row) for row in samples])


@given(fleets())
@settings(max_examples=150, deadline=None)
def test_counts_are_worth_what_those_of_the_naive_search_are(case: Case) -> None:
    counts = fast(case)
    assert [sum(row) for row in counts] == case[0]
    assert value(case, counts) == pytest.approx(value(case, naive(case)), abs=1e-6)


@given(fleets(clients=4))
@settings(max_examples=100, deadline=None)
def test_counts_are_worth_at_least_half_of_the_best(case: Case) -> None:
    sizes, trained, _ = case

    def splits(total: int, parts: int) -> list[list[int]]:
        return [list(c) for c in product(range(total + 1), repeat=parts) if sum(c) == total]

    every = product(*(splits(n, len(masks)) for n, masks in zip(sizes, trained, strict=True)))
    best = max(value(case, list(counts)) for counts in every)
    assert value(case, fast(case)) >= 0.5 * best - 1e-9


def test_two_equal_devices_that_can_train_one_of_two_layers_share_them() -> None:
    masks = np.array([[True, False], [False, True]])
    assert greedy_counts([2], [masks], [np.array([10.0, 10.0])]) == [[1, 1]]


def test_a_device_without_options_gets_none() -> None:
    masks = np.array([[True, True]])
    nothing = np.zeros((0, 2), dtype=bool)
    assert greedy_counts([3, 2], [nothing, masks], [np.zeros(0), np.array([5.0])]) == [[], [2]]


# --------------------------------------------------------------------------- in a run


# One code of 8 bits up and none down, so that these limits leave each device few windows.
ONE_CODE = ("upload.compress=int8", "download.compress=none")


def experiment(*overrides: str) -> Experiment:
    planned = not any(override.startswith("method=") for override in overrides)
    return assemble(
        config.parse(
            {},
            [
                "partition.clients=40",
                "model.name=mlp",
                "model.width=0.25",
                "devices.fleet=phones",
                "devices.round_seconds=0.25",
                *(ONE_CODE if planned else ()),
                *overrides,
            ],
        )
    )


def test_every_layer_is_trained_in_every_round_and_windows_move_between_clients() -> None:
    server = experiment().server
    seen: dict[int, set[tuple[str, ...]]] = {}
    for t in range(8):
        plans = plans_for(server, t)
        assert all(coverage(plans).values())
        for plan in plans:
            seen.setdefault(plan.client, set()).add(plan.full_layers)
    assert sum(len(sets) > 1 for sets in seen.values()) > 10


def test_how_many_clients_train_a_layer_is_the_same_in_every_round() -> None:
    server = experiment().server
    counts = [
        [len(clients) for clients in coverage(plans_for(server, t)).values()] for t in range(4)
    ]
    assert counts[0] == counts[1] == counts[2] == counts[3]


def test_fixed_windows_stay_and_random_ones_are_drawn_anew() -> None:
    fixed, random = (experiment(f"devices.windows={w}").server for w in ("fixed", "random"))
    assert plans_for(fixed, 0) == plans_for(fixed, 3)
    assert plans_for(random, 0) != plans_for(random, 3)


def test_plans_are_a_function_of_the_config() -> None:
    one, other = experiment().server, experiment().server
    assert plans_for(one, 5) == plans_for(other, 5)
    assert plans_for(one, 5) != plans_for(experiment("run.seed=1").server, 5)


def test_a_fleet_that_cannot_train_some_layer_is_refused_with_what_would_help() -> None:
    with pytest.raises(PlanError, match=r"no device of this fleet can train .*round_seconds = "):
        experiment("devices.round_seconds=0.01")
    with pytest.raises(PlanError, match=r"memory_share = "):
        experiment("devices.memory_share=0.0000001", "devices.round_seconds=0")


def test_a_device_that_can_do_nothing_is_left_out_and_the_others_go_on() -> None:
    run = experiment("devices.round_seconds=0.1")
    fleet = run.server.fleet
    assert fleet is not None and 0 < len(fleet.able) < 40
    assert len(plans_for(run.server, 0)) == 40  # all are evaluated


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "fiarse", "fedrop"])
def test_sub_models_get_the_largest_share_that_fits(method: str) -> None:
    tight = experiment(f"method={method}", "devices.round_seconds=0.6")
    loose = experiment(f"method={method}", "devices.round_seconds=0", "devices.memory_share=1")
    assert all(a <= b for a, b in zip(tight.server.keep, loose.server.keep, strict=True))
    assert set(loose.server.keep) == {1.0}
    assert len(set(tight.server.keep)) > 1
    limit = tight.config.devices.round_seconds
    fleet = tight.server.fleet
    assert fleet is not None
    assert all(tight.costs[i].seconds <= limit for i in fleet.able)


def test_with_fedavg_devices_that_cannot_hold_it_are_left_out() -> None:
    run = experiment("method=fedavg", "devices.memory_share=0.005", "model.width=1.0")
    fleet = run.server.fleet
    assert fleet is not None and 0 < len(fleet.able) < 40
    assert {fleet.binding[i] == "memory" for i in range(40) if i not in fleet.able} == {True}


def test_layers_that_see_few_classes_because_of_devices_are_pointed_out() -> None:
    narrow = experiment("partition.classes=1", "devices.round_seconds=0.1")
    trainers = possible_trainers(narrow.server.fleet.classes, "balanced")  # type: ignore[union-attr]
    few = [l for l, clients in trainers.items() if len(clients) < 8]
    assert few and all(l in warnings_of(narrow)["M3"] for l in few)
    wide = experiment("partition.classes=1", "devices.round_seconds=0", "devices.memory_share=1")
    assert "M3" not in warnings_of(wide)
    plans = [plan for t in range(30) for plan in plans_for(narrow.server, t)]
    seen = {l: set(clients) for l, clients in coverage(plans).items()}
    able = narrow.server.fleet.able  # type: ignore[union-attr]
    assert {l: clients & able for l, clients in seen.items()} == {
        l: set(clients) for l, clients in trainers.items()
    }


def test_under_ldp_every_device_takes_all_steps_that_are_accounted_for() -> None:
    private = experiment("privacy.enabled=true", "privacy.epsilon=50", "devices.round_seconds=0.5")
    plans = plans_for(private.server, 0)
    assert {plan.steps for plan in plans} == {0}
    assert len({plan.full_layers for plan in plans}) > 1
