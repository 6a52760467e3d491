"""Small updates several at a time: a call costs more than their numbers."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from fedp3.types import LayerMap

HANDFUL = 1 << 17  # numbers in small updates that are taken together
T = TypeVar("T")


def handfuls(each: Iterable[T], layers: LayerMap) -> Iterator[list[T]]:
    """These in the order given, as many in one list as whole models make a handful; large ones come alone."""
    stream, size = iter(each), max(1, HANDFUL // sum(math.prod(shape) for shape in layers.shapes.values()))
    while some := list(islice(stream, size)):
        yield some
