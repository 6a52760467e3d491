"""Costs from the plan alone: the paper's numbers, and what nets and messages really take."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedp3 import submodel
from fedp3.cost import (
    CONVENTIONS,
    communication_by_layer,
    deployed_by_layer,
    held_parameters,
    reductions,
    sizes,
    spread,
    traffic,
    traffic_by_layer,
    unit_counts,
)
from fedp3.errors import InputError
from fedp3.fleet import round_gflop
from fedp3.layermap import layer_map
from fedp3.local_prune import BY_UNITS, LOCAL_PRUNERS
from fedp3.models import MODELS, Spec, build
from fedp3.plan import PlanRules, client_plans
from fedp3.prune import SELECTORS, dispatch
from fedp3.types import ClientPlan, LayerMap, LayerPlan, Pruning
from fedp3.work import Work, flops, measure, peak_bytes
from worlds import world

DATA = {
    "cifar10": ("cnn", Spec((3, 32, 32), 10)),
    "cifar100": ("cnn", Spec((3, 32, 32), 100)),
    "fmnist": ("cnn", Spec((1, 32, 32), 10)),
    "emnist-l": ("mlp", Spec((1, 28, 28), 10)),
    "resnet18": ("resnet18", Spec((3, 32, 32), 10)),
}


def of(name: str) -> LayerMap:
    """The paper's net for a data set; counting needs no values."""
    model, spec = DATA[name]
    with torch.device("meta"):
        return layer_map(MODELS[model](spec))


def fleet(name: str, rules: str, keep: float = 0.9, clients: int = 100) -> tuple[tuple[ClientPlan, ...], LayerMap]:
    layers = of(name)
    return client_plans(PlanRules(rules), layers, [keep] * clients, 0, 0), layers


def rounded(values: Iterable[float], digits: int = 2) -> list[float]:
    return [round(v, digits) for v in values]


# --------------------------------------------------------------------------- the paper's numbers


@pytest.mark.parametrize(
    ("name", "percent"), [("cifar10", 10815.25), ("cifar100", 1522.91), ("fmnist", 13749.46), ("emnist-l", 30.23)]
)
def test_the_papers_ratios_are_percent_increases_without_fully_connected_biases(name: str, percent: float) -> None:
    layers = of(name)
    uploads = list(communication_by_layer(layers).values())
    assert round(spread(uploads), 2) == percent
    assert round(spread(list(communication_by_layer(layers, "true").values())), 2) != percent
    assert round(100 * max(uploads) / min(uploads) - 100, 2) == percent, "times would be a hundredth, and one more"


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
    assert rounded(spread(list(deployed_by_layer(layers, r).values())) for r in (0.9, 0.7, 0.5)) == percents


def test_a_client_of_conv1_is_smaller_by_less_than_the_paper_says() -> None:
    """57.93 % is how much larger the largest is; the smallest is 36.68 % smaller."""
    held = deployed_by_layer(of("cifar10"), 0.5).values()
    assert round(100 * (1 - min(held) / max(held)), 2) == 36.68


@pytest.mark.parametrize(
    ("rules", "by_layers", "up", "up_and_down"),
    [("lowerb", 60, 74.73, 41.10), ("opu2", 40, 49.82, 27.40), ("opu3", 20, 24.91, 13.70), ("full", 0, 0, 0)],
)
def test_communication_saved_four_ways(rules: str, by_layers: float, up: float, up_and_down: float) -> None:
    """60/40/20 % are layers going up; six layers, four of them fully connected, would give 67/50/33 %."""
    saved = reductions(*fleet("cifar10", rules), "paper")
    assert saved["layers_up"] == pytest.approx(by_layers)
    assert rounded([saved["parameters_up"], saved["parameters_up_down"]]) == [up, up_and_down]


def test_what_a_client_uploads_depends_on_its_layer() -> None:
    layers = of("cifar10")
    total = sum(sizes(layers, "paper").values())
    assert rounded(100 * n / total for n in communication_by_layer(layers).values()) == [0.54, 4.02, 58.78, 37.75]


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
    each = {round(reductions([p], layers)["parameters_up"], 2) for p in plans}
    assert sorted(each) == halves
    assert round(reductions(plans, layers)["parameters_up"], 2) == mean
    assert 100 * (len(layers.layers) - len(plans[0].whole)) / 16 / 2 == printed


