"""The identity of a record, wherever it is stored and however a run preprocesses it.

Privacy is accounted per record.  So a record must be recognised in every run: whatever its index,
whichever client has it, and whether or not the run pads its images.  Its identity is therefore a
hash of its raw values and its target, or of an identifier that the data set supplies.
"""

import hashlib
import hmac
from collections.abc import Callable

from torch import Tensor

from fedp3.core.errors import DataError
from fedp3.data.dataset import Dataset
from fedp3.data.inputs import tensors_of

ID_BYTES = 16  # two records share an identity by chance in 2^64


def record_ids(data: Dataset, indices: Tensor, key: bytes = b"") -> list[bytes]:
    """The identity of each of these records, in `ID_BYTES` bytes.

    Args:
        data: the data set.
        indices: the records.
        key: a secret that makes identities meaningless to everybody who does not have it; without
            it, whoever has a record can compute its identity.
    """
    digest = _keyed(key) if key else _plain
    if data.ids is not None:
        return [digest(b"id", data.ids[j].encode()) for j in indices.tolist()]
    if data.rows is not None:
        raise DataError(
            f"data set {data.name!r} is read row by row and has no identifiers of its records; "
            "give it `ids`, one text per row"
        )
    raw = data.x if data.raw is None else data.raw
    parts = [w[indices].contiguous() for w in tensors_of(raw)]
    kind = " ".join(f"{w.dtype}{tuple(w.shape[1:])}" for w in parts).encode()
    targets = _target_bytes(data, indices)
    identities = []
    for *values, target in zip(*parts, targets, strict=True):
        content = b"".join(w.numpy().tobytes() for w in values)
        identities.append(digest(kind, content + target))
    return identities


def _target_bytes(data: Dataset, indices: Tensor) -> list[bytes]:
    if data.labelled:
        return [b"%d" % label for label in data.y[indices].tolist()]
    return [y.numpy().tobytes() for y in data.y[indices].contiguous()]


def _plain(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha256(kind + b"\0" + content).digest()[:ID_BYTES]


def _keyed(key: bytes) -> Callable[[bytes, bytes], bytes]:
    def digest(kind: bytes, content: bytes) -> bytes:
        return hmac.digest(key, kind + b"\0" + content, "sha256")[:ID_BYTES]

    return digest
