"""A text file as records: sequences of characters that do not overlap, each of one speaker.

A play has blocks that are separated by empty lines and begin with their speaker:

    First Citizen:
    Before we proceed any further, hear me speak.

A speaker is a role, and what a role says is one text.  Each text is cut into records.  A network
reads a record's characters but the last, and predicts those but the first: no character is in two
records, so that a record is what privacy is about.  A text without speakers is one text.

A character is its bytes in UTF-8.  This vocabulary is the same for every text: one that was made
from the characters of a private text would reveal which of them it has.  A tokenizer has larger
tokens than characters; everything else is the same.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from fedp3.core.errors import DataError
from fedp3.data.dataset import Dataset
from fedp3.data.tokens import Tokenizer

VOCABULARY = 256  # values of a byte
PADDING = -100  # the target of a place after the end of a text; it does not count
LARGEST = 1 << 30  # bytes of a text file
SPEAKER = re.compile(r"^([^\n:]{1,60}):[ \t]*\n")


def read_text(
    path: Path, length: int, stride: int = 0, tokenizer: Tokenizer | None = None
) -> Dataset:
    """The records of a text file.

    Args:
        path: the file, in UTF-8.
        length: the number of characters, or tokens, that a network reads of a record.
        stride: how many of them further the next record begins; 0 means after the end of this
            one, and less than that makes records that overlap.
        tokenizer: from texts to tokens; None means characters.
    """
    stride = stride or length + 1
    xs, ys, roles = [], [], []
    texts = _texts(read_utf8(path))
    for role, text in enumerate(texts.values()):
        codes = _codes(text, tokenizer)
        for begin in range(0, len(codes) - 1, stride):
            record = codes[begin : begin + length + 1]
            xs.append(_padded(record[:-1], length, 0))
            ys.append(_padded(record[1:], length, PADDING))
            roles.append(role)
    if not xs:
        raise DataError(f"text file {path} has no two characters in a row: want a text")
    vocabulary = VOCABULARY if tokenizer is None else tokenizer.size
    return Dataset(
        name="text",
        x=torch.stack(xs),
        y=torch.stack(ys),
        classes=vocabulary,
        vocabulary=vocabulary,
        labelled=False,
        objective="language_modelling",
        roles=torch.tensor(roles) if roles[-1] > 0 else None,
        role_names=tuple(texts) if roles[-1] > 0 else (),
        overlapping=stride <= length,
    )


def _codes(text: str, tokenizer: Tokenizer | None) -> Tensor:
    if tokenizer is not None:
        return torch.tensor(tokenizer.plain(text), dtype=torch.int64)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int64)


def read_utf8(path: Path) -> str:
    """The content of a text file."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"text file {path} is longer than {LARGEST:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text file {path} cannot be read: {error}") from None


def _texts(content: str) -> dict[str, str]:
    """The lines of each role, in order of appearance; the entire content if there are no speakers.

    A block without a speaker continues the block before it.
    """
    blocks = re.split(r"\n[ \t]*\n\s*", content.replace("\r\n", "\n").strip() + "\n")
    if not any(SPEAKER.match(block) for block in blocks):
        return {"": content}
    speeches: dict[str, list[str]] = {}
    speaker = ""
    for block in blocks:
        named = SPEAKER.match(block)
        if named:
            speaker = named.group(1).strip()
        speech = block[named.end() :] if named else block
        speeches.setdefault(speaker, []).append(speech.strip())
    return {speaker: "\n".join(said) + "\n" for speaker, said in speeches.items()}


def _padded(codes: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(codes, (0, length - len(codes)), value=value)
