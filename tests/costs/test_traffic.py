"""Parameters and bytes from the plan alone: the paper's numbers, and what messages take."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedp3.core.errors import InputError
from fedp3.core.types import ClientPlan, LayerMap
from fedp3.costs.traffic import (
    CONVENTIONS,
    communication_by_layer,
    deployed_by_layer,
    reductions,
    retained_parameters,
    sizes,
    spread,
    traffic,
    traffic_by_layer,
    unit_counts,
)
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import MODELS, build
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import SELECTORS, PruneSettings

from .networks import rounded, spec_of

DATA = {
    "cifar10": spec_of("cnn", (3, 32, 32)),
    "cifar100": spec_of("cnn", (3, 32, 32), 100),
    "fmnist": spec_of("cnn", (1, 32, 32)),
    "emnist-l": spec_of("mlp", (1, 28, 28)),
    "resnet18": spec_of("resnet18", (3, 32, 32)),
}


def of(name: str) -> LayerMap:
    """The paper's network for a data set; counting needs no values."""
    with torch.device("meta"):
        return layer_map(MODELS[DATA[name].settings.name].build(DATA[name]))


def fleet(
    name: str, rules: str, keep: float = 0.9, clients: int = 100
) -> tuple[tuple[ClientPlan, ...], LayerMap]:
    layers = of(name)
    return client_plans(PlanSettings(layers=rules), layers, [keep] * clients, 0, 0), layers


# --------------------------------------------------------------------------- the paper's numbers


@pytest.mark.parametrize(
    ("name", "percent"),
    [("cifar10", 10815.25), ("cifar100", 1522.91), ("fmnist", 13749.46), ("emnist-l", 30.23)],
)
def test_the_papers_ratios_are_percent_increases_without_fully_connected_biases(
    name: str, percent: float
) -> None:
    layers = of(name)
    uploads = list(communication_by_layer(layers).values())
    assert round(spread(uploads), 2) == percent
    assert round(spread(list(communication_by_layer(layers, "true").values())), 2) != percent
    assert round(100 * max(uploads) / min(uploads) - 100, 2) == percent, (
        "times would be a hundredth, and one more"
    )


def test_the_largest_layer_is_the_first_fully_connected_one() -> None:
    """The paper's figure has the labels of FC1 and FC2 swapped."""
    uploads = communication_by_layer(of("cifar10"))
    assert (max(uploads, key=uploads.__getitem__), max(uploads.values())) == ("fc1", 1_648_640)
    assert (min(uploads, key=uploads.__getitem__), min(uploads.values())) == ("conv1", 15_104)


@pytest.mark.parametrize(
    ("name", "percents"),
    [
        ("cifar10", [6.47, 24.91, 57.93]),
        ("cifar100", [6.24, 23.79, 54.38]),
        ("fmnist", [6.49, 24.99, 58.18]),
        ("emnist-l", [0.91, 3.23, 6.60]),
    ],
)
def test_deployed_sizes_spread_as_the_paper_prints(name: str, percents: list[float]) -> None:
    layers = of(name)
    assert (
        rounded(spread(list(deployed_by_layer(layers, r).values())) for r in (0.9, 0.7, 0.5))
        == percents
    )


def test_a_client_of_conv1_is_smaller_by_less_than_the_paper_says() -> None:
    """57.93 % is how much larger the largest is; the smallest is 36.68 % smaller."""
    deployed = deployed_by_layer(of("cifar10"), 0.5).values()
    assert round(100 * (1 - min(deployed) / max(deployed)), 2) == 36.68


@pytest.mark.parametrize(
    ("rules", "by_layers", "up", "up_and_down"),
    [
        ("lowerb", 60, 74.73, 41.10),
        ("opu2", 40, 49.82, 27.40),
        ("opu3", 20, 24.91, 13.70),
        ("full", 0, 0, 0),
    ],
)
def test_communication_saved_four_ways(
    rules: str, by_layers: float, up: float, up_and_down: float
) -> None:
    """60/40/20 % are uploaded layers of five; six with four fully connected give 67/50/33 %."""
    saved = reductions(*fleet("cifar10", rules), "paper")
    assert saved["layers_up"] == pytest.approx(by_layers)
    assert rounded([saved["parameters_up"], saved["parameters_up_down"]]) == [up, up_and_down]


def test_what_a_client_uploads_depends_on_its_layer() -> None:
    layers = of("cifar10")
    total = sum(sizes(layers, "paper").values())
    assert rounded(100 * n / total for n in communication_by_layer(layers).values()) == [
        0.54,
        4.02,
        58.78,
        37.75,
    ]


@pytest.mark.parametrize(("rules", "saved"), [("lowerb", 50), ("opu2", 25), ("opu3", 0)])
def test_on_emnist_opu3_saves_nothing(rules: str, saved: float) -> None:
    assert reductions(*fleet("emnist-l", rules), "paper")["layers_up"] == pytest.approx(saved)