def test_resnet_against_an_unpruned_net_has_one_misprint() -> None:
    """Kept is 0.9 (1 - x): 12.5 % gives 21.25 % as printed; 6.25 % gives 15.625 %, printed as 16.63 %."""
    assert [100 * (1 - 0.9 * (1 - x)) for x in (0.125, 0.0625)] == pytest.approx([21.25, 15.625])


# --------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_no_convention_counts_running_statistics(convention: str) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    true = {"0": 36 + 4 + 8, "3": 12 + 3}
    assert sizes(layer_map(net), convention) == (true if convention == "true" else {"0": 48, "3": 12})


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(InputError, match=r"unknown convention 'papr' \(did you mean 'paper'\?\)"):
        sizes(of("emnist-l"), "papr")


def _normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 7), nn.Linear(7, 3))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build("mlp", Spec((1, 3, 3), 3, 0.01), 0),
    "cnn": lambda: build("cnn", Spec((1, 32, 32), 3, 1 / 32), 0),
    "batch": lambda: _normed(nn.BatchNorm2d),
    "group": lambda: _normed(lambda c: nn.GroupNorm(3, c)),
    "resnet18": lambda: build("resnet18", Spec((1, 8, 8), 3, 1 / 32), 0),
}


def filled(net: nn.Module) -> dict[str, Tensor]:
    """Weights without a single zero."""
    rng = torch.Generator().manual_seed(0)
    return {n: torch.rand(w.shape, generator=rng) + 1 for n, w in net.state_dict().items() if "tracked" not in n}


@pytest.mark.parametrize("net", NETS)
@given(
    selector=st.sampled_from(sorted(SELECTORS)),
    stale=st.sampled_from(("abstain", "vote")),
    rules=st.sampled_from(("full", "prune-all", "lowerb", "opu2", "random-1")),
    keep=st.floats(0.001, 1),
    t=st.integers(0, 3),
)
def test_held_parameters_are_those_of_a_dispatch_that_are_not_zero(
    net: str, selector: str, stale: str, rules: str, keep: float, t: int
) -> None:
    module = NETS[net]()
    layers, pruning = layer_map(module), Pruning(selector, stale=stale)
    plan = client_plans(PlanRules(rules), layers, [keep] * 3, 0, t)[1]
    [(weights, masks)] = dispatch(filled(module), [plan], layers, pruning, t, 0)
    nonzero = sum(int(w.count_nonzero()) for n, w in weights.items() if n not in layers.buffers)
    assert held_parameters(plan, layers, pruning) == nonzero
    assert unit_counts(plan, layers, pruning) == {g: len(at) for g, at in masks.units.items()}


@pytest.mark.parametrize("head", ["personal", "personal_uploaded"])
def test_a_personal_head_is_held_though_it_is_never_sent(head: str) -> None:
    layers = layer_map(NETS["mlp"]())
    shared, personal = (client_plans(PlanRules("opu2", head=h), layers, [0.5], 0, 0)[0] for h in ("shared", head))
    assert held_parameters(personal, layers, Pruning()) == held_parameters(shared, layers, Pruning())
    saved = 4 * sizes(layers)["ffc"]
    a, b = traffic(shared, layers, Pruning()), traffic(personal, layers, Pruning())
    assert (a.down - b.down, a.up - b.up) == (saved, saved if head == "personal" else 0)


def test_a_dense_round_weighs_four_bytes_a_number_each_way() -> None:
    layers = layer_map(NETS["batch"]())
    (plan,) = client_plans(PlanRules("full"), layers, [1.0], 0, 0)
    everything = 4 * sum(math.prod(s) for s in layers.shapes.values())
    cost = traffic(plan, layers, Pruning())
    assert (cost.down, cost.up, cost.masks) == (everything, everything, 0)


# --------------------------------------------------------------------------- work


def trains(layers: LayerMap, names: Iterable[str]) -> ClientPlan:
    chosen = set(names)
    return ClientPlan(0, {l: LayerPlan(train=l in chosen) for l in layers.layers})


def counted(work: Work, layers: LayerMap, trained: Iterable[str]) -> int:
    """What torch itself counts in one forward and backward pass."""
    own = {n for l in trained for n in layers.layers[l]}
    for n, w in work.net.named_parameters():
        w.requires_grad_(n in own)
    with FlopCounterMode(display=False) as counter:
        logits = work.net(torch.zeros(1, *work.shape, device=work.device))
        if own:
            learn = [w for w in work.net.parameters() if w.requires_grad]
            torch.autograd.grad(F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=work.device)), learn)
    return counter.get_total_flops()


