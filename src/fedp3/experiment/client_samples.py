"""Which samples each client has, as [partition] describes it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fedp3.config import Config
from fedp3.core.errors import InputError
from fedp3.data import Dataset
from fedp3.data.partition import BY_LABELS, ROLES, by_roles, partition, split
from fedp3.data.partition_file import read_partition
from fedp3.data.shards import Shard


def shards_of(config: Config, data: Dataset) -> dict[int, Shard]:
    """The train and test samples of each client."""
    return split_parts(_parts(config, data), config)


def _parts(config: Config, data: Dataset) -> Sequence[np.ndarray]:
    """Which samples each client has."""
    p, seed, y = config.partition, config.run.seed, data.y
    if p.file:
        parts = read_partition(Path(p.file), len(y))
        if len(parts) != p.clients:
            raise InputError(
                f"{p.file} has {len(parts)} clients, but [partition] clients is {p.clients}"
            )
        return parts
    if p.kind == ROLES:
        if data.roles is None:
            raise InputError(
                f"[partition] kind: data set {data.name!r} has no roles; in a text, a speaker's "
                "name stands on a line of its own and ends with a colon; use 'iid'"
            )
        return by_roles(data.roles.numpy(), p.clients)
    if not data.labelled and p.kind in BY_LABELS:
        raise InputError(
            f"[partition] kind: {p.kind!r} divides samples by their labels, and data set "
            f"{data.name!r} has none; use 'iid'" + ("" if data.roles is None else f" or {ROLES!r}")
        )
    return partition(
        p.kind,
        y.numpy() if data.labelled else np.zeros(len(y), np.int64),
        p.clients,
        seed=seed,
        classes=p.classes,
        alpha=p.alpha,
        sizes=p.sizes,
    )


def split_parts(parts: Sequence[np.ndarray], config: Config) -> dict[int, Shard]:
    """The train and test samples of each client, whose samples these are."""
    shards = {}
    for i, part in enumerate(parts):
        share = config.partition.train_share
        train, test = split(part, seed=config.run.seed, client=i, share=share)
        shards[i] = Shard(torch.from_numpy(train), torch.from_numpy(test))
    return shards


def names_of_roles(config: Config, data: Dataset, shards: Mapping[int, Shard]) -> tuple[str, ...]:
    """The names of clients that are roles of a text; empty for all others."""
    if config.partition.kind != ROLES or not data.role_names or data.roles is None:
        return ()
    first = [int(torch.cat([shard.train, shard.test])[0]) for _, shard in sorted(shards.items())]
    return tuple(data.role_names[int(data.roles[i])] for i in first)