@pytest.mark.parametrize(
    ("rules", "halves", "mean", "printed"),
    [
        ("resnet-b2-part", [2.06, 2.64], 2.35, 6.25),
        ("resnet-b3-part", [8.22, 10.57], 9.40, 6.25),
        ("resnet-no-b2-b3", [4.70, 18.79], 11.75, 12.5),
    ],
)
def test_resnet_plans_save_other_shares_than_printed(
    rules: str, halves: list[float], mean: float, printed: float
) -> None:
    """By parameters going up; the paper prints half the share of the 16 layers inside blocks."""
    plans, layers = fleet("resnet18", rules)
    by_client = {round(reductions([p], layers)["parameters_up"], 2) for p in plans}
    assert sorted(by_client) == halves
    assert round(reductions(plans, layers)["parameters_up"], 2) == mean
    assert 100 * (len(layers.layers) - len(plans[0].full_layers)) / 16 / 2 == printed


def test_resnet_against_an_unpruned_net_has_one_misprint() -> None:
    """Retained is 0.9 (1 - x): 12.5 % gives 21.25 % as printed, 6.25 % gives 15.625, not 16.63."""
    assert [100 * (1 - 0.9 * (1 - x)) for x in (0.125, 0.0625)] == pytest.approx([21.25, 15.625])


# --------------------------------------------------------------------------- parameters and bytes


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_no_convention_counts_running_statistics(convention: str) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    true = {"0": 36 + 4 + 8, "3": 12 + 3}
    assert sizes(layer_map(net), convention) == (
        true if convention == "true" else {"0": 48, "3": 12}
    )


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(InputError, match=r"unknown convention 'papr' \(did you mean 'paper'\?\)"):
        sizes(of("emnist-l"), "papr")


def _normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 7), nn.Linear(7, 3)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build(spec_of("mlp", (1, 3, 3), 3, width=0.01), 0),
    "cnn": lambda: build(spec_of("cnn", (1, 32, 32), 3, width=1 / 32), 0),
    "batch": lambda: _normed(nn.BatchNorm2d),
    "group": lambda: _normed(lambda c: nn.GroupNorm(3, c)),
    "resnet18": lambda: build(spec_of("resnet18", (1, 8, 8), 3, width=1 / 32), 0),
}


def filled(net: nn.Module) -> dict[str, Tensor]:
    """Weights without a single zero."""
    rng = torch.Generator().manual_seed(0)
    return {
        n: torch.rand(w.shape, generator=rng) + 1
        for n, w in net.state_dict().items()
        if "tracked" not in n
    }


@pytest.mark.parametrize("net", NETS)
@given(
    selector=st.sampled_from(sorted(SELECTORS)),
    unfed_columns=st.sampled_from(("abstain", "vote")),
    rules=st.sampled_from(("full", "prune-all", "lowerb", "opu2", "random-1")),
    keep=st.floats(0.001, 1),
    t=st.integers(0, 3),
)
def test_retained_parameters_are_those_of_a_dispatch_that_are_not_zero(
    net: str, selector: str, unfed_columns: str, rules: str, keep: float, t: int
) -> None:
    module = NETS[net]()
    layers, pruning = (
        layer_map(module),
        PruneSettings(selector=selector, unfed_columns=unfed_columns),
    )
    plan = client_plans(PlanSettings(layers=rules), layers, [keep] * 3, 0, t)[1]
    [(weights, masks)] = dispatch(filled(module), [plan], layers, pruning, t, 0)
    nonzero = sum(int(w.count_nonzero()) for n, w in weights.items() if n not in layers.buffers)
    assert retained_parameters(plan, layers, pruning) == nonzero
    assert unit_counts(plan, layers, pruning) == {g: len(at) for g, at in masks.units.items()}


@pytest.mark.parametrize("head", ["personal", "personal_uploaded"])
def test_a_personal_head_counts_though_it_is_never_sent(head: str) -> None:
    layers = layer_map(NETS["mlp"]())
    shared, personal = (
        client_plans(PlanSettings(layers="opu2", head=h), layers, [0.5], 0, 0)[0]
        for h in ("shared", head)
    )
    assert retained_parameters(personal, layers, PruneSettings()) == retained_parameters(
        shared, layers, PruneSettings()
    )
    saved = 4 * sizes(layers)["ffc"]
    a, b = traffic(shared, layers, PruneSettings()), traffic(personal, layers, PruneSettings())
    assert (a.down - b.down, a.up - b.up) == (saved, saved if head == "personal" else 0)


def test_a_dense_round_weighs_four_bytes_a_number_each_way() -> None:
    layers = layer_map(NETS["batch"]())
    (plan,) = client_plans(PlanSettings(layers="full"), layers, [1.0], 0, 0)
    everything = 4 * sum(math.prod(s) for s in layers.shapes.values())
    cost = traffic(plan, layers, PruneSettings())
    assert (cost.down, cost.up, cost.masks) == (everything, everything, 0)


def test_bytes_by_layer_add_up_and_name_the_uploaded_layers():
    net = build(spec_of("mlp", (1, 8, 8), width=0.1), 0)
    layers = layer_map(net)
    plan = client_plans(PlanSettings(layers="lowerb"), layers, [0.5] * 3, 0, 0)[0]
    by_layer, total = (
        traffic_by_layer(plan, layers, PruneSettings()),
        traffic(plan, layers, PruneSettings()),
    )
    assert (
        sum(t.down for t in by_layer.values()) == total.down
        and sum(t.up for t in by_layer.values()) == total.up
    )
    assert {l for l, t in by_layer.items() if t.up} == set(plan.uploaded)
