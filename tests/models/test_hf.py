"""Folders of transformers: the same numbers as its own models, and nothing else is read."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import hf_folders as H
from fedp3.core.errors import InputError
from fedp3.models.hf import files_of
from fedp3.models.hf_folder import KINDS
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build

LENGTH = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> Path:
    root: Path = tmp_path_factory.mktemp("folders")
    for kind in KINDS:
        H.folder(root / kind, kind)
    return root


def spec(kind: str, folder: Path, **changed: Any) -> ModelSpec:
    reads = KINDS[kind].reads
    settings = {"name": "hf", "path": str(folder), **changed.pop("settings", {})}
    usual = {
        "shape": (1, 8, 8) if reads == "images" else (LENGTH,),
        "classes": H.VOCABULARY if reads == "text" else H.CLASSES,
        "labelled": reads != "text",
        "vocabulary": 0 if reads == "images" else H.VOCABULARY,
    }
    return ModelSpec(**{**usual, **changed}, settings=ModelSettings(**settings))


def network(kind: str, root: Path, **changed: Any) -> Any:
    return build(spec(kind, root / kind, **changed), seed=0)


def records(kind: str, count: int = 4) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with padding at the end of some, and targets."""
    rng = torch.Generator().manual_seed(1)
    if KINDS[kind].reads == "images":
        return {"pixel_values": torch.randn(count, 1, 8, 8, generator=rng)}, torch.arange(count) % 3
    ids = torch.randint(4, H.VOCABULARY, (count, LENGTH), generator=rng)
    mask = (
        torch.arange(LENGTH) < torch.tensor([LENGTH - j % 4 for j in range(count)])[:, None]
    ).long()
    x = {"input_ids": ids * mask, "attention_mask": mask}
    if KINDS[kind].reads == "sequences":
        return x, torch.arange(count) % H.CLASSES
    return x, torch.roll(ids, -1, 1).masked_fill(mask == 0, -100)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=-100)


