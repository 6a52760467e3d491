"""Randomness by address: pinned, independent, and invisible to everybody else."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedp3.core.randomness import Stream, layers_draw_from, numpy_stream, stream

# Every stored result depends on these numbers: rows may be added below, never changed.
TABLE = {
    "PARTITION": 0,
    "SPLIT": 1,
    "PLAN": 2,
    "DEVICES": 3,
    "SAMPLE": 4,
    "INIT": 5,
    "BATCHES": 6,
    "GLOBAL_PRUNE": 7,
    "LOCAL_PRUNE": 8,
    "NOISE": 9,
    "LAYER": 10,
    "AUGMENT": 11,
    "SKETCH": 12,
    "SIZES": 13,
    "THEORY": 14,
    "AUDIT": 15,
    "DEAL": 16,
    "COMPRESS": 17,
    "FLEET": 18,
}
addresses = st.tuples(
    st.integers(0, 2**32),
    st.sampled_from(list(Stream)),
    st.lists(st.integers(0, 2**20), max_size=3).map(tuple),
)


def draws(seed: int, use: Stream, *at: int, n: int = 4) -> list[int]:
    return torch.randint(2**62, (n,), generator=stream(seed, use, *at)).tolist()


# --------------------------------------------------------------------------- pinned


def test_the_table_of_uses_only_grows() -> None:
    numbers = {use.name: use.value for use in Stream}
    assert TABLE.items() <= numbers.items()
    assert sorted(numbers.values()) == list(range(len(numbers))), "a new row takes the next number"


def test_streams_give_the_stored_bits() -> None:
    """A change here changes every result: record it in the changelog under Results."""
    assert torch.randint(2**31, (3,), generator=stream(0, Stream.INIT)).tolist() == [
        417777455,
        738316296,
        685751678,
    ]
    assert torch.randperm(6, generator=stream(0, Stream.INIT)).tolist() == [4, 1, 5, 3, 0, 2]
    assert torch.randint(2**31, (3,), generator=stream(7, Stream.BATCHES, 3, 11)).tolist() == [
        172270974,
        1686071990,
        1137661525,
    ]
    assert numpy_stream(0, Stream.INIT).integers(2**31, size=3).tolist() == [
        167590276,
        563270223,
        1788794570,
    ]
    assert numpy_stream(7, Stream.BATCHES, 3, 11).integers(2**31, size=3).tolist() == [
        1491471340,
        1023902081,
        2011812612,
    ]


# --------------------------------------------------------------------------- addressed


@given(addresses)
def test_an_address_always_gives_the_same_stream(at: tuple[int, Stream, tuple[int, ...]]) -> None:
    seed, use, where = at
    first = draws(seed, use, *where)
    draws(seed + 1, use, *where)  # what was drawn elsewhere does not matter
    torch.rand(3)
    assert draws(seed, use, *where) == first
    once, again = (numpy_stream(seed, use, *where).random(3).tolist() for _ in range(2))
    assert once == again


@given(st.lists(addresses, min_size=2, max_size=8, unique=True))
def test_different_addresses_give_different_streams(
    ats: list[tuple[int, Stream, tuple[int, ...]]],
) -> None:
    for of in (
        draws,
        lambda seed, use, *at: numpy_stream(seed, use, *at).integers(2**62, size=4).tolist(),
    ):
        seen = [tuple(of(seed, use, *where)) for seed, use, where in ats]
        assert len(set(seen)) == len(ats)


def test_neighbouring_addresses_are_different_streams() -> None:
    """Also those that an address glued together from digits would confuse."""
    ats = [
        (0, u, *at)
        for u in Stream
        for at in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (11,), (0, 11), (110,)]
    ]
    ats += [(1, Stream.INIT), (2, Stream.INIT), (2**32, Stream.INIT), (2**40, Stream.INIT)]
    assert len({tuple(draws(*at)) for at in ats}) == len(ats)


def test_streams_of_neighbouring_addresses_do_not_resemble_each_other() -> None:
    n = 4000
    ats = [(0, Stream.BATCHES, t, i) for t in range(3) for i in range(3)] + [
        (1, Stream.BATCHES, 0, 0),
        (0, Stream.NOISE, 0, 0),
    ]
    streams = [torch.rand(n, generator=stream(*at)) for at in ats]
    for a, b in combinations(streams, 2):
        correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
        assert abs(correlation) < 4.5 / n**0.5
    assert all(abs(float(s.mean()) - 0.5) < 4.5 / (12 * n) ** 0.5 for s in streams)


# --------------------------------------------------------------------------- global generator


@pytest.fixture
def generator_state() -> Tensor:
    torch.random.default_generator.manual_seed(99)
    torch.rand(7)
    return torch.random.get_rng_state()


def test_streams_leave_the_global_generators_alone(generator_state: Tensor) -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - the global state is what is looked at
    stream(0, Stream.INIT)
    torch.rand(9, generator=stream(1, Stream.LAYER, 2, 3))
    numpy_stream(0, Stream.PARTITION).random(9)
    assert torch.equal(torch.random.get_rng_state(), generator_state)
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_inside_layers_draw_from_their_stream_and_outside_nothing_has_happened(
    generator_state: Tensor,
) -> None:
    with layers_draw_from(stream(3, Stream.LAYER, 5, 6)):
        inside = torch.rand(4)
    assert torch.equal(inside, torch.rand(4, generator=stream(3, Stream.LAYER, 5, 6)))
    assert torch.equal(torch.random.get_rng_state(), generator_state)


def test_the_global_generator_is_put_back_after_an_exception(generator_state: Tensor) -> None:
    def draw_and_fail() -> None:
        torch.rand(4)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), layers_draw_from(stream(3, Stream.LAYER)):
        draw_and_fail()
    assert torch.equal(torch.random.get_rng_state(), generator_state)


def test_one_stream_inside_another_leaves_the_outer_where_it_was() -> None:
    with layers_draw_from(stream(1, Stream.LAYER)):
        a = torch.rand(2)
        with layers_draw_from(stream(2, Stream.LAYER)):
            torch.rand(9)
        b = torch.rand(2)
    assert torch.equal(torch.cat([a, b]), torch.rand(4, generator=stream(1, Stream.LAYER)))


def test_dropout_and_initialisers_are_a_function_of_the_address() -> None:
    def drawn(client: int) -> tuple[Tensor, Tensor]:
        with layers_draw_from(stream(0, Stream.LAYER, 4, client)):
            return nn.Dropout(0.5)(torch.ones(64)), nn.Linear(8, 8).weight.detach()

    torch.rand(3)
    (a, w), (b, v), (c, u) = drawn(1), drawn(1), drawn(2)
    assert torch.equal(a, b) and torch.equal(w, v)
    assert not torch.equal(a, c) and not torch.equal(w, u)
