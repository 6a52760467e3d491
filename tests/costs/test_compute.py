"""FLOPs and memory of a plan are what torch counts and what a real step allocates."""

import math
import platform
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

from fedp3.client.batching import LocalSettings
from fedp3.client.objectives import OBJECTIVES
from fedp3.client.sgd import prepare
from fedp3.core.errors import InputError
from fedp3.core.types import ClientPlan, LayerMap, LayerPlan
from fedp3.costs.compute import (
    FLOPS_PER_BYTE,
    ComputeProfile,
    flops,
    measure,
    measure_on,
    peak_bytes,
    step_bytes,
    time_flops,
)
from fedp3.costs.device_time import round_gflop
from fedp3.costs.traffic import retained_parameters, sizes
from fedp3.data.inputs import Batch
from fedp3.models import shrinking
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build, channels_last
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS, PruneSettings
from fedp3.privacy.mechanism import private_gradient
from fedp3.privacy.settings import Mechanism
from worlds import world

from .networks import rounded, spec_of


def trains(layers: LayerMap, names: Iterable[str]) -> ClientPlan:
    chosen = set(names)
    return ClientPlan(0, {l: LayerPlan(train=l in chosen) for l in layers.layers})


def counted(compute: ComputeProfile, layers: LayerMap, trained: Iterable[str]) -> int:
    """What torch itself counts in one forward and backward pass."""
    names = {n for l in trained for n in layers.layers[l]}
    for n, w in compute.net.named_parameters():
        w.requires_grad_(n in names)
    with FlopCounterMode(display=False) as counter:
        logits = compute.net(compute.example.x)
        if names:
            learn = [w for w in compute.net.parameters() if w.requires_grad]
            torch.autograd.grad(
                F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=compute.device)),
                learn,
            )
    return counter.get_total_flops()


def subsets(names: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, k) for k in range(len(names) + 1))


def ready(spec: ModelSpec) -> tuple[ComputeProfile, LayerMap]:
    net = build(spec, 0)
    return measure(net, spec.shape), layer_map(net)


@pytest.mark.parametrize(
    "spec", [spec_of("mlp", (1, 28, 28)), spec_of("cnn", (3, 32, 32), width=0.5)]
)
def test_flops_are_what_torch_counts_for_every_trained_subset(spec: ModelSpec) -> None:
    compute, layers = ready(spec)
    for trained in subsets(list(layers.layers)):
        assert flops(compute, trains(layers, trained), layers, PruneSettings()) == counted(
            compute, layers, trained
        )


@pytest.mark.parametrize("stem", [3, 7])
def test_flops_of_a_resnet_are_what_torch_counts(stem: int) -> None:
    compute, layers = ready(spec_of("resnet18", (3, 32, 32), width=1 / 8, stem=stem))
    order = list(layers.layers)
    for trained in ([], order, ["conv0"], ["b2.0.conv1"], ["ffc"], order[7:], order[:9:2]):
        assert flops(compute, trains(layers, trained), layers, PruneSettings()) == counted(
            compute, layers, trained
        )


def test_resnet18_with_a_7x7_stem_takes_74_megaflop_forward_and_217_with_all_trained() -> None:
    compute, layers = ready(spec_of("resnet18", (3, 32, 32), stem=7))
    order = list(layers.layers)
    plans = [trains(layers, names) for names in ([], order, order[order.index("b3.1.conv2") :])]
    assert rounded((flops(compute, p, layers, PruneSettings()) / 1e6 for p in plans), 1) == [
        74.0,
        217.3,
        112.3,
    ]


