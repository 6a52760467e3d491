"""Networks from a folder of Hugging Face's `transformers`: config.json and model.safetensors.

Nothing of a folder is executed, and nothing is downloaded:

- `config.json` chooses among the kinds of `KINDS`, and only the fields that such a config has are
  read from it.  A folder that names code of its own (`auto_map`) is refused.
- Weights are read from `model.safetensors`, or from its numbered parts.  Pickles are not read.
- File names are known here; none is taken from the text of a file.

What `transformers` leaves open is fixed, so that every engine computes the same bits: float32,
attention as plain products ("eager"), masks that depend on a record alone, and no dropout.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedp3.core.errors import InputError
from fedp3.models.zoo import MODELS, Architecture, ModelSettings, ModelSpec, plain_tail

HF = "hf"  # its name in a config
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
PART = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
LARGEST_CONFIG = 1 << 20  # bytes
CHUNK = 1 << 20
# Suffixes of files that are unpickled when they are read, or hold code.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DROPOUT = re.compile(r"dropout|pdrop")
# Fields of every config that say nothing about the network, or are decided here.
LEFT_OUT = {"transformers_version", "architectures", "dtype", "id2label", "label2id",
            "problem_type", "output_hidden_states", "return_dict", "use_cache",
            "is_encoder_decoder"}  # fmt: skip
MUST_BE_OFF = ("auto_map", "quantization_config", "is_decoder", "add_cross_attention")
NO_SCORE = torch.finfo(torch.float32).min  # of a token that is not attended to


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of transformer that can be loaded.

    Args:
        config: the name of its config class in `transformers`.
        model: the name of its class with a head.
        reads: what it reads: "sequences" that it classifies, "text" that it continues, or "images".
        head: beginnings of names of tensors that are drawn anew if the folder does not have them.
        more: fields of older configs besides those of the class.
        first_place: the place of the first token, where that is not 0.
    """

    config: str
    model: str
    reads: str
    head: tuple[str, ...] = ("classifier.",)
    more: frozenset[str] = frozenset()
    first_place: int = 0


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
        first_place=2,
    ),
    "gpt2": Kind(config="GPT2Config", model="GPT2LMHeadModel", reads="text", head=()),
    "llama": Kind(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        reads="text",
        head=(),
        more=frozenset({"rope_theta", "rope_scaling"}),
    ),
    "vit": Kind(config="ViTConfig", model="ViTForImageClassification", reads="images"),
}


# --------------------------------------------------------------------------- networks


class TextModel(nn.Module):
    """A model of tokens as a network that returns logits.

    Args:
        net: the model.
        causal: whether a token sees only itself and the tokens before it.
        files: the SHA-256 of each file that it was read from.
    """

    def __init__(self, net: nn.Module, *, causal: bool, files: Mapping[str, str]) -> None:
        super().__init__()
        self.net, self.causal, self.files = net, causal, dict(files)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The logits of each record, or of each token.

        Args:
            input_ids: tokens (records, tokens).
            attention_mask: 1 for tokens, 0 for padding; None means that there is no padding.
        """
        tokens = input_ids.shape[1]
        seen = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=input_ids.device)
        if attention_mask is not None:
            seen = attention_mask[:, None, None, :] != 0
        if self.causal:
            places = torch.arange(tokens, device=input_ids.device)
            seen = seen & (places[None, :] <= places[:, None])
        # A mask of four dimensions is used as it is.  What `transformers` would make of one of two
        # depends on the values of the whole batch.
        scores = torch.zeros(seen.shape, device=input_ids.device).masked_fill(~seen, NO_SCORE)
        logits: Tensor = self.net(input_ids=input_ids, attention_mask=scores).logits
        return logits


class ImageModel(nn.Module):
    """A model of images as a network that returns logits.

    Args:
        net: the model.
        files: the SHA-256 of each file that it was read from.
    """

    def __init__(self, net: nn.Module, *, files: Mapping[str, str]) -> None:
        super().__init__()
        self.net, self.files = net, dict(files)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """The logits of each image (records, channels, height, width)."""
        logits: Tensor = self.net(pixel_values=pixel_values).logits
        return logits


def files_of(net: nn.Module) -> dict[str, str]:
    """The SHA-256 of each file that a network was read from; empty for all other networks."""
    return dict(net.files) if isinstance(net, TextModel | ImageModel) else {}


# --------------------------------------------------------------------------- reading a folder


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
    if not path.is_dir():
        raise InputError(f"[model] path: there is no folder {path}")
    config = _read_config(path / CONFIG)
    kind = config.get("model_type")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise InputError(f"[model] path: {path} has a model of type {kind!r}, known: {known}")
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


def tokenizer_of(settings: ModelSettings) -> Path:
    """The tokenizer file of the folder that the settings name."""
    return Path(settings.path).expanduser() / TOKENIZER


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
    of_class = getattr(_transformers(), kind.config)
    known = {f.name for f in fields(of_class)} | set(of_class.attribute_map) | kind.more
    return {key: value for key, value in config.items() if key in known - LEFT_OUT}


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise InputError(
            "[model] name: 'hf' needs transformers, which is not installed: pip install 'fedp3[hf]'"
        ) from None


# --------------------------------------------------------------------------- building


def load_model(folder: Folder, spec: ModelSpec) -> nn.Module:
    """The network of a folder, with a head for these classes.

    A head that the folder does not have is drawn from torch's global generator.

    Args:
        folder: what was read of the folder.
        spec: samples and classes.
    """
    kind, library = KINDS[folder.kind], _transformers()
    rng = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    settings = {key: 0.0 if _is_dropout(key) else v for key, v in folder.config.items()}
    of_class = getattr(library, kind.config)
    settings |= {f.name: 0.0 for f in fields(of_class) if _is_dropout(f.name)}
    labels = {} if kind.reads == "text" else {"num_labels": spec.classes}
    with _quiet(library):
        try:
            config = of_class(**settings, **labels, use_cache=False)
        except Exception as error:  # whatever a class makes of wrong fields
            why = str(error).strip().splitlines()[0]
            raise InputError(f"[model] path: {folder.path / CONFIG} is wrong: {why}") from None
        _check_samples(folder, config, spec)
        model, found = getattr(library, kind.model).from_pretrained(
            None,
            config=config,
            state_dict=_weights(folder),
            attn_implementation="eager",
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _draw_head(model, folder, found, spec, rng)
    if kind.reads == "images":
        return ImageModel(model, files=folder.sha256)
    return TextModel(model, causal=kind.reads == "text", files=folder.sha256)


def _is_dropout(name: str) -> bool:
    return DROPOUT.search(name) is not None


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silence the progress bars and reports of `transformers`."""
    log = library.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def _weights(folder: Folder) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.weights:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"[model] path: {path} cannot be read: {error}") from None
    return {n: w.float() if w.is_floating_point() else w for n, w in tensors.items()}