def subsets(names: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, k) for k in range(len(names) + 1))


def ready(name: str, spec: Spec) -> tuple[Work, LayerMap]:
    net = build(name, spec, 0)
    return measure(net, spec.shape), layer_map(net)


@pytest.mark.parametrize(("name", "spec"), [("mlp", Spec((1, 28, 28), 10)), ("cnn", Spec((3, 32, 32), 10, 0.5))])
def test_flops_are_what_torch_counts_for_every_trained_subset(name: str, spec: Spec) -> None:
    work, layers = ready(name, spec)
    for trained in subsets(list(layers.layers)):
        assert flops(work, trains(layers, trained), layers, Pruning()) == counted(work, layers, trained)


@pytest.mark.parametrize("stem", [3, 7])
def test_flops_of_a_resnet_are_what_torch_counts(stem: int) -> None:
    work, layers = ready("resnet18", Spec((3, 32, 32), 10, 1 / 8, stem=stem))
    order = list(layers.layers)
    for trained in ([], order, ["conv0"], ["b2.0.conv1"], ["ffc"], order[7:], order[:9:2]):
        assert flops(work, trains(layers, trained), layers, Pruning()) == counted(work, layers, trained)


def test_resnet18_with_a_7x7_stem_takes_74_megaflop_forward_and_217_with_all_trained() -> None:
    work, layers = ready("resnet18", Spec((3, 32, 32), 10, stem=7))
    order = list(layers.layers)
    plans = [trains(layers, names) for names in ([], order, order[order.index("b3.1.conv2") :])]
    assert rounded((flops(work, p, layers, Pruning()) / 1e6 for p in plans), 1) == [74.0, 217.3, 112.3]


def test_frozen_layers_save_work_and_others_train_by_default() -> None:
    work, layers = ready("cnn", Spec((3, 32, 32), 10, 1 / 8))
    (train,), (freeze,) = (
        client_plans(PlanRules("lowerb", others=others), layers, [0.9], 0, 0) for others in ("train", "freeze")
    )
    whole = client_plans(PlanRules("full"), layers, [0.9], 0, 0)[0]
    everything, some = (flops(work, p, layers, Pruning()) for p in (train, freeze))
    assert everything == flops(work, whole, layers, Pruning()) > some
    assert some == counted(work, layers, freeze.whole)


@pytest.mark.parametrize(
    ("name", "shape", "width"), [("mlp", (1, 28, 28), 1 / 8), ("cnn", (3, 32, 32), 1 / 4), ("cnn", (1, 32, 32), 1 / 8)]
)
@pytest.mark.parametrize("selector", [name for name, s in SELECTORS.items() if s.units and not s.deals])
def test_units_cut_away_cost_as_little_as_a_narrower_net(
    name: str, shape: tuple[int, ...], width: float, selector: str
) -> None:
    work, layers = ready(name, Spec(shape, 10, width))
    narrow, inner = ready(name, Spec(shape, 10, width / 2))
    (plan,) = client_plans(PlanRules("prune-all", upload="kept"), layers, [0.5], 0, 0)
    whole = trains(inner, inner.layers)
    assert flops(work, plan, layers, Pruning(selector)) == flops(narrow, whole, inner, Pruning())
    assert held_parameters(plan, layers, Pruning(selector)) == held_parameters(whole, inner, Pruning())


@pytest.mark.parametrize("layers_", ["prune-all", "opu2"])
@pytest.mark.parametrize("selector", ["magnitude", "neuron"])
@pytest.mark.parametrize("way", sorted(BY_UNITS))
def test_local_pruning_by_units_costs_what_the_net_of_a_step_costs(way: str, selector: str, layers_: str) -> None:
    here = world("cnn", 2, Q=way, selector=selector, q=0.5, physical=True)
    work, layers = measure(here.net, tuple(here.data.x.shape[1:])), here.layers
    upload = "kept" if layers_ == "prune-all" else "none"
    for task in here.tasks(here.plans(layers_, 0.5, upload=upload)):
        step = LOCAL_PRUNERS[way](0.5, task.plan, task.masks, layers, torch.Generator())
        left = {g: len(at) for g, at in {**task.masks.units, **step.units}.items()}
        small, inner = submodel.shrink_net(here.net, layers, left), submodel.shrink_map(layers, left)
        want = flops(measure(small, work.shape), task.plan, inner, Pruning())
        samples = len(here.shards[task.plan.client].train)
        each = samples / math.ceil(samples / here.local.batch)
        assert round_gflop(work, task.plan, here.recipe, samples) * 1e9 == pytest.approx(want * each * here.local.steps)