def test_frozen_layers_save_flops_and_others_train_by_default() -> None:
    compute, layers = ready(spec_of("cnn", (3, 32, 32), width=1 / 8))
    (train,), (freeze,) = (
        client_plans(PlanSettings(layers="lowerb", others=others), layers, [0.9], 0, 0)
        for others in ("train", "freeze")
    )
    full = client_plans(PlanSettings(layers="full"), layers, [0.9], 0, 0)[0]
    everything, less = (flops(compute, p, layers, PruneSettings()) for p in (train, freeze))
    assert everything == flops(compute, full, layers, PruneSettings()) > less
    assert less == counted(compute, layers, freeze.full_layers)


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [("mlp", (1, 28, 28), 1 / 8), ("cnn", (3, 32, 32), 1 / 4), ("cnn", (1, 32, 32), 1 / 8)],
)
@pytest.mark.parametrize(
    "selector", [name for name, s in SELECTORS.items() if s.units and not s.deals]
)
def test_pruned_units_cost_as_little_as_a_narrower_net(
    name: str, shape: tuple[int, ...], width: float, selector: str
) -> None:
    compute, layers = ready(spec_of(name, shape, width=width))
    narrow, inner = ready(spec_of(name, shape, width=width / 2))
    (plan,) = client_plans(PlanSettings(layers="prune-all", upload="retained"), layers, [0.5], 0, 0)
    full = trains(inner, inner.layers)
    assert flops(compute, plan, layers, PruneSettings(selector=selector)) == flops(
        narrow, full, inner, PruneSettings()
    )
    assert retained_parameters(
        plan, layers, PruneSettings(selector=selector)
    ) == retained_parameters(full, inner, PruneSettings())


@pytest.mark.parametrize("layers_", ["prune-all", "opu2"])
@pytest.mark.parametrize("selector", ["magnitude", "neuron"])
@pytest.mark.parametrize("way", [name for name, pruner in LOCAL_PRUNERS.items() if pruner.by_units])
def test_local_pruning_by_units_costs_what_the_net_of_a_step_costs(
    way: str, selector: str, layers_: str
) -> None:
    here = world("cnn", 2, local_pruner=way, selector=selector, q=0.5, physical=True)
    compute, layers = measure(here.net, tuple(here.data.x.shape[1:])), here.layers
    upload = "retained" if layers_ == "prune-all" else "none"
    for task in here.tasks(here.plans(layers_, 0.5, upload=upload)):
        step = LOCAL_PRUNERS[way].draw(0.5, task.plan, task.masks, layers, torch.Generator())
        left = {g: len(at) for g, at in {**task.masks.units, **step.units}.items()}
        small, inner = (
            shrinking.shrink_net(here.net, layers, left),
            shrinking.shrink_map(layers, left),
        )
        shape = tuple(compute.example.x.shape[1:])
        want = flops(measure(small, shape), task.plan, inner, PruneSettings())
        samples = len(here.shards[task.plan.client].train)
        batch = samples / math.ceil(samples / here.local.batch)
        assert round_gflop(compute, task.plan, here.context, samples) * 1e9 == pytest.approx(
            want * batch * here.local.steps
        )


def test_pruned_single_weights_save_no_flops() -> None:
    compute, layers = ready(spec_of("mlp", (1, 28, 28), width=1 / 8))
    (plan,) = client_plans(PlanSettings(layers="prune-all", upload="retained"), layers, [0.5], 0, 0)
    assert flops(compute, plan, layers, PruneSettings(selector="random")) == flops(
        compute, trains(layers, layers.layers), layers, PruneSettings()
    )


def test_a_step_of_adam_remembers_two_numbers_per_weight_and_a_step_of_tokens_is_counted() -> None:
    spec = ModelSpec((6,), 11, ModelSettings(name="gpt", width=0.25, blocks=2))
    net = build(spec, 0)
    example = Batch(torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 6, dtype=torch.int64))
    compute = measure_on(net, example, OBJECTIVES["language_modelling"])
    layers = layer_map(net)
    plan = trains(layers, layers.layers)
    weights = 4 * sum(w.numel() for w in net.parameters())
    sgd, momentum, adam = (
        peak_bytes(compute, plan, layers, PruneSettings(), 2, slots) for slots in (0, 1, 2)
    )
    assert momentum - sgd >= weights and adam - momentum == weights
    assert flops(compute, plan, layers, PruneSettings()) == 3 * sum(compute.forward.values())


