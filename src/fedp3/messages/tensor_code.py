"""The exchanged values of one tensor as bytes, coded or not.

    uncoded          float32 values
    sparse           a mask, then float32 values
    integers         their scales (float16 per row, or one float32), then the packed symbols, in the
                     entropy code if the settings say so
    other codes      values of the code's type

All values are little-endian.  `size` is exactly what `encode` writes, from the number of values
alone; with the entropy code it is an upper bound.
"""

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.errors import CodecError
from fedp3.core.types import Block, Mask
from fedp3.messages.compression import Coding
from fedp3.messages.compressors import Compressor, scale_shape, top
from fedp3.messages.framing import Reader, values_bytes
from fedp3.messages.mask_code import mask_bytes, pack_mask, unpack_mask
from fedp3.messages.packing import PREFIX, expand, pack, squeeze, unpack
from fedp3.planning.selectors import retained_weights

Shape = tuple[int, ...]


def size(count: int, rows: int, compressor: Compressor | None, coding: Coding) -> int:
    """Bytes of the values of one tensor.

    Args:
        count: how many of its coordinates are exchanged.
        rows: over how many rows they lie (indices of the first dimension).
        compressor: the tensor's code; None if it has none.
        coding: the settings of the code.
    """
    if compressor is None:
        return 4 * count
    if compressor.sparse:
        k = retained_weights(coding.share, count)
        return 4 * k + mask_bytes(count, k)
    scales = {"none": 0, "tensor": 4, "rows": 2 * rows}[compressor.scales]
    if compressor.packing is None:
        return scales + compressor.dtype.itemsize * count
    return scales + compressor.packing.size(count) + (PREFIX if coding.entropy else 0)


def exchanged_rows(mask: Mask, shape: Shape) -> int:
    """Over how many rows the coordinates of a mask lie; a vector is one row."""
    if len(shape) < 2:
        return 1
    return shape[0] if not isinstance(mask, Block) or mask.rows is None else len(mask.rows)


def encode(
    sent: Tensor, scale: Tensor | None, mask: Mask, compressor: Compressor | None, coding: Coding
) -> bytes:
    """The values of one tensor.

    Args:
        sent: what the code made of the tensor, full-shaped; the tensor itself if it has none.
        scale: its scales.
        mask: the coordinates that are exchanged.
        compressor: the tensor's code; None if it has none.
        coding: the settings of the code.
    """
    values = M.take(sent, mask).flatten()
    if compressor is None:
        return values_bytes(values)
    if compressor.sparse:
        largest = top(values, coding.share)
        return pack_mask(largest) + values_bytes(values[largest])
    before = b""
    if compressor.scales == "rows":
        assert scale is not None
        before = values_bytes(_of_rows(scale, mask, sent.dim()).half())
    elif scale is not None:
        before = values_bytes(scale)
    if compressor.packing is None:
        return before + values_bytes(values)
    symbols = pack(values.numpy(), compressor.packing)
    return before + (squeeze(symbols) if coding.entropy else symbols)


def decode(
    reader: Reader, mask: Mask, shape: Shape, compressor: Compressor | None, coding: Coding
) -> tuple[Tensor, Tensor | None]:
    """The inverse of `encode`: what was sent, full-shaped and zero elsewhere, and its scales."""
    count = M.count(mask, shape)
    if compressor is None:
        return full_shaped(reader.values(count), mask, shape), None
    if compressor.sparse:
        k = retained_weights(coding.share, count)
        largest = unpack_mask(reader.take(mask_bytes(count, k)), count, k)
        return full_shaped(M.put(reader.values(k), largest, (count,)), mask, shape), None
    scale = _read_scales(reader, mask, shape, compressor)
    if compressor.packing is None:
        values = reader.values(count, compressor.dtype)
        return full_shaped(values, mask, shape), scale
    packed = compressor.packing.size(count)
    data = _read_squeezed(reader, packed) if coding.entropy else reader.take(packed)
    symbols = torch.from_numpy(unpack(data, count, compressor.packing))
    return full_shaped(symbols, mask, shape), scale


def _of_rows(scale: Tensor, mask: Mask, dimensions: int) -> Tensor:
    """The scales of the rows that are exchanged."""
    if dimensions < 2 or not isinstance(mask, Block) or mask.rows is None:
        return scale
    return scale[mask.rows]


def _read_scales(reader: Reader, mask: Mask, shape: Shape, compressor: Compressor) -> Tensor | None:
    full = scale_shape(shape, compressor)
    if full is None:
        return None
    if compressor.scales == "tensor":
        return reader.values(1).view(())
    scales = reader.values(exchanged_rows(mask, shape), torch.float16).float()
    if isinstance(mask, Block) and mask.rows is not None and len(shape) > 1:
        return M.put(scales, Block(mask.rows, None), full)
    return scales


def _read_squeezed(reader: Reader, size: int) -> bytes:
    length = int.from_bytes(reader.take(PREFIX), "little")
    if length > size:
        raise CodecError(f"an entropy-coded block has {length} bytes, at most {size} are accepted")
    return expand(reader.take(length), size)


def full_shaped(values: Tensor, mask: Mask, shape: Shape) -> Tensor:
    """These values at the coordinates of the mask, zero elsewhere."""
    if isinstance(mask, Block):
        sizes = list(shape)
        for side, indices in enumerate((mask.rows, mask.cols)):
            if indices is not None:
                sizes[side] = len(indices)
        values = values.view(sizes)
    return M.put(values, mask, shape)
