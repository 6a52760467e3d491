"""The parts of methods, one by one.

Losses, scaling, statistics, skipped blocks, dealt units, compression, mixed fleets.
"""

import math
import tomllib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from fedp3 import config
from fedp3.client.batching import LocalSettings, step_count
from fedp3.client.hooks import LossInputs, Pass
from fedp3.client.passes import in_order, restrict_plan
from fedp3.client.sgd import load_weights, named_tensors
from fedp3.client.update import local_update
from fedp3.core.errors import InputError, PlanError
from fedp3.core.types import ClientPlan, LayerPlan, Task
from fedp3.data.shards import Shard
from fedp3.messages.compression import RESIDUAL, UNCOMPRESSED, UploadSettings, pack, unpack
from fedp3.methods.fedcr import GAUSSIANS, coded_tail, divergence
from fedp3.methods.heterofl import masked_cross_entropy, recompute_statistics, scaled_outputs
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.capacities import capacities
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import deal_units, disjoint_slice, masks_for
from fedp3.server.round_plans import plans_for
from worlds import CLASSES, same, world

from . import reference as ref
from .fleet import bench, experiment, trained

# --------------------------------------------------------------------------- losses


def test_masked_cross_entropy_gives_absent_labels_a_constant_logit_and_no_gradient() -> None:
    net, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.tensor([0, 2, 0, 2, 2, 0])
    labels = torch.tensor([True, False, True, False])
    got = masked_cross_entropy(net, x, y, LossInputs(labels, {}))
    logits = net(x).detach()
    want = -sum(
        math.log(math.exp(row[label]) / (math.exp(row[0]) + math.exp(row[2]) + 2))
        for row, label in zip(logits.tolist(), y.tolist(), strict=True)
    ) / len(y)
    assert float(got.detach()) == pytest.approx(want, abs=1e-5)
    got.backward()
    assert (
        not bool(net.weight.grad[1].any())
        and not bool(net.bias.grad[3].any())
        and bool(net.weight.grad[0].any())
    )
    every_label = masked_cross_entropy(net, x, y, LossInputs(torch.ones(4, dtype=torch.bool), {}))
    assert torch.equal(every_label, cross_entropy(net(x), y)), (
        "a client with all labels does not notice"
    )


def test_the_divergence_is_that_of_torch() -> None:
    m, s, mu, sigma = (torch.rand(5, 3) + 0.1 for _ in range(4))
    normal = torch.distributions.Normal
    want = torch.distributions.kl_divergence(normal(m, s), normal(mu, sigma)).sum(1)
    assert torch.allclose(divergence(m, s, mu, sigma), want, atol=1e-5)
    assert torch.allclose(divergence(m, s, m, s), torch.zeros(5), atol=1e-6)


