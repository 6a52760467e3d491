"""A message: magic, length of header | header (JSON, with the sha256 of the payload) | payload.

Sizes are checked before anything is read, and a payload that was cut or changed on the way is refused.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedp3.errors import CodecError

MAGIC = b"fp3\x01"
HEADER_LIMIT = 1 << 20


def frame(header: Mapping[str, Any], payload: bytes) -> bytes:
    head = json.dumps({**header, "sha256": hashlib.sha256(payload).hexdigest()}, separators=(",", ":")).encode()
    return MAGIC + struct.pack("<I", len(head)) + head + payload


def open_frame(data: bytes, kind: str, most: int) -> tuple[dict[str, Any], memoryview]:
    """Header and payload of a message of this kind, with a payload of at most so many bytes."""
    if len(data) < 8 or data[:4] != MAGIC:
        raise CodecError("these bytes are no fedp3 message")
    (length,) = struct.unpack("<I", data[4:8])
    if length > min(HEADER_LIMIT, len(data) - 8):
        raise CodecError(f"header of {length} bytes in a message of {len(data)}")
    payload = memoryview(data)[8 + length :]
    if len(payload) > most:
        raise CodecError(f"a payload of {len(payload)} bytes, at most {most} can be meant")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the header is not JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise CodecError(f"want a message of kind {kind!r}")
    if header.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise CodecError("the payload does not match its checksum: truncated or changed on the way")
    return header, payload


def payload_size(data: bytes) -> int:
    """Bytes of a message that are payload; the rest is framing."""
    return len(data) - 8 - int(struct.unpack("<I", data[4:8])[0])


class Reader:
    """Takes pieces off a payload, never past its end."""

    def __init__(self, payload: memoryview) -> None:
        self.rest = payload

    def take(self, size: int) -> bytes:
        if size > len(self.rest):
            raise CodecError(f"the payload ends {size - len(self.rest)} bytes early")
        piece, self.rest = bytes(self.rest[:size]), self.rest[size:]
        return piece

    def values(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        native = torch.empty(0, dtype=dtype).numpy().dtype
        return torch.from_numpy(
            np.frombuffer(self.take(dtype.itemsize * count), native.newbyteorder("<")).astype(native)
        )

    def done(self) -> None:
        if len(self.rest):
            raise CodecError(f"{len(self.rest)} bytes too many in the payload")
