"""The GPT and the ViT compute what they should, and their blocks are layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedp3
from fedp3.core.errors import InputError
from fedp3.models.layer_map import layer_map
from fedp3.models.transformer_blocks import find_blocks
from fedp3.models.zoo import ModelSettings, ModelSpec, build


def small(name: str, shape: tuple[int, ...], outputs: int, **settings: Any) -> nn.Module:
    chosen = {"width": 0.25, "heads": 2, "blocks": 3, **settings}
    return build(ModelSpec(shape, outputs, ModelSettings(name=name, **chosen)), 0)


def attention_by_loops(net: Any, x: Tensor, *, causal: bool) -> Tensor:
    """Softmax attention, one head, record and token after the other."""
    records, tokens, width = x.shape
    q, k, v = net.qkv(x).chunk(3, dim=-1)
    per_head = net.head_width
    mixed = torch.zeros_like(x)
    for r in range(records):
        for h in range(width // per_head):
            part = slice(h * per_head, (h + 1) * per_head)
            for t in range(tokens):
                seen = t + 1 if causal else tokens
                scores = k[r, :seen, part] @ q[r, t, part] / per_head**0.5
                mixed[r, t, part] = scores.softmax(0) @ v[r, :seen, part]
    return net.out(mixed)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_a_loop(causal: bool) -> None:
    net = small("gpt" if causal else "vit", (5,) if causal else (1, 8, 8), 7)
    attention = net.blocks[0].attention  # type: ignore[union-attr, index]
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    expected = attention_by_loops(attention, x, causal=causal)
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-6)


def test_a_gpt_does_not_see_the_future() -> None:
    net = small("gpt", (6,), 11).eval()
    x = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 11
    a, b = net(x), net(other)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert not torch.allclose(a[:, 4:], b[:, 4:])
    assert a.shape == (2, 6, 11) and net(x[:, :3]).shape == (2, 3, 11)


def test_a_vit_is_a_function_of_all_patches() -> None:
    net = small("vit", (1, 8, 8), 4).eval()
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for i, j in ((0, 0), (0, 7), (7, 0), (7, 7)):
        other = x.clone()
        other[:, :, i, j] += 1
        assert not torch.allclose(net(x), net(other))


def test_samples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="sequences of tokens"):
        small("gpt", (1, 8, 8), 4)
    with pytest.raises(InputError, match="patches of 3x3"):
        small("vit", (1, 8, 8), 4, patch=3)


# --------------------------------------------------------------------------- blocks


def test_blocks_embedding_norm_and_head_are_layers() -> None:
    blocks = {f"blocks.{i}": 12 for i in range(3)}
    gpt = layer_map(small("gpt", (6,), 11))
    assert {l: len(names) for l, names in gpt.layers.items()} == (
        {"embedding": 2} | blocks | {"norm": 2, "head": 1}
    )
    vit = layer_map(small("vit", (1, 8, 8), 4))
    assert {l: len(names) for l, names in vit.layers.items()} == (
        {"embedding": 3} | blocks | {"norm": 2, "ffc": 2}
    )


class Encoder(nn.Module):
    """As Hugging Face nests them: `encoder.layer.0`, with parts on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 8))
        self.embeddings = nn.ModuleDict({"word": nn.Embedding(9, 8), "norm": nn.LayerNorm(8)})
        layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 3)


class Pairs(nn.Module):
    """Blocks that are lists themselves: attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [
            nn.ModuleList([nn.Sequential(nn.MultiheadAttention(8, 2)), nn.Linear(8, 8)])
            for _ in range(2)
        ]
        self.layers = nn.ModuleList(pairs)
        self.head = nn.Linear(8, 3)


def test_blocks_are_found_in_other_structures() -> None:
    layers = layer_map(Encoder()).layers
    assert list(layers) == [
        "embedding",
        "encoder.layer.0",
        "encoder.layer.1",
        "pooler",
        "classifier",
    ]
    assert len(layers["embedding"]) == 4
    assert find_blocks(Pairs()) == ["layers.0", "layers.1"]
    one = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.TransformerEncoderLayer(8, 2)))
    assert find_blocks(one) == ["1.0"]
    assert find_blocks(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))) == []


def test_units_of_the_mlp_of_a_block_can_be_pruned_and_the_residual_stream_cannot() -> None:
    groups = layer_map(small("gpt", (6,), 11)).groups
    free = {g for g, group in groups.items() if not group.fixed}
    assert free == {f"blocks.{i}.fc1" for i in range(3)}


def test_a_window_of_blocks_uploads_only_its_blocks() -> None:
    x = torch.randint(11, (60, 6), generator=torch.Generator().manual_seed(0))
    data = fedp3.from_tensors(x[:, :-1], x[:, 1:], labelled=False)
    result = fedp3.run(
        small("gpt", (6,), 11),
        data,
        objective="language_modelling",
        plan={"layers": "opu2"},
        partition={"clients": 5},
        run={"rounds": 1, "clients_per_round": 0},
    )
    rows = [row["layers"] for row in result.per_client]
    assert all(len(layers) == 3 and layers[-1] == "head" for layers in rows)
    assert {l for layers in rows for l in layers} == set(result.experiment.server.layers.layers)
