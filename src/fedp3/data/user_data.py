"""Data sets from what a user has: tensors, map-style data sets, or one of these for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedp3.core.errors import DataError, first_line, type_of
from fedp3.data.dataset import Dataset
from fedp3.data.inputs import Inputs, combine, map_tensors, tensors_of
from fedp3.data.labels import labels_and_names
from fedp3.data.rows import (
    Rows,
    labels_of,
    length_of,
    read_row,
    refuse_infinity,
    refuse_other_shapes,
    same_draws,
    seeded_rows,
)

Values = Tensor | npt.NDArray[Any]


def from_tensors(
    x: Values | tuple[Values, ...] | Mapping[str, Values],
    y: Values | Sequence[Any],
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
            Integers stay integers, such as tokens, unless a network can only compute with floats.
        y: integer labels from 0, or texts; without `labelled`, targets of any shape.
        name: the name of the data set in reports.
        classes: the number of classes; by default the largest label plus one, and 0 without labels.
        ids: a stable identifier of each sample.  Under LDP a device recognises its records by it,
            so pass one if your preprocessing changes; by default the values identify a sample.
        labelled: whether every sample has one class label.  Other targets are for other objectives
            than classification.
    """
    samples = map_tensors(lambda w: _clean(w, name), _structure(x, name))
    names: tuple[str, ...] = ()
    if labelled:
        targets, names = labels_and_names(y, name)
    else:
        targets = _targets(_as_tensor(y, name, "y"), name)
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
        class_names=names,
    )


def _structure(x: Any, name: str) -> Any:
    """Several inputs as a plain tuple or dict, one input as it is."""
    if isinstance(x, Mapping):
        return {str(key): _as_tensor(w, name, f"x[{key!r}]") for key, w in x.items()}
    if isinstance(x, tuple):
        return tuple(_as_tensor(w, name, f"x[{i}]") for i, w in enumerate(x))
    return _as_tensor(x, name, "x")


def _as_tensor(values: Any, name: str, what: str) -> Tensor:
    """The values in this machine's byte order, detached from any graph of gradients."""
    try:
        if not isinstance(values, Tensor) and hasattr(values, "__array__"):
            values = np.asarray(values)
            values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        found = torch.as_tensor(values).detach()
    except Exception as error:  # torch and NumPy raise many kinds for values that are no numbers
        text = first_line(error)
        stacked = isinstance(values, Sequence) and any(isinstance(v, Tensor) for v in values)
        hint = f"; pass torch.stack({what})" if stacked else ""
        raise DataError(
            f"data set {name!r}: {what} is {type_of(values)} that is no array of numbers "
            f"({type(error).__name__}: {text:.100}){hint}"
        ) from None
    if found.dim() == 0:
        raise DataError(f"data set {name!r}: {what} is a single number, want an array of samples")
    return found


def _clean(samples: Tensor, name: str) -> Tensor:
    """One input in a type that batches are made of; refused if it has NaN or infinity."""
    if samples.is_complex():
        raise DataError(f"data set {name!r} has samples of {samples.dtype}, want real numbers")
    if samples.dtype != torch.uint8:
        samples = samples.to(torch.float32 if samples.is_floating_point() else torch.int64)
    refuse_infinity(samples, name, "sample")
    return samples.contiguous()


def _targets(targets: Tensor, name: str) -> Tensor:
    if targets.is_complex():
        raise DataError(f"data set {name!r} has targets of {targets.dtype}, want real numbers")
    whole = not targets.is_floating_point()
    targets = targets.to(torch.int64 if whole else torch.float32).contiguous()
    refuse_infinity(targets, name, "the target of sample")
    return targets


# --------------------------------------------------------------------------- map-style data sets


