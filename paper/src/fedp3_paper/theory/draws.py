"""Addresses of the random numbers of the theory experiments, all under `Stream.THEORY`."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedp3.core.randomness import Stream, numpy_stream

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class For(IntEnum):
    """The purposes of streams.  Append only: the numbers are part of every result."""

    PROBLEM = 0  # (part)        matrices, centres, data splits
    PRUNE = 1  # (k)             global pruning sketches P_i^k
    AGGREGATE = 2  # (k)         aggregation sketches S_i^k
    BATCH = 3  # (k)             minibatches
    NOISE = 4  # (k)             Gaussian perturbation
    VECTORS = 5  # (part)        test vectors of an identity


def draw(seed: int, purpose: For, *address: int) -> np.random.Generator:
    """The generator of (seed, purpose, *address); one stream serves all runs of a batch."""
    return numpy_stream(seed, Stream.THEORY, int(purpose), *address)
