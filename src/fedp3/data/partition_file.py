"""Read a user's partition from a file."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedp3.core.errors import DataError
from fedp3.core.registry import pick
from fedp3.data.partition import Ints

Entries = Iterator[tuple[str, Any, Any]]  # (place in the file, client, index)


def read_partition(path: Path, samples: int) -> tuple[Ints, ...]:
    """Read the samples of each client from a file; samples may be omitted.

    Args:
        path: JSON {"0": [index, ...], ...} or CSV with lines `client,index`.
        samples: the number of samples in the data set.
    """
    entries = pick(FORMATS, path.suffix.lower(), "type of partition file")
    owner: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for place, client_text, index_text in entries(_read(path, samples), path):
        client, index = _as_index(client_text), _as_index(index_text)
        if client is None:
            raise DataError(
                f"{path}, {place}: the client is {client_text!r:.40}, want an integer from 0"
            )
        if index is None or index >= samples:
            raise DataError(
                f"{path}, {place}: the index is {index_text!r:.40}, want 0..{samples - 1}"
            )
        if index in owner:
            raise DataError(
                f"{path}, {place}: sample {index} already belongs to client {owner[index]}"
            )
        owner[index] = client
        parts.setdefault(client, []).append(index)
    gap = next((i for i in range(len(parts)) if i not in parts), None)
    if gap is not None or not parts:
        raise DataError(
            f"{path}: client {gap or 0} has no samples; "
            "number the clients 0, 1, 2, ... without a gap"
        )
    return tuple(np.sort(np.array(parts[i], np.int64)) for i in range(len(parts)))


def _read(path: Path, samples: int) -> str:
    limit = 64 * samples + 2**20  # no sample can be named twice, so a valid file is shorter
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"partition file {path} cannot be read: {error}") from None
    if len(text) > limit:
        raise DataError(
            f"partition file {path} is longer than {limit:,} bytes, "
            f"too long for {samples:,} samples"
        )
    return text


def _json_entries(text: str, path: Path) -> Entries:
    try:
        # As tuples of pairs: a dict would drop a client that is named twice.
        clients = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise DataError(f"partition file {path} is not JSON: {error}") from None
    is_object = isinstance(clients, tuple)
    if not is_object or not all(isinstance(indices, list) for _, indices in clients):
        raise DataError(f'partition file {path}: want {{"0": [index, ...], "1": [...], ...}}')
    for key, times in Counter(key for key, _ in clients).items():
        if times > 1:
            raise DataError(f"{path}, key {key!r:.40}: this client is named {times} times")
    for key, indices in clients:
        if not indices:
            raise DataError(f"{path}, key {key!r:.40}: this client has no samples; omit it")
        for j, index in enumerate(indices):
            yield f"key {key!r:.40}, entry {j}", key, index


def _csv_entries(text: str, path: Path) -> Entries:
    for number, line in enumerate(text.splitlines(), 1):
        fields = [field.strip() for field in line.split(",")]
        is_header = number == 1 and fields == ["client", "index"]
        if is_header or fields == [""]:
            continue
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: got {line!r:.40}, want client,index")
        yield f"line {number}", fields[0], fields[1]


def _as_index(value: Any) -> int | None:
    """The value as an integer from 0; None if it is anything else."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 19 else None
    return value if type(value) is int and value >= 0 else None


FORMATS: Mapping[str, Callable[[str, Path], Entries]] = {
    ".json": _json_entries,
    ".csv": _csv_entries,
}