def from_torch(
    dataset: torch_data.Dataset[Any],
    *,
    name: str = "user",
    classes: int | None = None,
    ids: Sequence[str] | None = None,
    labelled: bool = True,
    lazy: bool = False,
) -> Dataset:
    """Create a data set from all (x, target) pairs of a map-style data set.

    A row may also be a dict, as in Hugging Face's `datasets`: its `labels` or `label` are the
    target, and its other numbers are the inputs by name.

    Args:
        dataset: anything with a length and rows.
        name: the name of the data set in reports.
        classes: the number of classes; by default the largest label plus one.
        ids: a stable identifier of each row, see `from_tensors`; by default what the data set has
            as `ids`.  With `lazy`, LDP needs them.
        labelled: whether the target of each row is one class label.
        lazy: read a row when a batch needs it, and not all of them now.  Random transforms are then
            drawn anew for every step, and the data set need not fit into memory.  They may draw
            from the global generators of Python, NumPy and torch, which are seeded for each row; a
            generator of the data set's own would not repeat.  When a run is resumed, only targets
            and the first row are compared with those that it began with.
    """
    count = length_of(dataset, name)
    if count == 0:
        raise DataError(f"data set {name!r} has no samples")
    ids = getattr(dataset, "ids", None) if ids is None else ids
    names = None if ids is None else [str(i) for i in ids]
    if lazy:
        return _lazy(dataset, name, classes, names, labelled=labelled)
    samples: list[Inputs] = []
    targets: list[Any] = []
    for i in range(count):
        x, y = read_row(dataset, i, name, labelled=labelled)
        refuse_other_shapes(x, samples[0] if samples else x, f"data set {name!r}: sample {i}")
        if isinstance(y, Tensor):
            refuse_other_shapes(y, targets[0] if targets else y, f"data set {name!r}: target {i}")
        samples.append(x)
        targets.append(y)
    everything = combine(lambda *rows: torch.stack(rows), samples[0], *samples[1:])
    return from_tensors(
        everything,
        targets if labelled else torch.stack(targets),
        name=name,
        classes=classes,
        ids=names,
        labelled=labelled,
    )


def _lazy(
    source: Any, name: str, classes: int | None, ids: list[str] | None, *, labelled: bool
) -> Dataset:
    """A data set of which only the targets are read now."""
    rows = Rows(source=source, name=name, labelled=labelled)
    [(first, _)] = seeded_rows(rows, [0], same_draws)
    example = map_tensors(lambda w: w.unsqueeze(0), first)
    if labelled:
        targets: Any = labels_of(source, name)
    else:
        targets = torch.stack([_one_target(rows, i) for i in range(len(rows))])
    one = from_tensors(example, targets[:1], name=name, labelled=labelled)
    y, names = labels_and_names(targets, name) if labelled else (_targets(targets, name), ())
    if classes is None:
        classes = int(y.max()) + 1 if labelled else 0
    return replace(
        one,
        y=y,
        classes=classes,
        ids=None if ids is None else tuple(ids),
        class_names=names,
        rows=replace(rows, class_names=names),
    )


def _one_target(rows: Rows, i: int) -> Tensor:
    [(_, target)] = seeded_rows(rows, [i], same_draws)
    return torch.as_tensor(target)


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
        if (data.rows is None) != (first.rows is None):
            raise DataError(f"of client {i} and client 0, one has data that are read lazily")
        for what, a, b in (("samples", data.x, first.x), ("targets", data.y, first.y)):
            shapes = [[tuple(w.shape[1:]) for w in tensors_of(values)] for values in (a, b)]
            if shapes[0] != shapes[1]:
                raise DataError(
                    f"the {what} of client {i} have the shapes {shapes[0]}, those of client 0 "
                    f"{shapes[1]}; bring all to one shape"
                )
    y = torch.cat([d.y for d in datasets])
    parts = torch.split(torch.arange(len(y)), [len(d.y) for d in datasets])
    classes = max(d.classes for d in datasets)
    everything = replace(first, y=y, classes=classes, raw=None, roles=None, **_all(datasets))
    return everything, list(parts)


def _all(datasets: Sequence[Dataset]) -> dict[str, Any]:
    """The samples of all data sets, as fields of one."""
    first = datasets[0]
    if first.rows is None:
        x = combine(lambda *parts: torch.cat(parts), first.x, *(d.x for d in datasets[1:]))
        return {"x": x, "ids": None}
    sources = [d.rows.source for d in datasets if d.rows is not None]
    rows = replace(first.rows, source=torch_data.ConcatDataset(sources))
    ids = [i for d in datasets for i in d.ids or ()]
    return {"rows": rows, "ids": tuple(ids) if len(ids) == len(rows) else None}
