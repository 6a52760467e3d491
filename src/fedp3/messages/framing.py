"""The frame of a message: magic, header length, JSON header with the payload's sha256, payload.

All sizes are checked before anything is read.
A payload that was truncated or altered on the way is rejected.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedp3.core.errors import CodecError

MAGIC = b"fp3\x01"
HEADER_LIMIT = 1 << 20  # bytes
PREFIX = 8  # bytes before the header: the magic and the header's length


def frame(header: Mapping[str, Any], payload: bytes) -> bytes:
    """A message with this header and payload."""
    fields = {**header, "sha256": hashlib.sha256(payload).hexdigest()}
    encoded = json.dumps(fields, separators=(",", ":")).encode()
    return MAGIC + struct.pack("<I", len(encoded)) + encoded + payload


def open_frame(data: bytes, kind: str, limit: int) -> tuple[dict[str, Any], memoryview]:
    """Header and payload of a message.

    Args:
        data: the bytes that arrived.
        kind: the expected kind of message, "task" or "update".
        limit: the largest acceptable payload, in bytes.
    """
    if len(data) < PREFIX or data[:4] != MAGIC:
        raise CodecError("these bytes are no fedp3 message")
    length = _header_length(data)
    if length > min(HEADER_LIMIT, len(data) - PREFIX):
        raise CodecError(f"a header of {length} bytes does not fit a message of {len(data)} bytes")
    payload = memoryview(data)[PREFIX + length :]
    if len(payload) > limit:
        raise CodecError(f"the payload has {len(payload)} bytes, at most {limit} are accepted")
    try:
        header = json.loads(data[PREFIX : PREFIX + length])
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the header is not JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise CodecError(f"this is no message of kind {kind!r}")
    if header.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise CodecError("the payload does not match its checksum: truncated or changed on the way")
    return header, payload


def payload_size(data: bytes) -> int:
    """The number of bytes of a message that are payload; the others are framing."""
    return len(data) - PREFIX - _header_length(data)


def _header_length(data: bytes) -> int:
    return int(struct.unpack("<I", data[4:PREFIX])[0])


def values_bytes(w: Tensor) -> bytes:
    """The values of a tensor in little-endian order."""
    values = w.contiguous().numpy()
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


class Reader:
    """Reads a payload piece by piece and never past its end."""

    def __init__(self, payload: memoryview) -> None:
        self._remaining = payload

    @property
    def left(self) -> int:
        """The number of bytes that were not read yet."""
        return len(self._remaining)

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        missing = size - len(self._remaining)
        if missing > 0:
            raise CodecError(f"the payload ends {missing} bytes early")
        piece = bytes(self._remaining[:size])
        self._remaining = self._remaining[size:]
        return piece

    def values(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The next `count` numbers of this type, stored in little-endian order."""
        native = torch.empty(0, dtype=dtype).numpy().dtype
        data = self.take(dtype.itemsize * count)
        return torch.from_numpy(np.frombuffer(data, native.newbyteorder("<")).astype(native))

    def finish(self) -> None:
        """Reject a payload with bytes left over."""
        if len(self._remaining):
            raise CodecError(f"{len(self._remaining)} bytes too many in the payload")
