"""Hashes: the identity of a model, and of bytes."""

import hashlib
from typing import Any

from fedp3.core.types import Params


def model_sha256(W: Params) -> str:
    """Return the sha256 that identifies a model.

    It covers the name, dtype, shape and little-endian bytes of every tensor, in order of names.
    """
    digest = hashlib.sha256()
    for name in sorted(W):
        w = W[name].detach().cpu().contiguous()
        dtype = str(w.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{list(w.shape)}\0".encode())
        values = w.numpy()
        little_endian = values.dtype.newbyteorder("<")
        digest.update(values.astype(little_endian, copy=False).tobytes())
    return digest.hexdigest()


def sha256_of(*parts: Any) -> str:
    """The SHA-256 of these bytes or arrays, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
