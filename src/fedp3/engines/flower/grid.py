"""The server's side: an engine over Flower's Grid.

One node is one client.  Nodes have random numbers and come and go, so before every exchange those not seen yet are
asked who they are.  Replies are matched to tasks by the message they answer, never by who seems to have sent them:
for a dead node the SuperLink answers in its own name.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedp3.codec import decode_update, encode_task
from fedp3.engines.flower.records import (
    ABOUT,
    STATE,
    Identity,
    clean,
    failure_in,
    frame_of,
    identity_of,
    put_frame,
    state_bytes,
    state_of,
)
from fedp3.engines.inprocess import Engine, States, too_late
from fedp3.errors import CodecError
from fedp3.gate import EXTRA_LIMIT
from fedp3.types import AS_IS, Compression, Failure, Kind, LayerMap, Pruning, Reply, Task

QUERY_SECONDS = 60.0  # how long a new node may take to say who it is; a process is started for it
TYPES: Mapping[Kind, str] = {
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "probe": MessageType.EVALUATE,
}


def _a_second() -> None:
    time.sleep(1.0)


@dataclass(frozen=True, slots=True)
class Wire:
    """What the server must know to speak with the nodes of a run."""

    layers: LayerMap
    pruning: Pruning
    digest: str  # of the config; a node set up with another one is not asked
    run: str  # names the run on the nodes' disks
    deadline: float = 0.0  # seconds an exchange may take; 0: no limit
    rest: Callable[[], None] = _a_second  # between two looks for replies
    compression: Compression = AS_IS
    room: int = EXTRA_LIMIT  # bytes of a method's own tensors in a reply


@dataclass(frozen=True, slots=True)
class Roster:
    """Who is there: which node is which client."""

    met: dict[int, Identity] = field(default_factory=dict)  # node -> what it said, in the order they came
    refused: dict[int, str] = field(default_factory=dict)  # node -> why it will not be asked
    asked: dict[str, int] = field(default_factory=dict)  # question without an answer yet -> node

    @property
    def nodes(self) -> dict[int, int]:
        """Client -> node; of two that claim the same client the first, for as long as it is there."""
        return {said.client: n for n, said in reversed(self.met.items())}

    def refresh(self, grid: Grid, wire: Wire) -> None:
        """Forget nodes that left, and ask new ones who they are; who does not say so in time may say it later."""
        live = set(grid.get_node_ids())
        for n in self.met.keys() - live:
            log(WARNING, "client %d: its node left", self.met.pop(n).client)
        new = live - self.met.keys() - self.refused.keys() - set(self.asked.values())
        self.asked.update({_push(grid, Message(RecordDict(), n, MessageType.QUERY)): n for n in sorted(new)})
        end = time.monotonic() + (QUERY_SECONDS if new else 0)
        while live & set(self.asked.values()):
            for reply in grid.pull_messages(list(self.asked)):
                self._meet(self.asked.pop(reply.metadata.reply_to_message_id), reply, wire.digest)
            if end < time.monotonic():
                return
            wire.rest()

    def gather(self, grid: Grid, wire: Wire, clients: Iterable[int], seconds: float) -> set[int]:
        """Wait until these clients are there; returns those that are not when time is up."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(grid, wire)
            missing = set(clients) - self.nodes.keys()
            if not missing or end < time.monotonic():
                return missing
            wire.rest()

    def _meet(self, n: int, reply: Message, digest: str) -> None:
        if reply.has_error():  # the node's process broke, or it left: it is asked again if it is still there
            log(WARNING, "node %d could not say who it is: %s", n, clean(reply.error.reason))
            return
        try:
            said = identity_of(_content(reply))
            if said.digest != digest:
                raise CodecError("it was set up with another config")
        except CodecError as error:
            self.refused[n] = str(error)
            log(WARNING, "node %d is not asked: %s", n, error)
            return
        log(INFO, "client %d is there: %d examples, capacity %g", said.client, said.examples, said.capacity)
        if said.client in self.nodes:
            log(WARNING, "two nodes are client %d; the second waits until the first is gone", said.client)
        self.met[n] = said


def over(grid: Grid, wire: Wire, roster: Roster, states: States | None = None) -> Engine:
    """An engine over this grid; with `states`, what clients keep travels with their tasks: for simulation."""
    overdue: dict[str, int] = {}  # messages whose answer would come too late -> client

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        roster.refresh(grid, wire)
        _drop_overdue(grid, overdue)
        nodes, asked = roster.nodes, {}
        for task in tasks:
            i = task.plan.client
            if i in nodes:
                asked[i] = _message(task, nodes[i], wire, states)
            else:
                yield Failure(i, task.t, "no node is this client")
        of = {task.plan.client: task for task in tasks}
        for i, reply in _exchange(grid, asked, wire.deadline, wire.rest):
            if reply is None:
                overdue[asked[i].metadata.message_id] = i
                yield too_late(of[i], wire.deadline)
            else:
                yield _read(reply, of[i], wire, states)

    return Engine(execute, states if states is not None else States(), lambda: None, away=states is None)


def _message(task: Task, n: int, wire: Wire, states: States | None) -> Message:
    content = put_frame(RecordDict(), encode_task(task, wire.layers, wire.pruning))
    content[ABOUT] = ConfigRecord({"run": wire.run})
    state = states.start(task) if states is not None else None
    if state is not None:
        put_frame(content, state_bytes(state), STATE)
    return Message(content, n, TYPES[task.kind])


def _exchange(
    grid: Grid, messages: Mapping[int, Message], seconds: float, rest: Callable[[], None]
) -> Iterator[tuple[int, Message | None]]:
    """Replies as they come; None for each that did not come in time."""
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
    """One at a time: a round's models together may be more than one request can carry."""
    (sent,) = grid.push_messages([message])
    return str(sent)


def _drop_overdue(grid: Grid, overdue: dict[str, int]) -> None:
    """Take late answers off the SuperLink, and use none of them."""
    if overdue:
        for reply in grid.pull_messages(list(overdue)):
            client = overdue.pop(reply.metadata.reply_to_message_id, None)
            log(INFO, "client %s answered a round that was over; its answer is not used", client)


# --------------------------------------------------------------------------- replies


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise CodecError(f"Flower says (code {reply.error.code}): {clean(reply.error.reason)}")
    said = failure_in(reply.content)
    if said is not None:
        raise CodecError(said)
    return reply.content


def _read(reply: Message, task: Task, wire: Wire, states: States | None) -> Reply:
    """The update in a reply, or why there is none; what it holds is judged by the gate."""
    i = task.plan.client
    try:
        content = _content(reply)
        stale = wire.pruning.stale
        update = decode_update(frame_of(content), task, wire.layers, stale, wire.compression, wire.room)
        if update.client != i:
            raise CodecError(f"claims to be client {update.client}")
        if states is not None and STATE in content:
            states.keep(i, state_of(frame_of(content, STATE)))
    except CodecError as error:
        return Failure(i, task.t, str(error))
    return update
