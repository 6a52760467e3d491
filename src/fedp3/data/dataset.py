"""A pool of samples with targets, and batches of it as a network reads them.

Pixels stay raw (8 bits) until a batch is drawn: this takes a quarter of the memory, and padding and
cropping then add true black.  A batch is (x / 255 - mean) / std per channel.  Given a generator, it
is first cropped at random from the zero-padded image and flipped, as in the paper's CIFAR training.
To disable normalisation and augmentation, use
`dataclasses.replace(data, mean=(), std=(), crop=0, flip=False)`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedp3.core.errors import DataError
from fedp3.data.inputs import Batch, Inputs, combine, map_tensors, tensors_of
from fedp3.data.rows import Draws, Rows, read_batch, same_draws

INPUT_TYPES = (torch.uint8, torch.float32, torch.int64)
TARGET_TYPES = (torch.int64, torch.float32)
MOST_NAMED = 10  # labels that an error message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples with targets, which are divided among clients, and perhaps test samples of no client.

    Args:
        name: its name in reports and error messages.
        x: samples `(N, *shape)`: raw pixels as uint8, float32 that is scaled already, or int64 such
            as tokens; a tuple or dict of such tensors for a network with several inputs.  With
            `rows`, the first sample only.
        y: labels (N,) from 0, as int64; if not `labelled`, targets `(N, ...)`, int64 or float32.
        classes: the number of classes of a label, token or pixel; 0 if targets are no classes.
        mean: the mean of each channel on the 0..1 scale; empty means no normalisation.
        std: the standard deviation of each channel on the 0..1 scale.
        crop: the padding of the random crop; 0 means no crop.
        flip: whether images are flipped horizontally at random.
        raw: the samples before padding, where `x` was padded: what identifies a record.
        ids: a stable identifier of each sample, if its values alone do not identify it.
        labelled: whether every sample has one class label, by which it can be partitioned.
        objective: the name of the objective that fits the targets; empty if only its user knows.
        roles: the number of the speaker, author or device of each sample (N,), if that is known.
        role_names: the names of roles, by their numbers.
        overlapping: whether samples share parts of one text, as windows over it do.
        class_names: where labels were texts, the text of each class, by its number.
        rows: where samples are read when a batch needs them; None if `x` has all of them.
        test: a test set that no client has, on which the server's model is scored as C.
        vocabulary: the number of different tokens of samples; 0 if they are no tokens.
    """

    name: str
    x: Inputs
    y: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0
    flip: bool = False
    raw: Tensor | None = None
    ids: tuple[str, ...] | None = None
    labelled: bool = True
    objective: str = "classification"
    roles: Tensor | None = None
    role_names: tuple[str, ...] = ()
    overlapping: bool = False
    class_names: tuple[str, ...] = ()
    rows: Rows | None = None
    test: "Dataset | None" = None
    vocabulary: int = 0

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise DataError(f"data set {self.name!r} {problem}")

    @property
    def outputs(self) -> int:
        """How many numbers a network of the zoo returns for a sample, token or pixel."""
        return self.classes or math.prod(self.y.shape[1:])

    def _problem(self) -> str:
        """What contradicts itself; empty if nothing does."""
        tensors = tensors_of(self.x)
        if not tensors:
            return "has no inputs"
        n = len(tensors[0]) if self.rows is None else len(self.rows)
        if n == 0:
            return "has no samples"
        if any(len(w) != (n if self.rows is None else 1) for w in tensors):
            return f"has inputs of different lengths: {[len(w) for w in tensors]}"
        return (
            self._wrong_targets(n)
            or _wrong_type(tensors)
            or self._wrong_identity(n)
            or self._wrong_images()
            or self._wrong_labels()
            or self._wrong_test()
        )

    def _wrong_targets(self, n: int) -> str:
        if self.labelled and self.y.shape != (n,):
            return f"has {n} samples but labels of shape {tuple(self.y.shape)}"
        if self.y.dim() == 0 or len(self.y) != n:
            return f"has {n} samples but targets of shape {tuple(self.y.shape)}"
        return ""

    def _wrong_identity(self, n: int) -> str:
        if self.labelled and self.y.dtype != torch.int64:
            return f"has labels of {self.y.dtype}, want int64"
        if self.y.dtype not in TARGET_TYPES:
            return f"has targets of {self.y.dtype}, want int64 or float32"
        if self.raw is not None and len(self.raw) != n:
            return f"has {n} samples but {len(self.raw)} raw ones"
        if self.ids is not None and (len(self.ids) != n or len(set(self.ids)) != n):
            return f"has {n} samples but {len(set(self.ids))} different ids"
        if self.roles is not None and self.roles.shape != (n,):
            return f"has {n} samples but roles of shape {tuple(self.roles.shape)}"
        return ""

    def _wrong_images(self) -> str:
        if len(self.mean) != len(self.std):
            return f"has {len(self.mean)} means but {len(self.std)} standard deviations"
        if self.crop < 0 or not all(s > 0 for s in self.std):
            return "needs std > 0 and crop >= 0"
        if not (self.mean or self.crop or self.flip):
            return ""
        if not isinstance(self.x, Tensor):
            return "has several inputs, of which none can be normalised or augmented here"
        shape = tuple(self.x.shape)
        if len(shape) != 4:
            return f"needs images (N, channels, height, width) to normalise or augment, got {shape}"
        if self.mean and len(self.mean) not in (1, shape[1]):
            return f"has {len(self.mean)} means for samples of shape {shape[1:]}"
        return ""

    def _wrong_labels(self) -> str:
        low, high = int(self.y.min()), int(self.y.max())
        if self.labelled and (low < 0 or high >= self.classes):
            return f"has labels {low}..{high}, want 0..{self.classes - 1}{_renumbered(self.y)}"
        if self.class_names and len(self.class_names) > self.classes:
            return f"has {len(self.class_names)} names for {self.classes} classes"
        return ""

    def _wrong_test(self) -> str:
        if self.test is None:
            return ""
        if self.test.labelled != self.labelled or type(self.test.x) is not type(self.x):
            return "has a test set with other inputs or targets"
        if self.test.test is not None:
            return "has a test set that has a test set itself"
        return ""


