"""What users pass to `fedp3.run` as data: which kind it is, and one data set made of it.

    (x, y)               arrays
    a data set           map-style, a DataLoader around one, a list of rows (x, label), a `Dataset`
    (train, test)        two of these; the second one is a test set of no client
    [a, b, ...]          one of these for each client
    {"name": a, ...}     the same, by the name of the client
Everything else is refused, with what to write instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import data as torch_data

from fedp3.core.errors import FedP3Error, InputError, type_of
from fedp3.data.dataset import Dataset
from fedp3.data.labels import with_common_classes
from fedp3.data.user_data import from_tensors, from_torch, pool

Data = (
    Dataset
    | torch_data.Dataset[Any]
    | torch_data.DataLoader[Any]
    | tuple[Any, Any]
    | list[Any]
    | Mapping[Any, Any]
)
SPLITS = ("train", "training", "test", "testing", "valid", "validation", "val", "dev")
PAIRS = "pass ((x_train, y_train), (x_test, y_test))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The data of a run.

    Args:
        data: all samples of clients, and the test set if there is one.
        parts: which samples are each client's; None if they are yet to be divided.
        names: the names of the clients; empty if they have none.
        batch: the batch size of the DataLoaders; None if there are none, or several sizes.
    """

    data: Dataset
    parts: list[Tensor] | None = None
    names: tuple[str, ...] = ()
    batch: int | None = None


def gather(
    data: Data, test: Data | None = None, *, labelled: bool = True, lazy: bool = False
) -> Gathered:
    """One data set of everything that was passed.

    Args:
        data: see above.
        test: a test set of no client, if it is not in `data`.
        labelled: whether every sample has one class label.
        lazy: read rows of map-style data sets when they are needed.
    """
    train, test = _train_and_test(data, test)
    names, members, divided = _members(train)
    sets = []
    for i, one in enumerate(members):
        try:
            sets.append(_dataset(one, labelled=labelled, lazy=lazy))
        except FedP3Error as error:
            if not divided:
                raise
            raise type(error)(f"client {names[i] if names else i!r}: {error}") from None
    held_out = [] if test is None else [_dataset(test, labelled=labelled, lazy=lazy)]
    if lazy and all(one.rows is None for one in (*sets, *held_out)):
        raise InputError("lazy=True is for data sets that are read row by row; these are arrays")
    if (divided or held_out) and any(one.test is not None for one in (*sets, *held_out)):
        raise InputError("a data set has a test set of its own; pass only one test set, as test=")
    common = with_common_classes([*sets, *held_out])
    everything, parts = pool(common[: len(sets)]) if divided else (common[0], None)
    if held_out:
        everything = replace(everything, test=common[-1])
    sizes = {one.batch_size for one in members if isinstance(one, torch_data.DataLoader)}
    size = sizes.pop() if len(sizes) == 1 else None
    batch = size if size is not None and size > 1 else None
    return Gathered(data=everything, parts=parts, names=names, batch=batch)


# --------------------------------------------------------------------------- which kind


def _train_and_test(data: Any, test: Any) -> tuple[Any, Any]:
    """The training and the test data, of which the latter may be None."""
    if not isinstance(data, tuple) or len(data) != 2 or not _is_data(data[1]):
        return data, test
    if test is not None:
        raise InputError("the data are a pair (train, test), and test= is another test set")
    if not _is_data(data[0]):
        raise InputError(
            f"the data are a pair of {type_of(data[0])} and a data set; for training and "
            f"test data {PAIRS}, or two data sets"
        )
    return data


def _members(data: Any) -> tuple[tuple[str, ...], Sequence[Any], bool]:
    """The names of clients, the data of each, and whether each is the data of one client."""
    if isinstance(data, Mapping):
        _check_clients(data)
        return tuple(map(str, data)), list(data.values()), True
    if isinstance(data, list) and data and all(map(_is_data, data)):
        _refuse_pairs(dict(enumerate(data)))
        return (), data, True
    return (), [data], False


def _check_clients(data: Mapping[Any, Any]) -> None:
    """Refuse a dict that is anything but data by client."""
    keys = ", ".join(repr(key) for key in list(data)[:6])
    if data and all(str(key).lower() in SPLITS for key in data):
        raise InputError(
            f"the data are a dict with the keys {keys}, which look like parts of one data set; "
            "pass (data['train'], data['test']), or rename them if they are clients"
        )
    if not data or not all(map(_is_data, data.values())):
        raise InputError(
            f"the data are a dict with the keys {keys or 'of nobody'}; want the data of each "
            "client by its name, as in {'anna': (x, y), 'bob': (x, y)}; inputs with names are "
            "passed as (inputs, y)"
        )
    if len(set(map(str, data))) < len(data):
        raise InputError(f"two clients have the same name: {keys}")
    _refuse_pairs(data)


