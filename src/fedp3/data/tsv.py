"""Texts with labels from a file: one record a line, the text and its label with a tab between.

The first line may name the columns (`sentence<TAB>label`).  Labels are integers or names; they are
numbered in their order, and `Dataset.class_names` says which number is which label.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedp3.core.errors import DataError
from fedp3.data.dataset import Dataset
from fedp3.data.text import read_utf8
from fedp3.data.tokens import Tokenizer

LABEL_COLUMNS = ("label", "labels", "class", "target", "category")  # in a header
Line = tuple[int, str, str]  # its number in the file, its text, its label


def read_tsv(
    path: Path,
    length: int,
    tokenizer: Tokenizer,
    test_path: Path | None = None,
    labels: Sequence[str] = (),
) -> Dataset:
    """The records of a file of texts with labels.

    Args:
        path: the file, in UTF-8.
        length: tokens of a record: longer ones are cut, shorter ones padded.
        tokenizer: from texts to tokens.
        test_path: a second file, whose records are the test set of no client.
        labels: all labels, in the order of their numbers; empty means those of the files.
    """
    files = {place: read_lines(place) for place in (path, test_path) if place is not None}
    names = tuple(labels) or _names(label for lines in files.values() for _, _, label in lines)
    own, *test = [_records(*file, length, tokenizer, names) for file in files.items()]
    return replace(own, test=test[0] if test else None)


def _records(
    path: Path, lines: Sequence[Line], length: int, tokenizer: Tokenizer, names: tuple[str, ...]
) -> Dataset:
    """The lines of one file as tokens and class numbers."""
    numbers = {name: k for k, name in enumerate(names)}
    for number, _, label in lines:
        if label not in numbers:
            raise DataError(
                f"line {number} of {path} has the label {label!r}, which is none of "
                f"{', '.join(names)} ([data] labels)"
            )
    ids = tokenizer.sequences([text for _, text, _ in lines], length)
    empty = next((number for (number, _, _), row in zip(lines, ids, strict=True) if not row), None)
    if empty is not None:
        raise DataError(f"line {empty} of {path} has no tokens: its text is empty")
    tokens = torch.full((len(ids), length), tokenizer.padding)
    mask = torch.zeros(len(ids), length, dtype=torch.int64)
    for j, row in enumerate(ids):
        tokens[j, : len(row)] = torch.tensor(row)
        mask[j, : len(row)] = 1
    return Dataset(
        name="tsv",
        x={"input_ids": tokens, "attention_mask": mask},
        y=torch.tensor([numbers[label] for _, _, label in lines]),
        classes=len(names),
        class_names=names,
        vocabulary=tokenizer.size,
    )


def read_lines(path: Path) -> list[Line]:
    """The lines of a file, without its header and without empty ones.

    Raises:
        DataError: a line has not two columns, or the file has no records.
    """
    rows: list[tuple[int, list[str]]] = []
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if not line.strip():
            continue
        columns = line.rstrip("\r").split("\t")
        if len(columns) != 2:
            raise DataError(
                f"line {number} of {path} has {len(columns)} columns, want 2: a text, a tab, and "
                "its label"
            )
        rows.append((number, columns))
    column = 1
    if rows:
        header = [name.strip().lower() for name in rows[0][1]]
        named = [j for j, name in enumerate(header) if name in LABEL_COLUMNS]
        if len(named) == 1:
            column = named[0]
            rows = rows[1:]
    if not rows:
        raise DataError(f"{path} has no lines of a text and its label")
    return [(number, row[1 - column].strip(), row[column].strip()) for number, row in rows]


def _names(labels: Iterable[str]) -> tuple[str, ...]:
    """The different labels in order: numbers by value, names by alphabet."""
    different = set(labels)
    if all(label.lstrip("-").isdigit() for label in different):
        return tuple(sorted(different, key=int))
    return tuple(sorted(different))
