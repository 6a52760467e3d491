"""The identity of a model: one hash over all of its tensors."""

import hashlib

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
