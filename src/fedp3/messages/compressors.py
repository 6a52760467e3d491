"""Codes of changes: fewer bits for what is uploaded, and for what is sent down.

A client uploads the change d = W_i - W_sent, and the server adds it to what it sent.  The server
sends the change of its published weights (`fedp3.messages.versions`).  A code replaces d by

    fp16      d in half precision
    int8      s q, with s = max |d| / 127 and integers q, rounded up or down at random so that s q
              is unbiased, to 2^-17 s
    int4      the same in 4 bits, with one scale s in half precision per row, rounded to nearest
    ternary   s q with q in {-1, 0, 1}, with one s per row: the mean of the |d| that are sent
    topk      the k largest coordinates of d
    int4-random, ternary-random     rounded at random, unbiased, s = max |d| / 7 and max |d|

What int4, ternary and topk lose is added to the next d of the same sender (error feedback).  The
others need no memory.  Running statistics are never coded, because a variance must stay positive.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.registry import Registry
from fedp3.core.types import Block, Mask
from fedp3.messages.packing import BYTES, NIBBLES, TRITS, Packing
from fedp3.planning.selectors import magnitude, retained_weights

Coded = tuple[Tensor, Tensor | None]  # what is sent of a change, and its scale or None
Pack = Callable[[Tensor, float, torch.Generator], Coded]  # from change and share of topk
CACHED = 1 << 18  # values that are coded at once: with a few arrays of them, about a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """A code for the change of one tensor.

    Args:
        pack: takes the change, the share that `topk` sends and a generator; returns what is sent,
            in the same shape, and its scale or None.
        dtype: the type of what is sent.
        scales: what the receiver multiplies by: nothing, one float32 per tensor, or one float16
            per row (index of the first dimension).  With rows, `pack` takes and returns a matrix
            and a vector of scales, in float32; a tensor of one dimension is one row, and what
            becomes of a row must not depend on others.  Without, it takes and returns flat tensors.
        packing: how integers are written in few bits; None writes values of `dtype`.
        sparse: only the share `share` of the coordinates is sent, with a mask.
        feedback: what was lost is added to the sender's next change.
    """

    pack: Pack
    dtype: torch.dtype
    scales: Literal["none", "tensor", "rows"] = "none"
    packing: Packing | None = None
    sparse: bool = False
    feedback: bool = False


# None stands for no compression.
COMPRESSORS: Registry[Compressor | None] = Registry("compression")


# --------------------------------------------------------------------------- flat codes


def _to_half(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    return d.half(), None


def _to_int8(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    scale = d.abs().amax() / BYTES.most if d.numel() else d.new_zeros(())
    sent = torch.zeros_like(d, dtype=torch.int8)
    if bool(scale > 0) and bool(torch.isfinite(scale)):
        for first in range(0, d.numel(), CACHED):
            part = slice(first, first + CACHED)
            sent[part] = _rounded_at_random(d[part] / scale, BYTES.most, rng)
    return sent, scale


def _rounded_at_random(x: Tensor, most: int, rng: torch.Generator) -> Tensor:
    """The numbers, in place, rounded up or down at random with themselves as mean.

    Most of the time of such a code would be drawing, so that four numbers share 64 random bits.
    """
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(
        -(2**63), None, generator=rng
    )
    pieces = words.view(torch.int16)[: x.numel()].view(x.shape)
    # from -2^15 to 2^15 - 1, made to the middles of 2^16 equal parts of [0, 1]
    x.add_(pieces.float().mul_(2**-16).add_(0.5 + 2**-17))
    return x.floor_().clamp_(-most, most)


def _to_sparse(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    # NaN has no magnitude: it would be left out and stay in the residual.
    # If it is sent, the server rejects the update.
    if bool(d.isnan().any()):
        return d, None
    return d.masked_fill(~top(d, share), 0), None


def top(d: Tensor, share: float) -> Tensor:
    """The mask of the coordinates of a flat tensor that `topk` sends."""
    return magnitude(d, retained_weights(share, d.numel()), None)


# --------------------------------------------------------------------------- codes by rows

# The smallest |d| that ternary sends, as a share of sum d^2 / sum |d| of its row.  Coordinates that
# did not change, e.g. of pruned weights and inactive units, then do not count.  For bell-shaped
# changes it is 0.56 standard deviations, where the error is smallest.
TERNARY_THRESHOLD = 0.45


def _rows_by_largest(most: int, *, random: bool) -> Pack:
    """Integers up to `most`, with the largest |d| of a row as `most`."""

    def pack(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
        if not d.numel():
            return d.to(torch.int8), d.new_zeros(len(d))
        scale = _half(d.abs().amax(1) / most)
        divided = d * _inverse(scale)[:, None]
        # A scale in half precision may be too small for the largest number of its row.
        if random:
            return _rounded_at_random(divided, most, rng).to(torch.int8), scale
        return divided.round_().clamp_(-most, most).to(torch.int8), scale

    return pack


def _half(scale: Tensor) -> Tensor:
    """A scale as the receiver reads it."""
    return scale.half().float()


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for a row of zeros, or of numbers too small for half precision."""
    return torch.where(scale > 0, 1 / scale, 0)


