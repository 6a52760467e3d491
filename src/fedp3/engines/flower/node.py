"""What a node keeps on its own disk, and what it refuses.

    FOLDER/<run>/client-<i>/state-<t>.safetensors     its own layers after round t: the one its next task starts from,
                                                      and the newest
    FOLDER/trained                                    marks of the records that trained under LDP, in any run
A run is named by a random number that lives in the server's run folder, so a resumed run finds its states again and
another run of the same config does not.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedp3.data import Dataset
from fedp3.engines.flower.records import state_bytes, state_of
from fedp3.errors import InputError, RunError
from fedp3.privacy.ledger import Policy, permit
from fedp3.privacy.mechanism import local_steps
from fedp3.recipe import Recipe, Shard
from fedp3.record import write_atomic
from fedp3.types import ClientState, Task

NodeConfig = Mapping[str, object]  # what `flower-supernode --node-config` said


def client_of(node: NodeConfig) -> int:
    """Which client this node is."""
    client = node.get("partition-id")
    if type(client) is not int or client < 0:
        raise InputError("this node does not know which client it is; start it with --node-config 'partition-id=0'")
    return client


def capacity_of(node: NodeConfig) -> float:
    """The share of a layer this node can hold."""
    share = node.get("capacity", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"--node-config capacity={share!r} is not a share in (0, 1]")
    return float(share)


def home_of(node: NodeConfig, run: str) -> Path:
    """Where this node keeps what it keeps of a run."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = Path(str(node.get("folder") or state / "fedp3" / "nodes"))
    return folder / run / f"client-{client_of(node)}"


def admit(task: Task, recipe: Recipe, node: NodeConfig, home: Path) -> None:
    """Refuse a task before anything is done for it; called on the node, for every task, with its own folder."""
    capacity = capacity_of(node)
    most = max((p.keep for p in task.plan.layers.values() if p.send == "pruned"), default=0.0)
    if most > capacity:
        raise RunError(f"asked to hold {most:g} of a layer, its capacity is {capacity:g}")
    if recipe.private is not None and recipe.private.randomness != "os":
        raise RunError("noise from a seed the server knows protects nobody: set [privacy] randomness = 'os'")
    if task.kind != "evaluate" and (recipe.private is not None or "epsilon" in node):
        steps = local_steps(recipe.local, recipe.private) if recipe.private is not None else 0
        run, kept = home.parent.name, home.parent.parent  # one ledger for all runs
        reason = permit(kept, client_of(node), task.t, recipe.private, steps, policy_of(node), run)
        if reason:
            raise RunError(reason)


def as_scored(task: Task, node: NodeConfig) -> Task:
    """The task, without scores on test records if the node's owner gives none away (no epsilon counts them)."""
    scores = node.get("scores", True)
    if not isinstance(scores, bool):
        raise InputError(f"--node-config scores={scores!r} is not true or false")
    return replace(task, evaluate=task.evaluate and scores)


MARK = 16  # bytes of a record's hash; two records share one by chance in 2^64


def not_yet_trained(shard: Shard, task: Task, recipe: Recipe, home: Path) -> Shard:
    """The shard without test records that trained under LDP, in this run or another.

    No noise covers a score, so that whoever cut the same records otherwise could read off it what noise had hidden.
    """
    path = home.parent.parent / "trained"
    trained = _marks_in(path)
    if recipe.private is not None and task.kind != "evaluate":
        new = set(_marks(recipe.data, shard.train)) - trained
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
            trained |= new
            write_atomic(path, b"".join(sorted(trained)))  # before anything is drawn
    if not trained:
        return shard
    fresh = [mark not in trained for mark in _marks(recipe.data, shard.test)]
    return replace(shard, test=shard.test[torch.tensor(fresh, dtype=torch.bool)])


def _marks(data: Dataset, at: Tensor) -> list[bytes]:
    """A hash of each of these records, the same wherever in the data it lies."""
    x, y = data.x[at].contiguous(), data.y[at].tolist()
    return [hashlib.sha256(w.numpy().tobytes() + b"%d" % label).digest()[:MARK] for w, label in zip(x, y, strict=True)]


def _marks_in(path: Path) -> set[bytes]:
    data = path.read_bytes() if path.exists() else b""
    if len(data) % MARK:
        raise RunError(f"{path} was damaged; without it no score is known to be of records that did not train")
    return {data[j : j + MARK] for j in range(0, len(data), MARK)}


def policy_of(node: NodeConfig) -> Policy:
    """What this node may spend over all runs; without a word from its owner all is written down and nothing refused."""
    most, delta = node.get("epsilon", math.inf), node.get("delta", 1e-5)
    for name, value in (("epsilon", most), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"--node-config {name}={value!r} is not a number above 0")
    return Policy(float(str(most)), float(str(delta)))


# --------------------------------------------------------------------------- its state


def load_state(home: Path, task: Task) -> ClientState | None:
    """The state a task starts from; before training, all others are forgotten."""
    if task.kind == "train":
        for path in home.glob("state-*.safetensors"):
            if path != _place(home, task.state_from):
                path.unlink()
    place = _place(home, task.state_from)
    return state_of(place.read_bytes()) if place.exists() else None


def keep_state(home: Path, state: ClientState | None) -> None:
    """On disk before the update leaves: the server will name this round once it has accepted it."""
    if state is not None and state.tensors:
        home.mkdir(parents=True, exist_ok=True)
        write_atomic(_place(home, state.t), state_bytes(state))


def _place(home: Path, t: int) -> Path:
    return home / f"state-{t:08d}.safetensors"
