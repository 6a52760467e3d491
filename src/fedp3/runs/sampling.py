"""Text from a language model: the run's own, or one that `fedp3 export` wrote.

A model reads at most as many tokens as the records that it was trained on have.  Of a longer text
it reads the end.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, stream
from fedp3.core.threads import one_thread
from fedp3.data.catalogue import TEXT, tokenizer_path
from fedp3.data.tokens import Tokenizer, read_tokenizer
from fedp3.models.hf_folder import TOKENIZER, read_folder
from fedp3.models.zoo import MODELS
from fedp3.runs.existing import reopen
from fedp3.runs.networks import network, read_trained

ABOUT = "model.json"  # of an export


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A model that continues texts.

    Args:
        logits: from tokens to the logits of the token after the last one.
        context: the largest number of tokens that it reads.
        encode: from a text to tokens.
        decode: from tokens to a text.
    """

    logits: Callable[[Sequence[int]], Tensor]
    context: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def write_text(
    model: LanguageModel, prompt: str, length: int, temperature: float, seed: int
) -> str:
    """Continue a text; returns it with the prompt.

    Args:
        model: what continues it.
        prompt: its beginning.
        length: the number of tokens, or characters, that are added.
        temperature: below 1, likely tokens become likelier; at 0, the likeliest is always taken.
        seed: what tokens are drawn from.
    """
    tokens = model.encode(prompt)
    if not tokens:
        raise InputError("the prompt is empty: a model needs at least one token to continue")
    rng = stream(seed, Stream.SAMPLE_TEXT)
    with torch.no_grad(), one_thread():
        for _ in range(length):
            logits = model.logits(tokens[-model.context :]).double()
            tokens.append(_drawn(logits, temperature, rng))
    return model.decode(tokens)


def _drawn(logits: Tensor, temperature: float, rng: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    chances = torch.softmax((logits - logits.max()) / temperature, 0)
    return int(torch.multinomial(chances, 1, generator=rng))


# --------------------------------------------------------------------------- where models are


def read_language_model(folder: Path, data_dir: Path | None = None) -> LanguageModel:
    """The language model of a run, or of an export of one as pt2 or hf."""
    return _exported(folder) if (folder / ABOUT).exists() else _trained(folder, data_dir)


def _trained(folder: Path, data_dir: Path | None) -> LanguageModel:
    config = reopen(folder)
    if config.data.name != TEXT:
        raise InputError(
            f"{folder} is a run on {config.data.name!r}; only a model that was trained to continue "
            f"texts (data.name = {TEXT!r}) writes one"
        )
    architecture = MODELS.pick(config.model.name)
    own = architecture.tokenizer(config.model) if architecture.tokenizer else None
    path = tokenizer_path(config.data, own)
    run = read_trained(folder, data_dir)
    net = network(run, "global")

    def logits(tokens: Sequence[int]) -> Tensor:
        outputs: Tensor = net(torch.tensor([tokens]))
        return outputs[0, -1]

    return _of(logits, config.data.length, None if path is None else read_tokenizer(path))


def _exported(folder: Path) -> LanguageModel:
    try:
        about = json.loads((folder / ABOUT).read_text())
        kind, context, writes = about["format"], int(about["input"][-1]), about["writes_text"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{folder / ABOUT} is no export of a language model: {error}") from None
    if not writes:
        raise InputError(f"{folder} holds no language model: it was trained for something else")
    if kind not in READERS:
        raise InputError(
            f"the format {kind} holds weights and no network; export as {' or '.join(READERS)}, or "
            "name the run"
        )
    tokenizer = folder / TOKENIZER
    return _of(
        READERS[kind](folder, context),
        context,
        read_tokenizer(tokenizer) if tokenizer.exists() else None,
    )


def _from_pt2(folder: Path, context: int) -> Callable[[Sequence[int]], Tensor]:
    """An exported program reads sequences of one length; what follows a token does not matter."""
    net = torch.export.load(folder / "model.pt2").module()

    def logits(tokens: Sequence[int]) -> Tensor:
        padded = [*tokens, *[0] * (context - len(tokens))]
        outputs: Tensor = net(torch.tensor([padded]))
        return outputs[0, len(tokens) - 1]

    return logits


def _from_hf(folder: Path, context: int) -> Callable[[Sequence[int]], Tensor]:
    from fedp3.models.hf import plain_model

    net = plain_model(read_folder(folder))

    def logits(tokens: Sequence[int]) -> Tensor:
        outputs: Tensor = net(torch.tensor([tokens]))
        return outputs[0, -1]

    return logits


READERS = {"pt2": _from_pt2, "hf": _from_hf}


def _of(
    logits: Callable[[Sequence[int]], Tensor], context: int, tokenizer: Tokenizer | None
) -> LanguageModel:
    if tokenizer is not None:
        encode, decode = tokenizer.plain, tokenizer.text
        return LanguageModel(logits=logits, context=context, encode=encode, decode=decode)
    return LanguageModel(
        logits=logits,
        context=context,
        encode=lambda text: list(text.encode()),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    )