def test_a_layer_of_two_steps_passes_its_gradient_between_them() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    layer_names = {
        "body": ("0.weight", "0.bias", "2.weight", "2.bias"),
        "head": ("4.weight", "4.bias"),
    }
    compute, layers = measure(net, (4,)), layer_map(net, layer_names)
    for trained in subsets(list(layer_names)):
        assert flops(compute, trains(layers, trained), layers, PruneSettings()) == counted(
            compute, layers, trained
        )


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4, 8))
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)]
        )
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x + self.place)
        return self.out(self.blocks[1](h, h, h)[0].mean(1))


class Multiplying(nn.Module):
    """Multiplies what two linear layers return, and has no weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).transpose(1, 2) @ self.b(x)


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
        nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 3)
        ),
        (4, 8),
        2 * (4 * 8 * 32 + 2 * 4 * 4 * 8 + 2 * 4 * 8 * 16 + 32 * 3),
    ),
    "products without weights": (
        nn.Sequential(Multiplying(), nn.Flatten(), nn.Linear(8 * 16, 3)),
        (4, 8),
        2 * (4 * 8 * 8 + 4 * 8 * 16 + 8 * 4 * 16 + 8 * 16 * 3),
    ),
    "one layer": (nn.Linear(4, 3), (4,), 2 * 4 * 3),
    "data-dependent": (Choosing(), (4,), 2 * (4 * 5 + 5 * 3)),
}


@pytest.mark.parametrize(("net", "shape", "want"), COUNTED.values(), ids=COUNTED.keys())
def test_in_any_net_each_operation_is_counted_once(
    net: nn.Module, shape: tuple[int, ...], want: int
) -> None:
    forward = measure(net, shape).forward
    assert sum(forward.values()) == want
    assert set(forward) == layer_map(net).prunable


def test_a_block_shares_its_products_among_the_weights_in_it() -> None:
    forward = measure(COUNTED["products without weights"][0], (4, 8)).forward
    products = 2 * 8 * 4 * 16
    assert forward == {
        "0.a.weight": 2 * 4 * 8 * 8 + products // 3,
        "0.b.weight": 2 * 4 * 8 * 16 + round(products * 2 / 3),
        "2.weight": 2 * 8 * 16 * 3,
    }


def test_a_positional_parameter_costs_no_flops() -> None:
    assert measure(Attending(), (4, 8)).forward["place"] == 0


def test_measuring_leaves_the_net_and_the_generator_alone() -> None:
    net = Choosing().train()
    before, values = (
        torch.random.get_rng_state(),
        {n: w.clone() for n, w in net.state_dict().items()},
    )
    compute, layers = measure(net, (4,)), layer_map(net)
    peak_bytes(compute, trains(layers, ["b"]), layers, PruneSettings(), 6, slots=1)
    assert compute.device == "cpu" and torch.equal(torch.random.get_rng_state(), before)
    assert net.training and all(w.requires_grad for w in net.parameters())
    assert all(torch.equal(w, values[n]) for n, w in net.state_dict().items())


def test_a_net_that_does_not_take_the_data_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"does not take one example of shape \(5,\): RuntimeError"
    ):
        measure(nn.Linear(4, 3), (5,))


# --------------------------------------------------------------------------- memory

MEMORY = [
    spec_of("mlp", (1, 28, 28), width=1 / 4),
    spec_of("cnn", (3, 32, 32), width=1 / 4),
    spec_of("resnet18", (3, 32, 32), width=1 / 8),
]


@pytest.mark.parametrize("spec", MEMORY)
def test_memory_grows_with_the_batch_and_with_every_layer_trained(
    spec: ModelSpec,
) -> None:
    compute, layers = ready(spec)
    order = list(layers.layers)
    starts = range(len(order), -1, -max(1, len(order) // 4))
    deeper = [
        peak_bytes(compute, trains(layers, order[k:]), layers, PruneSettings(), 8, False)
        for k in starts
    ]
    assert deeper == sorted(deeper) and deeper[0] < deeper[-1]
    larger = [
        peak_bytes(compute, trains(layers, order), layers, PruneSettings(), batch, False)
        for batch in (2, 4, 32)
    ]
    assert larger == sorted(set(larger))


@given(st.data())
def test_training_more_never_takes_less_memory(data: st.DataObject) -> None:
    compute, layers = SMALL
    more = data.draw(st.sets(st.sampled_from(list(layers.layers))))
    fewer = {l for l in more if data.draw(st.booleans())}
    less, more_bytes = (
        peak_bytes(compute, trains(layers, names), layers, PruneSettings(), 8, False)
        for names in (fewer, more)
    )
    assert less <= more_bytes


SMALL = ready(spec_of("cnn", (1, 32, 32), width=1 / 16))


def test_momentum_takes_one_more_number_per_trained_parameter() -> None:
    compute, layers = SMALL
    for trained in (["ffc"], ["conv1", "fc2"], list(layers.layers)):
        without, with_it = (
            peak_bytes(compute, trains(layers, trained), layers, PruneSettings(), 8, m)
            for m in (False, True)
        )
        assert with_it - without == 4 * sum(sizes(layers)[l] for l in trained)


def test_memory_is_at_least_the_net_its_gradients_and_the_widest_activation() -> None:
    compute, layers = SMALL
    stored, trained = sum(sizes(layers).values()), sizes(layers)["fc1"]
    assert peak_bytes(compute, trains(layers, ["fc1"]), layers, PruneSettings(), 8, False) >= 4 * (
        stored + trained
    )
    assert peak_bytes(compute, trains(layers, []), layers, PruneSettings(), 8, False) >= 4 * (
        stored + 2 * 8 * 4 * 28 * 28
    )


def allocated(net: nn.Module, shape: tuple[int, ...], batch: int, trained: Sequence[str]) -> int:
    """The most bytes a real training step had allocated at once, by torch's own profiler."""
    weights = [w for n, w in net.named_parameters() if n in trained]

    def step() -> Any:
        x, y = torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.int64)
        return torch.autograd.grad(F.cross_entropy(net(x), y), weights)

    return most_allocated(step)


