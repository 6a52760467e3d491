"""Networks from a folder of Hugging Face's `transformers`, as `hf_folder` reads it.

What `transformers` leaves open is fixed, so that every engine computes the same bits: float32,
attention as plain products ("eager"), masks that depend on a record alone, and no dropout.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedp3.core.errors import InputError, first_line
from fedp3.models.hf_folder import (
    CLASSIFIER_HEAD,
    CONFIG,
    KINDS,
    TOKENIZER,
    Folder,
    read_folder,
    read_kind,
    read_weights,
    transformers_library,
)
from fedp3.models.zoo import MODELS, Architecture, ModelSettings, ModelSpec, plain_tail

HF = "hf"  # its name in a config
DROPOUT = re.compile(r"dropout|pdrop")
NO_SCORE = torch.finfo(torch.float32).min  # of a token that is not attended to


class TextModel(nn.Module):
    """A model of tokens as a network that returns logits.

    Args:
        net: the model.
        causal: whether a token sees only itself and the tokens before it.
        by_last: whether a record is classified by its last token, as causal models do.
        files: the SHA-256 of each file that it was read from.
    """

    def __init__(
        self, net: nn.Module, *, causal: bool, by_last: bool = False, files: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.net, self.causal, self.by_last, self.files = net, causal, by_last, dict(files)

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
        if self.by_last:
            return self._scores_of_last(input_ids, attention_mask, scores)
        logits: Tensor = self.net(input_ids=input_ids, attention_mask=scores).logits
        return logits

    def _scores_of_last(
        self, input_ids: Tensor, attention_mask: Tensor | None, scores: Tensor
    ) -> Tensor:
        """The logits of each record's last token that is not padding.

        `transformers` would look for padding by the number of its token, which a folder may not
        name, and which may stand in a text.
        """
        model: Any = self.net
        states: Tensor = model.base_model(
            input_ids=input_ids, attention_mask=scores
        ).last_hidden_state
        last = torch.full((len(states),), states.shape[1] - 1, device=states.device)
        if attention_mask is not None:
            places = torch.arange(states.shape[1], device=states.device)
            last = (places * (attention_mask != 0)).argmax(1)
        index = last[:, None, None].expand(-1, 1, states.shape[2])
        logits: Tensor = model.score(states.gather(1, index).squeeze(1))
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


# --------------------------------------------------------------------------- building


def load_model(folder: Folder, spec: ModelSpec) -> nn.Module:
    """The network of a folder, with a head for these classes.

    A head that the folder does not have is drawn from torch's global generator.

    Args:
        folder: what was read of the folder.
        spec: samples and classes.
    """
    kind, library = KINDS[folder.kind], transformers_library()
    rng = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    settings = {key: 0.0 if _is_dropout(key) else v for key, v in folder.config.items()}
    of_class = getattr(library, kind.config)
    settings |= {f.name: 0.0 for f in fields(of_class) if _is_dropout(f.name)}
    classifies = kind.reads != "text" or spec.labelled
    labels = {"num_labels": spec.classes} if classifies else {}
    name = kind.classifier if classifies and kind.classifier else kind.model
    weights = read_weights(folder)
    with _quiet(library):
        try:
            config = of_class(**settings, **labels, use_cache=False)
            _check_samples(folder, config, spec)
            model, found = getattr(library, name).from_pretrained(
                None,
                config=config,
                state_dict=weights,
                attn_implementation="eager",
                dtype=torch.float32,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except InputError:
            raise
        except Exception as error:  # whatever the library makes of wrong fields
            why = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"[model] path: {folder.path / CONFIG} is wrong: {why}") from None
    _draw_head(model, folder, found, spec, rng)
    if kind.reads == "images":
        return ImageModel(model, files=folder.sha256)
    causal = kind.reads == "text"
    return TextModel(model, causal=causal, by_last=causal and classifies, files=folder.sha256)


def plain_model(folder: Folder) -> nn.Module:
    """The network of a folder that contains all of its tensors, such as a language model."""
    outputs = int(folder.config.get("vocab_size", 0))
    shape = (int(folder.config.get("max_position_embeddings", 1)),)
    settings = ModelSettings(name=HF, path=str(folder.path))
    labelled = KINDS[folder.kind].reads != "text"
    return load_model(folder, ModelSpec(shape, outputs, settings, labelled=labelled)).eval()


def inner_model(net: nn.Module) -> nn.Module | None:
    """The model of `transformers` inside a network; None for all other networks."""
    return net.net if isinstance(net, TextModel | ImageModel) else None


def again_from(net: nn.Module, folder: Path) -> nn.Module:
    """The network with the model that this folder has, as `transformers` itself reads it."""
    model: Any = inner_model(net)
    again = copy.deepcopy(net)
    with _quiet(transformers_library()):
        again.net = type(model).from_pretrained(
            folder, local_files_only=True, attn_implementation="eager", dtype=torch.float32
        )
    return again.eval()


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


def _draw_head(
    model: Any, folder: Folder, found: Mapping[str, Any], spec: ModelSpec, rng: torch.Generator
) -> None:
    """Draw the head's tensors that the folder does not have; refuse if others are missing."""
    kind, parameters = KINDS[folder.kind], dict(model.named_parameters())
    other = sorted(
        str(key[0] if isinstance(key, tuple) else key) for key in found["mismatched_keys"]
    )
    new = sorted({*found["missing_keys"], *other} & parameters.keys())
    head = CLASSIFIER_HEAD if kind.classifier and spec.labelled else kind.head
    lacking = [n for n in new if not n.startswith(head)] if head else new
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
    if kind.reads == "sequences" and not spec.labelled:
        raise InputError(
            f"{what} classifies sequences, and the data are not for that; use data.name = 'tsv'"
        )
    before = 1 + (config.pad_token_id or 0) if kind.places_after_padding else 0
    places = config.max_position_embeddings - before
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


def tokenizer_of(settings: ModelSettings) -> Path:
    """The tokenizer file of the folder that the settings name, whose kind must be known."""
    folder = Path(settings.path).expanduser()
    read_kind(folder)
    return folder / TOKENIZER


def _build(spec: ModelSpec) -> nn.Module:
    if not spec.settings.path:
        raise InputError("[model] path: name = 'hf' needs a folder; set path")
    if spec.tail is not plain_tail:
        raise InputError("a stochastic code ([hooks] code) is for the networks of fedp3, not hf")
    return load_model(read_folder(Path(spec.settings.path).expanduser()), spec)


MODELS.add(HF, Architecture(build=_build, several_inputs=True, tokenizer=tokenizer_of))
