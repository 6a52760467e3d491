"""Composition over runs in process: what all runs together cost each single record.

The ledger of a run counts that run alone.  Seeds, sweeps, tuning and repeated runs use the same
records again, and their epsilons add up.  Runs that name the same file in `privacy.ledger` write
their charges to it, and report the largest epsilon that any of their records has spent in all runs.

    {"group", "run", "client", "records"}                 which records a client trains on
    {"group", "t", "steps", "noise_multiplier", "sample_rate", "seeded"}     one charge

Records are identified by their raw values under a secret key, which is in a file beside this one:
the ledger alone does not reveal whether somebody's record is in it.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError
from fedp3.core.files import locked, write_secret
from fedp3.data import Dataset
from fedp3.data.record_ids import ID_BYTES, record_ids
from fedp3.data.shards import Shard
from fedp3.privacy import accountant
from fedp3.privacy.ledger import Charge


@dataclass(frozen=True, slots=True)
class RecordLedger:
    """A run's part in a ledger over runs.

    Args:
        path: the file.
        groups: for each client, the name of its group of records in the file.
        seeded: repeating a round repeats the identical release.
    """

    path: Path
    groups: Mapping[int, str]
    seeded: bool

    def charge(self, charges: Iterable[Charge]) -> None:
        """Write charges of this run, on disk before this returns."""
        lines = [
            {
                "group": self.groups[c.client],
                "t": c.t,
                "steps": c.steps,
                "noise_multiplier": c.noise_multiplier,
                "sample_rate": c.sample_rate,
                "seeded": self.seeded,
            }
            for c in charges
        ]
        _append(self.path, lines)

    def epsilon_max(self, delta: float) -> float:
        """The largest epsilon that a record of this run has spent, in all runs of the file."""
        return largest_epsilon(self.path, delta, set(self.groups.values()))


def join(
    path: Path, run: str, data: Dataset, shards: Mapping[int, Shard], *, seeded: bool
) -> RecordLedger:
    """Take part in a ledger over runs; the records of each client are written to it once."""
    key = _key(path)
    known = {line["group"] for line in _read(path) if "records" in line}
    groups, new = {}, []
    for client, shard in sorted(shards.items()):
        records = b"".join(record_ids(data, shard.train, key))
        name = hashlib.sha256(f"{run} {client} ".encode() + records).hexdigest()[:32]
        groups[client] = name
        if name not in known:
            new.append({"group": name, "run": run, "client": client, "records": records.hex()})
    _append(path, new)
    return RecordLedger(path, groups, seeded)


def largest_epsilon(path: Path, delta: float, groups: set[str] | None = None) -> float:
    """The largest epsilon of any record in a ledger over runs.

    Args:
        path: the file.
        delta: the delta at which epsilon holds.
        groups: look only at records of these groups; None looks at all.
    """
    members: dict[str, list[bytes]] = {}
    spent: dict[str, Counter[tuple[float, float]]] = {}
    repeated: set[tuple[str, int]] = set()
    for line in _read(path):
        if "records" in line:
            ids = bytes.fromhex(line["records"])
            members[line["group"]] = [ids[j : j + ID_BYTES] for j in range(0, len(ids), ID_BYTES)]
            continue
        if line["seeded"]:
            if (line["group"], line["t"]) in repeated:
                continue
            repeated.add((line["group"], line["t"]))
        counter = spent.setdefault(line["group"], Counter())
        counter[line["noise_multiplier"], line["sample_rate"]] += line["steps"]
    groups_of: dict[bytes, list[str]] = {}
    for group, ids_of_group in members.items():
        for record in ids_of_group:
            groups_of.setdefault(record, []).append(group)
    wanted = set(members) if groups is None else groups
    # Records that were in the same groups have spent the same.
    together = {tuple(names) for names in groups_of.values() if wanted & set(names)}
    return max((_composed(names, spent, delta) for names in together), default=0.0)


def _composed(
    names: Sequence[str], spent: Mapping[str, Counter[tuple[float, float]]], delta: float
) -> float:
    total: Counter[tuple[float, float]] = Counter()
    for name in names:
        total.update(spent.get(name, Counter()))
    return accountant.epsilon(total, delta)


# --------------------------------------------------------------------------- the file


def _key(path: Path) -> bytes:
    key = path.with_name(f"{path.name}.key")
    with locked(path.parent, f".{path.name}.lock", wait=True):
        if not key.exists():
            if path.exists():
                raise InputError(f"{path} cannot be used without its key, and {key} is missing")
            write_secret(key)
    return key.read_bytes()


def _append(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    if not lines:
        return
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with locked(path.parent, f".{path.name}.lock", wait=True), path.open("a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise InputError(f"{path} is not a ledger over runs: {error}") from None
