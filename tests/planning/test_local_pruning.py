"""Q_i: every entry of `LOCAL_PRUNERS` is tested for the same claims."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference as ref
from fedp3.core import masks as M
from fedp3.core.types import ClientPlan, Masks
from fedp3.planning.local_pruning import draw_q
from fedp3.planning.prune_settings import LOCAL_PRUNERS, PruneSettings
from fedp3.planning.pruning import masks_for, pruned_layers
from worlds import KINDS, World, world

from .pruned_plans import CHAINS, Masked, every_pruner, everything_pruned, keeps

NO_MASKS = Masks()


def step(
    here: World, local: str, q: float, plan: ClientPlan, masks: Masks = NO_MASKS, seed: int = 0
) -> Masked:
    """Q_i of the package, one mask per tensor."""
    drawn = LOCAL_PRUNERS[local].draw(
        q, plan, masks, here.layers, torch.Generator().manual_seed(seed)
    )
    return {n: M.as_bool(M.active(n, drawn, here.layers), s) for n, s in here.layers.shapes.items()}


def density(masks: Mapping[str, Tensor], names: list[str]) -> float:
    return sum(int(masks[n].sum()) for n in names) / sum(masks[n].numel() for n in names)


@pytest.mark.parametrize("local", [l for l in LOCAL_PRUNERS if l != "ordered_matched"])
@pytest.mark.parametrize("kind", CHAINS)
@given(
    q=keeps,
    sets=st.sampled_from(("prune-all", "lowerb", "opu2")),
    seed=st.integers(0, 99),
    keep=keeps,
)
def test_step_masks_are_those_of_the_reference_implementation(kind, local, q, sets, seed, keep):
    here = world(kind)
    plan = here.plans(sets, keep)[1]
    masks = masks_for(plan, here.W, here.layers, PruneSettings(selector="neuron_norm"), 0, 0)
    retained = ref.kept_units(here.W, KINDS[kind].chain, plan, "neuron_norm", 0, 0)
    rng = torch.Generator().manual_seed(seed)
    want = ref.step_masks(local, q, here.W, KINDS[kind].chain, plan, retained, rng)
    got = step(here, local, q, plan, masks, seed)
    assert all(torch.equal(got[n], want[n]) for n in want)


@every_pruner
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sets", ["prune-all", "lowerb", "full"])
def test_local_pruning_touches_the_layers_outside_L_i_alone(kind, local, sets):
    """Of a layer in L_i, only weights of units that another layer writes or reads may be pruned."""
    here = world(kind)
    plan = here.plans(sets, 0.5)[0]
    masks = step(here, local, 0.5, plan)
    axes, pruned = here.layers.axes, pruned_layers(plan)
    touched = {
        a.group
        for l in pruned
        for n in here.layers.layers[l]
        for a in axes.get(n, ())
        if a is not None
    }
    for l, names in here.layers.layers.items():
        for n in names:
            assert masks[n].dtype == torch.bool and masks[n].shape == here.layers.shapes[n]
            if l not in pruned and not any(
                a is not None and a.group in touched for a in axes.get(n, ())
            ):
                assert bool(masks[n].all())
    assert all(bool(m.all()) for m in step(here, local, 1.0, plan).values())  # q = 1 is no pruning


@every_pruner
def test_the_same_stream_draws_the_same_step(local):
    here = world("cnn")
    plan = here.plans("prune-all", 0.5)[0]
    one, again = (step(here, local, 0.5, plan, seed=3) for _ in range(2))
    assert all(torch.equal(one[n], again[n]) for n in one)


@pytest.mark.parametrize("local", ["ordered_dropout", "ordered_matched"])
@given(pair=st.tuples(keeps, keeps).map(sorted))
def test_ordered_dropout_is_a_leading_block_nested_in_q(local, pair):
    here = world("cnn")
    plan = here.plans("prune-all", 0.5)[0]
    less, more = (step(here, local, q, plan) for q in pair)
    for n, mask in less.items():
        assert not bool((mask & ~more[n]).any())
        assert torch.equal(mask.flatten(1) if mask.dim() > 1 else mask, _leading(mask))
        if mask.dim() == 4:
            assert bool(
                ((mask.flatten(2).sum(2) % 25) == 0).all()
            )  # a kernel is pruned entirely or not at all
    columns = less["fc1.weight"].any(0).sum()
    assert int(columns) == 25 * int(less["conv2.bias"].sum())


def _leading(mask: Tensor) -> Tensor:
    """The leading block with as many rows and columns as the mask has."""
    if mask.dim() == 1:
        return torch.arange(len(mask)) < int(mask.sum())
    flat = mask.flatten(1)
    rows, cols = (torch.arange(flat.shape[d]) < int(flat.any(1 - d).sum()) for d in (0, 1))
    return rows[:, None] & cols[None, :]


def test_ordered_dropout_takes_the_lead_among_the_units_that_were_sent():
    here = world()
    plan = everything_pruned(here.layers, 0.5)
    masks = Masks(units={"fc1": torch.tensor([1, 3, 4, 5])})
    drawn = step(here, "ordered_dropout", 0.5, plan, masks)
    assert drawn["fc1.bias"].nonzero().flatten().tolist() == [1, 3]
    assert drawn["fc2.weight"].any(0).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("q", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("sets", ["prune-all", "lowerb"])
@pytest.mark.parametrize("kind", ["cnn", "resnet"])
def test_realised_densities_are_q_for_uniform_and_matched_and_less_for_ordered(kind, sets, q):
    here = world(kind)
    for plan in here.plans(sets, 0.5):
        names = [
            n
            for l in pruned_layers(plan)
            for n in here.layers.layers[l]
            if n in here.layers.prunable
        ]
        got = {local: density(step(here, local, q, plan), names) for local in LOCAL_PRUNERS}
        assert got["fixed"] == 1
        assert got["uniform"] == pytest.approx(q, abs=0.06)
        one_unit = 0.09  # what one unit more would change, on nets this narrow
        assert got["ordered_matched"] == pytest.approx(q, abs=one_unit)
        assert got["ordered_dropout"] <= got["ordered_matched"] + one_unit


def test_an_ordered_block_of_a_wide_layer_retains_the_square_of_q():
    here = world("cnn")
    plan = everything_pruned(here.layers, 0.5)
    drawn = step(here, "ordered_dropout", 0.5, plan)
    assert density(drawn, ["fc2.weight"]) == 0.25
    assert density(drawn, ["conv1.weight"]) == 0.5  # the input is never pruned
    assert density(drawn, ["ffc.weight"]) == 0.5  # nor are the classes


@given(q_min=keeps, seed=st.integers(0, 999))
def test_q_is_drawn_from_its_range_its_grid_or_not_at_all(q_min, seed):
    def drawn(pruning: PruneSettings) -> list[float]:
        rng = torch.Generator().manual_seed(seed)
        values = [draw_q(pruning, rng) for _ in range(50)]
        again = torch.Generator().manual_seed(seed)
        assert values == [ref.draw_q(pruning, again) for _ in range(50)]
        return values

    assert all(q_min <= q <= 1 for q in drawn(PruneSettings(q_min=q_min)))
    assert set(drawn(PruneSettings(q=(0.2, 0.6, 1.0)))) == {0.2, 0.6, 1.0}
    assert set(drawn(PruneSettings(q=0.5))) == {0.5}


def test_mean_of_q_is_the_middle_of_its_range():
    rng = torch.Generator().manual_seed(0)
    values = [draw_q(PruneSettings(q_min=0.5), rng) for _ in range(4000)]
    assert sum(values) / len(values) == pytest.approx(0.75, abs=0.01)
