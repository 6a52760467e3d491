"""Runs of transformers from folders: training, resuming, privacy and costs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import fedp3
import hf_folders as H
from fedp3.client.objectives import OBJECTIVES
from fedp3.client.sgd import load_weights, named_tensors
from fedp3.core.errors import InputError, PlanError
from fedp3.core.types import ClientPlan, LayerPlan
from fedp3.costs.compute import flops, measure_on, step_bytes
from fedp3.costs.traffic import traffic
from fedp3.data import Batch, batch, first_record
from fedp3.data.inputs import map_tensors
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.methods import METHODS
from fedp3.models.layer_map import layer_map
from fedp3.models.skipping import without_blocks
from fedp3.planning.prune_settings import PruneSettings
from fedp3.privacy.clipping import func_pieces
from fedp3.runs import export, session
from fedp3.runs.networks import Trained, network
from fedp3.runs.rehearsal import audit_subject


def settings(root: Path, kind: str, *more: str) -> Any:
    if not (root / kind).exists():
        H.folder(root / kind, kind)
    if not (root / "words.txt").exists():
        H.write_tsv(root / "sentences.tsv", H.sentences(60))
        H.write_text(root / "words.txt", 300)
    data = ("data.name=tsv", "data.path=sentences.tsv", "partition.kind=iid")
    if kind in ("gpt2", "llama"):
        data = ("data.name=text", "data.path=words.txt", "partition.kind=iid")
    return fedp3.make_config(
        *("model.name=hf", f"model.path={root / kind}", "data.length=8", *data),
        *("partition.clients=2", "run.clients_per_round=0", "run.rounds=2", "local.steps=3"),
        *("local.batch=4", "local.lr=0.1", "local.clip_norm=0", "run.eval_every=0"),
        *("plan.layers=full", *more),
    )


def trained(experiment: Experiment, folder: Path | None = None, **more: Any) -> Any:
    def engine(e: Experiment, states: Any) -> Any:
        return make_engine(e, 1, states, "inprocess")

    return session.train(experiment, folder, engine, **more)


def experiment_of(root: Path, kind: str, *more: str) -> Experiment:
    return assemble(settings(root, kind, *more), root)


# --------------------------------------------------------------------------- training


def test_an_exported_folder_names_the_classes(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, "bert", "run.rounds=1")
    names = experiment.client.data.class_names
    state = trained(experiment).state
    export.export(
        Trained(experiment=experiment, state=state, clients={}), tmp_path / "out", format="hf"
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert names and written["id2label"] == {str(i): name for i, name in enumerate(names)}
    assert written["label2id"] == {name: i for i, name in enumerate(names)}


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_one_client_trains_as_a_plain_loop_over_the_model_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    """With tied weights (GPT-2) and without: gradients of both uses of a tensor are added up."""
    whole = ("method=fedavg", "partition.clients=1", "local.epochs=1", "local.batch=1000")
    e = experiment_of(tmp_path, kind, *whole, "run.rounds=3")
    result = trained(e)
    own, data, indices = H.model(kind), e.client.data, e.shards[0].train
    x, y = batch(data, indices), data.y[indices]
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        logits = own(x).logits if isinstance(x, torch.Tensor) else own(**x).logits
        if kind == "gpt2":  # the mean over each record's own tokens
            losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            real = y != -100
            ((losses.view(y.shape) * real).sum(1) / real.sum(1)).mean().backward()
        else:
            F.cross_entropy(logits, y).backward()
        optimizer.step()
    expected = dict(own.named_parameters())
    assert set(result.state.W) == {f"net.{n}" for n in expected}
    for n, w in expected.items():
        torch.testing.assert_close(result.state.W[f"net.{n}"], w.detach(), rtol=1e-4, atol=1e-5)


def test_a_run_records_its_files_and_labels_and_resumes_only_with_the_same_folder(
    tmp_path: Path,
) -> None:
    def crash(record: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        trained(experiment_of(tmp_path, "bert"), folder, watch=session.watch_with(crash))
    about = json.loads((folder / "run.json").read_text())
    assert about["class_names"] == sorted(H.WORDS[: H.CLASSES])
    assert set(about["model_files"]) == {"config.json", "model.safetensors"}
    H.folder(tmp_path / "bert", "bert", seed=1)
    with pytest.raises(InputError, match="was begun with other model files"):
        trained(experiment_of(tmp_path, "bert"), folder, resume=True)
    H.folder(tmp_path / "bert", "bert", seed=0)
    assert trained(experiment_of(tmp_path, "bert"), folder, resume=True).state.t == 2


# --------------------------------------------------------------------------- privacy


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_gradients_of_records_are_those_of_a_loop_over_records(kind: str, tmp_path: Path) -> None:
    e = experiment_of(tmp_path, kind)
    net, data = e.client.net.train(), e.client.data
    loss = OBJECTIVES.pick(data.objective).loss
    x, y = batch(data, torch.arange(3)), data.y[:3]
    W = dict(net.named_parameters())
    pieces = func_pieces(net, x, y, W, {}, loss)
    c = torch.tensor([0.5, 1.0, 2.0])
    for n in W:
        total, squares = torch.zeros_like(W[n]), []
        for j in range(3):
            one = map_tensors(lambda w, j=j: w[j : j + 1], x)  # type: ignore[misc]
            alone = Batch(one, y[j : j + 1])
            outputs = net(one) if isinstance(one, torch.Tensor) else net(**one)
            (g,) = torch.autograd.grad(
                loss(outputs, alone).sum(), [W[n]], allow_unused=True, materialize_grads=True
            )
            squares.append(g.square().sum())
            total += c[j] * g
        found = torch.zeros_like(W[n])
        pieces[n][1](found, c, torch.tensor([], dtype=torch.int64))
        torch.testing.assert_close(pieces[n][0], torch.stack(squares), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found, total, rtol=1e-3, atol=1e-5)


LDP = ("privacy.enabled=true", "privacy.delta=1e-3", "privacy.epsilon=50", "plan.layers=full")


def test_windows_that_overlap_are_refused_under_ldp_and_lines_are_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sequences of the text overlap"):
        experiment_of(tmp_path, "gpt2", *LDP, "data.stride=2")
    assert experiment_of(tmp_path, "bert", *LDP).server.budget is not None


# --------------------------------------------------------------------------- blocks left out

CLIENTS = "partition.clients=3"


def skipping(e: Experiment, block: str) -> tuple[ClientPlan, ClientPlan]:
    """The plan of all layers, and the one without a block."""
    skip = LayerPlan(send="skip", train=False, upload="none")
    inside = e.server.layers.residual[block]
    full = ClientPlan(0, dict.fromkeys(e.server.layers.layers, LayerPlan()))
    return full, ClientPlan(0, {l: skip if l in inside else p for l, p in full.layers.items()})


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_costs_without_a_block_are_those_of_a_network_that_does_not_have_it(
    kind: str, tmp_path: Path
) -> None:
    e = experiment_of(tmp_path, kind, "plan.layers=full")
    block = list(e.server.layers.residual)[1]
    full, skipped = skipping(e, block)
    layers, pruning, like = e.server.layers, PruneSettings(keep=1.0), first_record(e.client.data)
    profile = measure_on(e.client.net, like, e.client.objective)
    small = without_blocks(assemble(e.config, tmp_path).client.net, [block])
    small_layers, small_profile = layer_map(small), measure_on(small, like, e.client.objective)
    plan = ClientPlan(0, dict.fromkeys(small_layers.layers, LayerPlan()))
    counted = flops(profile, skipped, layers, pruning)
    assert counted == flops(small_profile, plan, small_layers, pruning)
    assert counted < flops(profile, full, layers, pruning)
    memory = step_bytes(profile, skipped, layers, pruning, 4, 0)
    assert memory == step_bytes(small_profile, plan, small_layers, pruning, 4, 0)
    assert traffic(skipped, layers, pruning) == traffic(plan, small_layers, pruning)


def test_flops_count_both_uses_of_a_tied_tensor(tmp_path: Path) -> None:
    H.folder(tmp_path / "llama", "llama", tie_word_embeddings=False)
    untied = experiment_of(tmp_path, "llama", "plan.layers=full")
    H.folder(tmp_path / "llama", "llama")
    tied = experiment_of(tmp_path, "llama", "plan.layers=full")
    counted = [
        flops(
            measure_on(e.client.net, first_record(e.client.data), e.client.objective),
            e.first_plans[0],
            e.server.layers,
            PruneSettings(keep=1.0),
        )
        for e in (untied, tied)
    ]
    assert counted[0] == counted[1] > 0


def test_a_client_scores_and_exports_the_network_without_its_skipped_blocks(tmp_path: Path) -> None:
    e = experiment_of(tmp_path, "bert", "plan.layers=blocks-1", "plan.others=skip", CLIENTS)
    result = trained(e)
    run = Trained(experiment=e, state=result.state, clients={})
    net = network(run, "dispatched", 0)
    kept = [l for l in e.first_plans[0].full_layers if l in e.server.layers.residual]
    assert len(kept) == 1
    blocks = {n.partition(".attention")[0] for n, _ in net.named_parameters() if "attention" in n}
    assert blocks == set(kept)
    whole = network(run, "global")
    load_weights(named_tensors(whole), result.state.W)
    without_blocks(whole, [b for b in e.server.layers.residual if b not in kept])
    x = batch(e.client.data, torch.arange(3))
    assert torch.equal(net(**x), whole(**x))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("plan.layers=opu2", "plan.others=skip"), "would skip layer 'net.bert.embeddings'"),
        (
            ("plan.layers=opu7", "plan.others=skip", "model.layers=sublayers"),
            "and not the rest of its block",
        ),
        (("model.name=mlp", "model.path=''", "data.name=digits", "data.path=''",
          "data.length=64", "plan.layers=blocks-1"), "this network has none that are known"),
        (("model.name=mlp", "model.path=''", "data.name=digits", "data.path=''",
          "data.length=64", "prune.heads=true", "prune.selector=rolling"),
         "no attention heads that can be pruned"),
    ],
)  # fmt: skip
def test_plans_that_a_network_does_not_allow_are_refused(
    more: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=reason):
        experiment_of(tmp_path, "bert", *more)


LABELLED = ("data.name=tsv", "data.path=sentences.tsv")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder_classifies_with_units_cut_with_adapters_and_under_ldp(
    kind: str, tmp_path: Path
) -> None:
    cut = ("method=heterofl", "prune.keep=0.5", "prune.heads=true", "hooks.scale=false")
    private = ("privacy.enabled=true", "privacy.delta=1e-3", "privacy.noise_multiplier=0.5")
    for more in ((), cut, ("method=ffa-lora", "adapter.rank=2"), private):
        result = trained(experiment_of(tmp_path, kind, *LABELLED, *more)).result
        assert result["score"]["name"] == "accuracy" and not result["rejected"], more


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_embedding_and_head_name_layers_of_every_folder(kind: str, tmp_path: Path) -> None:
    e = experiment_of(tmp_path, kind, "model.frozen=['embedding']")
    tables = [n for n, m in e.client.net.named_modules() if isinstance(m, torch.nn.Embedding)]
    assert {f"{n}.weight" for n in tables} <= {n for n, _ in e.client.net.named_buffers()}
    e = experiment_of(tmp_path, kind, "model.frozen=['head']")
    assert not any("classifier" in n or "lm_head" in n for n in e.client.initial)


def test_an_audit_of_token_ids_is_refused_before_it_starts(tmp_path: Path) -> None:
    private = ("privacy.enabled=true", "privacy.delta=1e-3", "privacy.noise_multiplier=2")
    with pytest.raises(InputError, match="an audit attacks a run with made-up records of real"):
        audit_subject(experiment_of(tmp_path, "bert", *private))


WITH_HOOKS = [name for name, method in METHODS.items() if "hooks" in method.settings]
OF_OWN_NETWORKS = [name for name in WITH_HOOKS if name.startswith("fedcr")]


@pytest.mark.parametrize("method", sorted({*WITH_HOOKS} - {*OF_OWN_NETWORKS}))
def test_methods_with_code_of_their_own_train_a_text_encoder(method: str, tmp_path: Path) -> None:
    more = (f"method={method}", "partition.clients=5", "local.steps=1", "run.rounds=1")
    assert not trained(experiment_of(tmp_path, "bert", *more)).result["rejected"]


@pytest.mark.parametrize("method", OF_OWN_NETWORKS)
def test_a_stochastic_code_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stochastic code"):
        experiment_of(tmp_path, "bert", f"method={method}")
