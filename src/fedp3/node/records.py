"""Which of a node's records train, which are scored, and which trained under LDP before.

A score carries no noise.  So a record must never train under LDP in one run and be scored in
another: the node splits its records itself, by a secret hash of each record, and marks the records
that trained under LDP.  Records are identified by their raw values, see `fedp3.data.record_ids`.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from fedp3.core.errors import RunError
from fedp3.core.files import write_atomic
from fedp3.data import Dataset
from fedp3.data.record_ids import ID_BYTES, record_ids
from fedp3.data.shards import Shard
from fedp3.privacy.ledger import Anchor

FILE = "trained"


def own_split(data: Dataset, shard: Shard, key: bytes, test_share: float) -> Shard:
    """The node's own split of its records: the same in every run, and stable when records come.

    Args:
        data: the data set.
        shard: the node's records, as a config would split them.
        key: the node's secret, without which nobody can predict which records are tested.
        test_share: the expected share of test records.
    """
    everything = torch.tensor(
        sorted({*shard.train.tolist(), *shard.test.tolist()}), dtype=torch.int64
    )  # each once: a record that trained twice would count twice
    ids = record_ids(data, everything, key)
    limit = int(test_share * (1 << 64))
    test = torch.tensor([int.from_bytes(i[:8]) < limit for i in ids], dtype=torch.bool)
    return Shard(train=everything[~test], test=everything[test])


@dataclass(frozen=True, slots=True)
class Marks:
    """The records that trained under LDP, and how far the ledger had grown when they did."""

    anchor: Anchor
    ids: frozenset[bytes]


def read_marks(folder: Path) -> Marks:
    """The marks of a node; none if nothing trained yet."""
    path = folder / FILE
    if not path.exists():
        return Marks(Anchor(), frozenset())
    header, _, ids = path.read_bytes().partition(b"\n")
    try:
        anchor = Anchor(**json.loads(header))
        valid = len(ids) % ID_BYTES == 0
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise RunError(
            f"{path} was damaged, or written by 0.1.0.dev, so it is unknown which records were "
            "already used for training; restore it, or give the node a new folder and new records"
        )
    return Marks(anchor, frozenset(ids[j : j + ID_BYTES] for j in range(0, len(ids), ID_BYTES)))


def write_marks(folder: Path, marks: Marks) -> None:
    """Store marks; the caller holds the lock of the folder."""
    header = json.dumps(asdict(marks.anchor)).encode()
    write_atomic(folder / FILE, header + b"\n" + b"".join(sorted(marks.ids)))


def without_marked(data: Dataset, shard: Shard, marked: Collection[bytes]) -> Shard:
    """The shard without test records that trained under LDP."""
    if not marked:
        return shard
    unseen = [i not in marked for i in record_ids(data, shard.test)]
    return replace(shard, test=shard.test[torch.tensor(unseen, dtype=torch.bool)])
