"""What a deployed node prepares once per config and data set, and reads for later messages.

Flower starts a new process on the node for every message.  Partitioning the data set for all
clients, checking all plans and, under LDP, trying out the network take much longer than reading
their outcome for one client:

    FOLDER/prepared/client-<i>-<config>-<inputs>.safetensors

It holds the indices of the client's samples and, as metadata, whether ghost clipping covers the
network.  The name has the beginning of the config's digest and of a hash of everything else that
the outcome depends on.  An entry that is damaged, incomplete or of other inputs is ignored, and
written again.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedp3 import __version__
from fedp3.config import Config
from fedp3.config.plugins import Plugin
from fedp3.core.errors import RunError
from fedp3.core.files import write_atomic
from fedp3.core.hashing import sha256_of
from fedp3.data import Dataset
from fedp3.data.inputs import tensors_of
from fedp3.data.shards import Shard

FORMAT = "3"
log = logging.getLogger("flwr")


@dataclass(frozen=True, slots=True)
class Preparation:
    """A client's samples as the config splits them, and what was found about its network.

    Args:
        shard: the samples.
        ghost: under LDP, whether ghost clipping covers the network; False without LDP.
    """

    shard: Shard
    ghost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationKey:
    """Identifies a preparation.

    Args:
        client: the number of the client.
        config: the digest of the config.
        inputs: a hash of what else the outcome depends on: labels and shape of the data set, the
            network, the partition file, plugins and library versions.
    """

    client: int
    config: str
    inputs: str


def preparation_key(
    config: Config, client: int, net: nn.Module, data: Dataset, plugins: Sequence[Plugin]
) -> PreparationKey:
    """The key of a client's preparation.

    A partition depends on labels and roles alone, and ghost clipping on the shape of samples
    besides, so that the pixels need not be hashed.
    """
    inputs = {
        "shapes": [list(w.shape) for w in tensors_of(data.x)],
        "dtypes": [str(w.dtype) for w in tensors_of(data.x)],
        "classes": data.classes,
        "targets": sha256_of(data.y.contiguous().numpy()),
        "roles": None if data.roles is None else sha256_of(data.roles.contiguous().numpy()),
        "partition": _file_sha256(config.partition.file),
        "plugins": sorted(plugin.sha256 for plugin in plugins),
        "network": f"{net} {[tuple(w.shape) for w in net.state_dict().values()]}",
        "versions": [FORMAT, __version__, torch.__version__, np.__version__],
    }
    text = json.dumps(inputs, sort_keys=True)
    return PreparationKey(client=client, config=config.digest(), inputs=sha256_of(text.encode()))


def prepare_once(
    folder: Path,
    key: PreparationKey,
    prepare: Callable[[], Preparation],
    *,
    samples: int,
) -> Preparation:
    """The preparation of this key from the disk, or made now and written there.

    Args:
        folder: the node's folder.
        key: what is wanted.
        prepare: makes it, where the disk has no usable entry.
        samples: the size of the data set.
    """
    name = f"client-{key.client}-{key.config[:16]}-{key.inputs[:16]}.safetensors"
    path = folder / "prepared" / name
    stored = _read(path, key, samples)
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
    about = asdict(key) | {"ghost": made.ghost}
    text = json.dumps(about, sort_keys=True)
    return save_tensors(tensors, {"about": text, "sha256": _checksum(text, tensors)})


def _read(path: Path, key: PreparationKey, samples: int) -> Preparation | None:
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
        if type(about["ghost"]) is not bool:
            raise ValueError("it does not say whether ghost clipping covers the network")
        return Preparation(shard, about["ghost"])
    except Exception as error:  # safetensors has its own error for every kind of damage
        log.warning("%s is not used and will be written again: %s", path, error)
        return None


def _indices(tensor: Tensor, samples: int) -> Tensor:
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise ValueError(f"indices are {tensor.dtype} of {tensor.dim()} dimensions")
    if len(tensor) and not (int(tensor.min()) >= 0 and int(tensor.max()) < samples):
        raise ValueError(f"indices are outside of 0 to {samples - 1}")
    return tensor


def _file_sha256(path: str) -> str:
    """The hash of a partition file; one that cannot be read is refused when it is used."""
    try:
        return sha256_of(Path(path).read_bytes()) if path else ""
    except OSError:
        return "unreadable"


def _checksum(about: str, tensors: dict[str, Tensor]) -> str:
    parts = [about.encode()]
    for name, tensor in sorted(tensors.items()):
        parts += [name.encode(), tensor.numpy().tobytes()]
    return sha256_of(*parts)
