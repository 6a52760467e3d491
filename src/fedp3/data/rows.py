"""Rows of map-style data sets: how one is read, and data sets that are read row by row.

A row is a pair (x, target), or a dict with its target under `labels` or `label`.  `Rows` is a data
set that stays where it is: a row is read when a batch needs it, so that random transforms are drawn
anew and the data set need not fit into memory.  While a row is read, the global generators of
Python, NumPy and torch are seeded for it, so that the same row of the same step is the same on
every engine.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedp3.core.errors import DataError, type_of
from fedp3.core.randomness import Stream, global_draws, stream
from fedp3.data.inputs import Inputs, combine, map_tensors, tensors_of

TARGETS = ("labels", "label")  # the keys of targets in a row of Hugging Face's `datasets`
STORED = ("targets", "labels")  # where map-style data sets store the labels of all rows
CHECKED = 16  # rows whose labels are compared with the stored ones

# index of a row -> what random transforms draw from while it is read
Draws = Callable[[int], torch.Generator]
Label = int | str


def same_draws(i: int) -> torch.Generator:
    """Draws that are the same whenever a row is read, as for scores."""
    return stream(0, Stream.ROW, i)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A map-style data set whose rows are read when they are needed.

    Args:
        source: anything with a length and rows.
        name: its name in error messages.
        labelled: whether the target of each row is one class label.
        class_names: where labels are texts, the text of each class.
    """

    source: Any
    name: str
    labelled: bool
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.source)


def length_of(source: Any, name: str) -> int:
    """The number of rows; refused if there is none, as in a stream."""
    kind = type(source).__name__
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DataError(f"data set {name!r} is a {kind} without a length: want a map-style dataset")
    try:
        return len(source)
    except Exception as error:  # whatever a user's data set raises
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data set {name!r}: its length cannot be read: {reason}") from None


def read_row(source: Any, i: int, name: str, *, labelled: bool) -> tuple[Inputs, Tensor | Label]:
    """The inputs and the target of one row; a label is an integer or a text.

    Args:
        source: the data set.
        i: the row.
        name: the name of the data set in error messages.
        labelled: whether the target is one class label.
    """
    try:
        item = source[i]
    except Exception as error:  # whatever a user's data set raises
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data set {name!r}: sample {i} cannot be read: {reason:.200}") from None
    if isinstance(item, Mapping):
        item = _split_row(item, i, name)
    if not isinstance(item, Sequence) or isinstance(item, str | bytes) or len(item) != 2:
        raise DataError(f"data set {name!r}: sample {i} is {type_of(item)}, want a pair (x, label)")
    x, y = item
    return _inputs(x, i, name), _label(y, i, name) if labelled else _target(y, i, name)


def _split_row(row: Mapping[str, Any], i: int, name: str) -> tuple[dict[str, Any], Any]:
    """The inputs and the target of a row with named columns; columns of texts are left out."""
    key = next((key for key in TARGETS if key in row), None)
    if key is None:
        raise DataError(
            f"data set {name!r}: row {i} has the columns {', '.join(map(str, row))}, and none of "
            f"{' and '.join(TARGETS)} is the target; rename the column"
        )
    return {k: v for k, v in row.items() if k != key and _is_numeric(v)}, row[key]


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return not isinstance(value, str | bytes) and np.asarray(value).dtype.kind in "biuf"


def _inputs(x: Any, i: int, name: str) -> Inputs:
    if isinstance(x, Mapping):
        if not x:
            raise DataError(f"data set {name!r}: sample {i} has no numbers as inputs")
        return {str(k): torch.as_tensor(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple(torch.as_tensor(v) for v in x)
    if not isinstance(x, Tensor | np.ndarray):
        raise DataError(
            f"data set {name!r}: sample {i} is of type {type(x).__name__}, want a tensor; "
            "add a transform that returns one"
        )
    return torch.as_tensor(x)


def _label(y: Any, i: int, name: str) -> Label:
    if isinstance(y, str):
        return str(y)
    try:
        return operator.index(y)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"data set {name!r}: the label of sample {i} is {y!r:.40}, want an integer from 0, or "
            "a text"
        ) from None


def _target(y: Any, i: int, name: str) -> Tensor:
    try:
        return torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"data set {name!r}: the target of sample {i} is {y!r:.40}, want numbers"
        ) from None


