"""What stays on a node between rounds: personal layers, tensors of the method, copies of weights.

    FOLDER/runs/<run>/state-<t>.safetensors   the state after round t: the one that the next task
                                              starts from, and the newest

A run is named by a random number that is stored in the server's run folder.  A resumed run finds
its states by it.  Since the server chooses that number, a state also records the config, whether it
was made under LDP, and how far the ledger had grown: no other run can use it, and a node whose
ledger was lost does not go on.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save as save_tensors

from fedp3.core.errors import RunError
from fedp3.core.files import write_atomic
from fedp3.core.types import ClientState, Task
from fedp3.node.refusal import RefusalCode, Refused
from fedp3.privacy.ledger import Anchor, read


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKey:
    """What a state belongs to."""

    run: str
    config: str  # digest of the config
    ldp: bool


def read_state(folder: Path, key: StateKey, t: int) -> ClientState | None:
    """The state after round t; None if there is none.

    Raises:
        Refused: the state belongs to another config, or was made with or without LDP.
    """
    path = _path(folder / "runs" / key.run, t)
    return _read(folder, path, key) if path.exists() else None


def load_state(folder: Path, key: StateKey, task: Task) -> ClientState | None:
    """The state that a task starts from; before training, all others are deleted."""
    home = folder / "runs" / key.run
    path = _path(home, task.state_from)
    state = read_state(folder, key, task.state_from)
    if task.kind == "train":
        for other in home.glob("state-*.safetensors"):
            if other != path:
                other.unlink(missing_ok=True)  # another message may have deleted it
    return state


def save_state(folder: Path, key: StateKey, state: ClientState | None, anchor: Anchor) -> None:
    """Store a state, before the update is sent: once accepted, the server refers to this round."""
    if state is None or not state.tensors:
        return
    home = folder / "runs" / key.run
    home.mkdir(parents=True, exist_ok=True)
    about = {"t": state.t, "key": asdict(key), "anchor": asdict(anchor)}
    tensors = {n: w.contiguous() for n, w in state.tensors.items()}
    write_atomic(_path(home, state.t), save_tensors(tensors, {"about": json.dumps(about)}))


def _read(folder: Path, path: Path, key: StateKey) -> ClientState:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        made_for, anchor = StateKey(**about["key"]), Anchor(**about["anchor"])
        t = int(about["t"])
    except Exception as error:  # safetensors has its own error for every kind of damage
        raise Refused(RefusalCode.STATE, f"{path} is damaged: {type(error).__name__}") from None
    if made_for != key:
        raise Refused(
            RefusalCode.STATE,
            f"{path} belongs to another config, or to a run with LDP where this one has none or "
            "the other way round; a state is used only by the run that made it",
        )
    try:
        read(folder, anchor)
    except RunError as error:
        raise Refused(RefusalCode.STATE, str(error)) from None
    return ClientState(t, tensors)


def _path(home: Path, t: int) -> Path:
    return home / f"state-{t:08d}.safetensors"
