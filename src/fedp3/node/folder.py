"""Where a node stores everything, and whose folder it is.

FOLDER/node.json         which client this folder belongs to, and which files it must have
FOLDER/policy.toml       what the owner allows
FOLDER/split.key         the secret of the node's own split
FOLDER/ledger.jsonl      charges over all runs
FOLDER/trained           marks of records that trained under LDP, in any run
FOLDER/refusals.log      why messages were refused
FOLDER/refused.task      the last task that was refused, for `fedp3 node check`
FOLDER/prepared/         samples of configs, see `prepared`
FOLDER/runs/<run>/       states of rounds, see `states`
"""

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError
from fedp3.core.files import (
    locked,
    read_json,
    state_home,
    write_atomic,
    write_json,
    write_secret,
)
from fedp3.devices.fleet_file import read_to_extend
from fedp3.devices.settings import DeviceRow, row_of
from fedp3.node.policy import FILE as POLICY
from fedp3.node.policy import Policy, load_policy

NodeConfig = Mapping[str, object]  # the keys of `flower-supernode --node-config`
MOVED = ("epsilon", "delta", "scores")  # node-config keys of 0.1.0.dev that the policy replaced
LOCK = ".lock"
LOG_LINES = 200  # of the log of refusals that are kept
KEPT_TASK = 100_000_000  # bytes of the largest refused task that is stored


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node was started with.

    Args:
        client: which client it is.
        folder: where it stores everything.
        policy: what its owner allows.
        capacity: the share of a layer that it can hold.
    """

    client: int
    folder: Path
    policy: Policy
    capacity: float


def node_settings(node: NodeConfig) -> NodeSettings:
    """Read the settings of a node; its folder is claimed for its client."""
    moved = [key for key in MOVED if key in node]
    if moved:
        raise InputError(
            f"--node-config {moved[0]}=... is now part of the node's policy file; write one with: "
            f"fedp3 node init --folder {folder_of(node)}"
        )
    client, folder = client_of(node), folder_of(node)
    path = Path(str(node.get("policy") or folder / POLICY))
    if "policy" in node and not path.exists():
        raise InputError(f"--node-config policy={path}: there is no such file")
    claim(folder, client)
    return NodeSettings(
        client=client, folder=folder, policy=_policy(folder, path), capacity=capacity_of(node)
    )


def _policy(folder: Path, path: Path) -> Policy:
    """The policy of a node: a node that had one does not go on without it."""
    if not path.exists():
        if memory(folder).get("policy"):
            raise InputError(
                f"the policy {path} is gone, and this node had one; restore it, name it with "
                "--node-config 'policy=\"...\"', or write a new one with: fedp3 node init"
            )
        return Policy()
    if not memory(folder).get("policy"):
        with locked(folder, LOCK, wait=True):
            remember(folder, policy=True)
    return load_policy(path)


def client_of(node: NodeConfig) -> int:
    """Which client this node is."""
    client = node.get("partition-id")
    if type(client) is not int or client < 0:
        raise InputError(
            "this node does not know which client it is; "
            "start it with --node-config 'partition-id=0'"
        )
    return client


def capacity_of(node: NodeConfig) -> float:
    """The share of a layer that this node can hold."""
    share = node.get("capacity", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"--node-config capacity={share!r} is not a share in (0, 1]")
    return float(share)


def device_of_node(node: NodeConfig) -> DeviceRow | None:
    """The device that this node's owner describes, as a line of a fleet file; None without one."""
    named = node.get("device")
    if not named:
        return None
    client, lines = client_of(node), read_to_extend(Path(str(named)))
    device = lines.get(client) or (next(iter(lines.values())) if len(lines) == 1 else None)
    if device is None:
        raise InputError(f"--node-config device={named}: the file has no line for client {client}")
    return row_of(device)


