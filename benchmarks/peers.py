"""Other libraries on the same work, if they are installed: pfl-research and Flower's simulation.

`pip install pfl` installs the first.  Network, samples, batch size and number of local steps are
the same; evaluation is left out.
"""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import bare, fleets
from fedp3.engines.in_process import sequential
from fedp3.experiment.experiment import Experiment
from fedp3.server.rounds import run

ROUNDS = 5  # of one measurement


def ours(e: Experiment) -> float:
    """CPU seconds of ROUNDS rounds."""
    engine = sequential(e.client, e.shards)
    began = time.process_time()
    for _ in zip(run(e.server, e.start, engine.execute), range(ROUNDS), strict=False):
        pass
    return time.process_time() - began


class Scored(nn.Module):
    """The network with its loss, as pfl expects it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def pfl(e: Experiment) -> float:
    """The same rounds by pfl's federated averaging."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    work = bare.work_of(e)
    clients, local = fleets.participants(e), work.local
    turn = iter(clients * (ROUNDS + 2))
    data = FederatedDataset(
        lambda i: Dataset(name=[work.x[work.train[i]], work.y[work.train[i]]]), lambda: next(turn)
    )
    net = Scored(work.net)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    train = NNTrainHyperParams(
        local.batch, None, local.lr, local.clip_norm, local_num_steps=local.steps
    )
    rounds = NNAlgorithmParams(ROUNDS + 1, 10**9, len(clients), 0)
    ends: list[float] = []

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
            ends.append(time.process_time())  # the first one also evaluates; it is not measured
            return False, Metrics()

    backend = SimulatedBackend(data, data)
    FederatedAveraging().run(
        rounds, backend, model, train, callbacks=[Clock()], send_metrics_to_platform=False
    )
    return ends[-1] - ends[0]


def flower() -> str:
    """Flower's simulation with its FedAvg, in a new process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.flower_peer"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    theirs, ours_seconds = map(float, printed.split())
    return f"{theirs / ours_seconds:.1f} times our wall time per round, two processes each"


def against(
    peer: Callable[[Experiment], float], make: Callable[..., Experiment], pairs: int
) -> str:
    """The median of peer / ours, over fewer pairs, since peers are slow."""
    e = make(*fleets.DENSE)
    ours(e)
    ratios = sorted(peer(e) / ours(e) for _ in range(max(3, pairs // 5)))
    median = ratios[len(ratios) // 2]
    return f"{median:.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}] times our CPU time per round"


ROWS: Mapping[str, Callable[[int], str]] = {
    "W3 pfl": lambda pairs: against(pfl, fleets.tiny, pairs),
    "W1 pfl": lambda pairs: against(pfl, fleets.mlp, pairs),
    "W3 flwr": lambda pairs: flower(),
}


def rows() -> Mapping[str, Callable[[int], str]]:
    """The rows of the libraries that are installed."""
    return {
        name: row
        for name, row in ROWS.items()
        if importlib.util.find_spec(name.split()[1]) is not None
    }
