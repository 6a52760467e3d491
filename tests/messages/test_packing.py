"""Symbols in few bits come back as they were, take the bytes that are counted, or are refused."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import CodecError
from fedp3.messages.packing import (
    BYTES,
    NIBBLES,
    PREFIX,
    TRITS,
    Packing,
    expand,
    pack,
    squeeze,
    unpack,
)

PACKINGS = (BYTES, NIBBLES, TRITS)


@st.composite
def symbols_and_packings(draw: st.DrawFn) -> tuple[list[int], Packing]:
    packing = draw(st.sampled_from(PACKINGS))
    return draw(st.lists(st.integers(-packing.most, packing.most), max_size=40)), packing


@given(symbols_and_packings())
def test_symbols_come_back_from_the_counted_bytes(case: tuple[list[int], Packing]) -> None:
    symbols, packing = case
    data = pack(np.array(symbols, np.int8), packing)
    assert len(data) == packing.size(len(symbols)) == -(-len(symbols) // packing.per_byte)
    assert unpack(data, len(symbols), packing).tolist() == symbols


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=23))
def test_five_trits_are_the_digits_of_a_byte(symbols: list[int]) -> None:
    data = pack(np.array(symbols, np.int8), TRITS)
    padded = symbols + [0] * (-len(symbols) % 5)
    for k, byte in enumerate(data):
        trits = padded[5 * k : 5 * k + 5]
        assert byte == sum((trit + 1) * 3**place for place, trit in enumerate(trits))


@pytest.mark.parametrize(
    ("packing", "data", "count"),
    [
        (TRITS, bytes([243]), 5),  # beyond the largest byte of five trits
        (TRITS, bytes([255]), 5),
        (NIBBLES, bytes([0x80]), 2),  # -8, which has no counterpart
        (BYTES, bytes([0x80]), 1),  # -128, likewise
        (NIBBLES, bytes([0x98]), 1),  # a symbol after the last
        (TRITS, bytes([0]), 4),
        (TRITS, bytes([121, 121]), 5),  # a byte too many
        (BYTES, b"", 1),
    ],
)
def test_bytes_that_nobody_would_write_are_refused(
    packing: Packing, data: bytes, count: int
) -> None:
    with pytest.raises(CodecError):
        unpack(data, count, packing)


# --------------------------------------------------------------------------- entropy


@given(st.binary(max_size=300), st.booleans())
def test_an_entropy_code_loses_nothing_and_is_never_much_longer(data: bytes, flat: bool) -> None:
    data = bytes(len(data)) if flat else data
    coded = squeeze(data)
    assert len(coded) <= len(data) + PREFIX
    assert int.from_bytes(coded[:PREFIX], "little") == len(coded) - PREFIX
    assert expand(coded[PREFIX:], len(data)) == data


def test_unequal_symbols_get_shorter_to_within_two_percent_of_their_entropy() -> None:
    rng = np.random.default_rng(0)
    symbols = rng.choice([-1, 0, 1], size=200_000, p=[0.15, 0.7, 0.15]).astype(np.int8)
    entropy = -(0.7 * np.log2(0.7) + 0.3 * np.log2(0.15))
    bits = 8 * len(squeeze(pack(symbols, TRITS))) / len(symbols)
    assert entropy <= bits <= 1.02 * entropy


def _deflated(data: bytes) -> bytes:
    encoder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


@pytest.mark.parametrize(
    ("coded", "size"),
    [
        (_deflated(bytes(10_000_000)), 1000),  # a bomb: a thousand times as long as allowed
        (_deflated(b"abcdef" * 50), 301),  # too short
        (_deflated(b"abcdef" * 50) + b"x", 300),  # something behind it
        (_deflated(b"abcdef" * 50)[:-2], 300),  # cut off
        (b"\xff" * 20, 300),
        (b"", 1),
    ],
)
def test_a_hostile_block_is_refused(coded: bytes, size: int) -> None:
    with pytest.raises(CodecError):
        expand(coded, size)
