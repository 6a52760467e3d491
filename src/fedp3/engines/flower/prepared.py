"""What a deployed node prepares once per config and data set, and reads for later messages.

Flower starts a new process on the node for every message.  Partitioning the data set for all
clients, checking all plans and, under LDP, searching the noise multiplier take much longer than
reading their outcome for one client:

    FOLDER/prepared/client-<i>-<config>-<inputs>.safetensors

It holds the indices of the client's samples and, as metadata, the resolved mechanism.  The name has
the beginning of the config's digest and of a hash of everything else that the outcome depends on.
An entry that is damaged, incomplete or of other inputs is ignored, and written again.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedp3 import __version__
from fedp3.config import Config
from fedp3.config.plugins import Plugin
from fedp3.core.errors import RunError
from fedp3.core.files import write_atomic
from fedp3.data import Dataset
from fedp3.data.shards import Shard
from fedp3.privacy import accountant
from fedp3.privacy.settings import AUTO, Mechanism, PrivacySettings

FORMAT = "1"
log = logging.getLogger("flwr")


@dataclass(frozen=True, slots=True)
class Preparation:
    """A client's samples, and the mechanism it trains under."""

    shard: Shard
    mechanism: Mechanism | None  # None without LDP


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationKey:
    """Identifies a preparation.

    Args:
        client: whose it is.
        config: the digest of the config.
        inputs: a hash of the data set, the plugins and the versions that it was computed with.
    """

    client: int
    config: str
    inputs: str


def preparation_key(
    config: Config, client: int, data: Dataset, plugins: Sequence[Plugin]
) -> PreparationKey:
    """The key of a client's preparation.

    A partition depends on the labels alone, and the mechanism on the shape of samples besides, so
    that the pixels need not be hashed.
    """
    inputs = {
        "shape": list(data.x.shape),
        "dtype": str(data.x.dtype),
        "classes": data.classes,
        "labels": _sha256(data.y.contiguous().numpy()),
        "partition": _file_sha256(config.partition.file),
        "plugins": sorted(plugin.sha256 for plugin in plugins),
        "accountant": accountant.best() if config.privacy.enabled else "",
        "versions": [FORMAT, __version__, torch.__version__, np.__version__],
    }
    text = json.dumps(inputs, sort_keys=True)
    return PreparationKey(client=client, config=config.digest(), inputs=_sha256(text.encode()))


def prepare_once(
    folder: Path,
    key: PreparationKey,
    prepare: Callable[[], Preparation],
    *,
    samples: int,
    privacy: PrivacySettings,
) -> Preparation:
    """The preparation of this key from the disk, or made now and written there.

    Args:
        folder: the node's folder.
        key: what is wanted.
        prepare: makes it, where the disk has no usable entry.
        samples: the size of the data set.
        privacy: the config's privacy settings, which a stored mechanism must agree with.
    """
    name = f"client-{key.client}-{key.config[:16]}-{key.inputs[:16]}.safetensors"
    path = folder / "prepared" / name
    stored = _read(path, key, samples, privacy)
    if stored is not None:
        return stored
    made = prepare()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _to_bytes(key, made))
    except (OSError, RunError) as error:
        log.warning("the next message will prepare client %d again: %s", key.client, error)
    return made


def _to_bytes(key: PreparationKey, made: Preparation) -> bytes:
    tensors = {"train": made.shard.train.contiguous(), "test": made.shard.test.contiguous()}
    about = asdict(key) | {"mechanism": None if made.mechanism is None else asdict(made.mechanism)}
    text = json.dumps(about, sort_keys=True)
    return save_tensors(tensors, {"about": text, "sha256": _checksum(text, tensors)})


def _read(
    path: Path, key: PreparationKey, samples: int, privacy: PrivacySettings
) -> Preparation | None:
    """A stored preparation; None if there is none that can be used."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata["about"])
        if metadata["sha256"] != _checksum(metadata["about"], tensors):
            raise ValueError("it does not match its checksum")
        if {field: about[field] for field in asdict(key)} != asdict(key):
            raise ValueError("it is of another config, client or data set")
        shard = Shard(_indices(tensors["train"], samples), _indices(tensors["test"], samples))
        return Preparation(shard, _mechanism(about["mechanism"], privacy))
    except Exception as error:  # safetensors has its own error for every kind of damage
        log.warning("%s is not used and will be written again: %s", path, error)
        return None


def _indices(tensor: Tensor, samples: int) -> Tensor:
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise ValueError(f"indices are {tensor.dtype} of {tensor.dim()} dimensions")
    if len(tensor) and not (int(tensor.min()) >= 0 and int(tensor.max()) < samples):
        raise ValueError(f"indices are outside of 0 to {samples - 1}")
    return tensor


def _mechanism(stored: Any, privacy: PrivacySettings) -> Mechanism | None:
    """A stored mechanism, in agreement with the config's settings."""
    if not privacy.enabled:
        if stored is not None:
            raise ValueError("it has a mechanism, and the run has no LDP")
        return None
    if not isinstance(stored, dict) or stored.keys() != {f.name for f in fields(Mechanism)}:
        raise ValueError("it has no mechanism for a run under LDP")
    mechanism = Mechanism(**stored)
    noise = mechanism.noise_multiplier
    if type(noise) is not float or not math.isfinite(noise) or type(mechanism.ghost) is not bool:
        raise ValueError("its mechanism has values of a wrong type")
    for name in ("clip", "sample_rate", "randomness"):
        if getattr(mechanism, name) != getattr(privacy, name):
            raise ValueError(f"its mechanism has another {name}")
    if privacy.noise_multiplier != AUTO and noise != privacy.noise_multiplier:
        raise ValueError("its mechanism has another noise multiplier")
    if noise < 0 or (noise == 0 and math.isfinite(privacy.epsilon)):
        raise ValueError("its mechanism adds no noise")
    return mechanism


def _file_sha256(path: str) -> str:
    """The hash of a partition file; one that cannot be read is refused when it is used."""
    try:
        return _sha256(Path(path).read_bytes()) if path else ""
    except OSError:
        return "unreadable"


def _checksum(about: str, tensors: dict[str, Tensor]) -> str:
    parts = [about.encode()]
    for name, tensor in sorted(tensors.items()):
        parts += [name.encode(), tensor.numpy().tobytes()]
    return _sha256(*parts)


def _sha256(*parts: Any) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return h.hexdigest()