def most_allocated(step: Callable[[], Any]) -> int:
    step()  # what is made once, like packed weights, is not a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = step()
    del result
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        current += e.nbytes()
        peak = max(peak, current)
    return peak


REAL: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    **{
        name: (channels_last(build(spec_of(name, shape, width=1 / 4), 0)), shape)
        for name, shape in {"mlp": (1, 28, 28), "cnn": (3, 32, 32), "resnet18": (3, 32, 32)}.items()
    },
    "transformer": (
        nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3)),
            nn.Flatten(),
            nn.Linear(20 * 32, 3),
        ),
        (20, 32),
    ),
}


@pytest.mark.parametrize(("net", "shape"), REAL.values(), ids=REAL.keys())
@pytest.mark.parametrize("frozen", [0.0, 0.5, 0.9])
def test_memory_is_what_a_real_step_allocates(
    net: nn.Module, shape: tuple[int, ...], frozen: float
) -> None:
    """To a twentieth on x86; elsewhere to a fifth, because other kernels copy other things."""
    layers = layer_map(net)
    order = list(layers.layers)
    plan = trains(layers, order[int(frozen * len(order)) :])
    stored = 4 * sum(math.prod(s) for s in layers.shapes.values())
    real = stored + allocated(net, shape, 16, prepare(net, plan, layers))
    estimate = peak_bytes(measure(net, shape), plan, layers, PruneSettings(), 16, slots=0)
    tolerance = 0.05 if platform.machine() == "x86_64" else 0.2
    assert estimate == pytest.approx(real, rel=tolerance)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("frozen", [0.0, 0.5])
