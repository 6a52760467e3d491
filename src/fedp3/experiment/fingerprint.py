"""Fingerprint of a run's data, split and network, checked on resume."""

import secrets
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import read_json, state_home, write_secret
from fedp3.core.hashing import model_sha256, sha256_of
from fedp3.data.dataset import Dataset
from fedp3.data.inputs import tensors_of
from fedp3.experiment.assemble import published_at_start
from fedp3.experiment.experiment import Experiment
from fedp3.models.frozen import frozen_sha256
from fedp3.models.hf import files_of

KEYED = ("machine", "data", "clients", "test")
INITIAL = "initial.safetensors"  # W_0 of a network that was passed in, not built from the config


def fingerprint(experiment: Experiment) -> dict[str, str]:
    """Hashes of what must be the same for a run to be resumed.

    W_0 is not among them: it is stored in the run folder.
    """
    data, layers = experiment.client.data, experiment.server.layers
    split = []
    for _, shard in sorted(experiment.shards.items()):
        split += [torch.tensor([len(shard.train)]).numpy(), shard.train.numpy(), shard.test.numpy()]
    about = {
        "net": sha256_of(repr(sorted(layers.shapes.items())).encode()),
        "layers": sha256_of(
            repr([(l, list(names)) for l, names in layers.layers.items()]).encode()
        ),
        "scaling": sha256_of(
            repr((data.classes, data.mean, data.std, data.crop, data.flip)).encode()
        ),
    }
    if layers.frozen:
        about["frozen part"] = frozen_sha256(experiment.client.net)
    files = files_of(experiment.client.net)
    if files:
        about["model files"] = sha256_of(repr(sorted(files.items())).encode())
    if data.class_names:
        about["class names"] = sha256_of(repr(data.class_names).encode())
    if not any(len(s.train) or len(s.test) for s in experiment.shards.values()):
        return about  # the samples are on the nodes; the server has one example
    key = _machine_key()
    keyed = {
        "machine": sha256_of(key, b"which key"),
        "data": _hash_of(data, key),
        "clients": sha256_of(key, *split),
    }
    if experiment.server.central is not None:
        keyed["test"] = _hash_of(experiment.server.central.data, key)
    return about | keyed


def _hash_of(data: Dataset, key: bytes) -> str:
    """The hash of all samples and targets; of rows that are read later, the first sample's."""
    values = [w.contiguous().numpy() for w in (*tensors_of(data.x), data.y)]
    return sha256_of(key, *values)


def _machine_key() -> bytes:
    """A secret of this user on this machine, with which hashes of data are computed.

    Run folders are shared.  With a plain hash, whoever knows all records but one could test what
    the last one is.
    """
    path = state_home() / "fedp3" / "fingerprint.key"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_secret(path)
        return path.read_bytes()  # another process may have written its own at the same time
    except (OSError, RunError):
        return secrets.token_bytes(32)  # then data cannot be compared later


def check_fingerprint(folder: Path, experiment: Experiment) -> None:
    """Refuse to resume a run over other data, another split or a network with other layers."""
    then = read_json(folder / "run.json").get("inputs", {})
    now = fingerprint(experiment)
    if then.get("machine") != now.get("machine"):
        # Hashes of data mean nothing on another machine; those of the network still do.
        now = {what: value for what, value in now.items() if what not in KEYED}
    other = [what for what, value in now.items() if then.get(what, value) != value]
    if other:
        raise InputError(
            f"{folder} was begun with other {' and '.join(other)}: a run can be resumed only with "
            "what it began with; choose another folder"
        )


def with_initial(folder: Path, experiment: Experiment) -> Experiment:
    """The experiment with the W_0 that its run began with; the network has other values by now."""
    path = folder / INITIAL
    try:
        W = load_tensors(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}, with which this run began: {error}") from None
    if model_sha256(W) != read_json(folder / "run.json").get("initial_sha256"):
        raise InputError(f"{path} is damaged: it is not the W_0 that this run began with")
    client = replace(experiment.client, initial=W)
    published = published_at_start(experiment.config, client)
    start = replace(experiment.start, W=W, published=published)
    return replace(experiment, client=client, start=start)
