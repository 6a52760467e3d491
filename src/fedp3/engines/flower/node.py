"""What a node stores on its own disk, and what it refuses.

    FOLDER/<run>/client-<i>/state-<t>.safetensors   its state after round t: the one that its next
                                                    task starts from, and the newest
    FOLDER/prepared/                                its samples and mechanism, see `prepared`
    FOLDER/trained                                  marks of records that trained under LDP,
                                                    in any run

A run is named by a random number that is stored in the server's run folder.  A resumed run finds
its states by it, and another run of the same config does not.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedp3.client.context import ClientContext
from fedp3.core.errors import InputError, RunError
from fedp3.core.files import write_atomic
from fedp3.core.types import ClientState, Task
from fedp3.data import Dataset
from fedp3.data.shards import Shard
from fedp3.engines.flower.records import state_bytes, state_of
from fedp3.privacy.ledger import Policy, permit
from fedp3.privacy.mechanism import mechanism_of

NodeConfig = Mapping[str, object]  # the keys of `flower-supernode --node-config`
MARK = 16  # bytes of a record's hash; two records share one by chance in 2^64


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


def folder_of(node: NodeConfig) -> Path:
    """Where this node stores everything."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(str(node.get("folder") or state / "fedp3" / "nodes"))


def home_of(node: NodeConfig, run: str) -> Path:
    """Where this node stores its state in a run."""
    return folder_of(node) / run / f"client-{client_of(node)}"


def admit(task: Task, context: ClientContext, node: NodeConfig, home: Path) -> None:
    """Refuse a task before anything is done for it.

    This is called on the node, for every task.

    Args:
        task: what the server requests.
        context: what the node trains with.
        node: the node's settings.
        home: where the node stores its state in this run; its privacy ledger is two levels above.
    """
    capacity = capacity_of(node)
    largest = max((p.keep for p in task.plan.layers.values() if p.send == "pruned"), default=0.0)
    if largest > capacity:
        raise RunError(
            f"the task holds {largest:g} of a layer, and this node's capacity is {capacity:g}"
        )
    mechanism = mechanism_of(context)
    if mechanism is not None and mechanism.randomness != "os":
        raise RunError(
            "noise from a seed that the server knows protects nobody: "
            "set [privacy] randomness = 'os'"
        )
    if task.kind != "evaluate" and (mechanism is not None or "epsilon" in node):
        steps = 0 if mechanism is None else mechanism.steps_per_task(context.local)
        run, folder = home.parent.name, home.parent.parent  # one ledger for all runs
        reason = permit(folder, client_of(node), task.t, mechanism, steps, policy_of(node), run)
        if reason:
            raise RunError(reason)


def as_scored(task: Task, node: NodeConfig) -> Task:
    """The task, without scores on test records if the node's owner releases none.

    No epsilon counts such scores.
    """
    scores = node.get("scores", True)
    if not isinstance(scores, bool):
        raise InputError(f"--node-config scores={scores!r} is not true or false")
    return replace(task, evaluate=task.evaluate and scores)


def not_yet_trained(shard: Shard, task: Task, context: ClientContext, home: Path) -> Shard:
    """The shard without test records that trained under LDP, in this run or another.

    A score carries no noise.  A run that splits the same records differently would score records
    that trained in another run, and thereby reveal what the noise had hidden.
    """
    path = home.parent.parent / "trained"
    trained = _read_marks(path)
    if mechanism_of(context) is not None and task.kind != "evaluate":
        new = set(_marks(context.data, shard.train)) - trained
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
            trained |= new
            write_atomic(path, b"".join(sorted(trained)))  # before anything is drawn
    if not trained:
        return shard
    unseen = [mark not in trained for mark in _marks(context.data, shard.test)]
    return replace(shard, test=shard.test[torch.tensor(unseen, dtype=torch.bool)])


def _marks(data: Dataset, indices: Tensor) -> list[bytes]:
    """A hash of each of these records, whatever its index is."""
    x, y = data.x[indices].contiguous(), data.y[indices].tolist()
    return [
        hashlib.sha256(w.numpy().tobytes() + b"%d" % label).digest()[:MARK]
        for w, label in zip(x, y, strict=True)
    ]


def _read_marks(path: Path) -> set[bytes]:
    data = path.read_bytes() if path.exists() else b""
    if len(data) % MARK:
        raise RunError(
            f"{path} was damaged; without it, no record is known to be one that did not train"
        )
    return {data[j : j + MARK] for j in range(0, len(data), MARK)}


def policy_of(node: NodeConfig) -> Policy:
    """What this node may spend over all runs; by default it records all and refuses nothing."""
    epsilon, delta = node.get("epsilon", math.inf), node.get("delta", 1e-5)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"--node-config {name}={value!r} is not a number above 0")
    return Policy(float(str(epsilon)), float(str(delta)))


# --------------------------------------------------------------------------- the client's state


def load_state(home: Path, task: Task) -> ClientState | None:
    """The state that a task starts from; before training, all others are deleted."""
    path = _state_path(home, task.state_from)
    if task.kind == "train":
        for other in home.glob("state-*.safetensors"):
            if other != path:
                other.unlink()
    return state_of(path.read_bytes()) if path.exists() else None


def keep_state(home: Path, state: ClientState | None) -> None:
    """Store a state, before the update is sent: once accepted, the server refers to this round."""
    if state is not None and state.tensors:
        home.mkdir(parents=True, exist_ok=True)
        write_atomic(_state_path(home, state.t), state_bytes(state))


def _state_path(home: Path, t: int) -> Path:
    return home / f"state-{t:08d}.safetensors"
