"""A smaller network equals the masked one: forward, gradients, K steps, and written back."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedp3 import config
from fedp3.client.update import local_update
from fedp3.core import masks as M
from fedp3.core.types import ClientState, Masks
from fedp3.costs.table import unprunable_units
from fedp3.experiment.assemble import assemble
from fedp3.models import shrinking
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.prune_settings import SELECTORS
from worlds import KINDS, world

CLOSE = {"rtol": 1e-4, "atol": 2e-6}
# Batch norm over few values amplifies rounding errors, here through 18 layers.
BATCH_NORM = {"rtol": 1e-2, "atol": 1e-3}
STRUCTURED = [name for name, s in SELECTORS.items() if s.units is not None]


def some_units(layers, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Any units of any groups that can be pruned, in complete granules."""
    units = {}
    for g, u in layers.groups.items():
        blocks = u.units // u.granule
        if not u.fixed and float(torch.rand((), generator=rng)) < 0.8:
            k = int(torch.randint(1, blocks + 1, (), generator=rng))
            retained = torch.randperm(blocks, generator=rng)[:k].sort().values
            units[g] = (retained[:, None] * u.granule + torch.arange(u.granule)).flatten()
    return units


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(seed=st.integers(0, 999))
def test_forward_and_gradients_are_those_of_the_masked_net(kind, seed):
    here, rng = world(kind), torch.Generator().manual_seed(seed)
    layers, units = here.layers, some_units(here.layers, rng)
    masks = Masks(units=units)
    masked = copy.deepcopy(here.net).eval()
    small = shrinking.shrink_net(here.net, layers, shrinking.counts_of(units)).eval()
    zeroed = {n: M.zero_pruned(w, M.active(n, masks, layers)) for n, w in here.W.items()}
    masked.load_state_dict(zeroed, strict=False)
    small.load_state_dict(shrinking.take_units(here.W, units, layers), strict=False)
    x = torch.randn(5, *KINDS[kind].shape, generator=rng)
    a, b = masked(x), small(x)
    torch.testing.assert_close(a, b, **CLOSE)
    a.square().sum().backward()
    b.square().sum().backward()
    for (n, p), (_, q) in zip(masked.named_parameters(), small.named_parameters(), strict=True):
        inside = M.take(p.grad, M.active(n, masks, layers))
        torch.testing.assert_close(inside, q.grad.reshape(inside.shape), rtol=1e-3, atol=1e-4)


