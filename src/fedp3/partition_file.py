"""A user's own split, read from a file."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedp3.errors import DataError
from fedp3.lookup import pick
from fedp3.partition import Ints


def read_partition(path: Path, samples: int) -> tuple[Ints, ...]:
    """A user's own split: JSON {"0": [index, ...], ...} or CSV lines `client,index`; samples may be left out."""
    entries = pick(FORMATS, path.suffix.lower(), "type of partition file")
    limit = 64 * samples + 2**20  # no sample can be named twice, so a valid file is shorter
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"partition file {path} cannot be read: {error}") from None
    if len(text) > limit:
        raise DataError(f"partition file {path} is longer than {limit:,} bytes, too long for {samples:,} samples")
    owner: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for where, who, what in entries(text, path):
        client, index = _whole(who), _whole(what)
        if client is None:
            raise DataError(f"{path}, {where}: the client is {who!r:.40}, want a whole number from 0")
        if index is None or index >= samples:
            raise DataError(f"{path}, {where}: the index is {what!r:.40}, want 0..{samples - 1}")
        if index in owner:
            raise DataError(f"{path}, {where}: sample {index} already belongs to client {owner[index]}")
        owner[index] = client
        parts.setdefault(client, []).append(index)
    gap = next((i for i in range(len(parts)) if i not in parts), None)
    if gap is not None or not parts:
        raise DataError(f"{path}: client {gap or 0} has no samples; number the clients 0, 1, 2, ... without a gap")
    return tuple(np.sort(np.array(parts[i], np.int64)) for i in range(len(parts)))


Entries = Iterator[tuple[str, Any, Any]]  # where it stands, client, index


def _json_entries(text: str, path: Path) -> Entries:
    try:
        clients = json.loads(text, object_pairs_hook=tuple)  # a dict would drop a client that is named twice
    except (ValueError, RecursionError) as error:
        raise DataError(f"partition file {path} is not JSON: {error}") from None
    if not isinstance(clients, tuple) or not all(isinstance(indices, list) for _, indices in clients):
        raise DataError(f'partition file {path}: want {{"0": [index, ...], "1": [...], ...}}')
    for key, times in Counter(key for key, _ in clients).items():
        if times > 1:
            raise DataError(f"{path}, key {key!r:.40}: this client is named {times} times")
    for key, indices in clients:
        if not indices:
            raise DataError(f"{path}, key {key!r:.40}: this client has no samples; leave it out")
        for j, index in enumerate(indices):
            yield f"key {key!r:.40}, entry {j}", key, index


def _csv_entries(text: str, path: Path) -> Entries:
    for number, line in enumerate(text.splitlines(), 1):
        fields = [field.strip() for field in line.split(",")]
        if fields == [""] or (number == 1 and fields == ["client", "index"]):
            continue
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: got {line!r:.40}, want client,index")
        yield f"line {number}", fields[0], fields[1]


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 19 else None
    return value if type(value) is int and value >= 0 else None


FORMATS: Mapping[str, Callable[[str, Path], Entries]] = {".json": _json_entries, ".csv": _csv_entries}
