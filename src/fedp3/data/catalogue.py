"""Where data sets are on this machine, and how they are loaded.

These data folders are searched in order: the folder that the caller names, `FEDP3_DATA`, `fedp3` in
the user's cache folder, and finally the folders of system packages.  The first folder that has all
files of a data set is used.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from fedp3.core.errors import DataError
from fedp3.core.registry import NameIn, Registry, pick
from fedp3.core.settings import OWN, STRICT
from fedp3.data.dataset import Dataset, pooled
from fedp3.data.formats import Part, present
from fedp3.data.inputs import only_tensor, tensors_of
from fedp3.data.sources import SOURCES, Source
from fedp3.data.text import read_text
from fedp3.data.tokens import read_tokenizer
from fedp3.data.tsv import read_tsv


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One data set in the inventory.

    Args:
        name: its name.
        path: the folder of its files; None if they are not on this machine.
        bytes: its size on this disk; 0 if it comes with a package or is not on this machine.
        download: the size of its download in bytes, whether or not it is on this machine; 0 if it
            comes with a package.
        samples: the number of samples.
        classes: the number of classes.
        shape: the shape of one sample.
        note: its licence and what to cite.
    """

    name: str
    path: Path | None
    bytes: int
    download: int
    samples: int
    classes: int
    shape: tuple[int, ...]
    note: str


Load = Callable[[Path | None], Dataset]  # data folder, or None for the usual ones -> data set
DATASETS: Registry[Load] = Registry("data set")
# The names of data sets that are read from the file `path`: a text to continue, texts with labels.
TEXT, TSV = "text", "tsv"
CHARACTERS = "characters"  # the tokenizer of a text that has none
# Which settings are read with which of these names.
OF_FILES = {
    TEXT: frozenset({"path", "test_path", "length", "stride", "tokenizer"}),
    TSV: frozenset({"path", "length", "tokenizer", "test_path", "labels"}),
}
# What becomes of the published test part: a function of a data set that has it as its test set.
TEST_PARTS: Registry[Callable[[Dataset], Dataset]] = Registry("use of a test part")
POOLED = "pooled"
TEST_PARTS.add(POOLED, pooled)


@TEST_PARTS.register("official")
def _kept_apart(data: Dataset) -> Dataset:
    if data.test is None:
        others = _and(name for name, source in SOURCES.items() if source.files)
        raise DataError(
            f"[data] test: data set {data.name!r} has no test part of its own; use 'pooled', or "
            f"one of {others}, which have one"
        )
    return data


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The data set."""

    name: Annotated[str, NameIn(DATASETS, also=(OWN, *OF_FILES))] = Field(
        default="digits",
        description="the data set; digits comes with scikit-learn, others with `fedp3 data get`; "
        "text: the text file of path; tsv: the texts with labels of path",
    )
    path: str = Field(
        default="",
        description="with name = 'text': a text file; with 'tsv': a file of lines "
        "text<TAB>label; below the data folder if one is named",
    )
    labels: tuple[str, ...] = Field(
        default=(),
        description="with name = 'tsv': all labels, in the order of their numbers; [] means those "
        "of the files",
    )
    length: int = Field(
        default=64,
        ge=1,
        description="with name = 'text' or 'tsv': characters or tokens that a network reads at "
        "once",
    )
    stride: int = Field(
        default=0,
        ge=0,
        description="with name = 'text': how many characters or tokens further the next record "
        "begins; 0 means that records do not overlap, which LDP needs",
    )
    tokenizer: str = Field(
        default="",
        description="with name = 'text' or 'tsv': a tokenizer.json, or characters; if empty, that "
        "of the folder model.path, and characters of a text for networks without one",
    )
    test: Annotated[str, NameIn(TEST_PARTS, also=(OWN,))] = Field(
        default=POOLED,
        description="what becomes of a data set's published test part; pooled: clients have its "
        "samples too, and there is no C; official: no client has them, and the server's model is "
        "scored on them as C (mnist, fashion-mnist, emnist-l, cifar10, cifar100)",
    )
    test_path: str = Field(
        default="",
        description="with name = 'text' or 'tsv': a second such file that no client has, on which "
        "the server's model is scored as C",
    )


def load(
    name: str, data_dir: Path | None = None, pad_to: int | None = None, test: str = POOLED
) -> Dataset:
    """Load a data set from this machine.

    Args:
        name: the name of a registered data set.
        data_dir: the data folder to search first.
        pad_to: the side length to which raw images are padded with zeros, e.g. from 28 to 32 for
            the paper's CNN.
        test: a key of `TEST_PARTS`; "pooled" puts the published test part after the train part.
    """
    use = TEST_PARTS.pick(test)
    return _with_padding(use(DATASETS.pick(name)(data_dir)), pad_to)


def _with_padding(data: Dataset, side: int | None) -> Dataset:
    if data.test is not None:
        data = replace(data, test=_with_padding(data.test, side))
    if side is None or tensors_of(data.x)[0].shape[-2:] == (side, side):
        return data
    images = only_tensor(data.x, "a network for images")
    return replace(data, x=_padded(images, side, data.name), raw=images)


def load_as(
    settings: DataSettings,
    data_dir: Path | None,
    pad_to: int | None = None,
    tokenizer: Path | None = None,
) -> Dataset:
    """Load the data set that a config names.

    Args:
        settings: its name, and how a file is read.
        data_dir: the data folder to search first; relative paths of files are below it.
        pad_to: the side length to which raw images are padded with zeros.
        tokenizer: the tokenizer of the network, if it was trained with one.
    """
    if settings.name not in OF_FILES:
        return load(settings.name, data_dir, pad_to, settings.test)
    if not settings.path:
        raise DataError(f"[data] name: {settings.name!r} needs a file; set [data] path")
    tokenizer = tokenizer_path(settings, tokenizer)
    tokens = None if tokenizer is None else read_tokenizer(tokenizer)

    def below(path: str) -> Path:
        # An absolute path stays as it is.
        return (data_dir or Path()) / Path(path).expanduser()

    path = below(settings.path)
    test_path = below(settings.test_path) if settings.test_path else None
    if settings.name == TSV:
        if tokens is None:
            raise DataError(
                "[data] tokenizer: name = 'tsv' needs a tokenizer.json; set model.name = 'hf' with "
                "the folder of a network that reads sequences, which has one"
            )
        return read_tsv(path, settings.length, tokens, test_path, settings.labels)

    def read(path: Path) -> Dataset:
        return read_text(path, settings.length, settings.stride, tokens)

    return replace(read(path), test=None if test_path is None else read(test_path))


def tokenizer_path(settings: DataSettings, of_network: Path | None) -> Path | None:
    """The tokenizer file of texts; None if they are characters.

    Args:
        settings: where a user may name one.
        of_network: the one that the network was trained with.
    """
    if settings.tokenizer == CHARACTERS:
        return None
    return Path(settings.tokenizer).expanduser() if settings.tokenizer else of_network


def _load_published(name: str, data_dir: Path | None) -> Dataset:
    """Load one of the published data sets from its files; its last part is its test part."""
    source = SOURCES[name]
    folder = find(name, data_dir)
    if folder is None:
        raise DataError(_missing(name, source, data_dir))
    parts = source.parse(folder, source.files, source.classes)
    mean, std = (source.mean, source.std) if source.mean is not None else _moments(parts[0])

    def dataset(parts: Sequence[Part], test: Dataset | None) -> Dataset:
        return Dataset(
            name=name,
            x=torch.from_numpy(np.concatenate([x for x, _ in parts])),
            y=torch.from_numpy(np.concatenate([y for _, y in parts])),
            classes=source.classes,
            mean=mean,
            std=std,
            crop=source.crop,
            flip=source.flip,
            test=test,
        )

    if len(parts) == 1:
        return dataset(parts, None)
    return dataset(parts[:-1], dataset(parts[-1:], None))


for _name in SOURCES:
    DATASETS.add(_name, partial(_load_published, _name))


def find(name: str, data_dir: Path | None = None) -> Path | None:
    """Return the first folder that has all files of a published data set."""
    source = pick(SOURCES, name, "data set")
    if not source.files:
        return _package_folder("sklearn")
    below_roots = [root / source.folder for root in roots(data_dir)]
    for folder in (*below_roots, *map(Path, source.elsewhere)):
        if all(present(folder, file) for file in source.files):
            return folder
    return None


def roots(data_dir: Path | None = None) -> list[Path]:
    """Return the data folders in order of search; a download goes to the first."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = (data_dir, os.environ.get("FEDP3_DATA"), f"{cache}/fedp3")
    found = [Path(folder).expanduser() for folder in folders if folder]
    for folder in found:
        if folder.is_file():
            raise DataError(f"{folder} is a file: --data-dir and FEDP3_DATA name a folder")
    return found


