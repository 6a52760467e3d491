"""Random diagonal sketches: global pruning P (Definition 1) and model aggregation S (Definition 2).

A sketch is drawn for R runs and n clients at once and stored as its diagonal, shape (R, n, d).

P_i = Diag(1[j in S_i]) is biased: E[P_i w] = c w.  Divided by c it is Rand-t, which is unbiased but
has a larger norm.

S_i = n Diag(1[owner(j) = i]) deals every coordinate (or layer) to one client, so that
(1/n) sum_i S_i = I for every draw.  The proofs only use that owner(j) is uniform over clients, for
each j.  Slots are padded to a multiple of n before they are shuffled, so that this is exact even if
n divides neither d nor the number of layers.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array, Ints

Sketch = Callable[[np.random.Generator, int], Array]  # (stream, R) -> diagonals (R, n, d)


def deal(rng: np.random.Generator, runs: int, n: int, blocks: Sequence[int]) -> Ints:
    """The owner of every coordinate, (runs, sum(blocks)); a random permutation deals the blocks."""
    per_client = -(-len(blocks) // n)
    slots = np.tile(np.repeat(np.arange(n), per_client), (runs, 1))
    owner = rng.permuted(slots, axis=1)[:, : len(blocks)]
    return np.repeat(owner, blocks, axis=1)


def perm_k(n: int, blocks: Sequence[int], *, scaled: bool = True) -> Sketch:
    """Definition 2 over blocks of coordinates: S_i if scaled by n, else a 0/1 pruning sketch."""
    scale = float(n) if scaled else 1.0

    def sketch(rng: np.random.Generator, runs: int) -> Array:
        owner = deal(rng, runs, n, blocks)
        return np.asarray(scale * (owner[:, None, :] == np.arange(n)[:, None]))

    return sketch


def random_prune(n: int, d: int, keep: int, *, scaled: bool = False) -> Sketch:
    """Definition 1 with exactly `keep` coordinates per client; clients are independent.

    Scaled, it is Rand-t with t = keep.
    """
    if not 1 <= keep <= d:
        raise InputError(f"sketch: want 1 <= keep <= d = {d}, got {keep}")
    scale = d / keep if scaled else 1.0

    def sketch(rng: np.random.Generator, runs: int) -> Array:
        rank = rng.random((runs, n, d)).argsort(axis=-1)
        return np.asarray(scale * (rank < keep))

    return sketch


def bernoulli_prune(n: int, c: Array, *, scaled: bool = False) -> Sketch:
    """Definition 1 with independent coordinates, Prob(j in S) = c_j > 0; scaled: divided by c_j."""
    if not bool(np.all((c > 0) & (c <= 1))):
        raise InputError("sketch: a proper sampling wants every probability c_j in (0, 1]")
    scale = 1.0 / c if scaled else np.ones_like(c)

    def sketch(rng: np.random.Generator, runs: int) -> Array:
        return np.asarray((rng.random((runs, n, c.size)) < c) * scale)

    return sketch


def rand_t(n: int, d: int, t: int) -> Sketch:
    """The unbiased Rand-t compressor: E||R w - w||^2 = (d/t - 1) ||w||^2, clients independent."""
    return random_prune(n, d, t, scaled=True)


def identity(n: int, d: int) -> Sketch:
    """The identity, which prunes nothing."""

    def sketch(rng: np.random.Generator, runs: int) -> Array:
        return np.ones((runs, n, d))

    return sketch


def fixed(diagonals: Array) -> Sketch:
    """The same diagonals (n, d) at every draw: layer sets L_i that are never redrawn."""

    def sketch(rng: np.random.Generator, runs: int) -> Array:
        return np.broadcast_to(diagonals, (runs, *diagonals.shape))

    return sketch


def normalised(train: Array) -> Array:
    """The diagonals of S for overlapping layer sets (Alg. 3).

    Dividing by the number of clients that train a coordinate makes (1/n) sum_i S_i = I.
    """
    count = train.sum(axis=0)
    if not bool(np.all(count > 0)):
        raise InputError(
            f"layer sets: coordinates {np.flatnonzero(count == 0)} are trained by nobody"
        )
    return np.asarray(train * (train.shape[0] / count))
