"""The fields of a message's header, which come from another machine: each is checked as it is read.

A wrong field raises ValueError or TypeError.
"""

import math
from collections.abc import Collection, Sequence
from typing import get_args

from fedp3.core.errors import type_of
from fedp3.core.types import LayerPlan, Send, Upload

MAX_DIMENSIONS = 8  # of a method's tensor
MAX_INTEGER = 1 << 31  # rounds and clients are below it


def integer(value: object, least: int = 0) -> int:
    """An integer in the range of rounds and clients."""
    if type(value) is not int or not least <= value < MAX_INTEGER:
        raise ValueError(f"want an integer of at least {least}")
    return value


def number(value: object) -> float:
    """A metric."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a metric is {type_of(value)}, want a number")
    return float(value)


def shape(claimed: Sequence[object], room: int) -> list[int]:
    """The shape of a method's tensor, whose elements must fit `room`."""
    if len(claimed) > MAX_DIMENSIONS:
        raise ValueError(f"an extra has {len(claimed)} dimensions, at most {MAX_DIMENSIONS}")
    sizes = [integer(d) for d in claimed]
    if math.prod(max(1, d) for d in sizes) > room:
        raise ValueError("an extra is larger than what is accepted")
    return sizes


def layer_plan(send: Send, keep: float, train: bool, upload: Upload) -> LayerPlan:
    """The plan of one layer."""
    known = send in get_args(Send) and upload in get_args(Upload) and isinstance(train, bool)
    if not (known and isinstance(keep, int | float) and 0 < keep <= 1):
        raise ValueError("the plan of a layer has unknown values")
    return LayerPlan(send=send, keep=keep, train=train, upload=upload)


def deal(part: object, parts: object) -> tuple[int, int]:
    """Which of how many disjoint parts of the units a client gets."""
    if integer(part) >= integer(parts, least=1):
        raise ValueError("the client's part of the units is beyond the number of parts")
    return integer(part), integer(parts, least=1)


def name(value: object, known: Collection[str]) -> str:
    """A registered name, or nothing."""
    if not isinstance(value, str) or (value and value not in known):
        raise ValueError(f"want one of {', '.join(known)}, or nothing")
    return value


def reason(error: Exception) -> str:
    """What is wrong with a header, in a text of bounded length."""
    return f"{type(error).__name__}: {str(error)[:120]}"
