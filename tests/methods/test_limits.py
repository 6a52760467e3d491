"""Limit cases: where a method's own idea is switched off, it is FedAvg, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedp3.core.errors import ConfigError
from fedp3.engines.in_process import sequential
from fedp3.messages.compression import UploadSettings
from fedp3.runs import session
from fedp3.runs.checkpoint import load_checkpoint
from fedp3.server.aggregators import AggregateSettings, Aggregator
from fedp3.server.optimizer import optimize, with_optimizer
from fedp3.server.rounds import run_round
from fedp3.server.scoring import finish
from worlds import make_aggregator, same

from .fleet import experiment, trained

SIMPLE = "aggregate.rule=simple"
FEDAVG = trained(experiment("fedavg"))[0].W
UNWEIGHTED = trained(experiment("fedavg", SIMPLE))[0].W

OFF = {  # method -> what switches its idea off
    "fedprox": ["hooks.mu=0"],
    "fedavg-ft": [],  # fine-tuning never leaves the client
    "ditto": [],  # nor does the personal model
    "fedper": ["plan.head=shared"],
    "fedavg-topk": ["upload.compress=none"],
    "fedavgm": ["aggregate.server=none"],
    "fedavg-layer": ["plan.layers=full"],
    "fedrep": ["plan.head=shared", "hooks.passes=joint"],
    "fedp3": ["plan.layers=full", "aggregate.rule=examples"],
}
OFF_UNWEIGHTED = {
    "fedrop": ["prune.keep=1.0"],
    "heterofl": ["prune.keep=1.0", "hooks.loss=cross_entropy"],
    "fedrolex": ["prune.keep=1.0", "hooks.loss=cross_entropy"],
    "fiarse": ["prune.keep=1.0"],
    "scaffold": ["hooks.exchange=none"],
}


@pytest.mark.parametrize("method", OFF)
def test_without_its_idea_a_method_is_fedavg(method: str) -> None:
    assert same(trained(experiment(method, *OFF[method]))[0].W, FEDAVG)


@pytest.mark.parametrize("method", OFF_UNWEIGHTED)
def test_without_its_idea_a_method_that_counts_clients_alike_is_unweighted_fedavg(
    method: str,
) -> None:
    assert same(trained(experiment(method, *OFF_UNWEIGHTED[method]))[0].W, UNWEIGHTED)


def test_fjord_that_draws_nothing_but_one_is_fedavg() -> None:
    got = trained(experiment("fjord", "prune.keep=1.0", "prune.q=[1.0]"))[0].W
    assert all(torch.allclose(got[n], FEDAVG[n], atol=1e-6) for n in FEDAVG)


def test_ist_over_one_client_trains_the_whole_model() -> None:
    one = ["run.clients_per_round=1"]
    assert same(
        trained(experiment("ist", *one))[0].W, trained(experiment("fedavg", SIMPLE, *one))[0].W
    )


def test_the_first_round_of_scaffold_corrects_nothing() -> None:
    a, _ = trained(experiment("scaffold"), 1)
    b, _ = trained(experiment("fedavg", SIMPLE), 1)
    assert same(a.W, b.W)
    assert not same(trained(experiment("scaffold"), 2)[0].W, UNWEIGHTED)


def test_fedrolex_begins_as_heterofl_and_rolls_on() -> None:
    keep = "prune.keep=[1.0, 0.5, 0.25, 0.5]"
    assert same(
        trained(experiment("fedrolex", keep), 1)[0].W, trained(experiment("heterofl", keep), 1)[0].W
    )
    assert not same(
        trained(experiment("fedrolex", keep), 2)[0].W, trained(experiment("heterofl", keep), 2)[0].W
    )


def test_fedcr_with_all_hidden_layers_in_every_window_is_fedcr() -> None:
    a, b = experiment("fedcr"), experiment("fedcr-opu2", "prune.keep=1.0")
    assert same(trained(a)[0].W, trained(b)[0].W)


def test_fedbabu_never_moves_a_head_while_it_trains_the_body() -> None:
    e = experiment("fedbabu")
    state, states = trained(e)
    head = {n: e.start.W[n] for n in ("ffc.weight", "ffc.bias")}
    assert same({n: state.W[n] for n in head}, head)
    assert all(same({n: of[1].tensors[n] for n in head}, head) for of in states.by_client.values())


def test_local_training_moves_no_byte_and_no_weight_of_the_server() -> None:
    e = experiment("local")
    state, record = run_round(e.server, e.start, sequential(e.client, e.shards).execute)
    assert (record.bytes_up, record.bytes_down) == (0, 0) and same(state.W, e.start.W)


def test_p_of_ditto_is_the_personal_model_and_g_the_servers() -> None:
    e, plain = experiment("ditto"), experiment("fedavg")
    (state, states), (other, more) = trained(e, 3), trained(plain, 3)
    ditto = finish(e.server, state, sequential(e.client, e.shards, states).execute)
    fedavg = finish(plain.server, other, sequential(plain.client, plain.shards, more).execute)
    assert (ditto.G, ditto.D) == (fedavg.G, fedavg.D)
    assert ditto.P != fedavg.P


# ------------------------------------------------------------------------ what does not go together


@pytest.mark.parametrize(
    ("method", "override", "text"),
    [
        ("ditto", "plan.layers=opu2", "keeps a full model"),
        ("scaffold", "plan.layers=opu2", "corrects full models"),
        ("scaffold", "local.momentum=0.9", "set [local] momentum to 0"),
        ("scaffold", "hooks.passes=body", "one pass over the full model"),
        ("fedcr", "hooks.code=0", "need a stochastic code"),
        ("fedcr", "hooks.exchange=none", "needs the class Gaussians"),
        ("fedavg", "hooks.distil=true", "ordered_dropout"),
        ("fedprox", "hooks.passes=backwards", "unknown sequence of passes"),
        ("fedavg-topk", "upload.compress=zip", "unknown compression"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(method: str, override: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment(method, override)
    assert text in str(caught.value)


# --------------------------------------------------------------------------- server optimisers


def test_coordinates_nobody_sent_keep_their_bits_and_their_moments() -> None:
    layers = experiment("fedavg").server.layers
    W = {n: torch.randn(s) for n, s in layers.shapes.items()}
    mean = {n: w + 1 for n, w in W.items()}
    mask = torch.zeros(layers.shapes["fc1.weight"], dtype=torch.bool)
    mask[::2] = True
    for kind in ("momentum", "adam"):
        how = AggregateSettings(server=kind, server_lr=0.5)
        _, begun = optimize(W, mean, {"fc1.weight": None}, layers, how, {})
        new, moments = optimize(W, mean, {"fc1.weight": mask}, layers, how, begun)
        assert same({"w": new["fc1.weight"][1::2]}, {"w": W["fc1.weight"][1::2]})
        assert not bool((new["fc1.weight"][::2] == W["fc1.weight"][::2]).any())
        for name in moments:
            assert torch.equal(moments[name][1::2], begun[name][1::2])
            assert not torch.equal(moments[name][::2], begun[name][::2])


def test_a_server_without_momentum_or_with_its_learning_rate_at_one_is_the_mean() -> None:
    spec = experiment("fedavg").server.spec
    layers = spec.layers
    W = {n: torch.randn(s) for n, s in layers.shapes.items()}
    mean = {n: w + torch.randn(w.shape) for n, w in W.items()}
    sent = dict.fromkeys(W)
    plain = AggregateSettings()
    aggregator = Aggregator(apply=lambda W, updates, state: (mean, state))
    assert with_optimizer(aggregator, plain, spec) is aggregator, "the mean, to the bit"
    without = AggregateSettings(server="momentum", server_lr=1.0, beta1=0.0)
    got, _ = optimize(W, mean, sent, layers, without, {})
    assert all(torch.allclose(got[n], mean[n], atol=1e-6) for n in W)
    half, _ = optimize(W, mean, sent, layers, AggregateSettings(server_lr=0.5), {})
    assert all(torch.allclose(half[n], (W[n] + mean[n]) / 2, atol=1e-6) for n in W)


def test_running_statistics_are_averaged_and_not_optimised() -> None:
    e = experiment("resist")
    W, layers = e.start.W, e.server.layers
    mean = {n: w + 1 for n, w in W.items()}
    adam = AggregateSettings(server="adam", server_lr=0.1)
    new, moments = optimize(W, mean, dict.fromkeys(W), layers, adam, {})
    for n in layers.buffers:
        assert torch.equal(new[n], mean[n]) and f"m/{n}" not in moments


def test_an_empty_round_moves_no_moment() -> None:
    spec = experiment("fedavg").server.spec
    W = {n: torch.randn(s) for n, s in spec.layers.shapes.items()}
    aggregator = make_aggregator(AggregateSettings(server="adam", server_lr=0.1), spec)
    new, state = aggregator.apply(W, [], aggregator.init())
    assert same(new, W) and not state["moments"]


def test_compression_composes_with_fedp3_and_saves_the_bytes_it_promises() -> None:
    sizes = {}
    for kind in ("none", "fp16", "int8", "topk"):
        e = experiment("fedp3", f"upload.compress={kind}")
        _, record = run_round(e.server, e.start, sequential(e.client, e.shards).execute)
        assert not record.rejected
        sizes[kind] = record.bytes_up
    assert 2 * sizes["fp16"] == sizes["none"]
    assert sizes["int8"] < sizes["none"] / 3 and sizes["topk"] < sizes["none"] / 8


def test_a_residual_of_layers_that_are_not_uploaded_this_round_waits() -> None:
    """Top-k with redrawn layers: what was left out of a layer is stored until its next upload."""
    e = experiment("fedp3", "upload.compress=topk", "plan.layers=lowerb", "plan.redraw=true")
    spec = replace(e.server.spec, compression=UploadSettings(compress="topk", share=0.1))
    server = replace(e.server, spec=spec)
    engine = sequential(replace(e.client, spec=spec), e.shards)
    state, _ = run_round(server, e.start, engine.execute)
    first = {i: rounds[0].tensors for i, rounds in engine.states.by_client.items()}
    state, _ = run_round(server, state, engine.execute)
    for i, kept in first.items():
        later = engine.states.by_client[i][1].tensors
        assert set(kept) <= set(later)
        waiting = [n for n in kept if same({n: kept[n]}, {n: later[n]})]
        assert waiting or set(kept) == set(later)


def test_top_k_with_redrawn_layers_can_be_checkpointed(tmp_path: Path) -> None:
    """A residual that waits is in two states, and safetensors writes no tensor twice."""
    e = experiment(
        "fedp3", "upload.compress=topk", "plan.layers=lowerb", "plan.redraw=true", "run.rounds=4"
    )
    folder = tmp_path / "run"
    outcome = session.train(e, folder, lambda e, states: sequential(e.client, e.shards, states))
    checkpoint, broken = load_checkpoint(folder, e.config.digest())
    assert checkpoint is not None and not broken
    assert same(checkpoint.state.W, outcome.state.W)
