"""Group small updates so that one torch call handles many."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from fedp3.core.types import LayerMap

GROUP_SIZE = 1 << 17  # numbers in a group of small updates
T = TypeVar("T")


def group_updates(updates: Iterable[T], layers: LayerMap) -> Iterator[list[T]]:
    """The updates in order, in lists of up to GROUP_SIZE numbers; large updates come alone."""
    stream = iter(updates)
    numbers = sum(math.prod(shape) for shape in layers.shapes.values())
    size = max(1, GROUP_SIZE // numbers)
    while group := list(islice(stream, size)):
        yield group
