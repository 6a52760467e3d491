"""The server's side: an engine over Flower's Grid.

One node is one client.  Nodes have random numbers, and they come and go.  Before every exchange,
the server therefore queries nodes that it has not seen yet.  A reply is matched to its task by the
message that it answers, not by its sender: for a dead node, the SuperLink replies in its own name.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedp3.client.context import RunSpec
from fedp3.core.errors import CodecError
from fedp3.core.types import ClientState, Failure, Kind, Params, RejectionCode, Reply, Task
from fedp3.engines.base import Engine, States, too_late
from fedp3.engines.flower.records import (
    ABOUT,
    INITIAL,
    SETTINGS,
    STATE,
    Identity,
    about_record,
    clean,
    failure_in,
    frame_of,
    identity_of,
    lost_copy,
    put_frame,
    settings_record,
    state_bytes,
    state_of,
)
from fedp3.messages.codec import EXTRA_LIMIT, decode_update, encode_task
from fedp3.messages.copies import as_copies, split_copy, with_copy
from fedp3.node.context import Request
from fedp3.node.permits import Permit
from fedp3.privacy.settings import Mechanism

log = logging.getLogger("flwr").log  # what `flwr run --stream` shows
QUERY_SECONDS = 60.0  # how long a new node may take to answer a query: it starts a process for it
TYPES: Mapping[Kind, str] = {
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "probe": MessageType.EVALUATE,
}


def _a_second() -> None:
    time.sleep(1.0)


class Asking(Protocol):
    """What a query needs: a `Wire`, or an `Introduction` before there is one."""

    @property
    def digest(self) -> str: ...
    @property
    def frozen(self) -> str: ...
    @property
    def rest(self) -> Callable[[], None]: ...
    @property
    def settings(self) -> str: ...
    @property
    def action(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """How nodes are asked who they are, before the server knows the complete config.

    Args:
        settings: see `Wire`.
        action: see `Wire`.
        rest: see `Wire`.
        digest: of the config; empty accepts every node.
        frozen: see `Wire`; not compared without a digest.
    """

    settings: str
    action: str
    rest: Callable[[], None]
    digest: str = ""
    frozen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Settings for exchanging messages with the nodes of a run.

    Args:
        spec: what server and nodes both know.
        digest: of the config; a node with another one gets no tasks.
        settings: the settings of the run as JSON, for nodes that have no config of their own.
        action: which functions of a ClientApp answer; empty means its default ones.
        frozen: of the frozen part of the network, empty if there is none; likewise.
        initial: W_0, for nodes whose own network does not start from it; None if it does.
        run: names the run on the nodes' disks.
        mechanism: what the privacy settings resolve to, the same for all nodes; None without LDP.
        permit: the permission of a run owner, for nodes whose policy needs one.
        deadline: seconds that an exchange may take; 0 means no limit.
        rest: called between two looks for replies.
        room: bytes that a method's own tensors may take in a reply.
    """

    spec: RunSpec
    digest: str
    run: str
    mechanism: Mechanism | None = None
    permit: Permit | None = None
    deadline: float = 0.0
    rest: Callable[[], None] = _a_second
    room: int = EXTRA_LIMIT
    settings: str = ""
    action: str = ""
    frozen: str = ""
    initial: Params | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """Which node is which client."""

    met: dict[int, Identity] = field(default_factory=dict)  # by node, in order of arrival
    refused: dict[int, str] = field(default_factory=dict)  # node -> why it gets no tasks
    queries: dict[str, int] = field(default_factory=dict)  # message without a reply yet -> node

    @property
    def nodes(self) -> dict[int, int]:
        """Client -> node; of two nodes that claim the same client, the first one that is online."""
        return {identity.client: n for n, identity in reversed(self.met.items())}

    def refresh(self, grid: Grid, wire: Asking) -> None:
        """Forget nodes that left, and query new ones.

        A node that does not answer in time may answer later.
        """
        online = set(grid.get_node_ids())
        for n in self.met.keys() - online:
            log(WARNING, "client %d: its node left", self.met.pop(n).client)
        new = online - self.met.keys() - self.refused.keys() - set(self.queries.values())
        for n in sorted(new):
            query = Message(_with_settings(RecordDict(), wire), n, _type(MessageType.QUERY, wire))
            self.queries[_push(grid, query)] = n
        end = time.monotonic() + (QUERY_SECONDS if new else 0)
        while online & set(self.queries.values()):
            for reply in grid.pull_messages(list(self.queries)):
                n = self.queries.pop(reply.metadata.reply_to_message_id)
                self._meet(n, reply, wire)
            if end < time.monotonic():
                return
            wire.rest()

    def gather(self, grid: Grid, wire: Asking, clients: Iterable[int], seconds: float) -> set[int]:
        """Wait until these clients are online; returns those that are missing when time is up."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(grid, wire)
            missing = set(clients) - self.nodes.keys()
            if not missing or end < time.monotonic():
                return missing
            wire.rest()

    def _meet(self, n: int, reply: Message, wire: Asking) -> None:
        """Read a node's answer to a query."""
        if reply.has_error():  # its process failed or it left; a node online is queried again
            log(WARNING, "node %d did not answer a query: %s", n, clean(reply.error.reason))
            return
        try:
            identity = _identity(reply, wire)
        except CodecError as error:
            self.refused[n] = str(error)
            log(WARNING, "node %d gets no tasks: %s", n, error)
            return
        client, examples, capacity = identity.client, identity.examples, identity.capacity
        log(INFO, "client %d is online: %d examples, capacity %g", client, examples, capacity)
        if client in self.nodes:
            log(WARNING, "two nodes are client %d; the second waits until the first leaves", client)
        self.met[n] = identity


