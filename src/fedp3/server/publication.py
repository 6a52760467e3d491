"""The server's side of published weights: what clients are sent, and what they change.

Without `[download] compress` a client is sent the server's weights W, and nothing here does
anything.  With it, clients are sent the published weights R (`fedp3.messages.versions`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedp3.core.memo import once_per_plan
from fedp3.core.types import AcceptedUpdate, Params, RejectionCode, Task
from fedp3.costs.traffic import traffic
from fedp3.messages.compression import coding_of, compressor_of
from fedp3.messages.versions import Published, download_of, publish, with_holders
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.gate import GateResult


def sent_weights(state: ServerState) -> Params:
    """The weights that clients are sent: W, or what is published of them."""
    return state.W if state.published is None else state.published.R


def with_downloads(context: ServerContext, state: ServerState, tasks: list[Task]) -> list[Task]:
    """The tasks with how their weights are sent to clients that hold earlier ones."""
    published, spec = state.published, context.spec
    if published is None:
        return tasks
    layers, pruning = spec.layers, spec.pruning
    mask_bytes = once_per_plan(lambda plan: traffic(plan, layers, pruning).masks)

    def with_download(task: Task) -> Task:
        plan, unfed = task.plan, pruning.unfed_columns
        size = mask_bytes(plan)
        download = download_of(published, plan, task.masks, layers, unfed, spec.download, size)
        return replace(task, download=download)

    return [with_download(task) for task in tasks]


def against_weights(
    updates: Iterable[AcceptedUpdate], state: ServerState, context: ServerContext
) -> Iterator[AcceptedUpdate]:
    """The updates as if clients had started from W: W + (W_i - R).

    Coded changes were added to W already.
    """
    if state.published is None:
        yield from updates
        return
    R, layers = state.published.R, context.layers
    for accepted in updates:
        coding = coding_of(accepted.plan, context.spec.compression)
        tensors = dict(accepted.update.tensors)
        for l in accepted.plan.uploaded:
            if accepted.plan.layers[l].send not in ("dense", "pruned"):
                continue
            for n in layers.layers[l]:
                if compressor_of(n, layers, coding) is None:
                    tensors[n] = (tensors[n] - R[n]).add_(state.W[n])
        yield replace(accepted, update=replace(accepted.update, tensors=tensors))


def next_published(
    context: ServerContext, state: ServerState, W: Params, result: GateResult
) -> Published | None:
    """What is published after a round, with who holds what.

    Args:
        context: the run.
        state: the state before the round.
        W: the server's next weights, which are the same objects where nothing changed.
        result: what became of the round's replies.
    """
    published, spec = state.published, context.spec
    if published is None:
        return None
    accepted = {u.client: (u.plan, u.masks) for u in result.accepted}
    layers, unfed = spec.layers, spec.pruning.unfed_columns
    published = with_holders(published, accepted, layers, unfed)
    changed = {
        l for l, names in layers.layers.items() if any(W[n] is not state.W[n] for n in names)
    }
    return publish(published, W, changed, layers, spec.download, spec.seed, state.t)


def without_lost_copies(
    context: ServerContext, state: ServerState, result: GateResult
) -> ServerState:
    """The state in which clients whose copy is missing or damaged hold nothing.

    Their next task brings copies.  It also needs no state of an earlier round, unless the client
    has something personal: what a code lost of its uploads may be forgotten, personal layers never.
    """
    lost = [i for i, why in result.rejected.items() if why.code is RejectionCode.COPY]
    if state.published is None or not lost:
        return state
    held = {**state.published.held, **dict.fromkeys(lost)}
    state = replace(state, published=replace(state.published, held=held))
    hooks, plan = context.spec.hooks, context.plan
    personal = hooks.exchange is not None or any(p.personal for p in hooks.passes)
    if personal or plan.head != "shared" or plan.others == "personal":
        return state
    return replace(state, seen={i: t for i, t in state.seen.items() if i not in lost})
