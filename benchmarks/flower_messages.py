"""The time that a node takes for one message, with fedp3 and with a stock ClientApp of Flower.

Both train the same network on the same samples for the same number of steps, and return all of it.
Both load the data and build the network for every message.  Flower starts a process for each
message, so the first row is what a node sees: the CPU time of such a process from its start to its
answer.  The second row is the work in it alone, once everything is imported.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ratio import compare, shown

STEPS, BATCH, SAMPLES, LR = 10, 48, 480, 0.1


class Net(nn.Sequential):
    """An MLP."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )


def load_data() -> tuple[DataLoader[tuple[torch.Tensor, ...]], TensorDataset]:
    """Random samples, to train on and to test on."""
    x, y = torch.randn(SAMPLES, 784), torch.arange(SAMPLES) % 10
    train = TensorDataset(x, y)
    return DataLoader(train, batch_size=BATCH, shuffle=True), TensorDataset(x[:20], y[:20])


def stock_app() -> Any:
    """An app as Flower's own examples write it."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = Net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loader, _ = load_data()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": SAMPLES})
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def fedp3_app() -> Any:
    """The same training with fedp3."""
    from flwr.clientapp import ClientApp

    from fedp3.flower import fedp3_client

    return fedp3_client(ClientApp(), Net, load_data)


@dataclass
class Loopback:
    """A grid of one node in this process, which keeps every message."""

    app: Any
    context: Any
    sent: list[Any] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)

    def get_node_ids(self) -> list[int]:
        """The only node."""
        return [100]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Answer at once."""
        names = []
        for message in messages:
            self.sent.append(message)
            name = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.replies[name] = self.app(message, self.context)
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        """The answers."""
        return [self.replies.pop(name) for name in names if name in self.replies]


@contextmanager
def messages() -> Iterator[tuple[Any, Any, Any]]:
    """A message to our app and one to the stock app, and the node's context."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict

    from fedp3.flower import FedP3

    _pretend_to_be_a_task()
    arrays = ArrayRecord(Net().state_dict())
    with tempfile.TemporaryDirectory() as folder:
        node = {"partition-id": 0, "num-partitions": 1, "folder": str(Path(folder) / "node")}
        context = Context(7, 100, node, RecordDict(), {})
        grid: Any = Loopback(fedp3_app(), context)
        local = {"epochs": 1, "batch": BATCH, "lr": LR, "clip_norm": 0.0}
        strategy = FedP3(Net(), method="fedavg", local=local, run={"rounds": 1, "final_p": False})
        strategy.start(grid, arrays)
        (ours,) = (m for m in grid.sent if m.metadata.message_type == "train.fedp3")
        stock = Message(RecordDict({"arrays": arrays}), 100, "train")
        stock.metadata.__dict__["_message_id"] = "m0"
        yield ours, stock, context


def _pretend_to_be_a_task() -> None:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3


def work(pairs: int) -> str:
    """CPU time of a task at a node, against the stock app, in a process that goes on."""
    with messages() as (task, plain, context):
        ours, stock = fedp3_app(), stock_app()
        ratio = compare(
            lambda: _trained(ours(task, context)), lambda: _trained(stock(plain, context)), pairs
        )
    return f"{shown(ratio)} of a stock ClientApp with the same training"


def process(pairs: int) -> str:
    """CPU time of a process that is started for one message, against one with the stock app."""
    from flwr.common.serde import context_to_proto, message_to_proto

    # As on a node, whose packages were compiled when they were installed.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def answer(app: str, paths: Sequence[Path]) -> None:
        command = [sys.executable, "-m", "benchmarks.flower_messages", app, *map(str, paths)]
        subprocess.run(command, check=True, env=environment)

    with messages() as (task, plain, context), tempfile.TemporaryDirectory() as folder:
        about = Path(folder) / "context"
        about.write_bytes(context_to_proto(context).SerializeToString())
        paths = {}
        for app, message in (("fedp3_app", task), ("stock_app", plain)):
            paths[app] = Path(folder) / app
            paths[app].write_bytes(message_to_proto(message).SerializeToString())
        ratio = compare(
            lambda: answer("fedp3_app", (paths["fedp3_app"], about)),
            lambda: answer("stock_app", (paths["stock_app"], about)),
            pairs,
            _children_seconds,
        )
    return f"{shown(ratio)} of a process with a stock ClientApp"


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answer_one(app: str, message: Path, about: Path) -> None:
    """What a process does that is started for one message."""
    from flwr.common.serde import context_from_proto, message_from_proto
    from flwr.proto.message_pb2 import Context as ContextProto
    from flwr.proto.message_pb2 import Message as MessageProto

    _pretend_to_be_a_task()
    torch.set_num_threads(1)
    task = message_from_proto(MessageProto.FromString(message.read_bytes()))
    context = context_from_proto(ContextProto.FromString(about.read_bytes()))
    _trained(APPS[app]()(task, context))


def _trained(reply: Any) -> None:
    if not reply.has_content() or not reply.content.array_records:
        raise RuntimeError(f"the node refused to train: {reply}")


APPS: Mapping[str, Callable[[], Any]] = {"fedp3_app": fedp3_app, "stock_app": stock_app}
ROWS: Mapping[str, Callable[[int], str]] = {
    "F1 the process that Flower starts for a message": process,
    "F2 the work in it": work,
}

if __name__ == "__main__":
    answer_one(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
