"""Blocks of transformers: fewer heads and units equal masked ones, and blocks that are left out."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_folders as H
from fedp3.core import masks as M
from fedp3.core.errors import InputError
from fedp3.core.types import ClientPlan, LayerMap, LayerPlan
from fedp3.data.inputs import call
from fedp3.models import shrinking
from fedp3.models.hf_folder import KINDS
from fedp3.models.layer_map import layer_map
from fedp3.models.skipping import blocks_left_out, left_out, skipped_blocks, without_blocks
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.prune_settings import PruneSettings
from fedp3.planning.pruning import masks_for
from models.test_hf import loss_of, network, records

OWN = ("gpt", "vit-own")
ALL = (*KINDS, *OWN)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> Path:
    pytest.importorskip("transformers")
    root: Path = tmp_path_factory.mktemp("folders")
    for kind in KINDS:
        H.folder(root / kind, kind)
    return root


def case(kind: str, folders: Path) -> tuple[Any, Any, Tensor]:
    """A network, inputs and targets."""
    if kind not in OWN:
        return network(kind, folders), *records(kind)
    settings = ModelSettings(name=kind.removesuffix("-own"), width=0.125, heads=4, blocks=3)
    shape: tuple[int, ...] = (1, 8, 8)
    x, y = records("vit")[0]["pixel_values"], torch.arange(4) % 3
    if kind == "gpt":
        shape, (inputs, y) = (10,), records("gpt2")
        x = inputs["input_ids"]
    return build(ModelSpec(shape, H.VOCABULARY, settings), 0), x, y


def some_units(layers: LayerMap, seed: int) -> dict[str, Tensor]:
    """At least one unit of every group that can be pruned."""
    rng = torch.Generator().manual_seed(seed)
    units = {}
    for g, group in layers.groups.items():
        if not group.fixed:
            count = int(torch.randint(1, group.units + 1, (), generator=rng))
            units[g] = torch.randperm(group.units, generator=rng)[:count].sort().values
    return units


def gradients(net: nn.Module, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    loss = loss_of(call(net, x), y)
    loss.backward()
    return loss.detach(), {n: w.grad for n, w in net.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ALL)
def test_a_network_without_some_heads_and_units_equals_the_masked_one(
    kind: str, seed: int, folders: Path
) -> None:
    net, x, y = case(kind, folders)
    layers = layer_map(net, heads=True)
    units = some_units(layers, seed)
    assert {layers.groups[g].heads for g in units} == {True, False}
    counts = shrinking.counts_of(units)
    small = shrinking.shrink_net(net, layers, counts)
    W = {n: w.detach().clone() for n, w in net.named_parameters()}
    with torch.no_grad():
        for n, w in net.named_parameters():
            w.copy_(M.zero_pruned(w, M.block(n, units, layers)))
        for n, w in small.named_parameters():
            w.copy_(shrinking.take_units({n: W[n]}, units, layers)[n])
    assert sum(w.numel() for w in small.parameters()) < sum(w.numel() for w in net.parameters())
    loss, full = gradients(net, x, y)
    small_loss, cut = gradients(small, x, y)
    torch.testing.assert_close(small_loss, loss, rtol=1e-5, atol=1e-5)
    for n, g in cut.items():
        expected = M.take(full[n], M.block(n, units, layers))
        torch.testing.assert_close(g, expected, rtol=1e-4, atol=1e-5)
    back = shrinking.write_back(W, dict(small.named_parameters()), units, layers)
    assert all(torch.equal(back[n], W[n]) for n in back)


def test_heads_of_grouped_queries_are_pruned_together(folders: Path) -> None:
    """Llama with 4 heads of queries and 2 of keys: a unit is 2 heads of queries and 1 of keys."""
    net, _, _ = case("llama", folders)
    layers = layer_map(net, heads=True)
    block = "net.model.layers.0.self_attn"
    units = {f"{block}.k_proj": torch.tensor([1])}
    rows = {
        n: M.block(f"{block}.{n}.weight", units, layers) for n in ("q_proj", "k_proj", "v_proj")
    }
    assert rows["q_proj"].rows.tolist() == list(range(8, 16))
    assert rows["k_proj"].rows.tolist() == rows["v_proj"].rows.tolist() == list(range(4, 8))
    out = M.block(f"{block}.o_proj.weight", units, layers)
    assert out.rows is None and out.cols.tolist() == list(range(8, 16))


def test_queries_keys_and_values_that_are_one_layer_are_pruned_together(folders: Path) -> None:
    net, _, _ = case("gpt", folders)
    layers = layer_map(net, heads=True)
    units = {"blocks.1.attention.qkv": torch.tensor([0, 2])}  # of 4 heads, each 4 wide
    rows = M.block("blocks.1.attention.qkv.bias", units, layers).rows
    one = [0, 1, 2, 3, 8, 9, 10, 11]
    assert rows.tolist() == [16 * part + j for part in range(3) for j in one]


@pytest.mark.parametrize(
    ("kind", "group", "rows"),
    [
        ("gpt", "blocks.0.attention.qkv", True),
        ("gpt2", "net.transformer.h.0.attn.c_attn", False),
        ("gpt2", "net.transformer.h.0.mlp.c_fc", False),
        ("bert", "net.bert.encoder.layer.0.attention.self.key", True),
    ],
)
def test_the_largest_units_are_those_with_the_largest_weights(
    kind: str, group: str, rows: bool, folders: Path
) -> None:
    """Whether weights are stored by rows or columns, and queries, keys and values at once."""
    net, _, _ = case(kind, folders)
    layers = layer_map(net, heads=True)
    W = {n: w.detach() for n, w in net.named_parameters()}
    plan = ClientPlan(0, dict.fromkeys(layers.layers, LayerPlan(send="pruned", keep=0.5)))
    settings = PruneSettings(selector="neuron_norm", heads=True)
    chosen = masks_for(plan, W, layers, settings, 0, 0).units[group].tolist()
    weight = W[f"{group}.weight"]
    squares = []
    for unit in range(layers.groups[group].units):
        block = M.block(f"{group}.weight", {group: torch.tensor([unit])}, layers)
        indices = block.rows if rows else block.cols
        squares.append(float((weight[indices] if rows else weight[:, indices]).square().sum()))
    largest = sorted(range(len(squares)), key=lambda j: -squares[j])[: len(chosen)]
    assert chosen == sorted(largest)


def test_heads_are_fixed_unless_they_are_asked_for(folders: Path) -> None:
    net, _, _ = case("bert", folders)
    reasons = {g.fixed for g in layer_map(net).groups.values() if g.heads}
    assert reasons == {"[prune] heads is false"}
    own, _, _ = case("gpt", folders)
    assert not any(g.heads for g in layer_map(own).groups.values())


def test_an_activation_that_does_not_map_zero_to_zero_fixes_the_units_of_the_mlp(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    H.folder(tmp_path / "bert", "bert", hidden_act="sigmoid")
    layers = layer_map(network("bert", tmp_path), heads=True)
    reasons = {g.fixed for g in layers.groups.values() if not g.heads}
    assert reasons == {"the activation does not map 0 to 0"}


def test_a_block_with_a_replaced_layer_has_no_known_units(folders: Path) -> None:
    net, _, _ = case("bert", folders)
    net.net.bert.encoder.layer[1].attention.self.query = nn.Sequential(nn.Linear(8, 8))
    groups = layer_map(net, heads=True).groups
    assert any("layer.0" in g for g in groups) and not any("layer.1" in g for g in groups)


# --------------------------------------------------------------------------- blocks left out

LISTS = {
    "bert": "bert.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
    "roberta": "roberta.encoder.layer",
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "vit": "vit.layers",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_left_out_is_a_model_of_transformers_without_it(kind: str, folders: Path) -> None:
    net, x, _ = case(kind, folders)
    own = H.model(kind)
    parent, _, name = LISTS[kind].rpartition(".")
    blocks = own.get_submodule(LISTS[kind])
    setattr(own.get_submodule(parent), name, nn.ModuleList([blocks[0], blocks[2]]))
    skipped = f"net.{LISTS[kind]}.1"
    whole = call(net, x)
    with left_out(net, [skipped]):
        assert skipped_blocks(net) == (skipped,)
        logits = call(net, x)
    assert not skipped_blocks(net) and torch.equal(call(net, x), whole)
    torch.testing.assert_close(logits, own(**x).logits, rtol=1e-5, atol=1e-5)
    smaller = without_blocks(deepcopy(net), [skipped])
    assert torch.equal(call(smaller, x), logits)
    assert not any(n.startswith(skipped) for n, _ in smaller.named_parameters())


def test_smaller_networks_are_cached_apart_from_those_without_blocks(folders: Path) -> None:
    net, _, _ = case("gpt", folders)
    layers = layer_map(net, heads=True)
    counts: Mapping[str, int] = {"blocks.0.fc1": 3}
    with left_out(net, ["blocks.1"]):
        inside = shrinking.small_net(net, layers, counts)
    outside = shrinking.small_net(net, layers, counts)
    assert skipped_blocks(inside) == ("blocks.1",) and skipped_blocks(outside) == ()


def test_a_block_is_left_out_if_all_of_its_layers_are_skipped(folders: Path) -> None:
    net, _, _ = case("gpt", folders)
    layers = layer_map(net, sublayers=True)
    skip = LayerPlan(send="skip", train=False, upload="none")
    half = {"blocks.1.attention"}
    both = half | {"blocks.1.mlp"}
    plans = [
        ClientPlan(0, {l: skip if l in some else LayerPlan() for l in layers.layers})
        for some in (half, both)
    ]
    assert [blocks_left_out(plan, layers) for plan in plans] == [(), ("blocks.1",)]


def test_blocks_of_unknown_classes_are_neither_skipped_nor_divided() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Odd(), Odd()), nn.Linear(4, 2))
    assert layer_map(net).residual == {}
    with pytest.raises(InputError, match=r"the parts of 1\.0, an Odd, are not known"):
        layer_map(net, sublayers=True)
    encoder = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])
    assert set(layer_map(encoder, sublayers=True).residual) == {"0", "1"}
