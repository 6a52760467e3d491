"""Plans and pruning that leave something untrained are refused before training."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3 import config
from fedp3.core.errors import PlanError
from fedp3.experiment.assemble import assemble
from fedp3.planning.client_plans import HEADS, PlanSettings, client_plans
from fedp3.planning.coverage import check_coverage, check_pruning, coverage
from fedp3.planning.prune_settings import PruneSettings
from worlds import world

from .layer_maps import WINDOWS, chosen, deep, fleets, seeds, senders
from .pruned_plans import everything_pruned


@given(n=fleets, H=st.integers(1, 20), seed=seeds, name=st.sampled_from(sorted(WINDOWS)))
def test_coverage_lists_who_trains_and_uploads_each_layer(
    n: int, H: int, seed: int, name: str
) -> None:
    layers = deep(H)
    plans = client_plans(PlanSettings(layers=name), layers, [0.5] * n, seed, 0)
    want = {l: [p.client for p in plans if l in p.full_layers] for l in layers.layers}
    assert coverage(plans) == want


@given(
    n=st.integers(1, 30),
    H=st.integers(1, 12),
    seed=seeds,
    name=st.sampled_from(["lowerb", "opu2", "random-1"]),
)
def test_a_layer_left_to_nobody_is_refused_by_name(n: int, H: int, seed: int, name: str) -> None:
    layers = deep(H)
    orphans = sorted(
        f"h{j}" for j, m in enumerate(senders(chosen(name, layers, n, seed), H)) if m == 0
    )
    if not orphans:
        check_coverage(PlanSettings(layers=name), layers, [0.5] * n, seed, 10)
        return
    with pytest.raises(
        PlanError, match=rf"no client trains and uploads {', '.join(orphans)} under layers='{name}'"
    ):
        check_coverage(PlanSettings(layers=name), layers, [0.5] * n, seed, 10)
    check_coverage(PlanSettings(layers=name, upload="retained"), layers, [0.5] * n, seed, 10)


def test_prune_all_is_refused_unless_pruned_layers_come_back() -> None:
    with pytest.raises(PlanError, match="h0, h1, h2"):
        check_coverage(PlanSettings(layers="prune-all"), deep(3), [0.9] * 5, 0, 10)
    check_coverage(PlanSettings(layers="prune-all", upload="retained"), deep(3), [0.9] * 5, 0, 10)


def test_a_personal_head_is_declared_not_forgotten() -> None:
    for head in HEADS:
        check_coverage(PlanSettings(layers="opu2", head=head), deep(3), [0.9] * 5, 0, 1)


def test_redrawn_layers_are_covered_over_the_rounds_of_the_run() -> None:
    """Two clients cannot train six hidden layers in one round; redrawn, they do in time."""
    layers, keep = deep(6), [0.9] * 2
    with pytest.raises(PlanError):
        check_coverage(PlanSettings(layers="lowerb"), layers, keep, 0, 100)
    with pytest.raises(PlanError):
        check_coverage(PlanSettings(layers="random-1", redraw=True), layers, keep, 0, 2)
    check_coverage(PlanSettings(layers="random-1", redraw=True), layers, keep, 0, 100)


# --------------------------------------------------------------------------- pruning


def test_ordered_needs_one_client_that_retains_everything():
    here = world(selector="ordered")
    plans = here.plans("prune-all", 0.5, upload="retained")
    with pytest.raises(PlanError, match="retains the same units"):
        check_pruning(here.pruning, here.layers, plans)
    unpruned = [everything_pruned(here.layers, 1.0)]
    check_pruning(here.pruning, here.layers, [*plans[1:], *unpruned])
    check_pruning(PruneSettings(selector="rolling"), here.layers, plans)


def test_ordered_plans_that_are_redrawn_are_judged_over_all_rounds():
    """Whether round 0 alone reaches everything is luck; what counts is whether some round does."""
    settings = [
        "plan.layers=random-2",
        "plan.redraw=true",
        "prune.selector=ordered",
        "prune.keep=0.5",
    ]
    small = ["partition.clients=2", "run.clients_per_round=2", "model.width=0.125"]

    def refused(rounds: int) -> list[int]:
        seeds = []
        for seed in range(4):
            try:
                assemble(
                    config.parse(
                        {}, [*settings, *small, f"run.rounds={rounds}", f"run.seed={seed}"]
                    )
                )
            except PlanError:
                seeds.append(seed)
        return seeds

    assert refused(1) and not refused(40)


def test_units_that_cannot_be_traced_are_refused_where_they_would_be_pruned():
    here = world()
    untraced = replace(here.layers, axes={}, groups={}, buffers=frozenset(), note="it loops")
    for pruning in (
        PruneSettings(selector="neuron"),
        PruneSettings(local_pruner="ordered_dropout"),
    ):
        with pytest.raises(PlanError, match="it loops"):
            check_pruning(pruning, untraced, here.plans("opu2"))
        check_pruning(pruning, untraced, here.plans("full"))
    check_pruning(PruneSettings(selector="magnitude"), untraced, here.plans("opu2"))


def test_physically_pruned_units_cannot_grow_back_so_freeze_pruned_is_required():
    here = world()
    with pytest.raises(PlanError, match=r"prune.freeze_pruned=true, or prune.physical=false"):
        check_pruning(
            PruneSettings(selector="neuron", freeze_pruned=False), here.layers, here.plans("opu2")
        )
    check_pruning(
        PruneSettings(selector="neuron", freeze_pruned=False, physical=False),
        here.layers,
        here.plans("opu2"),
    )
    check_pruning(
        PruneSettings(selector="magnitude", freeze_pruned=False), here.layers, here.plans("opu2")
    )
    check_pruning(
        PruneSettings(selector="magnitude", freeze_pruned=False, local_pruner="ordered_dropout"),
        here.layers,
        here.plans("opu2"),
    )
