"""Small integers in few bits, and a lossless entropy code for what is left.

    bytes    one signed byte each
    nibbles  -7 to 7, two in a byte
    trits    -1, 0 and 1, five in a byte: 1.6 bits each, where their entropy is at most 1.58

Symbols of quantised changes are far from uniform, so that an entropy code makes them shorter still.
It is the Huffman mode of zlib (deflate without matches), which is in Python's standard library.  An
arithmetic code would gain little more: a byte of five trits already has many values, so that a
Huffman code of bytes loses little to whole bits.

Everything read here may come from another machine: sizes are known before anything is read, and no
byte is accepted that `pack` would not have written.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedp3.core.errors import CodecError

Symbols = np.ndarray  # (n,) int8


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How symbols from -most to most are written.

    Args:
        most: the largest symbol.
        per_byte: how many symbols a byte holds.
        pack: from symbols, whose number is a multiple of `per_byte`, to bytes.
        unpack: the inverse.
    """

    most: int
    per_byte: int
    pack: Callable[[Symbols], np.ndarray]
    unpack: Callable[[np.ndarray], Symbols]

    def size(self, count: int) -> int:
        """The bytes of this many symbols."""
        return math.ceil(count / self.per_byte)


def _write_bytes(symbols: Symbols) -> np.ndarray:
    return symbols.view(np.uint8)


def _read_bytes(data: np.ndarray) -> Symbols:
    return data.view(np.int8)


def _write_nibbles(symbols: Symbols) -> np.ndarray:
    low, high = (symbols.reshape(-1, 2) + np.int8(8)).astype(np.uint8).T
    data: np.ndarray = np.bitwise_or(low, high << np.uint8(4))
    return data


def _read_nibbles(data: np.ndarray) -> Symbols:
    pairs = np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=1)
    return pairs.reshape(-1).astype(np.int8) - np.int8(8)


_TRITS = 5  # in a byte: 3 ** 5 = 243 values
_PLACES = 3 ** np.arange(_TRITS, dtype=np.int64)
# byte -> its five trits; the 13 bytes that stand for nothing give -2, which is out of range
_TRITS_OF = np.where(
    np.arange(256)[:, None] < 3**_TRITS, np.arange(256)[:, None] // _PLACES % 3 - 1, -2
).astype(np.int8)


def _write_trits(symbols: Symbols) -> np.ndarray:
    digits = (symbols.reshape(-1, _TRITS) + np.int8(1)).astype(np.uint8)
    data: np.ndarray = digits[:, -1].copy()
    for place in reversed(range(_TRITS - 1)):  # Horner's scheme stays within a byte
        data *= np.uint8(3)
        data += digits[:, place]
    return data


def _read_trits(data: np.ndarray) -> Symbols:
    symbols: Symbols = _TRITS_OF[data].reshape(-1)
    return symbols


BYTES = Packing(most=127, per_byte=1, pack=_write_bytes, unpack=_read_bytes)
NIBBLES = Packing(most=7, per_byte=2, pack=_write_nibbles, unpack=_read_nibbles)
TRITS = Packing(most=1, per_byte=_TRITS, pack=_write_trits, unpack=_read_trits)


def pack(symbols: Symbols, packing: Packing) -> bytes:
    """Symbols as bytes; the last byte is filled up with zeros."""
    padding = -len(symbols) % packing.per_byte
    padded = np.concatenate([symbols, np.zeros(padding, np.int8)]) if padding else symbols
    return packing.pack(np.ascontiguousarray(padded)).tobytes()


def unpack(data: bytes, count: int, packing: Packing) -> Symbols:
    """The inverse of `pack`.

    Args:
        data: the bytes.
        count: the number of symbols, which the receiver knows.
        packing: how they are written.
    """
    if len(data) != packing.size(count):
        raise CodecError(
            f"{count} symbols take {packing.size(count)} bytes, and {len(data)} were sent"
        )
    symbols = packing.unpack(np.frombuffer(data, np.uint8))
    # -128 has no counterpart, so that the smallest is compared too.
    if len(symbols) and not -packing.most <= symbols.min() <= symbols.max() <= packing.most:
        raise CodecError(f"a symbol lies outside -{packing.most} to {packing.most}")
    if symbols[count:].any():
        raise CodecError("the bits after the last symbol are not zero")
    return symbols[:count].copy()


# --------------------------------------------------------------------------- entropy

PREFIX = 4  # bytes of the length that stands before an entropy-coded block


def squeeze(data: bytes) -> bytes:
    """The data in an entropy code, or as they are if that is not longer; with a length before it.

    It has at most `PREFIX` bytes more than the data.
    """
    encoder = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    coded = encoder.compress(data) + encoder.flush()
    shorter = coded if len(coded) < len(data) else data
    return len(shorter).to_bytes(PREFIX, "little") + shorter


def expand(coded: bytes, size: int) -> bytes:
    """The inverse of `squeeze`, without its length.

    Args:
        coded: the block; as long as the data if it is not in the entropy code.
        size: the number of bytes that it stands for; no more are ever made.
    """
    if len(coded) == size:
        return coded
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = decoder.decompress(coded, size + 1)
    except zlib.error as error:
        raise CodecError(f"an entropy-coded block is damaged: {error}") from None
    if len(data) != size or not decoder.eof or decoder.unused_data:
        raise CodecError(f"an entropy-coded block does not stand for {size} bytes")
    return data
