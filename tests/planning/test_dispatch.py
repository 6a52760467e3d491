"""What the server sends: dense layers of L_i, pruned layers elsewhere."""

import math

import pytest
import torch

import reference as ref
from fedp3.core import masks as M
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import SELECTORS
from worlds import KINDS, same, world

from .pruned_plans import CHAINS, every_selector, everything_pruned


@every_selector
@pytest.mark.parametrize("unfed_columns", ["abstain", "vote"])
@pytest.mark.parametrize("kind", CHAINS)
def test_pruned_layers_are_sent_masked_and_the_layers_of_L_i_dense(kind, selector, unfed_columns):
    """Columns of L_i that no retained unit feeds are not sent either, unless they are to vote."""
    here = world(kind, selector=selector, unfed_columns=unfed_columns)
    for task in here.tasks(here.plans("lowerb", 0.4), t=1):
        P = ref.pruned_masks(here.W, KINDS[kind].chain, task.plan, selector, 1, here.seed)
        for l, p in task.plan.layers.items():
            for n in here.layers.layers[l]:
                dense = p.send == "dense" and unfed_columns == "vote"
                want = here.W[n] if dense else torch.where(P[n], here.W[n], torch.tensor(0.0))
                assert torch.equal(task.weights[n], want)
                if p.send == "dense" and SELECTORS[selector].weights:
                    assert task.weights[n] is here.W[n]


@every_selector
def test_a_pruned_weight_is_plus_zero_whatever_it_was(selector):
    """What is not sent leaves neither sign nor NaN behind: messages hold retained values only."""
    here = world("cnn", selector=selector)
    for fill in (-1.0, math.nan):
        W = {n: torch.full_like(w, fill) for n, w in here.W.items()}
        ((weights, masks),) = dispatch(
            W, [everything_pruned(here.layers, 0.4)], here.layers, here.pruning, 0, 0
        )
        for n, w in weights.items():
            off = w[~M.as_bool(M.active(n, masks, here.layers), here.layers.shapes[n])]
            assert not bool((off.view(torch.int32) != 0).any())


def test_clients_of_one_keep_share_the_pruned_tensors_and_a_personal_head_is_not_sent():
    here = world()
    tasks = here.tasks(
        [*here.plans("prune-all", 0.5, head="personal"), *here.plans("prune-all", 0.7)]
    )
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