def refuse_other_shapes(x: Inputs, first: Inputs, what: str) -> None:
    """Refuse inputs or a target of another structure or shape than those of the first sample."""
    if type(x) is not type(first) or len(tensors_of(x)) != len(tensors_of(first)):
        raise DataError(f"{what} has other inputs than sample 0; give all samples the same ones")
    for w, like in zip(tensors_of(x), tensors_of(first), strict=True):
        if w.shape != like.shape:
            raise DataError(
                f"{what} has shape {tuple(w.shape)}, sample 0 has {tuple(like.shape)}; bring all "
                "samples to one shape, texts by padding"
            )


# --------------------------------------------------------------------------- when they are needed


def read_batch(
    rows: Rows, indices: Tensor, like: Inputs, targets: Tensor, draws: Draws = same_draws
) -> tuple[Any, Tensor]:
    """The inputs and targets of these rows.

    Args:
        rows: the data set.
        indices: the rows to read.
        like: one sample, as a batch, whose structure, shapes and types the inputs have.
        targets: the targets of all rows, as they were when the data set was created.
        draws: what random transforms draw from.
    """
    places = indices.tolist()
    first = map_tensors(lambda w: w[0], like)
    xs: list[Inputs] = []
    ys: list[Tensor] = []
    for i, (x, y) in zip(places, seeded_rows(rows, places, draws), strict=True):
        refuse_other_shapes(x, first, f"data set {rows.name!r}: sample {i}")
        xs.append(x)
        if isinstance(y, Tensor):
            refuse_other_shapes(y, targets[0], f"data set {rows.name!r}: target {i}")
            ys.append(y.to(targets.dtype))
        else:
            ys.append(targets[i])
            _refuse_other_label(rows, y, i, int(targets[i]))
    x = combine(lambda w, *read: torch.stack(read).to(w.dtype), like, *xs)
    for w in tensors_of(x):
        refuse_infinity(w, rows.name, "sample", places)
    return x, torch.stack(ys)


def seeded_rows(rows: Rows, places: Iterable[int], draws: Draws) -> list[tuple[Inputs, Any]]:
    """These rows, each read under its own draws."""
    read = []
    with global_draws() as draw_from:
        for i in places:
            draw_from(draws(i))
            read.append(read_row(rows.source, i, rows.name, labelled=rows.labelled))
    return read


def _refuse_other_label(rows: Rows, label: Label, i: int, known: int) -> None:
    """Refuse a label that has changed: samples were divided among clients by the one before."""
    before = rows.class_names[known] if rows.class_names else known
    if label != before:
        raise DataError(
            f"data set {rows.name!r}: the label of sample {i} is {label!r}, and it was {before!r} "
            "before; a label must not change between two reads"
        )


def labels_of(source: Any, name: str) -> list[Label]:
    """The labels of all rows.

    They are what the data set stores as `targets` or `labels`, if the rows agree with that;
    otherwise every row is read once, of which only the label is retained.

    Args:
        source: the data set.
        name: its name in error messages.
    """
    n = length_of(source, name)
    stored = _stored_labels(source, n)
    if stored is not None:
        tried = range(0, n, max(1, n // CHECKED))
        read = seeded_rows(Rows(source=source, name=name, labelled=True), tried, same_draws)
        if all(y == stored[i] for i, (_, y) in zip(tried, read, strict=True)):
            return stored
    found: list[Label] = []
    with global_draws() as draw_from:
        for i in range(n):
            draw_from(same_draws(i))
            _, y = read_row(source, i, name, labelled=True)
            assert not isinstance(y, Tensor)
            found.append(y)
    return found


def _stored_labels(source: Any, n: int) -> list[Label] | None:
    """The labels that a data set stores; None if it stores none that can be used."""
    for attribute in STORED:
        values = getattr(source, attribute, None)
        if isinstance(values, Tensor | np.ndarray):
            values = values.tolist()
        if isinstance(values, Sequence) and len(values) == n:
            labels = [v for v in values if isinstance(v, int | str) and not isinstance(v, bool)]
            if len(labels) == n:
                return labels
    return None


def refuse_infinity(
    values: Tensor, name: str, what: str, places: Sequence[int] | None = None
) -> None:
    """Refuse NaN and infinity.

    Args:
        values: samples or targets, along dimension 0.
        name: the name of the data set.
        what: what they are.
        places: the number of each sample, if it is not its place.
    """
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        finite = torch.isfinite(values.reshape(len(values), -1)).all(1)
        first = int((~finite).nonzero()[0])
        place = first if places is None else places[first]
        raise DataError(
            f"data set {name!r} has a value that is not finite in {what} {place}: clean it first"
        )
