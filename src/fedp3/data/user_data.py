"""Data sets from what a user has: tensors, map-style data sets, or one of these for each client."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedp3.core.errors import DataError, InputError
from fedp3.data.dataset import Dataset
from fedp3.data.inputs import Inputs, combine, map_tensors, tensors_of

Values = Tensor | npt.NDArray[Any]
# all samples together, or a list with the data of each client
Data = Dataset | torch_data.Dataset[Any] | tuple[Any, Any] | list[Any]
TARGETS = ("labels", "label")  # the keys of targets in a row of Hugging Face's `datasets`


def from_tensors(
    x: Values | tuple[Values, ...] | Mapping[str, Values],
    y: Values,
    *,
    name: str = "user",
    classes: int | None = None,
    ids: Sequence[str] | None = None,
    labelled: bool = True,
) -> Dataset:
    """Create a data set from tensors or arrays.

    Args:
        x: the samples along the first dimension; uint8 means raw pixels, any other type means that
            the values are scaled already.  A tuple or dict is for a network with several inputs.
            Whole numbers stay whole (tokens) if there are several inputs, or no labels; otherwise
            they become float32.
        y: integer labels from 0; without `labelled`, targets of any shape.
        name: the name of the data set in reports.
        classes: the number of classes; by default the largest label plus one, and 0 without labels.
        ids: a stable identifier of each sample.  Under LDP a device recognises its records by it,
            so pass one if your preprocessing changes; by default the values identify a sample.
        labelled: whether every sample has one class label.  Other targets are for other objectives
            than classification.
    """
    several = isinstance(x, tuple | Mapping)
    samples = map_tensors(
        lambda w: _clean(_as_tensor(w), name, whole=several or not labelled), _structure(x)
    )
    targets = _labels(_as_tensor(y), name) if labelled else _targets(_as_tensor(y), name)
    if classes is None:
        classes = int(targets.max()) + 1 if labelled and targets.numel() else 0
    return Dataset(
        name=name,
        x=samples,
        y=targets,
        classes=classes,
        ids=None if ids is None else tuple(map(str, ids)),
        labelled=labelled,
        objective="classification" if labelled else "",
    )


def _structure(x: Any) -> Any:
    """Several inputs as a plain tuple or dict, one input as it is."""
    if isinstance(x, Mapping):
        return {str(name): _as_tensor(w) for name, w in x.items()}
    return tuple(_as_tensor(w) for w in x) if isinstance(x, tuple) else _as_tensor(x)


def _as_tensor(values: Values) -> Tensor:
    """The values in this machine's byte order, detached from any graph of gradients."""
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return torch.as_tensor(values).detach()


def _clean(samples: Tensor, name: str, *, whole: bool) -> Tensor:
    """One input in a type that batches are made of; refused if it has NaN or infinity."""
    if samples.is_complex():
        raise DataError(f"data set {name!r} has samples of {samples.dtype}, want real numbers")
    if samples.dtype != torch.uint8:
        keeps = whole and not samples.is_floating_point()
        samples = samples.to(torch.int64 if keeps else torch.float32)
    _refuse_infinity(samples, name, "sample")
    return samples.contiguous()


def _labels(labels: Tensor, name: str) -> Tensor:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"data set {name!r} has labels of {labels.dtype}, want integers from 0")
    return labels.to(torch.int64).contiguous()


def _targets(targets: Tensor, name: str) -> Tensor:
    if targets.is_complex():
        raise DataError(f"data set {name!r} has targets of {targets.dtype}, want real numbers")
    whole = not targets.is_floating_point()
    targets = targets.to(torch.int64 if whole else torch.float32).contiguous()
    _refuse_infinity(targets, name, "the target of sample")
    return targets


def _refuse_infinity(values: Tensor, name: str, what: str) -> None:
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        finite = torch.isfinite(values.reshape(len(values), -1)).all(1)
        first = int((~finite).nonzero()[0])
        raise DataError(
            f"data set {name!r} has a value that is not finite in {what} {first}: clean it first"
        )


# --------------------------------------------------------------------------- map-style data sets


