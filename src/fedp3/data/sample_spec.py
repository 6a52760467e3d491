"""Shapes and types of samples: all that a server needs to know of data that only nodes have."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedp3.core.errors import DataError
from fedp3.data.dataset import INPUT_TYPES, TARGET_TYPES, Dataset
from fedp3.data.inputs import Inputs, tensors_of

LARGEST = 1 << 28  # numbers in one sample
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*INPUT_TYPES, *TARGET_TYPES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or target, without the axis of samples."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """What the samples of a data set look like, without any of their values.

    Args:
        inputs: the input, or several.
        names: of inputs that are passed by name; None passes them by position.
        several: whether there are several inputs, by position.
        target: the target.
        classes: the number of classes; 0 if targets are no classes.
        labelled: whether every sample has one class label.
        objective: the name of the objective that fits the targets.
    """

    inputs: tuple[TensorSpec, ...]
    target: TensorSpec
    classes: int
    names: tuple[str, ...] | None = None
    several: bool = False
    labelled: bool = True
    objective: str = ""

    def __str__(self) -> str:
        named = zip(self.names, self.inputs, strict=True) if self.names else None
        inputs = [f"{n}: {w}" for n, w in named] if named else list(map(str, self.inputs))
        return f"inputs {', '.join(inputs)}, target {self.target}, {self.classes} classes"


def sample_spec(data: Dataset) -> SampleSpec:
    """What the samples of a data set look like."""
    return SampleSpec(
        inputs=tuple(_spec(w) for w in tensors_of(data.x)),
        names=tuple(data.x) if isinstance(data.x, dict) else None,
        several=isinstance(data.x, tuple),
        target=_spec(data.y),
        classes=data.classes,
        labelled=data.labelled,
        objective=data.objective,
    )


def placeholder(spec: SampleSpec) -> Dataset:
    """A data set of one sample of zeros that looks like this."""
    zeros = [_zeros(w) for w in spec.inputs]
    x: Inputs = tuple(zeros)
    if spec.names is not None:
        x = dict(zip(spec.names, zeros, strict=True))
    elif not spec.several:
        (x,) = zeros
    return Dataset(
        name="nodes",
        x=x,
        y=_zeros(spec.target),
        classes=spec.classes,
        labelled=spec.labelled,
        objective=spec.objective,
    )


def _spec(w: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(w.shape[1:]), dtype=str(w.dtype).removeprefix("torch."))


def _zeros(spec: TensorSpec) -> Tensor:
    if spec.dtype not in DTYPES or any(n < 0 for n in spec.shape):
        raise DataError(f"samples of {spec} cannot be used; want {', '.join(DTYPES)}")
    if math.prod(spec.shape) > LARGEST:
        raise DataError(f"one sample of {spec} has more than {LARGEST:,} numbers")
    return torch.zeros((1, *spec.shape), dtype=DTYPES[spec.dtype])