# --------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_are_those_of_transformers(kind: str, folders: Path) -> None:
    net, own = network(kind, folders).train(), H.model(kind)
    x, y = records(kind)
    a, b = loss_of(net(**x), y), loss_of(own(**x).logits, y)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    a.backward()
    b.backward()
    gradients = dict(net.net.named_parameters())
    for n, w in own.named_parameters():
        torch.testing.assert_close(gradients[n].grad, w.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder_classifies_by_the_last_token_as_transformers_does(
    kind: str, folders: Path, tmp_path: Path
) -> None:
    import transformers

    changed = {"classes": H.CLASSES, "labelled": True}
    net = network(kind, folders, **changed).eval()
    assert list(layer_map(net).layers)[-1] == "net.score"
    x, _ = records(kind)
    shape = (len(x["input_ids"]), H.CLASSES)
    assert net(**x).shape == shape and net(x["input_ids"]).shape == shape
    net.net.save_pretrained(tmp_path)
    own = getattr(transformers, KINDS[kind].classifier).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(net(**x), own(**x).logits, rtol=1e-5, atol=1e-5)
    again = build(spec(kind, tmp_path, **changed), seed=5).eval()
    assert torch.equal(again(**x), net(**x)), "its head is read, not drawn"


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_padding_and_other_records_change_nothing(kind: str, folders: Path) -> None:
    net = network(kind, folders).eval()
    x, _ = records(kind)
    other = x["input_ids"].where(x["attention_mask"] == 1, 7)
    a, b = net(**x), net(other, x["attention_mask"])
    real = x["attention_mask"] == 1 if kind == "llama" else slice(None)
    assert torch.equal(a[real], b[real])
    alone = net(x["input_ids"][1:2], x["attention_mask"][1:2])
    torch.testing.assert_close(alone[0], a[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_embedding_norms_and_heads_are_layers(kind: str, folders: Path) -> None:
    layers = layer_map(network(kind, folders))
    first, *blocks = layers.residual
    names = [name.removeprefix("net.") for name in layers.layers]
    before, after = names[: names.index(first[4:])], names[-2:]
    assert len(before) == 1 and "embed" in before[0] and len(blocks) == 2
    assert (
        after
        == {
            "bert": ["bert.pooler.dense", "classifier"],
            "distilbert": ["pre_classifier", "classifier"],
            "roberta": ["classifier.dense", "classifier.out_proj"],
            "gpt2": ["transformer.h.2", "transformer.ln_f"],
            "llama": ["model.layers.2", "model.norm"],
            "vit": ["vit.layernorm", "classifier"],
        }[kind]
    )
    finer = layer_map(network(kind, folders), sublayers=True)
    assert len(finer.layers) == len(layers.layers) + 3
    assert sorted(n for names in finer.layers.values() for n in names) == sorted(layers.shapes)
    assert all(len(inside) == 2 for inside in finer.residual.values())


def test_tied_weights_belong_to_the_embedding_and_untied_ones_to_the_head(tmp_path: Path) -> None:
    H.folder(tmp_path / "llama", "llama", tie_word_embeddings=False)
    untied = layer_map(network("llama", tmp_path))
    assert untied.head == "net.lm_head" and not untied.aliases
    H.folder(tmp_path / "llama", "llama")
    tied = layer_map(network("llama", tmp_path))
    assert tied.aliases == {"net.lm_head.weight": "net.model.embed_tokens.weight"}
    assert tied.head == "net.model.norm"


def test_a_head_that_a_folder_lacks_is_drawn_from_the_seed(tmp_path: Path) -> None:
    """A folder of the bare encoder, with other names, as MiniLM's is."""
    encoder = H.model("bert").bert
    encoder.save_pretrained(tmp_path / "bert")
    first, again = (network("bert", tmp_path) for _ in range(2))
    other = build(spec("bert", tmp_path / "bert"), seed=1)
    values, repeated, redrawn = (net.net.state_dict() for net in (first, again, other))
    for n, w in encoder.state_dict().items():
        assert torch.equal(values[f"bert.{n}"], w)
    assert all(torch.equal(w, repeated[n]) for n, w in values.items())
    assert not torch.equal(values["classifier.weight"], redrawn["classifier.weight"])
    assert not values["classifier.bias"].any()


def test_half_precision_becomes_float32_and_parts_of_weights_are_joined(tmp_path: Path) -> None:
    net = H.model("gpt2").half()
    net.save_pretrained(tmp_path / "gpt2", max_shard_size="4KB")
    names = {p.name for p in (tmp_path / "gpt2").glob("*.safetensors")}
    assert len(names) > 1
    loaded = network("gpt2", tmp_path)
    assert set(files_of(loaded)) == names | {"config.json"}
    for n, w in net.named_parameters():
        assert torch.equal(loaded.net.state_dict()[n], w.float())
    (tmp_path / "gpt2" / sorted(names)[0]).unlink()
    with pytest.raises(InputError, match="parts of its weights"):
        network("gpt2", tmp_path)


# --------------------------------------------------------------------------- refusals


def bert(folders: Path, tmp_path: Path) -> Path:
    shutil.copytree(folders / "bert", tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "mamba"}, "a model of type 'mamba', known: bert, distilbert, roberta"),
        ({"model_type": ["bert"]}, "a model of type"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map'.*code of a folder is never run"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config', which is not supported"),
        ({"is_decoder": True}, "'is_decoder', which is not supported"),
        ({"position_embedding_type": "relative_key"}, "want 'absolute'"),
        ({"hidden_size": 12}, "another shape than config.json says"),
        ({"hidden_size": 9}, "config.json is wrong"),
        ({"num_hidden_layers": 4}, "lack bert.encoder.layer.3"),
        ({"hidden_act": "none"}, "config.json is wrong"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(
    fields: dict[str, Any], text: str, folders: Path, tmp_path: Path
) -> None:
    H.edit_config(bert(folders, tmp_path), **fields)
    with pytest.raises(InputError, match=text):
        network("bert", tmp_path)


def test_missing_files_and_pickles_are_refused(folders: Path, tmp_path: Path) -> None:
    folder = bert(folders, tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        network("bert", tmp_path / "elsewhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"pytorch_model\.bin and no model\.safetensors; pickles can"
    ):
        network("bert", tmp_path)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        network("bert", tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(InputError, match="cannot be read"):
        network("bert", tmp_path)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="no table"):
        network("bert", tmp_path)


@pytest.mark.parametrize(
    ("kind", "changed", "text"),
    [
        (
            "bert",
            {"shape": (17,)},
            "at most 16 tokens, and sequences have 17; set \\[data\\] length",
        ),
        ("roberta", {"shape": (18,)}, "at most 17 tokens"),
        ("bert", {"vocabulary": 99}, "knows 15 tokens, and the tokenizer has 99"),
        ("bert", {"labelled": False}, "classifies sequences.*data.name = 'tsv'"),
        ("bert", {"shape": (1, 8, 8)}, "takes sequences of tokens"),
        ("vit", {"shape": (3, 32, 32)}, r"takes images of shape \(1, 8, 8\)"),
        ("bert", {"classes": 5}, "for another number of classes than the 5.*new_head"),
        ("bert", {"settings": {"path": ""}}, "needs a folder"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    kind: str, changed: dict[str, Any], text: str, folders: Path
) -> None:
    with pytest.raises(InputError, match=text):
        network(kind, folders, **changed)


@pytest.mark.parametrize(("kind", "longest"), [("bert", 16), ("roberta", 17), ("llama", 16)])
def test_the_longest_sequence_that_is_allowed_can_be_computed(
    kind: str, longest: int, folders: Path
) -> None:
    net = network(kind, folders, shape=(longest,))
    assert len(net(torch.full((2, longest), 5))) == 2


def test_a_head_for_other_classes_is_replaced_on_request(folders: Path) -> None:
    net = network("bert", folders, classes=5, settings={"new_head": True})
    x, _ = records("bert")
    assert net(**x).shape == (4, 5)


def test_nothing_but_weights_and_fields_of_the_kind_is_read(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither code, adapters and names of files in a folder, nor the network."""
    folder = bert(folders, tmp_path)
    expected = network("bert", folders).eval()
    H.edit_config(
        folder,
        attn_implementation="kernels-community/evil",
        _attn_implementation="kernels-community/evil",
        transformers_weights="../evil.safetensors",
        _name_or_path="evil/evil",
        dtype="bfloat16",
        attention_probs_dropout_prob=0.9,
    )
    (folder / "modeling_bert.py").write_text("raise RuntimeError('code of the folder was run')")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/evil"}')
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../evil"}}')
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04evil")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    net = network("bert", tmp_path).train()
    x, _ = records("bert")
    assert torch.equal(net(**x), expected(**x))


def test_only_networks_from_folders_have_files(folders: Path) -> None:
    assert files_of(nn.Linear(2, 2)) == {}
    files = files_of(network("bert", folders))
    assert set(files) == {"config.json", "model.safetensors"}
    assert all(len(digest) == 64 for digest in files.values())