@pytest.mark.parametrize("ghost", [True, False])
def test_memory_under_ldp_is_what_a_real_private_step_allocates(
    name: str, frozen: float, ghost: bool
) -> None:
    """With ghost clipping where the network allows it, else with every record's gradient."""
    net, shape = REAL[name]
    layers, mechanism = layer_map(net), Mechanism(ghost=ghost)
    order = list(layers.layers)
    plan = trains(layers, order[int(frozen * len(order)) :])
    trained = prepare(net, plan, layers)
    W = {n: w for n, w in net.named_parameters() if n in trained}

    def step() -> None:
        x, y = torch.zeros(16, *shape), torch.zeros(16, dtype=torch.int64)
        private_gradient(mechanism, LocalSettings(batch=16), 160, 0, 0, 0)(net, x, y, W, {})

    stored = 4 * sum(math.prod(s) for s in layers.shapes.values())
    compute = measure(net, shape)
    estimate = peak_bytes(compute, plan, layers, PruneSettings(), 16, slots=0, private=mechanism)
    tolerance = 0.05 if platform.machine() == "x86_64" else 0.2
    assert estimate == pytest.approx(stored + most_allocated(step), rel=tolerance)
    plain = peak_bytes(compute, plan, layers, PruneSettings(), 16, slots=0)
    assert ghost or estimate > plain + 15 * 4 * sum(w.numel() for w in W.values())


@pytest.mark.parametrize("trained", [["ffc"], ["conv1", "fc2"], None])
def test_momentum_needs_room_for_the_new_velocity_of_one_tensor(trained: list[str] | None) -> None:
    """With one example and wide layers, applying the step takes more than the two passes."""
    compute, layers = WIDE
    plan = trains(layers, trained or layers.layers)
    learned = [
        math.prod(layers.shapes[n]) for l in trained or layers.layers for n in layers.layers[l]
    ]
    held = sum(math.prod(s) for s in layers.shapes.values()) + 2 * sum(learned)
    peak = peak_bytes(compute, plan, layers, PruneSettings(), 1, slots=1)
    assert peak >= 4 * (held + 2 * max(learned))
    if trained is None:
        assert peak == 4 * (held + 2 * max(learned))


WIDE = ready(spec_of("cnn", (1, 32, 32), width=1 / 2))


# --------------------------------------------------------------------------- bytes moved


def test_bytes_moved_are_what_each_operation_reads_and_writes() -> None:
    """By hand, for one linear layer from 4 to 3 numbers and a batch of two."""
    net = nn.Linear(4, 3)
    x, y, w, b, logits, loss, grads = 2 * 4 * 4, 2 * 8, 3 * 4 * 4, 3 * 4, 2 * 3 * 4, 4, (3 * 5) * 4
    forward = x + y + (x + w + b + logits) + 2 * logits + (logits + y + 2 * loss)
    backward = (
        2 * loss  # the gradient of the loss with respect to itself
        + (loss + logits + y + loss + logits)
        + 3 * logits
        + (logits + x + w)
        + (logits + b)
    )
    layers = layer_map(net)
    moved = step_bytes(
        measure(net, (4,)), trains(layers, layers.layers), layers, PruneSettings(), 2, False
    ).moved
    assert moved == forward + backward + 3 * grads


@given(st.data())
def test_training_more_never_moves_less(data: st.DataObject) -> None:
    compute, layers = SMALL
    more = data.draw(st.sets(st.sampled_from(list(layers.layers))))
    fewer = {l for l in more if data.draw(st.booleans())}
    less, more_bytes = (
        step_bytes(compute, trains(layers, names), layers, PruneSettings(), 8, False).moved
        for names in (fewer, more)
    )
    assert less <= more_bytes


def test_bytes_make_a_step_longer_and_without_them_flops_are_all() -> None:
    assert time_flops(7.0, 0) == 7.0
    assert time_flops(7.0, 2) == 7.0 + 2 * FLOPS_PER_BYTE


# --------------------------------------------------------------------------- smaller networks


def test_a_client_with_half_the_units_needs_less_memory_and_a_masked_one_does_not():
    net = build(spec_of("cnn", (1, 32, 32), width=0.25), 0)
    layers, compute = layer_map(net), measure(net, (1, 32, 32))
    plan = client_plans(PlanSettings(layers="lowerb"), layers, [0.5] * 4, 0, 0)[0]
    dense, small, masked = (
        peak_bytes(compute, plan, layers, pruning, 48, False)
        for pruning in (
            PruneSettings(selector="magnitude"),
            PruneSettings(selector="neuron"),
            PruneSettings(selector="neuron", physical=False),
        )
    )
    assert small < 0.8 * dense and masked == dense
