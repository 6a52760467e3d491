"""Folders of Hugging Face's `transformers`: config.json, model.safetensors, tokenizer.json.

Nothing of a folder is executed, and nothing is downloaded:

- `config.json` chooses among the kinds of `KINDS`, and only the fields that such a config has are
  read from it.  A folder that names code of its own (`auto_map`) is refused.
- Weights are read from `model.safetensors`, or from its numbered parts.  Pickles are not read.
- File names are known here; none is taken from the text of a file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedp3.core.errors import InputError

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
PART = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
LARGEST_CONFIG = 1 << 20  # bytes
CHUNK = 1 << 20
# Suffixes of files that are unpickled when they are read, or hold code.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Fields of every config that say nothing about the network, or are decided here.
LEFT_OUT = {"transformers_version", "architectures", "dtype", "id2label", "label2id",
            "problem_type", "output_hidden_states", "return_dict", "use_cache",
            "is_encoder_decoder"}  # fmt: skip
MUST_BE_OFF = ("auto_map", "quantization_config", "is_decoder", "add_cross_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of transformer that can be loaded.

    Args:
        config: the name of its config class in `transformers`.
        model: the name of its class with a head.
        reads: what it reads: "sequences" that it classifies, "text" that it continues, or "images".
        head: beginnings of names of tensors that are drawn anew if the folder does not have them.
        classifier: of a model that continues text, the name of its class that classifies sequences
            by their last token; its head is `CLASSIFIER_HEAD`.
        more: fields of older configs besides those of the class.
        places_after_padding: whether the first token has the place after the number of the padding
            token, and not place 0.
    """

    config: str
    model: str
    reads: str
    head: tuple[str, ...] = ("classifier.",)
    classifier: str = ""
    more: frozenset[str] = frozenset()
    places_after_padding: bool = False


CLASSIFIER_HEAD = ("score.",)
KINDS: Mapping[str, Kind] = {
    "bert": Kind(
        config="BertConfig",
        model="BertForSequenceClassification",
        reads="sequences",
        head=("classifier.", "bert.pooler."),
    ),
    "distilbert": Kind(
        config="DistilBertConfig",
        model="DistilBertForSequenceClassification",
        reads="sequences",
        head=("classifier.", "pre_classifier."),
    ),
    "roberta": Kind(
        config="RobertaConfig",
        model="RobertaForSequenceClassification",
        reads="sequences",
        places_after_padding=True,
    ),
    "gpt2": Kind(
        config="GPT2Config",
        model="GPT2LMHeadModel",
        reads="text",
        head=(),
        classifier="GPT2ForSequenceClassification",
    ),
    "llama": Kind(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        reads="text",
        head=(),
        classifier="LlamaForSequenceClassification",
        more=frozenset({"rope_theta", "rope_scaling"}),
    ),
    "vit": Kind(config="ViTConfig", model="ViTForImageClassification", reads="images"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What a folder contains, as far as it was read.

    Args:
        path: the folder.
        kind: the name of its kind.
        config: the fields of its config that this kind has.
        weights: the files of its weights.
        sha256: of each file.
    """

    path: Path
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)


def read_folder(path: Path) -> Folder:
    """Check a folder, and read everything but its weights.

    Raises:
        InputError: it is none, its kind is unknown, it needs code of its own, or has only pickles.
    """
    kind, config = read_kind(path)
    for key in MUST_BE_OFF:
        if config.get(key):
            raise InputError(
                f"[model] path: {path / CONFIG} sets {key!r}, which is not supported"
                + ("; code of a folder is never run" if key == "auto_map" else "")
            )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(
            f"[model] path: {path / CONFIG} sets position_embedding_type to "
            f"{config['position_embedding_type']!r}, want 'absolute'"
        )
    weights = _weight_files(path)
    hashes = {p.name: _sha256(p) for p in (path / CONFIG, *weights)}
    return Folder(
        path=path,
        kind=kind,
        config=_known_fields(config, KINDS[kind]),
        weights=weights,
        sha256=hashes,
    )


def read_kind(path: Path) -> tuple[str, dict[str, Any]]:
    """The kind of a folder's model, and its config.

    Raises:
        InputError: there is no such folder, or its kind is unknown.
    """
    if not path.is_dir():
        raise InputError(f"[model] path: there is no folder {path}")
    config = _read_config(path / CONFIG)
    kind = str(config.get("model_type"))
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise InputError(f"[model] path: {path} has a model of type {kind!r}, known: {known}")
    return kind, config


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise InputError(f"[model] path: {path} is longer than {LARGEST_CONFIG:,} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"[model] path: {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"[model] path: {path} holds no table of settings")
    return config


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    names = sorted(p.name for p in folder.iterdir() if PART.fullmatch(p.name))
    wanted = int(names[0][15:20]) if names else 0
    if names and names == [
        f"model-{i:05}-of-{wanted:05}.safetensors" for i in range(1, wanted + 1)
    ]:
        return tuple(folder / name for name in names)
    if names:
        raise InputError(
            f"[model] path: {folder} has {len(names)} of {wanted} parts of its weights"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise InputError(
            f"[model] path: {folder} has {pickles[0]} and no {WEIGHTS}; pickles can run code when "
            "they are read: load it where you trust it, and save it with model.save_pretrained(...)"
        )
    raise InputError(f"[model] path: {folder} has no {WEIGHTS}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _known_fields(config: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """The fields of a config that its class has, under this or an older name."""
    of_class = getattr(transformers_library(), kind.config)
    known = {f.name for f in fields(of_class)} | set(of_class.attribute_map) | kind.more
    return {key: value for key, value in config.items() if key in known - LEFT_OUT}


def transformers_library() -> Any:
    """The library `transformers`, which takes seconds to import."""
    try:
        return import_module("transformers")
    except ImportError:
        raise InputError(
            "[model] name: 'hf' needs transformers, which is not installed: pip install 'fedp3[hf]'"
        ) from None


def read_weights(folder: Folder) -> dict[str, Tensor]:
    """The tensors of a folder, in float32."""
    tensors: dict[str, Tensor] = {}
    for path in folder.weights:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"[model] path: {path} cannot be read: {error}") from None
    return {n: w.float() if w.is_floating_point() else w for n, w in tensors.items()}