def both(here, task, state=None):
    """The same task on the masked and on the smaller net."""
    shard = here.shards[task.plan.client]
    masked, a = local_update(here.but(physical=False).context, shard, task, state)
    small, b = local_update(here.but(physical=True).context, shard, task, state)
    return masked, small, a, b


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    selector=st.sampled_from(STRUCTURED),
    local_pruner=st.sampled_from(["fixed", "uniform", "ordered_dropout", "ordered_matched"]),
    sets=st.sampled_from(["prune-all", "lowerb", "opu2"]),
    rules=st.fixed_dictionaries(
        {
            "others": st.sampled_from(["train", "freeze"]),
            "head": st.sampled_from(["shared", "personal", "personal_uploaded"]),
            "upload": st.sampled_from(["none", "retained", "zeros"]),
        }
    ),
    unfed_columns=st.sampled_from(["abstain", "vote"]),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clip_norm=st.sampled_from([0.0, 0.5]),
    keep=st.sampled_from([0.3, 0.6, 1.0]),
)
def test_k_steps_leave_the_same_update_state_and_scores(
    kind,
    selector,
    local_pruner,
    sets,
    rules,
    unfed_columns,
    momentum,
    weight_decay,
    clip_norm,
    keep,
):
    # Dropout and `uniform` draw per tensor shape, so a smaller net draws other numbers.
    if kind == "dropout" or local_pruner == "uniform":
        local_pruner = "fixed"
    if kind == "dropout":
        kind = "mlp"
    here = world(
        kind,
        clients=2,
        sizes=[40, 40],
        batch=20 if kind == "resnet" else 4,
        selector=selector,
        local_pruner=local_pruner,
        unfed_columns=unfed_columns,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    task = here.tasks(here.plans(sets, keep, **rules), evaluate=True)[1]
    masked, small, a, b = both(here, task)
    near = BATCH_NORM if kind == "resnet" else CLOSE
    for one, other in ((masked, small), (a, b)):
        assert one.tensors.keys() == other.tensors.keys()
        for n, w in one.tensors.items():
            torch.testing.assert_close(w, other.tensors[n], **near, msg=lambda m, n=n: f"{n}: {m}")
    assert masked.metrics["loss"] == pytest.approx(small.metrics["loss"], rel=near["rtol"])
    assert masked.metrics["density"] == pytest.approx(small.metrics["density"])
    if kind != "resnet":
        assert masked.metrics["correct"] == small.metrics["correct"]


@pytest.mark.parametrize("local_pruner", ["ordered_dropout", "ordered_matched"])
@pytest.mark.parametrize("selector", ["magnitude", "random"])
def test_ordered_dropout_under_an_unstructured_mask_is_physical_too(local_pruner, selector):
    here = world(
        "cnn", selector=selector, local_pruner=local_pruner, momentum=0.5, weight_decay=0.01
    )
    for task in here.tasks(here.plans("lowerb", 0.5), evaluate=True):
        masked, small, _, _ = both(here, task)
        for n in masked.tensors:
            torch.testing.assert_close(masked.tensors[n], small.tensors[n], **CLOSE)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, no scales": lambda: nn.BatchNorm2d(8, affine=False),
    "batch, no statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "batch, no tensors": lambda: nn.BatchNorm2d(8, affine=False, track_running_stats=False),
    "group": lambda: nn.GroupNorm(4, 8),
    "group, no tensors": lambda: nn.GroupNorm(4, 8, affine=False),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "instance, no scales": lambda: nn.InstanceNorm2d(8, track_running_stats=True),
    "instance, no tensors": lambda: nn.InstanceNorm2d(8),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_any_normalisation_with_or_without_tensors_computes_the_same_when_cut(norm, training):
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        NORMS[norm](),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    layers = layer_map(net)
    units = {g: torch.arange(2, 6) for g, u in layers.groups.items() if not u.fixed}
    assert "3" in units and ("0" in units) == (norm == "group" or norm.startswith("batch"))
    W = {n: w for n, w in net.state_dict().items() if n in layers.shapes}
    small = shrinking.shrink_net(net, layers, shrinking.counts_of(units)).train(training)
    small.load_state_dict(shrinking.take_units(W, units, layers), strict=False)
    masked = copy.deepcopy(net).train(training)
    zeroed = {n: M.zero_pruned(w, M.active(n, Masks(units=units), layers)) for n, w in W.items()}
    masked.load_state_dict(zeroed, strict=False)
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(small(x), masked(x), rtol=0, atol=1e-6)


def test_a_personal_head_retains_its_columns_of_pruned_units():
    here = world("mlp", selector="neuron")
    plan = here.plans("lowerb", 0.3, head="personal")[0]
    head = {n: here.W[n] + 1 for n in here.layers.layers["ffc"]}
    task = here.tasks([plan], state_from=0)[0]
    _, _, a, b = both(here, task, ClientState(0, head))
    pruned = torch.ones(head["ffc.weight"].shape[1], dtype=torch.bool)
    if "fc3" in task.masks.units:
        pruned[task.masks.units["fc3"]] = False
        assert torch.equal(b.tensors["ffc.weight"][:, pruned], head["ffc.weight"][:, pruned])
    torch.testing.assert_close(a.tensors["ffc.weight"], b.tensors["ffc.weight"], **CLOSE)


def test_the_smaller_net_really_is_smaller():
    net = build(ModelSpec((3, 32, 32), 10, ModelSettings(name="cnn")), 0)
    layers = layer_map(net)
    half = {g: u.units // 2 for g, u in layers.groups.items() if not u.fixed}
    small = shrinking.shrink_net(net, layers, half)
    sizes = {n: p.numel() for n, p in small.named_parameters()}
    assert (
        sizes["conv2.weight"] == 32 * 32 * 25
        and sizes["fc1.weight"] == 512 * 800
        and sizes["ffc.weight"] == 10 * 512
    )
    assert small(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert (small.conv2.in_channels, small.fc1.in_features) == (32, 800)


def test_nets_are_cached_by_shape_up_to_a_limit():
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    layers = layer_map(net)
    first = shrinking.small_net(net, layers, {"0": 3})
    assert shrinking.small_net(net, layers, {"0": 3}) is first
    for k in range(1, 32):
        shrinking.small_net(net, layers, {"0": k})
    assert shrinking.small_net(net, layers, {"0": 3}) is not first
    assert len(shrinking._nets[net]) == shrinking.CACHE_SIZE


def test_without_freeze_pruned_a_masked_net_is_trained():
    """`check_pruning` refuses this for selectors of units.

    Local pruning of units under a mask of weights that is not frozen takes this path.
    """
    here = world("mlp", selector="neuron", freeze_pruned=False)
    task = here.tasks(here.plans("lowerb", 0.5))[0]
    masked, small, _, _ = both(here, task)
    assert all(torch.equal(masked.tensors[n], small.tensors[n]) for n in masked.tensors)


def test_units_that_cannot_be_pruned_are_listed_with_the_reason():
    narrow = [
        "model.name=resnet18",
        "model.width=0.0625",
        "plan.layers=lowerb",
        "partition.clients=17",
    ]

    def units_of(selector):
        experiment = assemble(config.parse({}, [*narrow, f"prune.selector={selector}"]))
        return unprunable_units(experiment.client.layers, selector, experiment.first_plans)

    unprunable = units_of("neuron")
    assert unprunable["b1.0.conv2"] == "a residual sum reads them"
    assert "b1.0.conv1" not in unprunable
    assert not units_of("magnitude")