def _refuse_pairs(clients: Mapping[Any, Any]) -> None:
    """Refuse training and test data by client."""
    for name, data in clients.items():
        if isinstance(data, tuple) and len(data) == 2 and all(map(_is_data, data)):
            raise InputError(
                f"the data of client {name!r} are a pair of data sets; every client tests on a "
                "part of its own samples (partition.train_share), so pass one data set for each "
                "client, and a test set of no client as test="
            )


def _is_data(part: object) -> bool:
    """Whether this is data of clients or a test set: a pair of arrays, or a data set."""
    if isinstance(part, Dataset | torch_data.Dataset | torch_data.DataLoader):
        return True
    if isinstance(part, Mapping):
        return bool(part) and all(map(_is_data, part.values()))
    if isinstance(part, tuple | list):
        pair = len(part) == 2 and _is_array(part[1]) and not _is_scalar(part[0])
        return pair or _is_rows(part) or (bool(part) and all(map(_is_data, part)))
    plain = isinstance(part, str | bytes | Tensor | np.ndarray) or hasattr(part, "__array__")
    return not plain and hasattr(part, "__len__") and hasattr(part, "__getitem__")


def _is_rows(part: Sequence[Any]) -> bool:
    """Whether these are rows (x, label)."""
    return bool(part) and all(
        isinstance(row, tuple) and len(row) == 2 and _is_scalar(row[1]) and not _is_scalar(row[0])
        for row in part
    )


def _is_array(value: object) -> bool:
    """Whether these can be the targets of several samples."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_scalar, value))
    return hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


def _is_scalar(value: object) -> bool:
    if isinstance(value, str | int | float | np.generic):
        return True
    return hasattr(value, "__array__") and getattr(value, "ndim", 1) == 0


# --------------------------------------------------------------------------- one data set


def _dataset(data: Any, *, labelled: bool, lazy: bool) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, torch_data.DataLoader):
        data = _of_loader(data)
    if isinstance(data, str | Path):
        raise InputError(f"the data are the text {str(data)!r}; read the file, and pass (x, y)")
    if isinstance(data, Tensor | np.ndarray) or hasattr(data, "__array__"):
        raise InputError(f"the data are {type_of(data)} without labels; pass (x, y)")
    if isinstance(data, Mapping):
        raise InputError("the test set is a dict; pass one pair (x, y), or one data set")
    if not isinstance(data, tuple | list) or _is_rows(data):
        rows: Any = data
        return from_torch(rows, labelled=labelled, lazy=lazy)
    if len(data) != 2:
        hint = f"; for training and test data {PAIRS}" if len(data) == 4 else ""
        clients = "; for the data of each client pass a list" if any(map(_is_data, data)) else ""
        raise InputError(f"the data are {len(data)} values, want a pair (x, y){hint}{clients}")
    x, y = data
    for name, part in (("x", x), ("y", y)):
        _check_array(name, part)
    return from_tensors(x, y, labelled=labelled)


def _of_loader(loader: torch_data.DataLoader[Any]) -> Any:
    """The data set of a DataLoader; refused where its batches are something else."""
    kind = "the data are a DataLoader"
    if isinstance(loader.dataset, torch_data.IterableDataset):
        raise InputError(
            f"{kind} over a stream, which cannot be divided among clients; pass list(stream) or "
            "one data set for each client"
        )
    if loader.collate_fn not in (torch_data.default_collate, torch_data.default_convert):
        raise InputError(
            f"{kind} with a collate_fn of its own, and clients draw other batches; let the rows of "
            "loader.dataset have one shape, and pass that"
        )
    sampler = loader.sampler
    usual = type(sampler) in (torch_data.SequentialSampler, torch_data.RandomSampler)
    drawn = isinstance(sampler, torch_data.RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    )
    batches = type(loader.batch_sampler) not in (torch_data.BatchSampler, type(None))
    if not usual or drawn or batches:
        odd = loader.batch_sampler if batches else sampler
        raise InputError(
            f"{kind} whose {type(odd).__name__} chooses samples, and clients choose their own; "
            "pass torch.utils.data.Subset(loader.dataset, indices) of the samples to train on"
        )
    return loader.dataset


def _check_array(name: str, part: object) -> None:
    """Refuse what has no values that can be read: nothing at all, or an unusual kind of tensor."""
    if part is None:
        raise InputError(f"{name} is None, want a tensor or an array")
    if isinstance(part, Tensor) and part.is_sparse:
        raise InputError(f"{name} is a sparse tensor; pass {name}.to_dense()")
    if isinstance(part, Tensor) and part.is_meta:
        raise InputError(f"{name} is on the device 'meta' and has no values")