def test_single_weights_pruned_away_save_no_work() -> None:
    work, layers = ready("mlp", Spec((1, 28, 28), 10, 1 / 8))
    (plan,) = client_plans(PlanRules("prune-all", upload="kept"), layers, [0.5], 0, 0)
    assert flops(work, plan, layers, Pruning("random")) == flops(work, trains(layers, layers.layers), layers, Pruning())


def test_a_layer_of_two_steps_passes_its_gradient_between_them() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    own = {"body": ("0.weight", "0.bias", "2.weight", "2.bias"), "head": ("4.weight", "4.bias")}
    work, layers = measure(net, (4,)), layer_map(net, own)
    for trained in subsets(list(own)):
        assert flops(work, trains(layers, trained), layers, Pruning()) == counted(work, layers, trained)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)])
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x + self.place)
        return self.out(self.blocks[1](h, h, h)[0].mean(1))


class Choosing(nn.Module):
    """Its way through depends on what it sees, which nothing without values can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 5), nn.Linear(5, 3), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        return self.b(h if h.sum() > 0 else -h)


COUNTED: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {  # two FLOPs a product, by hand
    "attention": (Attending(), (4, 8), 2 * (4 * 8 * 8 + 4 * 8 * 32 + 2 * 4 * 4 * 8 + 8 * 3)),
    "lstm": (nn.Sequential(nn.LSTM(8, 6)), (5, 8), 2 * 5 * (8 * 24 + 6 * 24)),
    "transformer": (
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 3)),
        (4, 8),
        2 * (4 * 8 * 32 + 2 * 4 * 4 * 8 + 2 * 4 * 8 * 16 + 32 * 3),
    ),
    "one layer": (nn.Linear(4, 3), (4,), 2 * 4 * 3),
    "data-dependent": (Choosing(), (4,), 2 * (4 * 5 + 5 * 3)),
}


@pytest.mark.parametrize(("net", "shape", "want"), COUNTED.values(), ids=COUNTED.keys())
def test_in_any_net_each_operation_is_counted_once(net: nn.Module, shape: tuple[int, ...], want: int) -> None:
    forward = measure(net, shape).forward
    assert sum(forward.values()) == want
    assert set(forward) == layer_map(net).prunable


def test_a_positional_parameter_does_no_work() -> None:
    assert measure(Attending(), (4, 8)).forward["place"] == 0


def test_measuring_leaves_the_net_and_the_generator_alone() -> None:
    net = Choosing().train()
    before, values = torch.random.get_rng_state(), {n: w.clone() for n, w in net.state_dict().items()}
    work, layers = measure(net, (4,)), layer_map(net)
    peak_bytes(work, trains(layers, ["b"]), layers, Pruning(), 6, momentum=True)
    assert work.device == "cpu" and torch.equal(torch.random.get_rng_state(), before)
    assert net.training and all(w.requires_grad for w in net.parameters())
    assert all(torch.equal(w, values[n]) for n, w in net.state_dict().items())


def test_a_net_that_does_not_take_the_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"does not take one example of shape \(5,\): RuntimeError"):
        measure(nn.Linear(4, 3), (5,))


# --------------------------------------------------------------------------- memory

MEMORY = [
    ("mlp", Spec((1, 28, 28), 10, 1 / 4)),
    ("cnn", Spec((3, 32, 32), 10, 1 / 4)),
    ("resnet18", Spec((3, 32, 32), 10, 1 / 8)),
]


@pytest.mark.parametrize(("name", "spec"), MEMORY)
def test_memory_grows_with_the_batch_and_with_every_layer_trained(name: str, spec: Spec) -> None:
    work, layers = ready(name, spec)
    order = list(layers.layers)
    starts = range(len(order), -1, -max(1, len(order) // 4))
    deeper = [peak_bytes(work, trains(layers, order[k:]), layers, Pruning(), 8, False) for k in starts]
    assert deeper == sorted(deeper) and deeper[0] < deeper[-1]
    larger = [peak_bytes(work, trains(layers, order), layers, Pruning(), batch, False) for batch in (2, 4, 32)]
    assert larger == sorted(set(larger))


@given(st.data())
def test_training_more_never_takes_less_memory(data: st.DataObject) -> None:
    work, layers = SMALL
    more = data.draw(st.sets(st.sampled_from(list(layers.layers))))
    fewer = {l for l in more if data.draw(st.booleans())}
    some, all_of_it = (peak_bytes(work, trains(layers, names), layers, Pruning(), 8, False) for names in (fewer, more))
    assert some <= all_of_it


SMALL = ready("cnn", Spec((1, 32, 32), 10, 1 / 16))


def test_momentum_takes_one_more_number_per_trained_parameter() -> None:
    work, layers = SMALL
    for trained in (["ffc"], ["conv1", "fc2"], list(layers.layers)):
        without, with_it = (peak_bytes(work, trains(layers, trained), layers, Pruning(), 8, m) for m in (False, True))
        assert with_it - without == 4 * sum(sizes(layers)[l] for l in trained)


def test_memory_is_at_least_the_net_its_gradients_and_the_widest_activation() -> None:
    work, layers = SMALL
    held, trained = sum(sizes(layers).values()), sizes(layers)["fc1"]
    assert peak_bytes(work, trains(layers, ["fc1"]), layers, Pruning(), 8, False) >= 4 * (held + trained)
    assert peak_bytes(work, trains(layers, []), layers, Pruning(), 8, False) >= 4 * (held + 2 * 8 * 4 * 28 * 28)


def allocated(net: nn.Module, shape: tuple[int, ...], batch: int, trained: set[str]) -> int:
    """The most bytes a real training step had allocated at once, by torch's own profiler."""
    for n, w in net.train().named_parameters():
        w.requires_grad_(n in trained)

    def step() -> Any:
        loss = F.cross_entropy(net(torch.zeros(batch, *shape)), torch.zeros(batch, dtype=torch.int64))
        return torch.autograd.grad(loss, [w for w in net.parameters() if w.requires_grad])

    step()  # what is made once, like packed weights, is not a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        grads = step()
    del grads
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        now += e.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(("name", "spec"), MEMORY)
@pytest.mark.parametrize("frozen", [0.0, 0.5, 0.9])
def test_memory_is_what_a_real_step_allocates(name: str, spec: Spec, frozen: float) -> None:
    """To a fifth (a twelfth where this was written): what a kernel takes for itself differs between processors."""
    net = build(name, spec, 0)
    layers = layer_map(net)
    order = list(layers.layers)
    trained = order[int(frozen * len(order)) :]
    own = {n for l in trained for n in layers.layers[l]} - layers.buffers
    held = 4 * sum(math.prod(s) for s in layers.shapes.values())
    real = held + allocated(net, spec.shape, 16, own)
    estimate = peak_bytes(measure(net, spec.shape), trains(layers, trained), layers, Pruning(), 16, momentum=False)
    assert estimate == pytest.approx(real, rel=0.2)


def test_a_client_with_half_the_units_needs_less_memory_and_a_masked_one_does_not():
    net = build("cnn", Spec((1, 32, 32), 10, 0.25), 0)
    layers, work = layer_map(net), measure(net, (1, 32, 32))
    plan = client_plans(PlanRules("lowerb"), layers, [0.5] * 4, 0, 0)[0]
    dense, small, masked = (
        peak_bytes(work, plan, layers, pruning, 48, False)
        for pruning in (Pruning("magnitude"), Pruning("neuron"), Pruning("neuron", physical=False))
    )
    assert small < 0.8 * dense and masked == dense


def test_bytes_by_layer_add_up_and_name_the_layers_that_travel():
    net = build("mlp", Spec((1, 8, 8), 10, 0.1), 0)
    layers = layer_map(net)
    plan = client_plans(PlanRules("lowerb"), layers, [0.5] * 3, 0, 0)[0]
    each, total = traffic_by_layer(plan, layers, Pruning()), traffic(plan, layers, Pruning())
    assert sum(t.down for t in each.values()) == total.down and sum(t.up for t in each.values()) == total.up
    assert {l for l, t in each.items() if t.up} == set(plan.uploaded)
