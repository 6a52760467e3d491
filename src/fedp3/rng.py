"""Randomness by address: the only maker of generators.

A stream is named by (seed, use, round, client, ...), never stored and never shared, so that the order of
work, the number of workers, the engine and a resumed run cannot change what is drawn.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Use(IntEnum):
    """What a stream is for.  Append only: the numbers are part of every result."""

    PARTITION = 0  # ()               which sample goes to which client
    SPLIT = 1  # (client)             a client's train/test cut
    PLAN = 2  # (round or 0)          layer sets L_i
    DEVICES = 3  # ()                 which client is which device class
    SAMPLE = 4  # (round)             the participants C_t
    INIT = 5  # ()                    initial weights W_0
    BATCHES = 6  # (round, client)    order of the local data
    GLOBAL_PRUNE = 7  # (round, client)   P_i, for selectors that draw
    LOCAL_PRUNE = 8  # (round, client)    Q_i, one draw per local step
    NOISE = 9  # (round, client)      LDP noise, simulation only
    LAYER = 10  # (round, client)     Dropout and any other layer that draws
    AUGMENT = 11  # (round, client)   random crops and flips
    SKETCH = 12  # (layer)            attention's sketch
    SIZES = 13  # ()                  unequal client sizes
    THEORY = 14  # (purpose, iteration, ...)   sketches, problems and noise of the theory experiments
    AUDIT = 15  # (purpose)             made-up records that an audit attacks
    DEAL = 16  # (round)              which units each of a round's clients gets, where they are dealt out
    COMPRESS = 17  # (round, client)  rounding up or down of uploads


_MT_HEAD, _MT_WORDS = 24, 624  # where the Mersenne Twister's words lie in a CPU generator's state


def _entropy(seed: int, use: Use, at: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(int(use), *at))


def stream(seed: int, use: Use, *at: int) -> torch.Generator:
    """An independent torch generator addressed by (seed, use, *at)."""
    state = _entropy(seed, use, at).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def numpy_stream(seed: int, use: Use, *at: int) -> np.random.Generator:
    """The same address as a numpy generator, for what torch cannot draw (Dirichlet, choice)."""
    return np.random.Generator(np.random.PCG64(_entropy(seed, use, at)))


def os_stream() -> torch.Generator:
    """A generator that nobody can name: its whole state comes from the operating system.

    A seed would not do: torch takes 32 bits of it, few enough to try them all.
    """
    rng = torch.Generator()
    state = rng.get_state()
    words = _MT_HEAD + 8 * np.arange(_MT_WORDS)[:, None] + np.arange(4)  # the low half of each 64-bit field
    state[torch.from_numpy(words.flatten())] = torch.frombuffer(bytearray(os.urandom(4 * _MT_WORDS)), dtype=torch.uint8)
    rng.set_state(state)
    return rng


@contextmanager
def layers_draw_from(rng: torch.Generator) -> Iterator[None]:
    """Inside, torch's global CPU generator draws what this one would; outside, it is untouched.

    Layers such as Dropout and the initialisers of `torch.nn` can draw from nowhere else.
    """
    before = torch.random.get_rng_state()
    torch.random.set_rng_state(rng.get_state())
    try:
        yield
    finally:
        torch.random.set_rng_state(before)
