"""What a client is sent, trains and uploads of each layer."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from fedp3.core.memo import once_per_plan
from fedp3.core.types import LayerPlan
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.client_plans import HEADS, OTHERS, PlanSettings, client_plans, layer_sets
from fedp3.planning.layer_sets import LAYER_SETS

from .layer_maps import fitting


@pytest.mark.parametrize("name", LAYER_SETS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("upload", ["none", "retained", "zeros"])
def test_a_plan_sends_the_layers_of_L_i_dense_and_prunes_the_others(
    name: str, head: str, others: str, upload: str
) -> None:
    layers = fitting(name, 5)
    keep = (0.9, 0.7, 0.5, 1.0)
    settings = PlanSettings(layers=name, others=others, head=head, upload=upload)
    plans = client_plans(settings, layers, keep, 0, 0)
    sets = layer_sets(settings, layers, len(keep), 0, 0)
    assert [p.client for p in plans] == [0, 1, 2, 3]
    for plan, L_i, r in zip(plans, sets, keep, strict=True):
        assert list(plan.layers) == list(layers.layers)
        assert plan.layers[layers.head] == HEADS[head]
        for l in layers.hidden:
            trains = others != "freeze" or upload != "none"
            unpruned = {
                "personal": LayerPlan(send="none", upload="none"),
                "skip": LayerPlan(send="skip", train=False, upload="none"),
                "hold": LayerPlan(train=False, upload="none"),
            }
            pruned = LayerPlan(send="pruned", keep=r, train=trains, upload=upload)
            assert plan.layers[l] == (LayerPlan() if l in L_i else unpruned.get(others, pruned))
        if head != "personal":
            assert plan.full_layers == L_i
        assert set(plan.uploaded) >= set(plan.full_layers)


def test_heads_are_sent_and_uploaded_as_their_name_says() -> None:
    assert {h: (p.send, p.upload, p.train) for h, p in HEADS.items()} == {
        "shared": ("dense", "all", True),
        "personal": ("none", "none", True),
        "personal_uploaded": ("none", "all", True),
    }


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"head": "persnal"}, "head\n.*'shared', 'personal' or 'personal_uploaded'"),
        ({"others": "freze"}, "others\n.*'train', 'freeze', 'hold', 'noise', 'personal' or 'skip'"),
        ({"upload": "all"}, "upload\n.*'none', 'retained' or 'zeros'"),
        ({"layers": "oqu2"}, "unknown layer set 'oqu2' .*did you mean 'opu2'"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        PlanSettings(**settings)


def test_what_plans_share_is_made_once_and_shares_of_one_deal_apart():
    layers = layer_map(build(ModelSpec((1, 8, 8), 10, ModelSettings(name="mlp", width=0.05)), 0))
    plans = client_plans(PlanSettings(layers="lowerb"), layers, [0.5] * 12, 0, 0)
    made = []
    of = once_per_plan(lambda plan: made.append(plan.client) or plan.full_layers)
    assert [of(plan) for plan in plans] == [plan.full_layers for plan in plans]
    assert len(made) == len({plan.full_layers for plan in plans}) == 3
    assert of(replace(plans[0], deal=(1, 2))) == plans[0].full_layers and len(made) == 4