def test_classes_nobody_has_are_standard_normals_again() -> None:
    held = {"mean": torch.ones(2, 3), "std": torch.full((2, 3), 0.5)}
    reply = {
        "mean": torch.tensor([[2.0] * 3, [7.0] * 3]),
        "std": torch.tensor([[1.0] * 3, [0.0] * 3]),
    }
    new = GAUSSIANS.combine(held, [reply], 9)
    assert torch.allclose(new["mean"], torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert torch.allclose(new["std"], torch.tensor([[2**-0.5] * 3, [1.0] * 3]))


def test_a_code_is_drawn_while_training_and_its_mean_otherwise() -> None:
    model = ModelSettings(name="mlp", width=0.012)
    net = build(ModelSpec((1, 3, 3), CLASSES, model, coded_tail(256, model)), 0)
    x = torch.randn(4, 1, 3, 3)
    assert not torch.equal(net.train()(x), net(x))
    assert torch.equal(net.eval()(x), net(x))


def test_fedcr_on_a_network_without_a_code_is_refused() -> None:
    e = experiment("fedcr")
    other = build(ModelSpec((1, 3, 3), CLASSES, ModelSettings(name="mlp", width=0.012)), 0)
    with pytest.raises(InputError, match="a stochastic code before its head"):
        e.client.hooks.loss(
            other,
            torch.randn(2, 1, 3, 3),
            torch.tensor([0, 1]),
            LossInputs(torch.ones(4), e.start.extra),
        )


# --------------------------------------------------------------------------- passes


def test_steps_of_a_pass_are_its_share_of_the_local_steps() -> None:
    steps = [step_count(LocalSettings(steps=10), 7, s) for s in (1.0, 0.5, 0.04, 5.0)]
    assert steps == [10, 5, 1, 50]
    assert step_count(LocalSettings(epochs=2, batch=4), 10, 0.5) == 3
    assert step_count(LocalSettings(steps=0), 10, 5.0) == 0


def test_a_pass_trains_its_layers_and_no_frozen_one() -> None:
    layers = experiment("fedavg").server.layers
    plan = ClientPlan(0, {l: LayerPlan(train=l != "fc2") for l in layers.layers})
    for which, want in (
        ("all", {"fc1", "fc3", "ffc"}),
        ("body", {"fc1", "fc3"}),
        ("head", {"ffc"}),
    ):
        got = restrict_plan(plan, Pass(layers=which), layers)
        assert {l for l, p in got.layers.items() if p.train} == want


def test_scaling_divides_inside_and_leaves_nothing_behind() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(4, 3)
    plain = net(x)
    with scaled_outputs(net, {"0": 0.25}):
        assert torch.allclose(net.train()(x), 4 * plain)
        assert torch.allclose(net.eval()(x), 4 * plain)
    assert torch.equal(net.train()(x), plain) and not net[0]._forward_hooks


def test_a_client_that_never_saw_a_label_answers_with_zero_for_it_in_p_alone() -> None:
    """HeteroFL's loss does not train the rows of absent labels; unmasked they would win."""
    e = experiment("heterofl", "prune.keep=1.0")
    y, plan, absent = e.client.data.y, plans_for(e.server, 0)[0], 0
    everyones = torch.cat([s.train for s in e.shards.values()])
    mine = everyones[y[everyones] != absent]
    shard = Shard(mine, mine)
    loud = dict(e.start.W)  # the label that the client lacks wins every vote of the net
    loud["ffc.bias"] = loud["ffc.bias"].index_fill(0, torch.tensor([absent]), 1e3)
    score = {
        kind: local_update(
            e.client, shard, Task(t=0, plan=plan, weights=loud, kind=kind, evaluate=True), None
        )[0].metrics["correct"]
        for kind in ("evaluate", "probe")
    }
    assert score["evaluate"] == 0 < score["probe"]


def test_a_narrow_net_is_scored_with_the_scaler_it_was_trained_with() -> None:
    e = experiment("heterofl", "prune.keep={'0.25' = 0.5, '1.0' = 0.5}")
    plans = plans_for(e.server, 0)
    sent = dispatch(e.start.W, plans, e.server.layers, e.server.spec.pruning, 0, 0)
    i, (weights, masks) = next((i, s) for i, s in enumerate(sent) if s[1].units)
    task = Task(t=0, plan=plans[i], weights=weights, masks=masks, kind="evaluate", evaluate=True)
    got = local_update(e.client, e.shards[i], task, None)[0].metrics["test_loss"]
    b = bench(e)
    shares = {l: len(masks.units[l]) / e.server.layers.groups[l].units for l in ref.HIDDEN}
    kept = ref.unit_masks(b.W, {l: masks.units[l].tolist() for l in ref.HIDDEN})
    V = {n: w * kept[n] for n, w in b.W.items()}
    at = e.shards[i].test
    want = float(ref.cross_entropy(ref.forward(V, b.x[at], shares), b.y[at])) * len(at)
    assert got == pytest.approx(want, rel=1e-4)


def test_static_norm_takes_the_statistics_of_the_clients_samples_once() -> None:
    here = world("batchnorm")
    net, shard = here.net, here.shards[0]
    load_weights(named_tensors(net), here.W)
    net.train()
    recompute_statistics(net, in_order(here.context, shard.train))
    norm = dict(net.named_modules())["norm"]
    inputs = []
    handle = norm.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    net.eval()(here.data.x[shard.train])
    handle.remove()
    want = inputs[0].transpose(0, 1).flatten(1)
    assert torch.allclose(norm.running_mean, want.mean(1), atol=1e-5)
    assert torch.allclose(norm.running_var, want.var(1), atol=1e-4)
    assert norm.momentum == 0.1


def test_a_frozen_norm_keeps_its_statistics() -> None:
    here = world("batchnorm")
    load_weights(named_tensors(here.net), here.W)
    here.net.eval()
    recompute_statistics(here.net, in_order(here.context, here.shards[0].train))
    assert torch.equal(named_tensors(here.net)["norm.running_mean"], here.W["norm.running_mean"])


# -------------------------------------------------------------------------- blocks that are skipped


def test_a_skipped_block_is_idle() -> None:
    """The net with a block's tensors at zero computes what the net without the block does."""
    net = build(
        ModelSpec((1, 8, 8), CLASSES, ModelSettings(name="resnet18", width=1 / 16)), 0
    ).eval()
    with torch.no_grad():
        for n, w in named_tensors(net.b3[1]).items():
            if "tracked" not in n:
                w.zero_()
    x = torch.randn(3, 1, 8, 8)
    with_zeros = net(x)
    net.b3[1] = nn.Identity()
    assert torch.allclose(net(x), with_zeros, atol=1e-6)


def test_resist_deals_every_block_to_somebody_and_sends_no_absent_one() -> None:
    e = experiment("resist")
    idle = {f"b{b}.{k}" for b, k in ((1, 0), (1, 1), (2, 1), (3, 1), (4, 1))}
    for t in range(3):
        seen: set[str] = set()
        for plan in plans_for(e.server, t):
            skipped = {l.rpartition(".")[0] for l, p in plan.layers.items() if p.send == "skip"}
            assert len(skipped) == 3 and skipped <= idle
            seen |= idle - skipped
        assert seen == idle
    assert plans_for(e.server, 0) != plans_for(e.server, 1)


def test_a_block_that_was_skipped_leaves_the_servers_as_it_was() -> None:
    e = experiment("resist", "run.clients_per_round=1")
    state, _ = trained(e, 1)
    (i,) = state.seen
    absent = [l for l, p in plans_for(e.server, 0)[i].layers.items() if p.send == "skip"]
    names = [n for l in absent for n in e.server.layers.layers[l]]
    assert names and same({n: state.W[n] for n in names}, {n: e.start.W[n] for n in names})


# ------------------------------------------------------------------------- units that are dealt out


@given(units=st.integers(1, 40), m=st.integers(1, 40))
def test_parts_are_disjoint_and_complete_and_never_empty(units: int, m: int) -> None:
    hands = [range(*disjoint_slice(units, (j, m))) for j in range(m)]
    assert all(len(hand) >= 1 and hand.stop <= units for hand in hands)
    assert set().union(*hands) == set(range(units))
    if m <= units:
        assert sum(len(hand) for hand in hands) == units
        assert max(map(len, hands)) - min(map(len, hands)) <= 1


def test_the_clients_of_a_round_share_the_units_out() -> None:
    e = experiment("ist", "run.clients_per_round=3")
    plans = deal_units(plans_for(e.server, 4)[1:], "dealt", 3)
    for t in range(3):
        masks = [
            masks_for(p, e.start.W, e.server.layers, e.server.spec.pruning, t, 5) for p in plans
        ]
        for g in masks[0].units:
            at = torch.cat([m.units[g] for m in masks])
            assert sorted(at.tolist()) == list(range(12))


def test_only_a_selector_that_deals_changes_plans() -> None:
    plans = client_plans(
        PlanSettings(layers="prune-all", upload="retained"),
        experiment("fedavg").server.layers,
        [0.5] * 4,
        0,
        0,
    )
    for name, s in SELECTORS.items():
        assert (deal_units(plans, name, 2) != list(plans)) == s.deals


# --------------------------------------------------------------------------- compression


def upload(
    kind: str, selector: str = "magnitude", share: float = 0.1
) -> tuple[Task, dict, object, UploadSettings]:
    here = world("batchnorm", pruning=PruneSettings(selector=selector))
    plans = here.plans("lowerb", 0.5, upload="retained")
    ((weights, masks),) = dispatch(here.W, plans[:1], here.layers, here.pruning, 0, 0)
    task = Task(t=0, plan=plans[0], weights=weights, masks=masks)
    torch.random.fork_rng()
    rng = torch.Generator().manual_seed(3)
    moved = {n: w + 0.1 * torch.randn(w.shape, generator=rng) for n, w in weights.items()}
    return task, moved, here.layers, UploadSettings(compress=kind, share=share)


def masked(task: Task, tensors: dict, layers: object) -> dict:
    """What an uncompressed upload would be."""
    return dict(pack(tensors, task, layers, "abstain", UNCOMPRESSED, 0, {}).tensors)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize(("kind", "error"), [("fp16", 1e-3), ("int8", 0.01)])
def test_what_comes_out_is_near_what_went_in(kind: str, error: float, selector: str) -> None:
    task, moved, layers, how = upload(kind, selector)
    packed = pack(moved, task, layers, "abstain", how, 0, {})
    got = unpack(packed.tensors, packed.scales, task, layers, "abstain", how)
    plain = unpack(masked(task, moved, layers), {}, task, layers, "abstain", UNCOMPRESSED)
    for n in plain:
        off = (got[n] - plain[n])[got[n] != 0]
        assert float(off.abs().max()) <= error
        assert n not in layers.buffers or torch.equal(got[n], plain[n]), (
            "running statistics are sent as they are"
        )


def test_eight_bits_are_right_in_the_mean() -> None:
    task, moved, layers, how = upload("int8")
    n = "fc.weight"
    outs = []
    for seed in range(400):
        packed = pack(moved, task, layers, "abstain", how, seed, {})
        outs.append(unpack(packed.tensors, packed.scales, task, layers, "abstain", how)[n])
    scale = float(packed.scales[f"scale/{n}"])
    want = moved[n]
    here = outs[0] != 0
    assert float((torch.stack(outs).mean(0) - want)[here].abs().max()) < 5 * scale / math.sqrt(
        4 * 400
    )


def test_what_top_k_leaves_out_is_remembered_to_the_last_bit() -> None:
    task, moved, layers, how = upload("topk")
    packed = pack(moved, task, layers, "abstain", how, 0, {})
    for n in packed.tensors:
        if n in layers.buffers:
            continue
        change = moved[n] - task.weights[n]
        here = packed.tensors[n] + packed.residual[f"{RESIDUAL}{n}"]
        kept = here != 0
        assert torch.equal(here[kept], change[kept])
        assert int((packed.tensors[n] != 0).sum()) <= max(1, math.floor(0.1 * change.numel()))
    again = pack(moved, task, layers, "abstain", how, 0, packed.residual)
    assert not same(again.tensors, packed.tensors), "what was left out counts the next time"


def test_top_k_sends_what_is_not_a_number_so_that_it_is_refused() -> None:
    task, moved, layers, how = upload("topk")
    packed = pack(
        {n: torch.full_like(w, math.nan) for n, w in moved.items()},
        task,
        layers,
        "abstain",
        how,
        0,
        {},
    )
    assert all(bool(w.isnan().any()) for n, w in packed.tensors.items() if n not in layers.buffers)


# --------------------------------------------------------------------------- mixed fleets


def test_a_fleet_of_shares_has_that_many_devices_of_each_class() -> None:
    shares = {0.125: 0.2, 0.5: 0.5, 1.0: 0.3}
    assert Counter(capacities(shares, 100, 0)) == {0.125: 20, 0.5: 50, 1.0: 30}
    assert Counter(capacities(shares, 7, 0)) == {0.125: 1, 0.5: 4, 1.0: 2}
    assert capacities(shares, 100, 0) != capacities(shares, 100, 1)


@given(
    st.dictionaries(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]), st.integers(1, 5), min_size=1),
    st.integers(30, 90),
)
def test_every_class_gets_its_share_to_the_nearest_client(
    parts: dict[float, int], clients: int
) -> None:
    shares = {k: n / sum(parts.values()) for k, n in parts.items()}
    got = Counter(capacities(shares, clients, 3))
    assert sum(got.values()) == clients
    assert all(abs(got[k] - clients * share) <= 1 for k, share in shares.items())


@pytest.mark.parametrize(
    ("shares", "text"),
    [({0.5: 0.5}, "add up to 0.5"), ({0.5: 0.999, 1.0: 0.001}, "no client of 10"), ({}, "add up")],
)
def test_shares_that_make_no_fleet_are_refused(shares: dict[float, float], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        capacities(shares, 10, 0)


def test_a_fleet_is_one_override_and_is_written_as_it_was_read() -> None:
    c = config.parse(
        {"method": "heterofl"}, ["prune.keep={'0.125' = 0.2, '0.5' = 0.5, '1.0' = 0.3}"]
    )
    assert c.prune.keep == {0.125: 0.2, 0.5: 0.5, 1.0: 0.3}
    again = config.parse(tomllib.loads(config.to_toml(c)))
    assert again == c and again.digest() == c.digest()


def test_a_method_runs_on_a_mixed_fleet() -> None:
    e = experiment("heterofl", "prune.keep={'0.25' = 0.5, '1.0' = 0.5}")
    assert sorted(e.server.keep) == [0.25, 0.25, 1.0, 1.0]
    state, _ = trained(e, 1)
    assert not same(state.W, e.start.W)
    assert replace(e, config=e.config).config.method == "heterofl"
