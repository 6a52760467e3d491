"""Tokens of texts, by a tokenizer file of the library `tokenizers` (tokenizer.json).

Such a file is a table of rules and tokens in JSON: reading it runs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fedp3.core.errors import DataError

LARGEST_TOKENIZER = 1 << 28  # bytes
PADDING_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """From texts to tokens.

    Args:
        size: the number of different tokens.
        padding: the token that fills up short sequences; it is masked, so that any will do.
        sequences: takes texts and a length; returns the tokens of each, with those that begin and
            end a sequence, cut to that length.
        plain: takes a text; returns its tokens, and no others.
        text: takes tokens; returns their text.
    """

    size: int
    padding: int
    sequences: Callable[[Sequence[str], int], list[list[int]]]
    plain: Callable[[str], list[int]]
    text: Callable[[Sequence[int]], str]


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        DataError: there is no such file, or it is no tokenizer.
    """
    try:
        library = import_module("tokenizers")
    except ImportError:
        raise DataError(
            "[data] tokenizer: a tokenizer needs the library tokenizers, which is not installed: "
            "pip install 'fedp3[hf]'"
        ) from None
    if not path.is_file():
        raise DataError(f"[data] tokenizer: there is no file {path}")
    if path.suffix == ".model":
        raise DataError(
            f"[data] tokenizer: {path} is a model of sentencepiece; convert it to a tokenizer.json "
            "first (examples/llama_folder.py does so for llama2.c)"
        )
    if path.stat().st_size > LARGEST_TOKENIZER:
        raise DataError(f"[data] tokenizer: {path} is longer than {LARGEST_TOKENIZER:,} bytes")
    try:
        tokens = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"[data] tokenizer: {path} is no tokenizer.json: {error}") from None
    tokens.no_padding()
    tokens.no_truncation()
    ids = tokens.get_vocab(with_added_tokens=True)
    padding = next((ids[token] for token in PADDING_TOKENS if token in ids), 0)

    def sequences(texts: Sequence[str], length: int) -> list[list[int]]:
        tokens.enable_truncation(length)
        encoded = [e.ids for e in tokens.encode_batch(list(texts), add_special_tokens=True)]
        tokens.no_truncation()
        return encoded

    def plain(text: str) -> list[int]:
        encoded: list[int] = tokens.encode(text, add_special_tokens=False).ids
        return encoded

    def text(ids: Sequence[int]) -> str:
        decoded: str = tokens.decode(list(ids), skip_special_tokens=False)
        return decoded

    return Tokenizer(
        size=max(ids.values(), default=-1) + 1,
        padding=padding,
        sequences=sequences,
        plain=plain,
        text=text,
    )