def _wrong_type(tensors: Sequence[Tensor]) -> str:
    wrong = [w.dtype for w in tensors if w.dtype not in INPUT_TYPES]
    return f"has samples of {wrong[0]}, want uint8 or float32, or int64 for tokens" if wrong else ""


def _renumbered(labels: Tensor) -> str:
    """How to number labels from 0, as the end of an error message; empty if there are too many."""
    found = sorted(set(labels.tolist()))
    if len(found) > MOST_NAMED:
        return ""
    return (
        f": the labels are {', '.join(map(str, found))}; number them with "
        "y = numpy.unique(y, return_inverse=True)[1], or pass their names as texts"
    )


def records(
    data: Dataset,
    indices: Tensor,
    augment: torch.Generator | None = None,
    draws: Draws = same_draws,
) -> Batch:
    """Return the samples at these indices with their targets, pixels as normalised float32.

    Args:
        data: the data set.
        indices: the samples to return.
        augment: if given, the samples are cropped and flipped at random with this generator.
        draws: where rows are read now, what their random transforms draw from.
    """
    if data.rows is None:
        x = map_tensors(lambda w: w[indices], data.x)
        return Batch(_prepared(data, x, augment), data.y[indices])
    x, y = read_batch(data.rows, indices, data.x, data.y, draws)
    return Batch(_prepared(data, x, augment), y)


def batch(data: Dataset, indices: Tensor, augment: torch.Generator | None = None) -> Any:
    """The samples of `records` alone."""
    return records(data, indices, augment).x


def _prepared(data: Dataset, x: Any, augment: torch.Generator | None) -> Any:
    """Samples as a network reads them."""
    if not isinstance(x, Tensor):
        return map_tensors(_scaled, x)
    if augment is not None and (data.crop or data.flip):
        x = _crop_and_flip(x, data.crop, data.flip, augment)
    x = _scaled(x)
    if data.mean:
        per_channel = (-1, 1, 1)
        mean = torch.tensor(data.mean, device=x.device).view(per_channel)
        std = torch.tensor(data.std, device=x.device).view(per_channel)
        x = x.sub(mean).div_(std)
    return x


def first_record(data: Dataset) -> Batch:
    """The first sample and its target, as a batch."""
    return records(data, torch.arange(1))


def pooled(data: Dataset) -> Dataset:
    """One pool of the samples of a data set and of its test set, in this order."""
    test = data.test
    if test is None:
        return data
    x = combine(lambda a, b: torch.cat([a, b]), data.x, test.x)
    return replace(data, x=x, y=torch.cat([data.y, test.y]), test=None)


def _scaled(x: Tensor) -> Tensor:
    return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x


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
