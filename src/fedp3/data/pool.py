"""A pool of labelled samples, and batches of it as a net wants them.

Pixels stay raw (8 bits) until a batch is drawn: a quarter of the memory, and padding and cropping then see
true black.  A batch is (x / 255 - mean) / std per channel; with a generator it is first cropped at random
from the zero-padded image and flipped (the paper's CIFAR training).  To switch either off:
`dataclasses.replace(data, mean=(), std=(), crop=0, flip=False)`.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import data as torch_data

from fedp3.errors import DataError


@dataclass(frozen=True, slots=True)
class Dataset:
    """One pool of labelled samples: the published train and test parts together."""

    name: str
    x: Tensor  # (N, *shape) uint8 raw pixels, or float32 already scaled
    y: Tensor  # (N,) int64
    classes: int
    mean: tuple[float, ...] = ()  # per channel on the 0..1 scale; empty: not normalised
    std: tuple[float, ...] = ()
    crop: int = 0  # padding of the random crop; 0: none
    flip: bool = False  # random horizontal flip

    def __post_init__(self) -> None:
        for wrong, text in (
            (len(self.x) == 0, "has no samples"),
            (self.y.shape != (len(self.x),), f"has {len(self.x)} samples but labels of shape {tuple(self.y.shape)}"),
            (self.x.dtype not in (torch.uint8, torch.float32), f"has samples of {self.x.dtype}, want uint8 or float32"),
            (self.y.dtype != torch.int64, f"has labels of {self.y.dtype}, want int64"),
            (len(self.mean) != len(self.std), f"has {len(self.mean)} means but {len(self.std)} standard deviations"),
            (self.crop < 0 or not all(s > 0 for s in self.std), "wants std > 0 and crop >= 0"),
            (
                bool(self.mean or self.crop or self.flip) and self.x.ndim != 4,
                f"wants images (N, channels, height, width) to normalise or augment, got {tuple(self.x.shape)}",
            ),
            (
                bool(self.mean) and len(self.mean) not in (1, *self.x.shape[1:2]),
                f"has {len(self.mean)} means for samples of shape {tuple(self.x.shape[1:])}",
            ),
        ):
            if wrong:
                raise DataError(f"data set {self.name!r} {text}")
        low, high = int(self.y.min()), int(self.y.max())
        if low < 0 or high >= self.classes:
            raise DataError(f"data set {self.name!r} has labels {low}..{high}, want 0..{self.classes - 1}")


def batch(data: Dataset, at: Tensor, augment: torch.Generator | None = None) -> Tensor:
    """The samples at these indices as float32, normalised; cropped and flipped at random given a generator."""
    x = data.x[at]
    if augment is not None and (data.crop or data.flip):
        x = _crop_and_flip(x, data.crop, data.flip, augment)
    if x.dtype == torch.uint8:
        x = x.to(torch.float32).div_(255)
    if data.mean:
        channel = (-1, 1, 1)
        mean, std = (torch.tensor(v, device=x.device).view(channel) for v in (data.mean, data.std))
        x = x.sub(mean).div_(std)
    return x


def _crop_and_flip(x: Tensor, crop: int, flip: bool, rng: torch.Generator) -> Tensor:
    n, channels, h, w = x.shape
    rows = torch.arange(h).expand(n, h)
    columns = torch.arange(w).expand(n, w)
    if crop:
        x = F.pad(x, (crop,) * 4)
        rows = rows + _draw(2 * crop + 1, n, rng)
        columns = columns + _draw(2 * crop + 1, n, rng)
    if flip:
        columns = torch.where(_draw(2, n, rng) == 1, columns.flip(1), columns)
    at = (rows[:, :, None] * x.shape[3] + columns[:, None, :]).view(n, 1, h * w).to(x.device)
    return x.flatten(2).gather(2, at.expand(n, channels, h * w)).view(n, channels, h, w)


def _draw(below: int, n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(below, (n, 1), generator=rng, device=rng.device).cpu()


def from_tensors(
    x: Tensor | npt.NDArray[Any], y: Tensor | npt.NDArray[Any], *, name: str = "user", classes: int | None = None
) -> Dataset:
    """A pool of the user's own samples: uint8 is taken as raw pixels, everything else as scaled already.

    Args:
        x: samples, first axis the sample.
        y: integer labels from 0.
        name: what the pool is called in reports.
        classes: how many classes there are; by default the largest label plus one.
    """
    xs, ys = _tensor(x), _tensor(y)
    if ys.is_floating_point() or ys.is_complex() or ys.dtype == torch.bool:
        raise DataError(f"data set {name!r} has labels of {ys.dtype}, want integers from 0")
    if xs.is_complex():
        raise DataError(f"data set {name!r} has samples of {xs.dtype}, want real numbers")
    xs, ys = (xs if xs.dtype == torch.uint8 else xs.to(torch.float32)).contiguous(), ys.to(torch.int64).contiguous()
    if xs.is_floating_point() and not bool(torch.isfinite(xs).all()):
        where = int((~torch.isfinite(xs.reshape(len(xs), -1)).all(1)).nonzero()[0])
        raise DataError(f"data set {name!r} has a value that is not finite in sample {where}: clean it first")
    if classes is None:
        classes = int(ys.max()) + 1 if ys.numel() else 0
    return Dataset(name, xs, ys, classes)


def _tensor(values: Tensor | npt.NDArray[Any]) -> Tensor:
    """What it holds, in this machine's order of bytes and without a history of gradients."""
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return torch.as_tensor(values).detach()


def from_torch(dataset: torch_data.Dataset[Any], *, name: str = "user", classes: int | None = None) -> Dataset:
    """A pool of all (x, y) pairs of a map-style torch dataset, read once: a random transform is drawn once."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(f"data set {name!r} is a {type(dataset).__name__} without a length: want a map-style dataset")
    xs: list[Tensor] = []
    ys: list[int] = []
    for i in range(len(dataset)):
        x, y = _pair(dataset[i], i, name)
        if xs and x.shape != xs[0].shape:
            raise DataError(
                f"data set {name!r}: sample {i} has shape {tuple(x.shape)}, sample 0 has {tuple(xs[0].shape)}; "
                "bring all samples to one shape"
            )
        xs.append(x)
        ys.append(y)
    if not xs:
        raise DataError(f"data set {name!r} has no samples")
    return from_tensors(torch.stack(xs), torch.tensor(ys), name=name, classes=classes)


def _pair(item: Any, i: int, name: str) -> tuple[Tensor, int]:
    if not isinstance(item, Sequence) or len(item) != 2:
        raise DataError(f"data set {name!r}: sample {i} is a {type(item).__name__}, want a pair (x, label)")
    x, y = item
    if not isinstance(x, Tensor | np.ndarray):
        raise DataError(
            f"data set {name!r}: sample {i} holds a {type(x).__name__}, want a tensor; add a transform that makes one"
        )
    try:
        return torch.as_tensor(x), operator.index(y)
    except TypeError:
        raise DataError(f"data set {name!r}: the label of sample {i} is {y!r}, want an integer from 0") from None
