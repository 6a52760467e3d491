"""P_i: every entry of `SELECTORS` is tested for the same claims."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import reference as ref
from fedp3.core import masks as M
from fedp3.core.types import Masks
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import masks_for
from fedp3.planning.selectors import magnitude, neuron_norm, retained_units, retained_weights
from worlds import KINDS, same, world

from .pruned_plans import (
    CHAINS,
    UNITS,
    WEIGHTS,
    every_selector,
    everything_pruned,
    keeps,
    masks_of,
)


@every_selector
@pytest.mark.parametrize("kind", CHAINS)
@given(
    keep=keeps,
    sets=st.sampled_from(("prune-all", "lowerb", "opu2")),
    t=st.integers(0, 9),
    client=st.integers(0, 3),
)
def test_masks_are_those_of_the_reference_implementation(kind, selector, keep, sets, t, client):
    here = world(kind)
    plan = here.plans(sets, keep)[client]
    got = masks_of(here, plan, selector, t)
    want = ref.pruned_masks(here.W, KINDS[kind].chain, plan, selector, t, here.seed)
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def test_counts_are_exact_floors_and_ceilings_of_decimal_shares():
    """Floats alone are wrong: 0.29 * 100 is 28.999999999999996, 0.07 * 100 is 7.000000000000001."""
    for k, n in itertools.product(range(1, 101), range(1, 121)):
        keep = k / 100
        assert retained_weights(keep, n) == ref.floor_share(keep, n)
        assert retained_units(keep, n, 1) == ref.ceil_share(keep, n)
        assert retained_units(keep, 3 * n, 3) == 3 * ref.ceil_share(keep, n)


@pytest.mark.parametrize("selector", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_unstructured_selectors_retain_the_floor_of_each_weight_and_all_other_tensors(
    kind, selector
):
    here = world(kind)
    got = masks_of(here, everything_pruned(here.layers, 0.37), selector)
    for n, mask in got.items():
        head = n in here.layers.layers[here.layers.head]
        dense = head or mask.dim() < 2
        assert int(mask.sum()) == (
            mask.numel() if dense else max(1, math.floor(0.37 * mask.numel()))
        )


@pytest.mark.parametrize("selector", UNITS)
@pytest.mark.parametrize("kind", KINDS)
def test_structured_selectors_retain_the_ceiling_of_units_with_all_their_tensors(kind, selector):
    here = world(kind)
    masks = masks_for(
        everything_pruned(here.layers, 0.37),
        here.W,
        here.layers,
        PruneSettings(selector=selector),
        1,
        0,
    )
    free = {g: u for g, u in here.layers.groups.items() if not u.fixed}
    assert masks.units.keys() == free.keys() and masks.units
    for g, u in free.items():
        indices = masks.units[g].tolist()
        assert len(indices) == u.granule * math.ceil(0.37 * u.units / u.granule)
        assert indices == sorted(set(indices)) and indices[0] >= 0 and indices[-1] < u.units
    vectors = [
        n
        for n, axes in here.layers.axes.items()
        if len(here.layers.shapes[n]) == 1 and axes[0].group in free
    ]
    for n in vectors:
        mask = M.active(n, masks, here.layers)
        assert torch.equal(mask.rows, masks.units[here.layers.axes[n][0].group])


@every_selector
@pytest.mark.parametrize("kind", CHAINS)
@given(pair=st.tuples(keeps, keeps).map(sorted), t=st.integers(0, 5))
def test_masks_are_nested_in_keep(kind, selector, pair, t):
    here = world(kind)
    less, more = (
        masks_of(here, everything_pruned(here.layers, keep), selector, t) for keep in pair
    )
    assert all(not bool((less[n] & ~more[n]).any()) for n in less)


@every_selector
def test_keeping_everything_masks_nothing(selector):
    here = world()
    assert (
        masks_for(
            everything_pruned(here.layers, 1.0),
            here.W,
            here.layers,
            PruneSettings(selector=selector),
            3,
            0,
        )
        == Masks()
    )


@pytest.mark.parametrize("selector", [s for s in SELECTORS if s != "neuron_norm"])
@pytest.mark.parametrize("kind", CHAINS)
def test_pruning_what_is_pruned_changes_nothing(kind, selector):
    here = world(kind, selector=selector)
    plan = [everything_pruned(here.layers, 0.4)]
    ((once, _),) = dispatch(here.W, plan, here.layers, here.pruning, 2, 0)
    ((twice, _),) = dispatch(once, plan, here.layers, here.pruning, 2, 0)
    assert same(once, twice)


@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=12), st.data()
)
def test_magnitude_and_norms_take_the_first_among_equals_and_are_idempotent(values, data):
    w = torch.tensor(values)
    k = data.draw(st.integers(1, len(values)))
    mask = magnitude(w, k, None)
    assert torch.equal(mask, ref.top_k(w, k))
    assert torch.equal(magnitude(w * mask, k, None), mask)
    assert torch.equal(neuron_norm(w.abs(), k, 0, None), mask.nonzero().flatten())
    assert torch.equal(neuron_norm(w.abs() * mask, k, 0, None), mask.nonzero().flatten())


@every_selector
def test_only_selectors_that_draw_differ_between_clients_and_all_are_repeatable(
    selector,
):
    here = world("cnn")
    one, again, other = (
        masks_of(here, everything_pruned(here.layers, 0.5, i), selector) for i in (0, 0, 1)
    )
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one) == SELECTORS[selector].draws


@every_selector
def test_a_derivable_mask_needs_the_shapes_alone(selector):
    here = world("cnn")
    blank = here.but(W={n: torch.zeros_like(w) for n, w in here.W.items()})
    plan = everything_pruned(here.layers, 0.5)
    one, other = masks_of(here, plan, selector), masks_of(blank, plan, selector)
    assert all(torch.equal(one[n], other[n]) for n in one) == SELECTORS[selector].derivable


@pytest.mark.parametrize("selector", UNITS)
@given(keep=keeps, t=st.integers(0, 7))
def test_groupnorm_is_pruned_by_entire_groups(selector, keep, t):
    here = world("groupnorm")
    units = masks_for(
        everything_pruned(here.layers, keep),
        here.W,
        here.layers,
        PruneSettings(selector=selector),
        t,
        0,
    ).units
    for at in [units["conv"].tolist()] if "conv" in units else []:
        assert len(at) == 2 * math.ceil(keep * 3 - 1e-9)
        assert (
            {u // 2 for u in at}
            == {u // 2 for u in at if u % 2 == 0}
            == {u // 2 for u in at if u % 2 == 1}
        )


def test_ordered_retains_the_first_units():
    here = world("cnn")
    units = masks_for(
        everything_pruned(here.layers, 0.3),
        here.W,
        here.layers,
        PruneSettings(selector="ordered"),
        5,
        0,
    ).units
    assert {g: at.tolist() for g, at in units.items()} == {
        "conv1": [0], "conv2": [0], "fc1": list(range(10)), "fc2": list(range(10))
    }  # fmt: skip


def test_rolling_moves_on_by_one_unit_a_round_and_reaches_all():
    here = world()
    seen = set()
    for t in range(6):
        units = masks_for(
            everything_pruned(here.layers, 0.5),
            here.W,
            here.layers,
            PruneSettings(selector="rolling"),
            t,
            0,
        ).units
        assert units["fc1"].tolist() == sorted((t + j) % 6 for j in range(3))
        seen |= set(units["fc1"].tolist())
    assert seen == set(range(6))


def test_behind_a_flatten_a_channel_has_25_inputs():
    here = world("cnn")
    plan = everything_pruned(here.layers, 0.5)
    masks = masks_for(plan, here.W, here.layers, PruneSettings(selector="ordered"), 0, 0)
    assert masks.units["conv2"].tolist() == [0]
    mask = M.as_bool(M.active("fc1.weight", masks, here.layers), here.layers.shapes["fc1.weight"])
    assert (
        mask.shape == (32, 50)
        and mask[:16, :25].all()
        and not mask[:, 25:].any()
        and not mask[16:].any()
    )
    conv2 = M.as_bool(
        M.active("conv2.weight", masks, here.layers), here.layers.shapes["conv2.weight"]
    )
    assert conv2.shape == (2, 2, 5, 5) and conv2[0, 0].all() and int(conv2.sum()) == 25


@pytest.mark.parametrize(
    ("settings", "hint"),
    [({"selector": "magnitud"}, "magnitude"), ({"local_pruner": "uniforme"}, "uniform")],
)
def test_unknown_names_are_refused_with_a_suggestion(settings, hint):
    with pytest.raises(ValidationError, match=f"did you mean '{hint}'"):
        PruneSettings(**settings)
