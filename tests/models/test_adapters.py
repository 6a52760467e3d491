"""Adapters beside frozen weights: as peft computes and merges them, and what is refused."""

import pytest
import torch
from torch import nn

import fedp3
from fedp3.core.errors import InputError
from fedp3.experiment.assemble import assemble_from
from fedp3.models.adapters import AdapterSettings, with_adapters
from fedp3.models.frozen import frozen_sha256, frozen_tensors, thaw
from fedp3.models.layer_map import layer_map
from fedp3.models.lora import lora_modules, merge
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.privacy.trial import uses_ghost


def gpt(blocks: int = 2) -> nn.Module:
    settings = ModelSettings(name="gpt", width=0.25, blocks=blocks, heads=2)
    return build(ModelSpec((12,), 20, settings), 0)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def lora(**more: object) -> AdapterSettings:
    return AdapterSettings(kind="lora", **{"rank": 3, "rule": "factors", **more})


def drawn(net: nn.Module) -> nn.Module:
    """Adapters that do something: B is zero at the start."""
    rng = torch.Generator().manual_seed(3)
    for adapter in lora_modules(net).values():
        adapter.b.weight.data.normal_(0, 0.3, generator=rng)
    return net


TOKENS = torch.arange(48).view(4, 12) % 20


def test_a_network_starts_as_it_was_and_only_b_moves_it():
    plain = gpt()
    before = {n: w.clone() for n, w in plain.state_dict().items()}
    adapted = with_adapters(plain, lora(), [], 0)
    assert torch.equal(adapted(TOKENS), plain(TOKENS))
    assert not torch.allclose(drawn(adapted)(TOKENS), plain(TOKENS), atol=1e-3)
    assert all(torch.equal(w, before[n]) for n, w in plain.state_dict().items())
    assert not lora_modules(plain)
    shared = frozen_tensors(adapted)["blocks.0.fc1.weight"]
    assert shared.data_ptr() == plain.blocks[0].fc1.weight.data_ptr()


def test_loss_gradients_and_merged_weights_are_those_of_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["qkv", "fc2"], lora_dropout=0.0)
    adapted = drawn(with_adapters(gpt(), lora(scale=2.0, targets=("qkv", "fc2")), [], 0))
    theirs = peft.get_peft_model(gpt(), config)
    values = dict(theirs.named_parameters())
    for path, adapter in lora_modules(adapted).items():
        for theirs_name, ours in (("A", adapter.a), ("B", adapter.b)):
            name = f"base_model.model.{path}.lora_{theirs_name}.default.weight"
            values[name].data.copy_(ours.weight.data)

    def loss(net: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(net(TOKENS).flatten(0, 1), TOKENS.flatten().roll(-1))

    ours, reference = loss(adapted), loss(theirs)
    assert float((ours - reference).detach().abs()) < 1e-5
    ours.backward()
    reference.backward()
    for path, adapter in lora_modules(adapted).items():
        for theirs_name, m in (("A", adapter.a), ("B", adapter.b)):
            want = values[f"base_model.model.{path}.lora_{theirs_name}.default.weight"].grad
            assert torch.allclose(m.weight.grad, want, atol=1e-5), path
    thaw(adapted)
    merge(adapted)
    merged = theirs.merge_and_unload().state_dict()
    assert adapted.state_dict().keys() == merged.keys() == gpt().state_dict().keys()
    for n, w in adapted.state_dict().items():
        assert torch.allclose(w, merged[n], atol=1e-5), n


def test_the_adapters_of_a_block_are_one_layer_and_its_pairs_are_units():
    for rule, tensors in (("factors", ("a", "b")), ("freeze_a", ("b",))):
        layers = layer_map(with_adapters(gpt(), lora(rule=rule, targets=("qkv", "fc1")), [], 0))
        assert list(layers.layers) == ["blocks.0", "blocks.1", "head"]
        paths = ("blocks.0.attention.qkv", "blocks.0.fc1")
        assert layers.layers["blocks.0"] == tuple(f"{p}.{t}.weight" for p in paths for t in tensors)
        assert {g: (u.units, u.layer) for g, u in layers.groups.items() if not u.fixed} == {
            "blocks.0.rank": (3, "blocks.0"), "blocks.1.rank": (3, "blocks.1"),
        }  # fmt: skip
        assert set(layers.frozen) | set(layers.shapes) >= {f"{p}.base.weight" for p in paths}


def test_the_seed_determines_a_which_is_never_sent():
    hashes = [frozen_sha256(with_adapters(gpt(), lora(rule="freeze_a"), [], s)) for s in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_trains_beside_adapters_can_be_chosen():
    names = ("norm", "blocks.1.norm2")
    layers = layer_map(with_adapters(gpt(), lora(train=names), [], 0))
    assert list(layers.layers) == ["blocks.0", "blocks.1", "norm"]
    assert "blocks.1.norm2.weight" in layers.layers["blocks.1"]
    without = layer_map(with_adapters(gpt(), lora(), ["head.weight"], 0))
    assert list(without.layers) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("net", "settings", "text"),
    [
        (chain, lora(), "like a projection of queries or values; the network has 0, 2, 4$"),
        (gpt, lora(targets=("quey",)), r"named 'quey'; the network has blocks\.\*\.attention\.qkv"),
        (gpt, lora(rank=17), r"rank: 17 is above the width of blocks\.0\.attention\.qkv, .* 16 "),
        (gpt, lora(targets=("head",)), "head is trained itself"),
        (gpt, lora(train=("tail",)), r"\[adapter\] train: the network has no layer"),
        (
            lambda: with_adapters(gpt(), lora(), [], 0),
            lora(),
            "has adapters already",
        ),
    ],
)
def test_mistakes_are_answered_before_training(net, settings, text):
    with pytest.raises(InputError, match=text):
        with_adapters(net(), settings, [], 0)


@pytest.fixture
def data():
    y = torch.arange(80) % 2
    return torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None], y


