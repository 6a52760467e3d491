"""Checkpoints of a run: written atomically, each with its sha256."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import json_line, read_object, write_atomic
from fedp3.core.hashing import model_sha256
from fedp3.core.trees import flatten, unflatten
from fedp3.core.types import ClientState
from fedp3.devices.buffer import Flight
from fedp3.devices.round_ends import Visit
from fedp3.messages.published_file import restored, saved
from fedp3.server.context import ServerState

RETAINED = 2  # checkpoints in a folder: the newest may be the one that a crash broke
OWN_SHA256 = "own_sha256"  # of the manifest's other entries


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to be resumed."""

    state: ServerState
    clients: Mapping[int, Mapping[int, ClientState]]  # client -> round -> its state


def save_checkpoint(folder: Path, checkpoint: Checkpoint, digest: str) -> None:
    """Write a checkpoint, then its manifest: it is valid only if both exist and agree."""
    state = checkpoint.state
    aggregator, tensors = flatten(state.aggregator, "aggregator")
    tensors |= {f"W/{n}": w.contiguous() for n, w in state.W.items()}
    tensors |= {f"extra/{n}": w.contiguous() for n, w in state.extra.items()}
    tensors |= {f"average/{n}": w.contiguous() for n, w in (state.average or {}).items()}
    for version, W in state.versions.items():
        # Layers that nobody trained in between are the same tensors, which cannot be stored twice.
        tensors |= {f"version/{version}/{n}": w.clone().contiguous() for n, w in W.items()}
    for i, rounds in checkpoint.clients.items():
        for t, client in rounds.items():
            tensors |= {f"client/{i}/{t}/{n}": w.contiguous() for n, w in client.tensors.items()}
    published, of_published = flatten(saved(state.published), "published")
    tensors |= of_published
    data = save_tensors(tensors)
    manifest = {
        "t": state.t,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "config": digest,
        "model_sha256": model_sha256(state.W),
        "seen": dict(state.seen),
        "void": state.void,
        "clock": state.clock,
        "flying": [[flight.version, asdict(flight.visit)] for flight in state.flying],
        "aggregator": aggregator,
        "published": published,
        "torch": torch.__version__,
    }
    place = folder / "checkpoint"
    # the folder is synced when the manifest is written
    write_atomic(place / f"{state.t:08d}.safetensors", data, sync_folder=False)
    write_atomic(place / f"{state.t:08d}.json", _signed(json_line(manifest)))
    for old in _rounds(place)[:-RETAINED]:
        for suffix in ("json", "safetensors"):
            (place / f"{old:08d}.{suffix}").unlink(missing_ok=True)


def _signed(line: bytes) -> bytes:
    """A JSON object with the hash of its line as one more entry."""
    entry = f', "{OWN_SHA256}": "{hashlib.sha256(line).hexdigest()}"}}\n'
    return line.removesuffix(b"}\n") + entry.encode()


def _rounds(place: Path) -> list[int]:
    return sorted(int(path.stem) for path in place.glob("*.json") if path.stem.isdigit())


def load_checkpoint(folder: Path, digest: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is intact, and what was wrong with newer ones."""
    place = folder / "checkpoint"
    broken: list[str] = []
    for t in reversed(_rounds(place)):
        try:
            return _read(place, t, digest), broken
        except (OSError, ValueError, KeyError, TypeError, RunError) as error:
            broken.append(
                f"checkpoint of round {t} cannot be used ({error}); trying the one before"
            )
    return None, broken


def _read(place: Path, t: int, digest: str) -> Checkpoint:
    manifest = read_object(place / f"{t:08d}.json")
    recorded = manifest.pop(OWN_SHA256, "")
    if hashlib.sha256(json_line(manifest)).hexdigest() != recorded:
        raise RunError("its manifest was changed after it was written")
    if manifest["config"] != digest:
        raise InputError(
            f"{place} belongs to another config (its digest is {manifest['config'][:12]}, not "
            f"{digest[:12]})"
        )
    data = (place / f"{t:08d}.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise RunError(
            "its sha256 differs from the manifest's; it has "
            f"{len(data)} of {manifest['bytes']} bytes"
        )
    tensors = load_tensors(data)
    W = _under("W/", tensors)
    if model_sha256(W) != manifest["model_sha256"]:
        raise RunError("its weights do not have the recorded model hash")
    state = ServerState(
        t=int(manifest["t"]),
        W=W,
        aggregator=unflatten(manifest["aggregator"], tensors),
        seen={int(i): int(r) for i, r in manifest["seen"].items()},
        void=int(manifest["void"]),
        extra=_under("extra/", tensors),
        clock=int(manifest["clock"]),
        flying=tuple(Flight(v, Visit(**visit)) for v, visit in manifest["flying"]),
        versions=_versions(_under("version/", tensors)),
        published=restored(unflatten(manifest["published"], tensors)),
        average=_under("average/", tensors) or None,
    )
    return Checkpoint(state, _client_states(_under("client/", tensors)))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): w for n, w in tensors.items() if n.startswith(prefix)}


def _versions(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """From names "round/tensor" to the model of each round."""
    models: dict[int, dict[str, Tensor]] = {}
    for name, w in tensors.items():
        version, n = name.split("/", 1)
        models.setdefault(int(version), {})[n] = w
    return models


def _client_states(tensors: Mapping[str, Tensor]) -> dict[int, dict[int, ClientState]]:
    """From names "client/round/tensor" to the state of each client and round."""
    named: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name, w in tensors.items():
        i, t, n = name.split("/", 2)
        named.setdefault(int(i), {}).setdefault(int(t), {})[n] = w
    return {
        i: {t: ClientState(t, stored) for t, stored in rounds.items()}
        for i, rounds in named.items()
    }
