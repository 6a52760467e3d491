"""The run folder: what a run was, what happened, and where it can go on.

    config.toml    the complete config, as run          events.jsonl   one line a round, synced to disk
    run.json       plan, labels, versions               checkpoint/    the last two states, each with its sha256
    result.json    the end of a finished run            report.html
    initial.safetensors    W_0, where a net was given and not built from the config
Everything is written to a new file, synced, then moved into place.  Nothing here is unpickled.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedp3.aggregate import Memory
from fedp3.errors import InputError, RunError
from fedp3.server import RoundRecord, ServerState
from fedp3.types import ClientState, Params

KEPT = 2  # checkpoints kept: the newest may be the one a crash broke


def model_sha256(W: Params) -> str:
    """The model's identity: sha256 over tensors by name of (name, dtype, shape, little-endian bytes)."""
    h = hashlib.sha256()
    for n in sorted(W):
        w = W[n].detach().cpu().contiguous()
        h.update(f"{n}\0{str(w.dtype).removeprefix('torch.')}\0{list(w.shape)}\0".encode())
        h.update(w.numpy().astype(w.numpy().dtype.newbyteorder("<"), copy=False).tobytes())
    return h.hexdigest()


# --------------------------------------------------------------------------- files


def write_atomic(path: Path, data: bytes, *, last: bool = True) -> None:
    """All of it or nothing: a crash or a full disk leaves the old file.

    With `last` its name, too, is on disk in the end; without, some later write to the same folder sees to that.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        if last:
            _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise RunError(f"cannot write {len(data)} bytes to {path}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def create(
    folder: Path, config_toml: str, description: Mapping[str, Any], files: Mapping[str, bytes] | None = None
) -> None:
    """Begin a run folder; an existing run is never overwritten.  The config comes last: with it the run has begun."""
    if (folder / "config.toml").exists():
        raise InputError(f"{folder} holds a run already; go on with it by: fedp3 resume {folder}")
    try:
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
    for name, data in (files or {}).items():
        write_atomic(folder / name, data)
    write_json(folder / "run.json", description)
    write_atomic(folder / "config.toml", config_toml.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, atomically."""
    write_atomic(path, (json.dumps(_plain(value), indent=1) + "\n").encode())


