"""A Grid without Flower's processes: nodes run here, and tests may spoil their replies."""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

# (message sent, reply) -> what arrives; None: nothing yet
Spoil = Callable[[Message, Message], Message | None]


@contextmanager
def in_a_run():
    """Messages can be made only inside a run."""
    before = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
    yield
    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


@dataclass
class FakeGrid:
    """Answers at once; node 100 + k has the k-th node-config."""

    app: ClientApp
    configs: list[dict[str, Any]]
    spoil: Spoil = lambda sent, reply: reply
    away: set[int] = field(default_factory=set)
    seen: list[Message] = field(default_factory=list)  # every message sent, queries too
    waiting: dict[str, Message | None] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)

    def get_node_ids(self) -> list[int]:
        return [100 + k for k in range(len(self.configs)) if k not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.seen.append(message)
            message.metadata.__dict__["_message_id"] = f"m{len(self.seen)}"
            self.waiting[message.metadata.message_id] = self.spoil(message, self._answer(message))
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        arrived = [i for i in ids if self.waiting.get(i) is not None]
        return [self.waiting.pop(i) for i in reversed(arrived)]  # never in the order of sending

    def _answer(self, message: Message) -> Message:
        n = message.metadata.dst_node_id
        if n not in self.contexts:
            self.contexts[n] = Context(7, n, self.configs[n - 100], RecordDict(), {})
        try:
            return self.app(message, self.contexts[n])
        except Exception as error:
            return Message(Error(2, repr(error)), reply_to=message)


def with_content(content: RecordDict) -> Spoil:
    """Every answer to a task replaced by this."""

    def spoil(sent: Message, reply: Message) -> Message:
        if sent.metadata.message_type == "query":
            return reply
        return Message(content, reply_to=sent)

    return spoil