def _draw_head(
    model: Any, folder: Folder, found: Mapping[str, Any], spec: ModelSpec, rng: torch.Generator
) -> None:
    """Draw the tensors of the head that the folder does not have; refuse if it lacks others."""
    kind, parameters = KINDS[folder.kind], dict(model.named_parameters())
    other = sorted(
        str(key[0] if isinstance(key, tuple) else key) for key in found["mismatched_keys"]
    )
    new = sorted({*found["missing_keys"], *other} & parameters.keys())
    lacking = [n for n in new if not n.startswith(kind.head)] if kind.head else new
    if lacking:
        more = f" and {len(lacking) - 1} more tensors" if len(lacking) > 1 else ""
        raise InputError(
            f"[model] path: the weights of {folder.path} lack {lacking[0]}{more}, or have another "
            f"shape than {CONFIG} says"
        )
    if other and not spec.settings.new_head:
        raise InputError(
            f"[model] path: the head of {folder.path} is for another number of classes than the "
            f"{spec.classes} of the data; set [model] new_head to draw a new one"
        )
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    with torch.no_grad():
        for n in new:
            if parameters[n].dim() > 1:
                parameters[n].normal_(0, deviation, generator=rng)
            else:
                parameters[n].zero_()


def _check_samples(folder: Folder, config: Any, spec: ModelSpec) -> None:
    """Refuse samples that a model of this kind does not read."""
    kind, what = KINDS[folder.kind], f"the {folder.kind} of {folder.path}"
    if kind.reads == "images":
        want = (config.num_channels, config.image_size, config.image_size)
        if spec.shape != want:
            raise InputError(f"{what} takes images of shape {want}, the data have {spec.shape}")
        return
    if len(spec.shape) != 1:
        raise InputError(f"{what} takes sequences of tokens, got samples of shape {spec.shape}")
    if spec.labelled != (kind.reads == "sequences"):
        does = "classifies sequences" if kind.reads == "sequences" else "continues texts"
        want = "data.name = 'tsv'" if kind.reads == "sequences" else "data.name = 'text'"
        raise InputError(f"{what} {does}, and the data are not for that; use {want}")
    places = config.max_position_embeddings - kind.first_place
    if spec.shape[0] > places:
        raise InputError(
            f"{what} reads at most {places} tokens, and sequences have {spec.shape[0]}; set "
            "[data] length"
        )
    if spec.vocabulary > config.vocab_size:
        raise InputError(
            f"{what} knows {config.vocab_size} tokens, and the tokenizer has {spec.vocabulary}; "
            "use the tokenizer that it was trained with"
        )


def _build(spec: ModelSpec) -> nn.Module:
    if not spec.settings.path:
        raise InputError("[model] path: name = 'hf' needs a folder; set path")
    if spec.tail is not plain_tail:
        raise InputError("a stochastic code ([hooks] code) is for the networks of fedp3, not hf")
    return load_model(read_folder(Path(spec.settings.path).expanduser()), spec)


MODELS.add(HF, Architecture(build=_build, several_inputs=True, tokenizer=tokenizer_of))