def _line(value: Mapping[str, Any]) -> bytes:
    """One line of JSON; only what holds NaN or infinity needs a second look."""
    try:
        return (json.dumps(value, allow_nan=False) + "\n").encode()
    except ValueError:
        return (json.dumps(_plain(value)) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of ours."""
    try:
        return _object(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} was damaged or is not ours: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError("it does not hold a JSON object")
    return value


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity, and only text as keys."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


# --------------------------------------------------------------------------- events


def as_event(record: RoundRecord) -> dict[str, Any]:
    """A round as plain data; `asdict` would copy every list of clients."""
    own = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for name, v in own.items()}


def append_event(folder: Path, record: RoundRecord) -> None:
    """One line for one round, on disk before this returns."""
    path = folder / "events.jsonl"
    line = _line(as_event(record) | {"round": record.t + 1})
    try:
        with path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"cannot write {len(line)} bytes to {path}: {error.strerror or error}") from error


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The rounds recorded so far; a last line that a crash cut short is left out."""
    path = folder / "events.jsonl"
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            break
        if not isinstance(events[-1], dict) or not {"t", "rejected", "G"} <= events[-1].keys():
            raise InputError(f"{path}: line {len(events)} is not a round of a run")
    return events


def cut_events(folder: Path, t: int) -> None:
    """Drop what was recorded after round t: those rounds will be run again."""
    kept = [e for e in read_events(folder) if e["t"] < t]
    write_atomic(folder / "events.jsonl", b"".join((json.dumps(e) + "\n").encode() for e in kept))


# --------------------------------------------------------------------------- checkpoints


OWN_SHA256 = "own_sha256"  # of the manifest's other entries


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on."""

    state: ServerState
    clients: Mapping[int, Mapping[int, ClientState]]  # client -> round -> what stays with it


def save_checkpoint(folder: Path, checkpoint: Checkpoint, digest: str) -> None:
    """Write a checkpoint, then its manifest: it counts only when both are there and agree."""
    state = checkpoint.state
    tensors: dict[str, Tensor] = {f"W/{n}": w.contiguous() for n, w in state.W.items()}
    for l, sketches in state.memory.sketches.items():
        tensors |= {f"sketch/{i}/{l}": s.contiguous() for i, s in sketches.items()}
    for i, rounds in checkpoint.clients.items():
        tensors |= {f"client/{i}/{t}/{n}": w.contiguous() for t, s in rounds.items() for n, w in s.tensors.items()}
    tensors |= {f"moment/{n}": w.contiguous() for n, w in state.memory.moments.items()}
    tensors |= {f"extra/{n}": w.contiguous() for n, w in state.extra.items()}
    data = save_tensors(tensors)
    manifest = {
        "t": state.t,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "config": digest,
        "model_sha256": model_sha256(state.W),
        "seen": dict(state.seen),
        "void": state.void,
        "logits": dict(state.memory.logits),
        "shares": state.memory.shares,
        "torch": torch.__version__,
    }
    place = folder / "checkpoint"
    write_atomic(place / f"{state.t:08d}.safetensors", data, last=False)  # its manifest follows into the same folder
    write_atomic(place / f"{state.t:08d}.json", _signed(_line(manifest)))
    for old in _numbers(place)[:-KEPT]:
        for suffix in ("json", "safetensors"):
            (place / f"{old:08d}.{suffix}").unlink(missing_ok=True)


def _signed(line: bytes) -> bytes:
    """A JSON object with the hash of its line as one more entry."""
    return line.removesuffix(b"}\n") + f', "{OWN_SHA256}": "{hashlib.sha256(line).hexdigest()}"}}\n'.encode()


def _numbers(place: Path) -> list[int]:
    return sorted(int(p.stem) for p in place.glob("*.json") if p.stem.isdigit())


def load_checkpoint(folder: Path, digest: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones."""
    place = folder / "checkpoint"
    broken: list[str] = []
    for t in reversed(_numbers(place)):
        try:
            return _read(place, t, digest), broken
        except (OSError, ValueError, KeyError, TypeError, RunError) as error:
            broken.append(f"checkpoint of round {t} cannot be used ({error}); trying the one before")
    return None, broken


def _read(place: Path, t: int, digest: str) -> Checkpoint:
    manifest = _object(place / f"{t:08d}.json")
    own = manifest.pop(OWN_SHA256, "")
    if hashlib.sha256(_line(manifest)).hexdigest() != own:
        raise RunError("its manifest was changed after it was written")
    if manifest["config"] != digest:
        raise InputError(f"{place} belongs to another config (digest {manifest['config'][:12]}, this is {digest[:12]})")
    data = (place / f"{t:08d}.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise RunError(f"its sha256 differs from the manifest's; {len(data)} of {manifest['bytes']} bytes are there")
    plain: dict[str, dict[str, Tensor]] = {"W": {}, "moment": {}, "extra": {}}
    sketches: dict[str, dict[int, Tensor]] = {}
    clients: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name, w in load_tensors(data).items():
        kind, _, rest = name.partition("/")
        if kind in plain:
            plain[kind][rest] = w
        elif kind == "sketch":
            i, _, l = rest.partition("/")
            sketches.setdefault(l, {})[int(i)] = w
        else:
            i, when, n = rest.split("/", 2)
            clients.setdefault(int(i), {}).setdefault(int(when), {})[n] = w
    shares = {l: {int(i): float(a) for i, a in of.items()} for l, of in manifest["shares"].items()}
    logits = {int(i): float(s) for i, s in manifest["logits"].items()}
    memory, W = Memory(logits, shares, sketches, plain["moment"]), plain["W"]
    seen = {int(i): int(r) for i, r in manifest["seen"].items()}
    state = ServerState(int(manifest["t"]), W, memory, seen, int(manifest["void"]), plain["extra"])
    if model_sha256(W) != manifest["model_sha256"]:
        raise RunError("its weights do not have the recorded model hash")
    return Checkpoint(state, {i: {r: ClientState(r, ts) for r, ts in rounds.items()} for i, rounds in clients.items()})
