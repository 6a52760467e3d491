"""P_i, Q_i and the dispatch: every row of `SELECTORS` and `LOCAL_PRUNERS` is held to the same claims."""

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference as ref
from fedp3 import config
from fedp3 import masks as M
from fedp3.checks import check_pruning
from fedp3.errors import InputError, PlanError
from fedp3.experiment import assemble
from fedp3.local_prune import LOCAL_PRUNERS, draw_q
from fedp3.prune import SELECTORS, dispatch, kept_units, kept_weights, magnitude, masks_for, neuron_norm, pruned_layers
from fedp3.types import ClientPlan, LayerMap, LayerPlan, Masks, Pruning
from worlds import KINDS, World, same, world

CHAINS = [kind for kind, k in KINDS.items() if k.chain]
WEIGHTS = [name for name, s in SELECTORS.items() if s.weights and not s.together]
UNITS = [name for name, s in SELECTORS.items() if s.units and not s.deals]
every_selector = pytest.mark.parametrize("selector", SELECTORS)
every_pruner = pytest.mark.parametrize("local", LOCAL_PRUNERS)
Masked = dict[str, Tensor]
keeps = st.integers(1, 100).map(lambda k: k / 100)


def masks_of(here: World, plan: ClientPlan, selector: str, t: int = 0) -> Masked:
    """P_i of the package, as one bool mask per tensor."""
    masks = masks_for(plan, here.W, here.layers, Pruning(selector), t, here.seed)
    return {n: M.as_bool(M.active(n, masks, here.layers), s) for n, s in here.layers.shapes.items()}


def everything_pruned(layers: LayerMap, keep: float, client: int = 0) -> ClientPlan:
    """All layers but the head pruned."""
    return ClientPlan(client, dict.fromkeys(layers.hidden, LayerPlan("pruned", keep)) | {layers.head: LayerPlan()})


# --------------------------------------------------------------------------- selectors


@every_selector
@pytest.mark.parametrize("kind", CHAINS)
@given(keep=keeps, sets=st.sampled_from(("prune-all", "lowerb", "opu2")), t=st.integers(0, 9), client=st.integers(0, 3))
def test_masks_are_those_of_the_twin(kind, selector, keep, sets, t, client):
    here = world(kind)
    plan = here.plans(sets, keep)[client]
    got = masks_of(here, plan, selector, t)
    want = ref.pruned_masks(here.W, KINDS[kind].chain, plan, selector, t, here.seed)
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def test_counts_are_exact_floors_and_ceilings_of_decimal_shares():
    """All hundredths of all sizes to 120: 0.29 * 100 is 28.999999999999996, 0.07 * 100 is 7.000000000000001."""
    for k, n in itertools.product(range(1, 101), range(1, 121)):
        keep = k / 100
        assert kept_weights(keep, n) == ref.floor_share(keep, n)
        assert kept_units(keep, n, 1) == ref.ceil_share(keep, n)
        assert kept_units(keep, 3 * n, 3) == 3 * ref.ceil_share(keep, n)


@pytest.mark.parametrize("selector", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_unstructured_selectors_keep_the_floor_of_each_weight_and_all_of_the_rest(kind, selector):
    here = world(kind)
    got = masks_of(here, everything_pruned(here.layers, 0.37), selector)
    for n, mask in got.items():
        head = n in here.layers.layers[here.layers.head]
        whole = head or mask.dim() < 2
        assert int(mask.sum()) == (mask.numel() if whole else max(1, math.floor(0.37 * mask.numel())))


@pytest.mark.parametrize("selector", UNITS)
@pytest.mark.parametrize("kind", KINDS)
def test_structured_selectors_keep_the_ceiling_of_units_with_all_they_own(kind, selector):
    here = world(kind)
    masks = masks_for(everything_pruned(here.layers, 0.37), here.W, here.layers, Pruning(selector), 1, 0)
    free = {g: u for g, u in here.layers.groups.items() if not u.fixed}
    assert masks.units.keys() == free.keys() and masks.units
    for g, u in free.items():
        at = masks.units[g]
        assert len(at) == u.granule * math.ceil(0.37 * u.units / u.granule)
        assert at.tolist() == sorted(set(at.tolist())) and int(at[0]) >= 0 and int(at[-1]) < u.units
    vectors = [n for n, axes in here.layers.axes.items() if len(here.layers.shapes[n]) == 1 and axes[0].group in free]
    for n in vectors:
        kept = M.active(n, masks, here.layers)
        assert torch.equal(kept.rows, masks.units[here.layers.axes[n][0].group])


@every_selector
@pytest.mark.parametrize("kind", CHAINS)
@given(pair=st.tuples(keeps, keeps).map(sorted), t=st.integers(0, 5))
def test_masks_are_nested_in_keep(kind, selector, pair, t):
    here = world(kind)
    less, more = (masks_of(here, everything_pruned(here.layers, keep), selector, t) for keep in pair)
    assert all(not bool((less[n] & ~more[n]).any()) for n in less)


@every_selector
def test_keeping_everything_masks_nothing(selector):
    here = world()
    assert masks_for(everything_pruned(here.layers, 1.0), here.W, here.layers, Pruning(selector), 3, 0) == Masks()


@pytest.mark.parametrize("selector", [s for s in SELECTORS if s != "neuron_norm"])
@pytest.mark.parametrize("kind", CHAINS)
def test_pruning_what_is_pruned_changes_nothing(kind, selector):
    here = world(kind, selector=selector)
    plan = [everything_pruned(here.layers, 0.4)]
    ((once, _),) = dispatch(here.W, plan, here.layers, here.pruning, 2, 0)
    ((twice, _),) = dispatch(once, plan, here.layers, here.pruning, 2, 0)
    assert same(once, twice)


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=12), st.data())
def test_magnitude_and_norms_take_the_first_among_equals_and_are_idempotent(values, data):
    w = torch.tensor(values)
    k = data.draw(st.integers(1, len(values)))
    mask = magnitude(w, k, None)
    assert torch.equal(mask, ref.top_k(w, k))
    assert torch.equal(magnitude(w * mask, k, None), mask)
    assert torch.equal(neuron_norm(w.abs(), k, 0, None), mask.nonzero().flatten())
    assert torch.equal(neuron_norm(w.abs() * mask, k, 0, None), mask.nonzero().flatten())


