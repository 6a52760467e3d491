"""Networks of a given name and size, for counting."""

from collections.abc import Iterable
from typing import Any

from fedp3.models.zoo import ModelSettings, ModelSpec


def spec_of(name: str, shape: tuple[int, ...], classes: int = 10, **settings: Any) -> ModelSpec:
    return ModelSpec(shape, classes, ModelSettings(name=name, **settings))


def rounded(values: Iterable[float], digits: int = 2) -> list[float]:
    return [round(v, digits) for v in values]
