"""Randomness by address: the only module that creates random generators.

A stream is addressed by (seed, use, round, client, ...), and never stored or shared.  The order of
work, the number of workers, the engine and a resumed run therefore cannot change what is drawn.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """The use of a stream; the rest of its address follows in parentheses.

    Only ever append to this list: the numbers determine every stored result.
    """

    # (): which sample belongs to which client
    PARTITION = 0
    # (client): how a client's samples are split into train and test samples
    SPLIT = 1
    # (round or 0): the layer sets L_i
    PLAN = 2
    # (): which client belongs to which device class
    DEVICES = 3
    # (round): the participants C_t
    SAMPLE = 4
    # (): the initial weights W_0
    INIT = 5
    # (round, client): the order of the local samples
    BATCHES = 6
    # (round, client): P_i, for selectors that draw
    GLOBAL_PRUNE = 7
    # (round, client): Q_i, one draw per local step
    LOCAL_PRUNE = 8
    # (round, client): the noise of local differential privacy, in simulations only
    # (round): the noise of client-level differential privacy, in simulations only
    NOISE = 9
    # (round, client): Dropout and any other layer that draws
    LAYER = 10
    # (round, client): random crops and flips
    AUGMENT = 11
    # (layer): the sketch of the attention rule
    SKETCH = 12
    # (): unequal client sizes
    SIZES = 13
    # (purpose, iteration, ...): sketches, problems and noise of the theory experiments
    THEORY = 14
    # (purpose): synthetic records that a privacy audit attacks
    AUDIT = 15
    # (round): which units each client of a round gets, for selectors that deal units out
    DEAL = 16
    # (round, client): stochastic rounding of uploads
    COMPRESS = 17
    # (client): the device of a client, drawn from a fleet with a name
    # (): which client has which device, for devices with given shares of the clients
    FLEET = 18
    # (): by how much each client is ahead in a schedule of layers
    # (round): the layers that are due at each client, for schedules that draw them
    SCHEDULE = 19
    # (round): the layers whose last change the server repeats
    RECYCLE = 20
    # (round): random rounding of the changes that the server publishes
    PUBLISH = 21
    # (adapter): the matrix A of an adapter
    ADAPTER = 22
    # (): the tokens of a text that a language model writes
    SAMPLE_TEXT = 23
    # (round, client, step, sample): what a data set draws while it reads a sample of a step
    # (sample): while it reads a sample for a score
    ROW = 24


# The Mersenne Twister's words in the state of torch's CPU generator: their offset and number.
_MT_OFFSET, _MT_WORDS = 24, 624


def _entropy(seed: int, use: Stream, address: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(int(use), *address))


def stream(seed: int, use: Stream, *address: int) -> torch.Generator:
    """Return an independent torch generator addressed by (seed, use, *address)."""
    state = _entropy(seed, use, address).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def numpy_stream(seed: int, use: Stream, *address: int) -> np.random.Generator:
    """Return a numpy generator of the same address, for distributions that torch does not have."""
    return np.random.Generator(np.random.PCG64(_entropy(seed, use, address)))


def os_stream() -> torch.Generator:
    """Return a generator that nobody can reproduce: its entire state comes from the OS.

    Seeding would not be enough: torch uses 32 bits of a seed, few enough to try all of them.
    """
    rng = torch.Generator()
    state = rng.get_state()
    # Each word is the low half of a 64-bit field.
    places = _MT_OFFSET + 8 * np.arange(_MT_WORDS)[:, None] + np.arange(4)
    entropy = bytearray(os.urandom(4 * _MT_WORDS))
    state[torch.from_numpy(places.flatten())] = torch.frombuffer(entropy, dtype=torch.uint8)
    rng.set_state(state)
    return rng


def random_ranks(n: int, rng: torch.Generator) -> list[int]:
    """Return a random permutation of 0, ..., n-1: the rank of each of n clients."""
    ranks = [0] * n
    for rank, i in enumerate(torch.randperm(n, generator=rng).tolist()):
        ranks[i] = rank
    return ranks


@contextmanager
def layers_draw_from(rng: torch.Generator) -> Iterator[None]:
    """Let torch's global CPU generator draw what `rng` would draw, and restore it afterwards.

    Layers such as Dropout and the initialisers of `torch.nn` use only the global generator.
    """
    before = torch.random.get_rng_state()
    torch.random.set_rng_state(rng.get_state())
    try:
        yield
    finally:
        torch.random.set_rng_state(before)


@contextmanager
def global_draws() -> Iterator[Callable[[torch.Generator], None]]:
    """A context with a function that seeds the global generators of Python, NumPy and torch.

    Code of users, such as random transforms of a data set, draws from them.  Afterwards they are as
    they were before.
    """
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002

    def draw_from(rng: torch.Generator) -> None:
        of_python, of_numpy = torch.randint(1 << 32, (2,), generator=rng).tolist()
        random.setstate(random.Random(of_python).getstate())
        np.random.set_state(np.random.RandomState(of_numpy).get_state())  # noqa: NPY002
        torch.random.set_rng_state(rng.get_state())

    try:
        yield draw_from
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.random.set_rng_state(before[2])
