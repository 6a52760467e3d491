"""Parsers of the published file formats: IDX (MNIST and kin) and CIFAR's fixed-length rows.

IDX: 0 0, type byte (8: unsigned byte), number of axes, each axis as a big-endian 32-bit count, then the bytes.
CIFAR: per sample one label byte (CIFAR-100: coarse, then fine), then the 32x32 red, green and blue planes.

What a file must hold is known beforehand, so no more than that is ever read, whatever a header claims or
a gzip stream unpacks to.  Nothing here can run code from a file.
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

from fedp3.errors import DataError

Bytes = npt.NDArray[np.uint8]
Part = tuple[npt.NDArray[np.uint8 | np.float32], npt.NDArray[np.int64]]  # x (n, channels, height, width), y (n,)

PIXELS = 3 * 32 * 32  # of a CIFAR image
LETTERS = 26  # EMNIST's labels are 1..26


@dataclass(frozen=True, slots=True)
class File:
    """One published file and the shape of the bytes in it."""

    name: str
    shape: tuple[int, ...]


# Folder, its files, number of classes -> the parts as published, train before test.
Parser = Callable[[Path, Sequence[File], int], list[Part]]


def idx(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """Grey images and labels from pairs of IDX files."""
    return [
        (_read_idx(folder, images)[:, None], _labels(_read_idx(folder, labels), 0, classes - 1, folder, labels))
        for images, labels in zip(files[::2], files[1::2], strict=True)
    ]


def letters(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """The first `classes` letters of EMNIST, upright: the files hold every image transposed."""
    parts: list[Part] = []
    for images, labels in zip(files[::2], files[1::2], strict=True):
        y = _labels(_read_idx(folder, labels), 1, LETTERS, folder, labels) - 1
        chosen = y < classes
        parts.append((_read_idx(folder, images)[chosen].transpose(0, 2, 1)[:, None], y[chosen]))
    return parts


def cifar(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """Colour images and their finest label."""
    parts: list[Part] = []
    for file in files:
        rows = _read(folder, file, math.prod(file.shape), zipped=False)[1].reshape(file.shape)
        finest = file.shape[1] - PIXELS - 1
        y = _labels(rows[:, finest], 0, classes - 1, folder, file)
        parts.append((rows[:, finest + 1 :].reshape(-1, 3, 32, 32), y))
    return parts


def digits(folder: Path, files: Sequence[File], classes: int) -> list[Part]:
    """The 8x8 digits that scikit-learn carries, scaled from 0..16 to 0..1."""
    from sklearn.datasets import load_digits  # takes over a second to import

    published = load_digits(n_class=classes)
    return [((published.images[:, None] / 16).astype(np.float32), published.target.astype(np.int64))]


def present(folder: Path, file: File) -> Path | None:
    """The file as published, or its un-gzipped twin, if there is one."""
    names = (file.name, file.name.removesuffix(".gz"))
    # Not Path.exists: that raises where a folder may not be entered.
    return next((folder / name for name in names if os.access(folder / name, os.F_OK)), None)


def _read_idx(folder: Path, file: File) -> Bytes:
    header = struct.pack(f">HBB{len(file.shape)}I", 0, 8, len(file.shape), *file.shape)
    path, raw = _read(folder, file, len(header) + math.prod(file.shape), zipped=True)
    got = raw[: len(header)].tobytes()
    if got != header:
        shape = " x ".join(f"{n:,}" for n in file.shape)
        raise DataError(
            f"{path} begins with {got.hex()}, want {header.hex()} (IDX, {shape} unsigned bytes): "
            "replace it with the published file"
        )
    return raw[len(header) :].reshape(file.shape)


def _read(folder: Path, file: File, size: int, *, zipped: bool) -> tuple[Path, Bytes]:
    path = present(folder, file)
    if path is None:
        raise DataError(f"{folder / file.name} is missing: put the published file there")
    try:
        with gzip.open(path) if zipped and _is_gzip(path) else path.open("rb") as stream:
            raw = stream.read(size + 1)  # one more, so that a longer file shows and gzip checks its sum
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or corrupt ({error}): replace it with the published file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the disk and its permissions") from None
    if len(raw) != size:
        got = f"{len(raw):,}" if len(raw) < size else f"more than {size:,}"
        raise DataError(f"{path} holds {got} bytes, want {size:,}: replace it with the published file")
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
