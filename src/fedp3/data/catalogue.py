"""Where data sets lie on this machine, and reading them from there.

Data folders are searched in this order: the one asked for, `FEDP3_DATA`, `fedp3` in the user's cache folder,
and last what a system package installed.  The first folder that has all files of a data set is used.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedp3.data.files import Part, present
from fedp3.data.pool import Dataset
from fedp3.data.sources import NAMES, Source
from fedp3.errors import DataError
from fedp3.lookup import pick


@dataclass(frozen=True, slots=True)
class Row:
    """One data set in the inventory."""

    name: str
    path: Path | None  # the folder of its files; None: not here
    bytes: int  # on this disk; 0 where it comes with a package or is not here
    download: int  # bytes to download; 0 where there is nothing to download
    samples: int
    classes: int
    shape: tuple[int, ...]
    note: str


def load(name: str, data_dir: Path | None = None, pad_to: int | None = None) -> Dataset:
    """Read a data set from this machine, train and test parts pooled in this order.

    Args:
        name: a key of `NAMES`.
        data_dir: the data folder to look in first.
        pad_to: side length to which raw images are padded with zeros, e.g. 28 -> 32 for the paper's CNN.
    """
    source = pick(NAMES, name, "data set")
    folder = find(name, data_dir)
    if folder is None:
        raise DataError(_missing(name, source, data_dir))
    parts = source.parse(folder, source.files, source.classes)
    mean, std = (source.mean, source.std) if source.mean is not None else _moments(parts[0])
    x = torch.from_numpy(np.concatenate([x for x, _ in parts]))
    y = torch.from_numpy(np.concatenate([y for _, y in parts]))
    return Dataset(name, _padded(x, pad_to, name), y, source.classes, mean, std, source.crop, source.flip)


def find(name: str, data_dir: Path | None = None) -> Path | None:
    """The first folder that holds all files of a data set."""
    source = pick(NAMES, name, "data set")
    if not source.files:
        return _package("sklearn")
    folders = [*(root / source.folder for root in roots(data_dir)), *map(Path, source.elsewhere)]
    return next((at for at in folders if all(present(at, file) for file in source.files)), None)


def roots(data_dir: Path | None = None) -> list[Path]:
    """The data folders in order of search; a download goes to the first."""
    named = (data_dir, os.environ.get("FEDP3_DATA"))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [Path(at).expanduser() for at in (*named, f"{cache}/fedp3") if at]


def inventory(data_dir: Path | None = None) -> list[Row]:
    """What is known, and where on this machine it is."""
    return [_row(name, source, find(name, data_dir)) for name, source in NAMES.items()]


def by_hand(source: Source, folder: Path) -> str:
    """How to do without a download, as the tail of an error text."""
    archive = f" (from {source.url}{source.downloads[0].name})" if source.unpack else ""
    return f"put {_and(file.name for file in source.files)}{archive} into {folder}"


def _missing(name: str, source: Source, data_dir: Path | None) -> str:
    if not source.files:
        return f"data set {name!r} comes with scikit-learn, which is not installed here: install scikit-learn"
    places = [*map(str, roots(data_dir)), *source.elsewhere]
    return (
        f"data set {name!r} is not here (looked in {_and(places)}): run `fedp3 data get {name}`, "
        f"or {by_hand(source, roots(data_dir)[0] / source.folder)}"
    )


def _row(name: str, source: Source, at: Path | None) -> Row:
    found = [present(at, file) for file in source.files] if at else []
    return Row(
        name=name,
        path=at,
        bytes=sum(path.stat().st_size for path in found if path),
        download=sum(file.bytes for file in source.downloads),
        samples=source.samples,
        classes=source.classes,
        shape=source.shape,
        note=source.note,
    )


def _package(module: str) -> Path | None:
    spec = find_spec(module)  # finds it without the second an import takes
    return Path(spec.origin).parent if spec and spec.origin else None


def _moments(part: Part) -> tuple[tuple[float], tuple[float]]:
    """Mean and standard deviation of all pixels of a part, on the 0..1 scale."""
    x, _ = part
    # A histogram in slices is exact and spares a copy of all pixels in float64.
    counts = sum(np.bincount(some.ravel(), minlength=256) for some in np.array_split(x, 1 + len(x) // 1_000))
    value = np.arange(256) / 255
    share = counts / np.sum(counts)
    mean = float(value @ share)
    return (mean,), (float(np.sqrt((value - mean) ** 2 @ share)),)


def _padded(x: Tensor, side: int | None, name: str) -> Tensor:
    if side is None:
        return x
    height, width = side - x.shape[-2], side - x.shape[-1]
    if height < 0 or width < 0:
        raise DataError(f"data set {name!r} has images of {x.shape[-2]}x{x.shape[-1]}: cannot pad them to {side}")
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