def _to_ternary(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    total, length = d.abs().sum(1), d.norm(2, dim=1)
    least = TERNARY_THRESHOLD * length * length / total
    # From the threshold on, a number becomes 1 or -1; below it, the conversion cuts it to 0.
    symbols = (d * _inverse(least)[:, None]).clamp_(-1, 1).to(torch.int8)
    sent = (d * symbols).sum(1)
    count = symbols.abs().sum(1, dtype=torch.float32).clamp_(min=1)
    # NaN is in no comparison: without this it would stay in the residual for ever.
    return symbols, torch.where(total.isfinite(), _half(sent / count), total)


COMPRESSORS.add("none", None)
COMPRESSORS.add("fp16", Compressor(pack=_to_half, dtype=torch.float16))
COMPRESSORS.add("int8", Compressor(pack=_to_int8, dtype=torch.int8, scales="tensor", packing=BYTES))
COMPRESSORS.add(
    "int4",
    Compressor(
        pack=_rows_by_largest(NIBBLES.most, random=False),
        dtype=torch.int8,
        scales="rows",
        packing=NIBBLES,
        feedback=True,
    ),
)
COMPRESSORS.add(
    "int4-random",
    Compressor(
        pack=_rows_by_largest(NIBBLES.most, random=True),
        dtype=torch.int8,
        scales="rows",
        packing=NIBBLES,
    ),
)
COMPRESSORS.add(
    "ternary",
    Compressor(pack=_to_ternary, dtype=torch.int8, scales="rows", packing=TRITS, feedback=True),
)
COMPRESSORS.add(
    "ternary-random",
    Compressor(
        pack=_rows_by_largest(TRITS.most, random=True),
        dtype=torch.int8,
        scales="rows",
        packing=TRITS,
    ),
)
COMPRESSORS.add(
    "topk", Compressor(pack=_to_sparse, dtype=torch.float32, sparse=True, feedback=True)
)


# --------------------------------------------------------------------------- one tensor


def pack_tensor(
    change: Tensor, mask: Mask, compressor: Compressor, share: float, rng: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """What is sent of a change, and its scales, both full-shaped.

    Args:
        change: full-shaped.
        mask: the coordinates that are exchanged; elsewhere what is sent is zero.
        compressor: the code.
        share: of the coordinates that a sparse code sends.
        rng: for codes that round at random.
    """
    shape = tuple(change.shape)
    if compressor.scales != "rows":
        values = M.take(change, mask)
        flat, scale = compressor.pack(values.flatten(), share, rng)
        return M.put(flat.view(values.shape), mask, shape), scale
    # Weights that are pruned one by one leave rows as they are, with zeros in them.
    block = mask if isinstance(mask, Block) else None
    values = M.zero_pruned(change, mask) if block is None else M.take(change, block)
    rows = _rows(tuple(values.shape))
    symbols, scale = compressor.pack(values.reshape(rows, -1), share, rng)
    sent = M.put(symbols.view(values.shape), block, shape)
    if scale is not None and block is not None and block.rows is not None and len(shape) > 1:
        scale = M.put(scale, Block(block.rows, None), (_rows(shape),))
    return sent, scale


def pack_remembering(
    change: Tensor, compressor: Compressor, share: float, rng: torch.Generator
) -> Coded:
    """Code a dense change by rows, and turn it, in place, into what the code loses.

    A few rows at a time go through all steps while they are in the processor's cache.  A code that
    draws nothing gives the same bits as with all rows at once.

    Args:
        change: full-shaped and contiguous; afterwards, what was lost of it.
        compressor: a code by rows with feedback.
        share: of the coordinates that a sparse code sends.
        rng: for codes that round at random.
    """
    rows = _rows(tuple(change.shape))
    matrix = change.view(rows, -1)
    sent = torch.empty(matrix.shape, dtype=compressor.dtype)
    scales = torch.empty(rows)
    for block in _blocks(matrix):
        d = matrix[block]
        symbols, scale = compressor.pack(d, share, rng)
        assert scale is not None
        sent[block], scales[block] = symbols, scale
        d.sub_(symbols * scale[:, None])
    return sent.view(change.shape), scales


def add_to(base: Tensor, sent: Tensor, scale: Tensor | None) -> Tensor:
    """The tensor that a change was made to, with the change that is sent: `base` + `value_of`."""
    if scale is None or not base.numel() or not base.is_contiguous():
        return value_of(sent, scale).add_(base)
    total = torch.empty_like(base)
    rows = _rows(tuple(base.shape))
    out, start, symbols = total.view(rows, -1), base.view(rows, -1), sent.reshape(rows, -1)
    each = scale.expand(rows)[:, None]
    for block in _blocks(out):
        torch.mul(symbols[block], each[block], out=out[block]).add_(start[block])
    return total


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """Some rows after the other, about `CACHED` values at a time."""
    step = max(1, CACHED // max(1, matrix.shape[1]))
    for first in range(0, len(matrix), step):
        yield slice(first, first + step)


def value_of(sent: Tensor, scale: Tensor | None) -> Tensor:
    """The change that a coded tensor stands for, full-shaped."""
    if scale is None:
        return sent.float()
    if scale.dim() and sent.dim() > 1:
        scale = scale.view(-1, *[1] * (sent.dim() - 1))
    return sent * scale


def scale_shape(shape: tuple[int, ...], compressor: Compressor | None) -> tuple[int, ...] | None:
    """The shape of the scales of a tensor; None if it has none."""
    if compressor is None or compressor.scales == "none":
        return None
    return () if compressor.scales == "tensor" else (_rows(shape),)


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1
