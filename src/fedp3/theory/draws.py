"""Addresses of the random numbers of the theory experiments, all under `Use.THEORY`."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedp3.rng import Use, numpy_stream

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class For(IntEnum):
    """What a stream of an experiment is for.  Append only: the numbers are part of every result."""

    PROBLEM = 0  # (part)        matrices, centres, data splits
    PRUNE = 1  # (k)             global pruning sketches P_i^k
    AGGREGATE = 2  # (k)         aggregation sketches S_i^k
    BATCH = 3  # (k)             minibatches
    NOISE = 4  # (k)             Gaussian perturbation
    VECTORS = 5  # (part)        test vectors of an identity


def draw(seed: int, purpose: For, *at: int) -> np.random.Generator:
    """The generator addressed by (seed, purpose, *at); one stream serves all runs of a batch."""
    return numpy_stream(seed, Use.THEORY, int(purpose), *at)
