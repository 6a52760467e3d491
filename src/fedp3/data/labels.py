"""Class labels: integers from 0, made from what users have, with hints where that is not clear.

Labels that are texts become the numbers of their classes, in alphabetical order.  A data set, the
record of a run and exported networks know which number is which text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedp3.core.errors import DataError
from fedp3.data.dataset import Dataset


def labels_and_names(labels: Any, name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as int64, and the text of each class where they are texts.

    Args:
        labels: one label per sample: a tensor, an array or a sequence.
        name: the name of the data set in error messages.
    """
    if not isinstance(labels, Tensor):
        try:
            labels = np.asarray(labels)
        except Exception as error:  # NumPy raises many kinds for nested values
            raise DataError(
                f"data set {name!r}: the labels are no array: {type(error).__name__}"
            ) from None
        if labels.dtype.kind in "USO":
            return _from_texts(labels, name)
        labels = np.ascontiguousarray(labels, labels.dtype.newbyteorder("="))
    numbers = torch.as_tensor(labels).detach()
    problem = _no_labels(numbers)
    if problem:
        raise DataError(f"data set {name!r} has {problem}")
    return numbers.to(torch.int64).contiguous(), ()


def _from_texts(labels: Any, name: str) -> tuple[Tensor, tuple[str, ...]]:
    if labels.ndim != 1:
        raise DataError(
            f"data set {name!r} has labels of shape {labels.shape}, want one per sample"
        )
    values = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in labels.tolist()]
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return torch.tensor(values, dtype=torch.int64), ()
    odd = next((v for v in values if not isinstance(v, str)), None)
    if odd is not None or None in values:
        raise DataError(
            f"data set {name!r} has a label of type {type(odd).__name__}; want texts only, or "
            "integers from 0"
        )
    names = tuple(sorted(set(values)))
    numbers = {text: i for i, text in enumerate(names)}
    return torch.tensor([numbers[v] for v in values], dtype=torch.int64), names


def _no_labels(values: Tensor) -> str:
    """What these are if they are no labels, and what to do; empty if they can be labels."""
    what = f"labels of shape {tuple(values.shape)}"
    if values.dim() == 2 and values.shape[1] == 1:
        return f"{what}, want one dimension; pass y[:, 0]"
    if values.dim() == 2 and not values.is_complex() and _is_one_hot(values):
        return f"{what} that are one-hot, want the number of the class; pass y.argmax(1)"
    if values.dim() > 1:
        return (
            f"{what}, want one integer per sample; for other targets name what clients minimise, "
            "as in objective='multi_label', 'regression' or 'segmentation'"
        )
    if values.dtype == torch.bool:
        return "labels of torch.bool, want integers from 0; pass y.long()"
    if values.is_floating_point() or values.is_complex():
        return (
            f"labels of {values.dtype}, want integers from 0; pass y.long() if they are the "
            "numbers of classes, or objective='regression'"
        )
    return ""


def _is_one_hot(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all()) and bool((values.sum(1) == 1).all())


def with_common_classes(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The same data sets, in which a label means the same in all of them.

    Args:
        datasets: the data of clients and of a test set.
    """
    if len({bool(data.class_names) for data in datasets}) > 1:
        raise DataError("some of the data have texts as labels and others numbers; use one kind")
    names = tuple(sorted({name for data in datasets for name in data.class_names}))
    if names:
        return [_renamed(data, names) for data in datasets]
    most = max(data.classes for data in datasets)
    return [data if data.classes == most else replace(data, classes=most) for data in datasets]


def _renamed(data: Dataset, names: tuple[str, ...]) -> Dataset:
    """The data set with the class numbers of more names than its own."""
    if data.class_names == names:
        return data
    numbers = torch.tensor([names.index(name) for name in data.class_names])
    rows = None if data.rows is None else replace(data.rows, class_names=names)
    y = numbers[data.y]
    return replace(data, y=y, classes=len(names), class_names=names, rows=rows)
