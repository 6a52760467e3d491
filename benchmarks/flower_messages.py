"""The time that a node takes for one message, with fedp3 and with a stock ClientApp of Flower.

Both train the same network on the same samples for the same number of steps, and return all of it.
Both load the data and build the network for every message, as in a process that Flower starts for
it.  What Flower and Python take to start that process is the same for both, and not counted, but
for what is imported: the second row compares that, each in new processes.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ratio import compare, shown

STEPS, BATCH, SAMPLES, LR = 10, 48, 480, 0.1
IMPORTS = {
    "ours": "import torch, flwr.app, flwr.clientapp, fedp3.flower",
    "stock": "import torch, flwr.app, flwr.clientapp",
}


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


def _apps() -> tuple[Any, Any]:
    """A stock app, and the same with fedp3."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedp3.flower import fedp3_client

    stock = ClientApp()

    @stock.train()
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

    return stock, fedp3_client(ClientApp(), Net, load_data)


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


def message(pairs: int) -> str:
    """CPU time of a task at a node, against the stock app."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedp3.flower import FedP3

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
    stock, ours = _apps()
    arrays = ArrayRecord(Net().state_dict())
    with tempfile.TemporaryDirectory() as folder:
        node = {"partition-id": 0, "num-partitions": 1, "folder": str(Path(folder) / "node")}
        context = Context(7, 100, node, RecordDict(), {})
        grid: Any = Loopback(ours, context)
        local = {"epochs": 1, "batch": BATCH, "lr": LR, "clip_norm": 0.0}
        strategy = FedP3(Net(), method="fedavg", local=local, run={"rounds": 1, "final_p": False})
        strategy.start(grid, arrays)
        (task,) = (m for m in grid.sent if m.metadata.message_type == "train.fedp3")
        plain = Message(RecordDict({"arrays": arrays}), 100, "train")
        ratio = compare(lambda: ours(task, context), lambda: stock(plain, context), pairs)
    return f"{shown(ratio)} of a stock ClientApp with the same training"


def imports(pairs: int) -> str:
    """Wall time until a node's app is imported, against the stock app's imports."""

    def start(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    ours, stock = (lambda: start(IMPORTS["ours"])), (lambda: start(IMPORTS["stock"]))
    ratio = compare(ours, stock, min(pairs, 5), time.perf_counter)
    return f"{shown(ratio)} of the imports of a stock ClientApp (wall time)"


ROWS: Mapping[str, Callable[[int], str]] = {
    "F1 a message at a Flower node": message,
    "F2 start of a node's process": imports,
}