@every_selector
def test_only_selectors_that_draw_differ_between_clients_and_all_are_the_same_when_asked_again(selector):
    here = world("cnn")
    one, again, other = (masks_of(here, everything_pruned(here.layers, 0.5, i), selector) for i in (0, 0, 1))
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
def test_groupnorm_is_cut_by_whole_groups(selector, keep, t):
    here = world("groupnorm")
    units = masks_for(everything_pruned(here.layers, keep), here.W, here.layers, Pruning(selector), t, 0).units
    for at in [units["conv"].tolist()] if "conv" in units else []:
        assert len(at) == 2 * math.ceil(keep * 3 - 1e-9)
        assert {u // 2 for u in at} == {u // 2 for u in at if u % 2 == 0} == {u // 2 for u in at if u % 2 == 1}


def test_ordered_keeps_the_leading_units():
    here = world("cnn")
    units = masks_for(everything_pruned(here.layers, 0.3), here.W, here.layers, Pruning("ordered"), 5, 0).units
    assert {g: at.tolist() for g, at in units.items()} == {
        "conv1": [0], "conv2": [0], "fc1": list(range(10)), "fc2": list(range(10))
    }  # fmt: skip


def test_rolling_moves_on_by_one_unit_a_round_and_reaches_all():
    here = world()
    seen = set()
    for t in range(6):
        units = masks_for(everything_pruned(here.layers, 0.5), here.W, here.layers, Pruning("rolling"), t, 0).units
        assert units["fc1"].tolist() == sorted((t + j) % 6 for j in range(3))
        seen |= set(units["fc1"].tolist())
    assert seen == set(range(6))


def test_behind_a_flatten_a_channel_owns_its_25_inputs():
    here = world("cnn")
    plan = everything_pruned(here.layers, 0.5)
    masks = masks_for(plan, here.W, here.layers, Pruning("ordered"), 0, 0)
    assert masks.units["conv2"].tolist() == [0]
    mask = M.as_bool(M.active("fc1.weight", masks, here.layers), here.layers.shapes["fc1.weight"])
    assert mask.shape == (32, 50) and mask[:16, :25].all() and not mask[:, 25:].any() and not mask[16:].any()
    conv2 = M.as_bool(M.active("conv2.weight", masks, here.layers), here.layers.shapes["conv2.weight"])
    assert conv2.shape == (2, 2, 5, 5) and conv2[0, 0].all() and int(conv2.sum()) == 25


# --------------------------------------------------------------------------- dispatch


@every_selector
@pytest.mark.parametrize("stale", ["abstain", "vote"])
@pytest.mark.parametrize("kind", CHAINS)
def test_pruned_layers_are_sent_masked_and_the_layers_of_L_i_whole(kind, selector, stale):
    """Columns of L_i that no kept unit feeds are not sent either, unless they are to vote."""
    here = world(kind, selector=selector, stale=stale)
    for task in here.tasks(here.plans("lowerb", 0.4), t=1):
        P = ref.pruned_masks(here.W, KINDS[kind].chain, task.plan, selector, 1, here.seed)
        for l, p in task.plan.layers.items():
            for n in here.layers.layers[l]:
                whole = p.send == "dense" and stale == "vote"
                want = here.W[n] if whole else torch.where(P[n], here.W[n], torch.tensor(0.0))
                assert torch.equal(task.weights[n], want)
                if p.send == "dense" and SELECTORS[selector].weights:
                    assert task.weights[n] is here.W[n]


@every_selector
def test_a_pruned_weight_is_plus_zero_whatever_it_was(selector):
    """What is not sent leaves neither its sign nor a NaN behind: bytes carry the kept values alone."""
    here = world("cnn", selector=selector)
    for fill in (-1.0, math.nan):
        W = {n: torch.full_like(w, fill) for n, w in here.W.items()}
        ((weights, masks),) = dispatch(W, [everything_pruned(here.layers, 0.4)], here.layers, here.pruning, 0, 0)
        for n, w in weights.items():
            off = w[~M.as_bool(M.active(n, masks, here.layers), here.layers.shapes[n])]
            assert not bool((off.view(torch.int32) != 0).any())


def test_clients_of_one_keep_share_the_pruned_tensors_and_a_personal_head_is_not_sent():
    here = world()
    tasks = here.tasks([*here.plans("prune-all", 0.5, head="personal"), *here.plans("prune-all", 0.7)])
    assert tasks[0].weights["fc1.weight"] is tasks[1].weights["fc1.weight"]
    assert tasks[0].weights["fc1.weight"] is not tasks[-1].weights["fc1.weight"]
    assert set(here.layers.shapes) - set(tasks[0].weights) == {"ffc.weight", "ffc.bias"}
    assert set(tasks[-1].weights) == set(here.layers.shapes)


@every_selector
def test_the_model_is_not_written_to_by_a_dispatch(selector):
    here = world("batchnorm", selector=selector)
    before = {n: w.clone() for n, w in here.W.items()}
    here.tasks(here.plans("prune-all", 0.3))
    assert same(here.W, before)


# --------------------------------------------------------------------------- local pruning


WHOLE = Masks()


def step(here: World, local: str, q: float, plan: ClientPlan, masks: Masks = WHOLE, seed: int = 0) -> Masked:
    """Q_i of the package, one mask per tensor."""
    drawn = LOCAL_PRUNERS[local](q, plan, masks, here.layers, torch.Generator().manual_seed(seed))
    return {n: M.as_bool(M.active(n, drawn, here.layers), s) for n, s in here.layers.shapes.items()}


def density(masks: Mapping[str, Tensor], names: list[str]) -> float:
    return sum(int(masks[n].sum()) for n in names) / sum(masks[n].numel() for n in names)


@pytest.mark.parametrize("local", [l for l in LOCAL_PRUNERS if l != "ordered_matched"])
@pytest.mark.parametrize("kind", CHAINS)
@given(q=keeps, sets=st.sampled_from(("prune-all", "lowerb", "opu2")), seed=st.integers(0, 99), keep=keeps)
def test_step_masks_are_those_of_the_twin(kind, local, q, sets, seed, keep):
    here = world(kind)
    plan = here.plans(sets, keep)[1]
    masks = masks_for(plan, here.W, here.layers, Pruning("neuron_norm"), 0, 0)
    kept = ref.kept_units(here.W, KINDS[kind].chain, plan, "neuron_norm", 0, 0)
    rng = torch.Generator().manual_seed(seed)
    want = ref.step_masks(local, q, here.W, KINDS[kind].chain, plan, kept, rng)
    got = step(here, local, q, plan, masks, seed)
    assert all(torch.equal(got[n], want[n]) for n in want)


@every_pruner
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sets", ["prune-all", "lowerb", "full"])
def test_local_pruning_touches_the_layers_outside_L_i_alone(kind, local, sets):
    """Of a layer of L_i only what meets a unit that a layer outside writes or reads may rest at a step."""
    here = world(kind)
    plan = here.plans(sets, 0.5)[0]
    masks = step(here, local, 0.5, plan)
    axes, pruned = here.layers.axes, pruned_layers(plan)
    touched = {a.group for l in pruned for n in here.layers.layers[l] for a in axes.get(n, ()) if a is not None}
    for l, names in here.layers.layers.items():
        for n in names:
            assert masks[n].dtype == torch.bool and masks[n].shape == here.layers.shapes[n]
            if l not in pruned and not any(a is not None and a.group in touched for a in axes.get(n, ())):
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
            assert bool(((mask.flatten(2).sum(2) % 25) == 0).all())  # a kernel is cut whole or not at all
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
        names = [n for l in pruned_layers(plan) for n in here.layers.layers[l] if n in here.layers.prunable]
        got = {local: density(step(here, local, q, plan), names) for local in LOCAL_PRUNERS}
        assert got["fixed"] == 1
        assert got["uniform"] == pytest.approx(q, abs=0.06)
        one_unit = 0.09  # what one unit more would change, on nets this narrow
        assert got["ordered_matched"] == pytest.approx(q, abs=one_unit)
        assert got["ordered_dropout"] <= got["ordered_matched"] + one_unit


def test_an_ordered_block_of_a_wide_layer_keeps_the_square_of_q():
    here = world("cnn")
    plan = everything_pruned(here.layers, 0.5)
    drawn = step(here, "ordered_dropout", 0.5, plan)
    assert density(drawn, ["fc2.weight"]) == 0.25
    assert density(drawn, ["conv1.weight"]) == 0.5  # the input is never cut
    assert density(drawn, ["ffc.weight"]) == 0.5  # nor are the classes


@given(q_min=keeps, seed=st.integers(0, 999))
def test_q_is_drawn_from_its_range_its_grid_or_not_at_all(q_min, seed):
    def drawn(pruning: Pruning) -> list[float]:
        rng = torch.Generator().manual_seed(seed)
        values = [draw_q(pruning, rng) for _ in range(50)]
        twin = torch.Generator().manual_seed(seed)
        assert values == [ref.draw_q(pruning, twin) for _ in range(50)]
        return values

    assert all(q_min <= q <= 1 for q in drawn(Pruning(q_min=q_min)))
    assert set(drawn(Pruning(q=(0.2, 0.6, 1.0)))) == {0.2, 0.6, 1.0}
    assert set(drawn(Pruning(q=0.5))) == {0.5}


def test_mean_of_q_is_the_middle_of_its_range():
    rng = torch.Generator().manual_seed(0)
    values = [draw_q(Pruning(q_min=0.5), rng) for _ in range(4000)]
    assert sum(values) / len(values) == pytest.approx(0.75, abs=0.01)


# --------------------------------------------------------------------------- refusals


def test_ordered_that_nobody_completes_is_refused_and_one_whole_client_mends_it():
    here = world(selector="ordered")
    plans = here.plans("prune-all", 0.5, upload="kept")
    with pytest.raises(PlanError, match="never moves"):
        check_pruning(here.pruning, here.layers, plans)
    whole = [everything_pruned(here.layers, 1.0)]
    check_pruning(here.pruning, here.layers, [*plans[1:], *whole])
    check_pruning(Pruning("rolling"), here.layers, plans)


def test_ordered_plans_that_are_redrawn_are_judged_over_all_rounds():
    """Whether round 0 alone reaches everything is luck; what counts is whether some round does."""
    settings = ["plan.layers=random-2", "plan.redraw=true", "prune.selector=ordered", "prune.keep=0.5"]
    small = ["partition.clients=2", "run.clients_per_round=2", "model.width=0.125"]

    def refused(rounds: int) -> list[int]:
        found = []
        for seed in range(4):
            try:
                assemble(config.parse({}, [*settings, *small, f"run.rounds={rounds}", f"run.seed={seed}"]))
            except PlanError:
                found.append(seed)
        return found

    assert refused(1) and not refused(40)


def test_units_that_cannot_be_followed_are_refused_where_they_would_be_cut():
    here = world()
    lost = LayerMap(here.layers.layers, here.layers.shapes, {}, {}, here.layers.prunable, frozenset(), "it loops")
    for pruning in (Pruning("neuron"), Pruning(local="ordered_dropout")):
        with pytest.raises(PlanError, match="it loops"):
            check_pruning(pruning, lost, here.plans("opu2"))
        check_pruning(pruning, lost, here.plans("full"))
    check_pruning(Pruning("magnitude"), lost, here.plans("opu2"))


def test_cut_units_cannot_grow_back_so_a_free_mask_is_refused_where_they_are_cut():
    here = world()
    with pytest.raises(PlanError, match=r"prune.hold=true, or prune.physical=false"):
        check_pruning(Pruning("neuron", hold=False), here.layers, here.plans("opu2"))
    check_pruning(Pruning("neuron", hold=False, physical=False), here.layers, here.plans("opu2"))
    check_pruning(Pruning("magnitude", hold=False), here.layers, here.plans("opu2"))
    check_pruning(Pruning("magnitude", hold=False, local="ordered_dropout"), here.layers, here.plans("opu2"))


@pytest.mark.parametrize(
    ("pruning", "hint"), [(Pruning("magnitud"), "magnitude"), (Pruning(local="uniforme"), "uniform")]
)
def test_unknown_names_are_refused_with_a_suggestion(pruning, hint):
    here = world()
    with pytest.raises(InputError, match=f"did you mean '{hint}'"):
        check_pruning(pruning, here.layers, here.plans())