def from_torch(
    dataset: torch_data.Dataset[Any],
    *,
    name: str = "user",
    classes: int | None = None,
    labelled: bool = True,
) -> Dataset:
    """Create a data set from all (x, target) pairs of a map-style data set.

    A row may also be a dict, as in Hugging Face's `datasets`: its `labels` or `label` are the
    target, and its other numbers are the inputs by name.  Each row is read once, so that a random
    transform is drawn only once.

    Args:
        dataset: anything with a length and rows.
        name: the name of the data set in reports.
        classes: the number of classes; by default the largest label plus one.
        labelled: whether the target of each row is one class label.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise DataError(f"data set {name!r} is a {kind} without a length: want a map-style dataset")
    samples: list[Inputs] = []
    targets: list[Tensor] = []
    for i in range(len(dataset)):
        x, y = _pair(dataset[i], i, name, labelled=labelled)
        _refuse_other_shapes(x, samples[0] if samples else x, f"data set {name!r}: sample {i}")
        _refuse_other_shapes(y, targets[0] if targets else y, f"data set {name!r}: target {i}")
        samples.append(x)
        targets.append(y)
    if not samples:
        raise DataError(f"data set {name!r} has no samples")
    x = combine(lambda *rows: torch.stack(rows), samples[0], *samples[1:])
    return from_tensors(x, torch.stack(targets), name=name, classes=classes, labelled=labelled)


def _pair(item: Any, i: int, name: str, *, labelled: bool) -> tuple[Inputs, Tensor]:
    if isinstance(item, Mapping):
        item = _split_row(item, i, name)
    if not isinstance(item, Sequence) or len(item) != 2:
        raise DataError(
            f"data set {name!r}: sample {i} is a {type(item).__name__}, want a pair (x, label)"
        )
    x, y = item
    return _inputs(x, i, name), _target(y, i, name, labelled=labelled)


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


def _target(y: Any, i: int, name: str, *, labelled: bool) -> Tensor:
    try:
        return torch.as_tensor(operator.index(y) if labelled else y)
    except (TypeError, ValueError, RuntimeError):
        want = "an integer from 0" if labelled else "numbers"
        raise DataError(
            f"data set {name!r}: the label of sample {i} is {y!r:.40}, want {want}"
        ) from None


def _refuse_other_shapes(x: Inputs, first: Inputs, what: str) -> None:
    for w, like in zip(tensors_of(x), tensors_of(first), strict=True):
        if w.shape != like.shape:
            raise DataError(
                f"{what} has shape {tuple(w.shape)}, sample 0 has {tuple(like.shape)}; bring all "
                "samples to one shape, texts by padding"
            )


# --------------------------------------------------------------------------- one for each client


def pool(datasets: Sequence[Dataset]) -> tuple[Dataset, list[Tensor]]:
    """One data set of all samples, and which of them are each client's.

    Args:
        datasets: the data set of each client.
    """
    first = datasets[0]
    for i, data in enumerate(datasets):
        if type(data.x) is not type(first.x) or data.labelled != first.labelled:
            raise DataError(f"the data of client {i} have other inputs or targets than client 0's")
        for what, a, b in (("samples", data.x, first.x), ("targets", data.y, first.y)):
            shapes = [[tuple(w.shape[1:]) for w in tensors_of(values)] for values in (a, b)]
            if shapes[0] != shapes[1]:
                raise DataError(
                    f"the {what} of client {i} have the shapes {shapes[0]}, those of client 0 "
                    f"{shapes[1]}; bring all to one shape"
                )
    x = combine(lambda *parts: torch.cat(parts), first.x, *(d.x for d in datasets[1:]))
    y = torch.cat([d.y for d in datasets])
    classes = max(d.classes for d in datasets)
    everything = replace(first, x=x, y=y, classes=classes, raw=None, ids=None, roles=None)
    parts = torch.split(torch.arange(len(y)), [len(d.y) for d in datasets])
    return everything, list(parts)


# --------------------------------------------------------------------------- anything


def gather(data: Data, *, labelled: bool = True) -> tuple[Dataset, list[Tensor] | None]:
    """Return all samples, and which of them are each client's if the data are a list.

    Args:
        data: tensors (x, y), a map-style data set, a `Dataset`, or a list of these.
        labelled: whether every sample has one class label.
    """
    if not isinstance(data, list) or not data or not all(map(_is_dataset, data)):
        return _dataset(data, labelled=labelled), None
    return pool([_dataset(one, labelled=labelled) for one in data])


def _is_dataset(part: object) -> bool:
    """Whether this is the data of one client: a pair of tensors, or a data set."""
    if isinstance(part, tuple):
        return len(part) == 2 and isinstance(part[1], Tensor | np.ndarray)
    return isinstance(part, Dataset | torch_data.Dataset)


def _dataset(data: Data, *, labelled: bool) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, torch_data.DataLoader):
        raise InputError("the data are a DataLoader, which draws batches; pass loader.dataset")
    if isinstance(data, str | Path):
        raise InputError(f"the data are the text {str(data)!r}; read the file, and pass (x, y)")
    if isinstance(data, Mapping):
        raise InputError(
            "the data are a dict; pass all samples together as (x, y), and name the samples of "
            "each client with partition={'file': ...} (docs/reference/config.md)"
        )
    if not isinstance(data, tuple | list):
        return from_torch(data, labelled=labelled)
    if len(data) != 2:
        raise InputError(f"the data are {len(data)} values, want a pair (x, y)")
    x, y = data
    if isinstance(y, tuple | list) and _holds_arrays(y):
        raise InputError(
            "the data are pairs of pairs; every client's samples are split into training and test "
            "samples by fedp3, so pass one pair (x, y) of all samples"
        )
    for name, part in (("x", x), ("y", y)):
        _check_array(name, part)
    return from_tensors(x, _numbers(y), labelled=labelled)


def _check_array(name: str, part: object) -> None:
    """Refuse what has no values that can be read: nothing at all, or an unusual kind of tensor."""
    if part is None:
        raise InputError(f"{name} is None, want a tensor or an array")
    if isinstance(part, Tensor) and part.is_sparse:
        raise InputError(f"{name} is a sparse tensor; pass {name}.to_dense()")
    if isinstance(part, Tensor) and part.is_meta:
        raise InputError(f"{name} is on the device 'meta' and has no values")


def _holds_arrays(part: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor | np.ndarray) and value.ndim > 0 for value in part)


def _numbers(labels: Any) -> Any:
    """Labels as they are; texts are refused with how to number them."""
    kind = labels.dtype.kind if isinstance(labels, np.ndarray) else ""
    texts = isinstance(labels, Sequence) and any(isinstance(label, str) for label in labels)
    if texts or kind in ("U", "S", "O"):
        raise InputError(
            "the labels are texts, want integers from 0: "
            "names, y = numpy.unique(labels, return_inverse=True)"
        )
    return labels
