"""Nested plain data with tensors: separated into JSON and named tensors, and joined again."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedp3.core.errors import InputError, type_of


def flatten(tree: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """Separate a tree into plain JSON and its tensors by name.

    Every value becomes a tagged list, so that tuples, integer keys, NaN and infinity survive the
    round trip.

    Args:
        tree: dicts, lists, tuples, tensors, numbers, strings and None, nested in any way.
        prefix: what the names of the tensors begin with; a slash and a number follow.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"{prefix}/{len(tensors)}"
            tensors[name] = value.detach().contiguous()
            return ["tensor", name]
        if isinstance(value, Mapping):
            return ["dict", [[_key(k), walk(v)] for k, v in value.items()]]
        if isinstance(value, tuple):
            return ["tuple", [walk(v) for v in value]]
        if isinstance(value, list):
            return ["list", [walk(v) for v in value]]
        if isinstance(value, float) and not math.isfinite(value):
            return ["float", str(float(value))]  # JSON has no NaN and no infinity
        if value is None or isinstance(value, bool | int | float | str):
            return ["value", value]
        raise InputError(
            "a saved state consists of dicts, lists, tuples, tensors, numbers, strings and None, "
            f"got {type_of(value)}"
        )

    return walk(tree), tensors


def _key(key: Any) -> str | int:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    raise InputError(f"the keys of a saved state are strings or integers, got {key!r}")


def unflatten(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Join what `flatten` separated."""
    kind, value = plain
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {k: unflatten(v, tensors) for k, v in value}
    if kind == "list":
        return [unflatten(v, tensors) for v in value]
    if kind == "tuple":
        return tuple(unflatten(v, tensors) for v in value)
    if kind == "float":
        return float(value)
    if kind != "value":
        raise ValueError(f"unknown part {kind!r} of a saved state")
    return value
