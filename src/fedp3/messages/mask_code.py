"""Masks as bytes: a bitmap, or a list of indices where that is shorter."""

import math

import numpy as np
import torch
from torch import Tensor

from fedp3.core.errors import CodecError


def mask_bytes(n: int, k: int) -> int:
    """Bytes of a mask that retains k of n coordinates.

    It is a bitmap, or a list of the retained or of the pruned indices where that is shorter.
    """
    return min(math.ceil(n / 8), 4 * min(k, n - k))


def pack_mask(mask: Tensor) -> bytes:
    """A bool mask in `mask_bytes` bytes."""
    flat = mask.flatten().numpy()
    n, k = flat.size, int(flat.sum())
    if mask_bytes(n, k) == math.ceil(n / 8):
        return np.packbits(flat).tobytes()
    listed = flat if k <= n - k else ~flat
    return np.flatnonzero(listed).astype("<u4").tobytes()


def unpack_mask(data: bytes, n: int, k: int) -> Tensor:
    """The inverse of `pack_mask`.

    Args:
        data: the packed mask.
        n: the number of coordinates, from the plan and never from the data.
        k: the number of retained coordinates, from the plan too.
    """
    if len(data) != mask_bytes(n, k):
        raise CodecError(f"a mask of {k} in {n} takes {mask_bytes(n, k)} bytes, got {len(data)}")
    if len(data) == math.ceil(n / 8):
        flat = np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(bool)
    else:
        indices = np.frombuffer(data, "<u4")
        if indices.size and int(indices.max()) >= n:
            raise CodecError(f"a mask index is {int(indices.max())}, beyond {n}")
        listed = np.zeros(n, bool)
        listed[indices] = True
        flat = listed if k <= n - k else ~listed
    retained = int(flat.sum())
    if retained != k:
        raise CodecError(f"a mask retains {retained} of {n} coordinates, the plan says {k}")
    return torch.from_numpy(flat)