def inventory(data_dir: Path | None = None) -> list[Row]:
    """List the published data sets, and where on this machine they are."""
    return [_row(name, source, find(name, data_dir)) for name, source in SOURCES.items()]


def by_hand(source: Source, folder: Path) -> str:
    """Return how to do without a download, as the end of an error message."""
    archive = f" (from {source.url}{source.downloads[0].name})" if source.unpack else ""
    return f"put {_and(file.name for file in source.files)}{archive} into {folder}"


def _missing(name: str, source: Source, data_dir: Path | None) -> str:
    if not source.files:
        return (
            f"data set {name!r} comes with scikit-learn, which is not installed: "
            "install scikit-learn"
        )
    folders = [*map(str, roots(data_dir)), *source.elsewhere]
    return (
        f"data set {name!r} is not on this machine (searched {_and(folders)}): "
        f"run `fedp3 data get {name}`, or {by_hand(source, roots(data_dir)[0] / source.folder)}"
    )


def _row(name: str, source: Source, folder: Path | None) -> Row:
    paths = [present(folder, file) for file in source.files] if folder else []
    return Row(
        name=name,
        path=folder,
        bytes=sum(path.stat().st_size for path in paths if path),
        download=sum(file.bytes for file in source.downloads),
        samples=source.samples,
        classes=source.classes,
        shape=source.shape,
        note=source.note,
    )


def _package_folder(module: str) -> Path | None:
    spec = find_spec(module)  # an import would take a second
    return Path(spec.origin).parent if spec and spec.origin else None


def _moments(part: Part) -> tuple[tuple[float], tuple[float]]:
    """Mean and standard deviation of all pixels of a part, on the 0..1 scale."""
    x, _ = part
    # A histogram by slices is exact and avoids a float64 copy of all pixels.
    slices = np.array_split(x, 1 + len(x) // 1_000)
    counts = sum(np.bincount(pixels.ravel(), minlength=256) for pixels in slices)
    value = np.arange(256) / 255
    share = counts / np.sum(counts)
    mean = float(value @ share)
    return (mean,), (float(np.sqrt((value - mean) ** 2 @ share)),)


def _padded(x: Tensor, side: int, name: str) -> Tensor:
    height, width = side - x.shape[-2], side - x.shape[-1]
    if height < 0 or width < 0:
        size = f"{x.shape[-2]}x{x.shape[-1]}"
        raise DataError(f"data set {name!r} has images of {size}: cannot pad them to {side}")
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
