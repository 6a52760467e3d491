"""The copy of published weights that a client stores: tensors beside those of its state.

A copy is stored with the state of the round in which the client was sent it.  A client has the copy
that its next task changes, and the newest; what a copy needs on disk is bounded by two networks.
"""

from dataclasses import replace

from fedp3.core import masks as M
from fedp3.core.types import ClientState, Download, LayerMap, Params, Task, TensorDownload
from fedp3.messages.codec import Copy
from fedp3.messages.compression import DownloadSettings
from fedp3.messages.versions import (
    copy_bytes,
    copy_type,
    is_coded,
    published_values,
    sent_masks,
)

VALUES = "copy/"  # prefix of the weights that a client holds
HELD = "held/"  # prefix of masks of the coordinates that it holds, where it does not hold all


def copy_tensors(
    task: Task, layers: LayerMap, unfed_columns: str, settings: DownloadSettings
) -> Params:
    """What a client stores of the weights that a task brought, by prefixed name.

    Only weights to train with are published; other tasks, and runs without coded changes, leave
    nothing.
    """
    if task.kind != "train" or not is_coded(settings):
        return {}
    stored = {}
    for n, (_, mask) in sent_masks(task.plan, task.masks, layers, unfed_columns).items():
        stored[f"{VALUES}{n}"] = task.weights[n].to(copy_type(n, layers, settings))
        if mask is not None:
            stored[f"{HELD}{n}"] = M.as_bool(mask, layers.shapes[n])
    return stored


def copy_in(state: ClientState | None) -> Copy | None:
    """The copy that is stored with a client's state; None if there is none."""
    if state is None:
        return None
    return {
        n.removeprefix(VALUES): (w.float(), state.tensors.get(f"{HELD}{n.removeprefix(VALUES)}"))
        for n, w in state.tensors.items()
        if n.startswith(VALUES)
    }


def initial_copy(initial: Params, layers: LayerMap, settings: DownloadSettings) -> Copy:
    """What a client holds that never took part: it can make W_0 itself."""
    return {n: (w, None) for n, w in published_values(initial, layers, settings).items()}


def with_copy(state: ClientState | None, t: int, copy: Params) -> ClientState | None:
    """A client's state of round t, together with a copy."""
    if not copy:
        return state
    return ClientState(t, {**(state.tensors if state else {}), **copy})


def split_copy(state: ClientState) -> tuple[ClientState, ClientState]:
    """A state without its copy, and the copy."""
    copy = {n: w for n, w in state.tensors.items() if n.startswith((VALUES, HELD))}
    own = {n: w for n, w in state.tensors.items() if n not in copy}
    return ClientState(state.t, own), ClientState(state.t, copy)


def as_copies(task: Task, layers: LayerMap, unfed_columns: str, settings: DownloadSettings) -> Task:
    """The task with copies of all weights, for a client whose copy is not at hand."""
    needed = sent_masks(task.plan, task.masks, layers, unfed_columns)
    size = sum(
        copy_bytes(n, M.count(mask, layers.shapes[n]), layers, settings)
        for n, (_, mask) in needed.items()
    )
    return replace(
        task, download=Download(dict.fromkeys(needed, TensorDownload(copied=True)), size)
    )
