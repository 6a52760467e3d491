"""Parsers of the published file formats: IDX (MNIST and kin) and CIFAR's fixed-length rows.

IDX: two zero bytes, a type byte (8 means unsigned byte), the number of dimensions, the size of each
dimension as a big-endian 32-bit number, then the values.
CIFAR: for each sample one label byte (CIFAR-100: coarse, then fine), then the 32x32 red, green and
blue planes.

The contents of each file are known beforehand.  No more than that is ever read, whatever a header
claims or a gzip stream unpacks to.  Nothing here can execute code from a file.
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedp3.core.errors import DataError

Bytes = npt.NDArray[np.uint8]
# x (n, channels, height, width) and y (n,)
Part = tuple[npt.NDArray[np.uint8 | np.float32], npt.NDArray[np.int64]]

PIXELS = 3 * 32 * 32  # bytes of a CIFAR image
LETTERS = 26  # EMNIST's labels are 1..26


@dataclass(frozen=True, slots=True)
class File:
    """One published file and the shape of its values."""

    name: str
    shape: tuple[int, ...]


# (folder, its files, number of classes) -> the parts as published, train before test
Parser = Callable[[Path, Sequence[File], int], list[Part]]


def idx(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """Read grey images and labels from pairs of IDX files."""
    parts: list[Part] = []
    for images, labels in zip(files[::2], files[1::2], strict=True):
        x = _read_idx(folder, images)[:, None]
        y = _labels(_read_idx(folder, labels), 0, classes - 1, folder, labels)
        parts.append((x, y))
    return parts


def letters(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """Read the first `classes` letters of EMNIST; the files store every image transposed."""
    parts: list[Part] = []
    for images, labels in zip(files[::2], files[1::2], strict=True):
        y = _labels(_read_idx(folder, labels), 1, LETTERS, folder, labels) - 1
        chosen = y < classes
        upright = _read_idx(folder, images)[chosen].transpose(0, 2, 1)
        parts.append((upright[:, None], y[chosen]))
    return parts


def cifar(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """Read colour images and their finest labels."""
    parts: list[Part] = []
    for file in files:
        _, raw = _read(folder, file, math.prod(file.shape), zipped=False)
        rows = raw.reshape(file.shape)
        finest = file.shape[1] - PIXELS - 1
        y = _labels(rows[:, finest], 0, classes - 1, folder, file)
        parts.append((rows[:, finest + 1 :].reshape(-1, 3, 32, 32), y))
    return parts


def digits(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """Load the 8x8 digits that come with scikit-learn, scaled from 0..16 to 0..1."""
    from sklearn.datasets import load_digits  # the import takes over a second

    published = load_digits(n_class=classes)
    x = (published.images[:, None] / 16).astype(np.float32)
    return [(x, published.target.astype(np.int64))]


def present(folder: Path, file: File) -> Path | None:
    """Return the path of the file as published or unpacked; None if there is neither."""
    for path in (folder / file.name, folder / file.name.removesuffix(".gz")):
        if os.access(path, os.F_OK):  # Path.exists raises where a folder may not be entered
            return path
    return None


def _read_idx(folder: Path, file: File) -> Bytes:
    header = struct.pack(f">HBB{len(file.shape)}I", 0, 8, len(file.shape), *file.shape)
    path, raw = _read(folder, file, len(header) + math.prod(file.shape), zipped=True)
    start = raw[: len(header)].tobytes()
    if start != header:
        shape = " x ".join(f"{n:,}" for n in file.shape)
        raise DataError(
            f"{path} begins with {start.hex()}, want {header.hex()} "
            f"(IDX, {shape} unsigned bytes): replace it with the published file"
        )
    return raw[len(header) :].reshape(file.shape)


def _read(folder: Path, file: File, size: int, *, zipped: bool) -> tuple[Path, Bytes]:
    path = present(folder, file)
    if path is None:
        raise DataError(f"{folder / file.name} is missing: put the published file there")
    try:
        with gzip.open(path) if zipped and _is_gzip(path) else path.open("rb") as stream:
            # One byte more reveals a longer file, and lets gzip verify its checksum.
            raw = stream.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is truncated or corrupt ({error}): replace it with the published file"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): check the disk and its permissions"
        ) from None
    if len(raw) != size:
        length = f"{len(raw):,}" if len(raw) < size else f"more than {size:,}"
        raise DataError(
            f"{path} has {length} bytes, want {size:,}: replace it with the published file"
        )
    return path, np.frombuffer(raw, np.uint8)


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _labels(raw: Bytes, low: int, high: int, folder: Path, file: File) -> npt.NDArray[np.int64]:
    if raw.min() < low or raw.max() > high:
        raise DataError(
            f"{present(folder, file)} has labels {raw.min()}..{raw.max()}, want {low}..{high}: "
            "replace it with the published file"
        )
    return raw.astype(np.int64)