def folder_of(node: NodeConfig) -> Path:
    """The folder in which this node stores everything; by default one for each client."""
    folder = node.get("folder")
    return Path(str(folder)) if folder else default_folder(client_of(node))


def default_folder(client: int) -> Path:
    """The folder of a node that was not given one."""
    return state_home() / "fedp3" / "nodes" / f"client-{client}"


def claim(folder: Path, client: int) -> None:
    """Make this the folder of this client; refuse the folder of another one.

    Ledger and marks belong to the records of one device.  Two nodes that shared them would spend
    each other's budget, and a device that came back under another number would begin a new one.
    """
    if not memory(folder):
        with contextlib.suppress(OSError):  # `locked` says what is wrong
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # personal layers are stored here
        with locked(folder, LOCK, wait=True):
            if not memory(folder):
                remember(folder, client=client)
    owner = memory(folder).get("client")
    if owner != client:
        raise InputError(
            f"{folder} belongs to client {owner}, and this node is client {client}; "
            "give every node a folder of its own with --node-config 'folder=\"...\"'"
        )


def memory(folder: Path) -> dict[str, Any]:
    """A node's record of its own files, so that a lost file is not taken for a new one."""
    path = folder / "node.json"
    return read_json(path) if path.exists() else {}


def remember(folder: Path, **facts: object) -> None:
    """Add to what a node remembers; the caller holds the lock of the folder."""
    known = memory(folder)
    if any(known.get(name) != value for name, value in facts.items()):
        write_json(folder / "node.json", known | facts)


def secret_key(folder: Path) -> bytes:
    """The random secret of this node's split, made at the first use.

    Another key would be another split, in which records that were scored train.
    """
    path = folder / "split.key"
    known = memory(folder).get("split_key")
    if known is None:
        with locked(folder, LOCK, wait=True):
            if not path.exists():
                write_secret(path)
            known = hashlib.sha256(path.read_bytes()).hexdigest()
            remember(folder, split_key=known)
    key = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(key).hexdigest() != known:
        raise InputError(
            f"{path} is gone or was replaced, and with another key the node would split its "
            "records differently; restore it, or give the node a new folder and new records"
        )
    return key


# --------------------------------------------------------------------------- what can be looked at


def log_refusal(folder: Path, code: str, text: str) -> None:
    """Write down why a message was refused; the oldest lines are dropped."""
    path = folder / "refusals.log"
    printable = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    line = f"{datetime.now(UTC).isoformat(timespec='seconds')} {code}: {printable}"
    with contextlib.suppress(Exception), locked(folder, ".refusals", wait=True):
        lines = path.read_text().splitlines() if path.exists() else []
        write_atomic(path, "\n".join([*lines[1 - LOG_LINES :], line, ""]).encode())


def keep_refused_task(folder: Path, frame: bytes) -> None:
    """Store a task that was refused, so that the owner can look at it."""
    if len(frame) > KEPT_TASK:
        return
    with contextlib.suppress(Exception):  # a full disk must not turn a refusal into something else
        write_atomic(folder / "refused.task", frame)


def stored_runs(folder: Path) -> set[str]:
    """The runs whose states this node stores."""
    return {path.name for path in (folder / "runs").glob("*")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Something that a node can compute or be sent again."""

    path: Path
    kind: str  # "prepared" or "states"
    bytes: int


def caches(folder: Path) -> list[Cache]:
    """What can be deleted without touching the ledger, the marks, the keys or the policy."""
    found = [(p, "prepared") for p in sorted((folder / "prepared").glob("*.safetensors"))]
    found += [(p, "states") for p in sorted((folder / "runs").glob("*")) if p.is_dir()]
    return [Cache(path=p, kind=kind, bytes=_size(p)) for p, kind in found]


def clear(cache: Cache) -> None:
    """Delete a cache."""
    if cache.path.is_dir():
        shutil.rmtree(cache.path)
    else:
        cache.path.unlink()


def _size(path: Path) -> int:
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sum(p.stat().st_size for p in files)