def _identity(reply: Message, wire: Asking) -> Identity:
    reason = failure_in(reply.content)
    if reason is not None:
        raise CodecError(reason)
    identity = identity_of(reply.content)
    if not wire.digest:
        return identity
    if identity.digest != wire.digest:
        raise CodecError("it was set up with another config")
    if identity.frozen != wire.frozen:
        raise CodecError(
            "the frozen part of its network has other values; give it the same pretrained model"
        )
    return identity


def over(grid: Grid, wire: Wire, roster: Roster, states: States | None = None) -> Engine:
    """An engine over the nodes of a grid.

    Args:
        grid: Flower's grid.
        wire: how messages are exchanged.
        roster: which node is which client; it is kept up to date.
        states: for simulation, the clients' states, which are then sent with their tasks.
    """
    overdue: dict[str, int] = {}  # messages whose reply would come too late -> client
    stored = None if states is None else _Stored(states, States())

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        roster.refresh(grid, wire)
        _drop_overdue(grid, overdue)
        nodes = roster.nodes
        messages: dict[int, Message] = {}
        for task in tasks:
            client = task.plan.client
            if client in nodes:
                messages[client] = _message(task, nodes[client], wire, stored)
            else:
                yield Failure(
                    client=client,
                    t=task.t,
                    reason="no node is this client",
                    code=RejectionCode.LOST,
                )
        tasks_by_client = {task.plan.client: task for task in tasks}
        for client, reply in _exchange(grid, messages, wire.deadline, wire.rest):
            task = tasks_by_client[client]
            if reply is None:
                overdue[messages[client].metadata.message_id] = client
                yield too_late(task, wire.deadline)
            else:
                yield _read(reply, task, wire, stored)

    return Engine(
        execute=execute,
        states=states if states is not None else States(),
        close=lambda: None,
        remote_state=states is None,
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """In a simulation: what clients store, which is sent with their tasks.

    Copies of published weights are apart from states, because they are in no checkpoint: after a
    resume, the first task of a client brings its weights anew.
    """

    states: States
    copies: States

    def start(self, task: Task, spec: RunSpec) -> tuple[Task, ClientState | None]:
        """A task, and what the client starts it from."""
        state, copy = self.states.start(task), self.copies.start(task)
        if task.download is not None and task.state_from >= 0 and copy is None:
            task = as_copies(task, spec.layers, spec.pruning.unfed_columns, spec.download)
        if copy is not None:
            state = with_copy(state, task.state_from, copy.tensors)
        return task, state

    def keep(self, client: int, state: ClientState) -> None:
        """Store what a client ended with."""
        own, copy = split_copy(state)
        self.states.keep(client, own)
        self.copies.keep(client, copy)


def _message(task: Task, n: int, wire: Wire, stored: _Stored | None) -> Message:
    spec = wire.spec
    state = None
    if stored is not None:
        task, state = stored.start(task, spec)
    frame = encode_task(task, spec.layers, spec.pruning, spec.download)
    content = put_frame(RecordDict(), frame)
    request = Request(run=wire.run, mechanism=wire.mechanism, permit=wire.permit)
    content[ABOUT] = about_record(request)
    _with_settings(content, wire)
    unknown = _unknown_start(task, wire)
    if unknown:
        put_frame(content, state_bytes(ClientState(task.t, unknown)), INITIAL)
    if state is not None:
        put_frame(content, state_bytes(state), STATE)
    return Message(content, n, _type(TYPES[task.kind], wire))


def _unknown_start(task: Task, wire: Wire) -> Params:
    """W_0 of what a client starts from in its first task, and is not sent otherwise."""
    if wire.initial is None or task.state_from >= 0:
        return {}
    if any(p.personal for p in wire.spec.hooks.passes_of(task.kind)):
        return wire.initial
    personal = [l for l, p in task.plan.layers.items() if p.send == "none"]
    return {n: wire.initial[n] for l in personal for n in wire.spec.layers.layers[l]}


def _with_settings(content: RecordDict, wire: Asking) -> RecordDict:
    if wire.settings:
        content[SETTINGS] = settings_record(wire.settings)
    return content


def _type(kind: str, wire: Asking) -> str:
    """The type of a message: by it, a ClientApp chooses the function that answers."""
    return f"{kind}.{wire.action}" if wire.action else kind


def _exchange(
    grid: Grid, messages: Mapping[int, Message], seconds: float, rest: Callable[[], None]
) -> Iterator[tuple[int, Message | None]]:
    """Replies as they arrive; None for each that did not arrive in time."""
    end = time.monotonic() + seconds
    waiting = {_push(grid, message): key for key, message in messages.items()}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            key = waiting.pop(reply.metadata.reply_to_message_id, None)
            if key is not None:
                yield key, reply
        if waiting and seconds > 0 and end < time.monotonic():
            yield from ((key, None) for key in waiting.values())
            return
        if waiting:
            rest()


def _push(grid: Grid, message: Message) -> str:
    """Send one message; all models of a round may be more than one request can carry."""
    (message_id,) = grid.push_messages([message])
    return str(message_id)


def _drop_overdue(grid: Grid, overdue: dict[str, int]) -> None:
    """Take late replies off the SuperLink, and use none of them."""
    if not overdue:
        return
    for reply in grid.pull_messages(list(overdue)):
        client = overdue.pop(reply.metadata.reply_to_message_id, None)
        log(INFO, "client %s replied after its round had ended; the reply is not used", client)


# --------------------------------------------------------------------------- replies


def _failure(reply: Message) -> tuple[RejectionCode, str] | None:
    """Why a node sent no update: the reason that it gives, or Flower's."""
    if reply.has_error():
        text = f"Flower reports (code {reply.error.code}): {clean(reply.error.reason)}"
        return RejectionCode.LOST, text
    reason = failure_in(reply.content)
    if reason is None:
        return None
    return RejectionCode.COPY if lost_copy(reply.content) else RejectionCode.FAILED, reason


def _read(reply: Message, task: Task, wire: Wire, stored: _Stored | None) -> Reply:
    """The update in a reply, or why there is none; the gate judges the update's content."""
    client, spec = task.plan.client, wire.spec
    failure = _failure(reply)
    if failure is not None:
        code, reason = failure
        return Failure(client=client, t=task.t, reason=reason, code=code)
    try:
        content = reply.content
        update = decode_update(
            frame_of(content),
            task,
            spec.layers,
            spec.pruning.unfed_columns,
            spec.compression,
            wire.room,
        )
        if update.client != client:
            raise CodecError(f"claims to be client {update.client}")
        if stored is not None and STATE in content:
            stored.keep(client, state_of(frame_of(content, STATE)))
    except CodecError as error:
        return Failure(client=client, t=task.t, reason=str(error), code=RejectionCode.UNREADABLE)
    return update