RUN = {
    "method": "ffa-lora",
    "adapter": {"targets": ["0", "2"], "rank": 4},
    "partition": {"kind": "iid", "clients": 4},
    "local": {"steps": 2, "lr": 0.1},
    "run": {"rounds": 2, "clients_per_round": 4, "eval_every": 0},
}


def test_any_network_gets_adapters_and_is_given_back_merged(data):
    plain = chain()
    before = {n: w.clone() for n, w in plain.state_dict().items()}
    result = fedp3.run(plain, data, **RUN)
    assert result.weights.keys() == {"0.b.weight", "2.b.weight", "4.weight", "4.bias"}
    assert all(torch.equal(w, before[n]) for n, w in plain.state_dict().items())
    merged = result.model.state_dict()
    assert merged.keys() == before.keys()
    moved = {n for n, w in merged.items() if not torch.equal(w, before[n])}
    assert moved == {"0.weight", "2.weight", "4.weight", "4.bias"}
    adapted = with_adapters(plain, AdapterSettings(kind="lora", **RUN["adapter"]), [], 0)
    for n in ("0", "2"):
        a = frozen_tensors(adapted)[f"{n}.a.weight"]
        want = before[f"{n}.weight"] + 2.0 * result.weights[f"{n}.b.weight"] @ a
        assert torch.allclose(merged[f"{n}.weight"], want, atol=1e-6)


@pytest.mark.parametrize("rule", ["freeze_a", "factors"])
def test_under_ldp_without_noise_or_clip_adapters_train_as_without_ldp(rule, data):
    """Ghost clipping covers adapters: they are linear layers."""
    adapter = {**RUN["adapter"], "rule": rule}
    private = {
        "enabled": True, "epsilon": float("inf"), "clip": 1e6, "sample_rate": 1.0,
        "randomness": "seeded", "delta": 1e-3,
    }  # fmt: skip
    from fedp3 import config
    from fedp3.data import from_tensors

    plain = {**RUN, "adapter": adapter, "local": {"steps": 2, "lr": 0.1, "batch": 100}}
    without = fedp3.run(chain(), data, **plain)
    result = fedp3.run(chain(), data, **{**plain, "privacy": private})
    for n, w in without.weights.items():
        assert torch.allclose(result.weights[n], w, atol=1e-6), n
    sections = {**RUN, "adapter": adapter, "privacy": private, "model": {"name": "own"}}
    sections |= {"data": {"name": "own"}}
    e = assemble_from(config.parse(sections), chain(), from_tensors(*data))
    assert uses_ghost(e.client)
