"""A pool of labelled samples, and batches of it as a network reads them.

Pixels stay raw (8 bits) until a batch is drawn: this takes a quarter of the memory, and padding and
cropping then add true black.  A batch is (x / 255 - mean) / std per channel.  Given a generator, it
is first cropped at random from the zero-padded image and flipped, as in the paper's CIFAR training.
To disable normalisation and augmentation, use
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

from fedp3.core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One pool of labelled samples: the published train and test parts together.

    Args:
        name: its name in reports and error messages.
        x: samples `(N, *shape)`: raw pixels as uint8, or float32 that is scaled already.
        y: labels (N,) from 0, as int64.
        classes: the number of classes.
        mean: the mean of each channel on the 0..1 scale; empty means no normalisation.
        std: the standard deviation of each channel on the 0..1 scale.
        crop: the padding of the random crop; 0 means no crop.
        flip: whether images are flipped horizontally at random.
        raw: the samples before padding, where `x` was padded: what identifies a record.
        ids: a stable identifier of each sample, if its values alone do not identify it.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0
    flip: bool = False
    raw: Tensor | None = None
    ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise DataError(f"data set {self.name!r} {problem}")

    def _problem(self) -> str:
        """What contradicts itself; empty if nothing does."""
        n, shape = len(self.x), tuple(self.x.shape)
        if n == 0:
            return "has no samples"
        if self.y.shape != (n,):
            return f"has {n} samples but labels of shape {tuple(self.y.shape)}"
        if self.x.dtype not in (torch.uint8, torch.float32):
            return f"has samples of {self.x.dtype}, want uint8 or float32"
        if self.y.dtype != torch.int64:
            return f"has labels of {self.y.dtype}, want int64"
        if self.raw is not None and len(self.raw) != n:
            return f"has {n} samples but {len(self.raw)} raw ones"
        if self.ids is not None and (len(self.ids) != n or len(set(self.ids)) != n):
            return f"has {n} samples but {len(set(self.ids))} different ids"
        if len(self.mean) != len(self.std):
            return f"has {len(self.mean)} means but {len(self.std)} standard deviations"
        if self.crop < 0 or not all(s > 0 for s in self.std):
            return "needs std > 0 and crop >= 0"
        if (self.mean or self.crop or self.flip) and self.x.ndim != 4:
            return f"needs images (N, channels, height, width) to normalise or augment, got {shape}"
        if self.mean and len(self.mean) not in (1, shape[1]):
            return f"has {len(self.mean)} means for samples of shape {shape[1:]}"
        low, high = int(self.y.min()), int(self.y.max())
        if low < 0 or high >= self.classes:
            return f"has labels {low}..{high}, want 0..{self.classes - 1}"
        return ""


def batch(data: Dataset, indices: Tensor, augment: torch.Generator | None = None) -> Tensor:
    """Return the samples at these indices as normalised float32.

    Args:
        data: the data set.
        indices: the samples to return.
        augment: if given, the samples are cropped and flipped at random with this generator.
    """
    x = data.x[indices]
    if augment is not None and (data.crop or data.flip):
        x = _crop_and_flip(x, data.crop, data.flip, augment)
    if x.dtype == torch.uint8:
        x = x.to(torch.float32).div_(255)
    if data.mean:
        per_channel = (-1, 1, 1)
        mean = torch.tensor(data.mean, device=x.device).view(per_channel)
        std = torch.tensor(data.std, device=x.device).view(per_channel)
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
    pixels = rows[:, :, None] * x.shape[3] + columns[:, None, :]
    pixels = pixels.view(n, 1, h * w).to(x.device)
    cropped = x.flatten(2).gather(2, pixels.expand(n, channels, h * w))
    return cropped.view(n, channels, h, w)


def _draw(below: int, n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(below, (n, 1), generator=rng, device=rng.device).cpu()


def from_tensors(
    x: Tensor | npt.NDArray[Any],
    y: Tensor | npt.NDArray[Any],
    *,
    name: str = "user",
    classes: int | None = None,
    ids: Sequence[str] | None = None,
) -> Dataset:
    """Create a data set from tensors or arrays.

    Args:
        x: the samples along the first dimension; uint8 means raw pixels, any other type means that
            the values are scaled already.
        y: integer labels from 0.
        name: the name of the data set in reports.
        classes: the number of classes; by default the largest label plus one.
        ids: a stable identifier of each sample.  Under LDP a device recognises its records by it,
            so pass one if your preprocessing changes; by default the values identify a sample.
    """
    samples, labels = _as_tensor(x), _as_tensor(y)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"data set {name!r} has labels of {labels.dtype}, want integers from 0")
    if samples.is_complex():
        raise DataError(f"data set {name!r} has samples of {samples.dtype}, want real numbers")
    if samples.dtype != torch.uint8:
        samples = samples.to(torch.float32)
    samples, labels = samples.contiguous(), labels.to(torch.int64).contiguous()
    if samples.is_floating_point() and not bool(torch.isfinite(samples).all()):
        finite = torch.isfinite(samples.reshape(len(samples), -1)).all(1)
        first = int((~finite).nonzero()[0])
        raise DataError(
            f"data set {name!r} has a value that is not finite in sample {first}: clean it first"
        )
    if classes is None:
        classes = int(labels.max()) + 1 if labels.numel() else 0
    return Dataset(
        name=name,
        x=samples,
        y=labels,
        classes=classes,
        ids=None if ids is None else tuple(map(str, ids)),
    )


def _as_tensor(values: Tensor | npt.NDArray[Any]) -> Tensor:
    """The values in this machine's byte order, detached from any graph of gradients."""
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return torch.as_tensor(values).detach()


def from_torch(
    dataset: torch_data.Dataset[Any], *, name: str = "user", classes: int | None = None
) -> Dataset:
    """Create a data set from all (x, label) pairs of a map-style torch dataset.

    Each pair is read once, so that a random transform is drawn only once.

    Args:
        dataset: the torch dataset.
        name: the name of the data set in reports.
        classes: the number of classes; by default the largest label plus one.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise DataError(f"data set {name!r} is a {kind} without a length: want a map-style dataset")
    samples: list[Tensor] = []
    labels: list[int] = []
    for i in range(len(dataset)):
        x, y = _pair(dataset[i], i, name)
        if samples and x.shape != samples[0].shape:
            raise DataError(
                f"data set {name!r}: sample {i} has shape {tuple(x.shape)}, sample 0 has "
                f"{tuple(samples[0].shape)}; bring all samples to one shape"
            )
        samples.append(x)
        labels.append(y)
    if not samples:
        raise DataError(f"data set {name!r} has no samples")
    return from_tensors(torch.stack(samples), torch.tensor(labels), name=name, classes=classes)


def _pair(item: Any, i: int, name: str) -> tuple[Tensor, int]:
    if not isinstance(item, Sequence) or len(item) != 2:
        raise DataError(
            f"data set {name!r}: sample {i} is a {type(item).__name__}, want a pair (x, label)"
        )
    x, y = item
    if not isinstance(x, Tensor | np.ndarray):
        raise DataError(
            f"data set {name!r}: sample {i} is of type {type(x).__name__}, want a tensor; "
            "add a transform that returns one"
        )
    try:
        return torch.as_tensor(x), operator.index(y)
    except TypeError:
        raise DataError(
            f"data set {name!r}: the label of sample {i} is {y!r}, want an integer from 0"
        ) from None
