"""The yardstick: the same SGD steps and a plain mean, as one would write them in PyTorch without a framework."""

import copy
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3.experiment import Experiment
from fedp3.recipe import batches
from fedp3.rng import Use, stream
from fedp3.server import sample
from fedp3.types import Local


@dataclass(frozen=True)
class Work:
    """What a bare loop needs to know."""

    net: nn.Module
    x: Tensor
    y: Tensor
    train: Mapping[int, Tensor]  # client -> its samples
    local: Local


def work_of(e: Experiment) -> Work:
    train = {i: s.train for i, s in e.shards.items()}
    net = copy.deepcopy(e.recipe.net).to(memory_format=torch.contiguous_format)  # as one gets it from PyTorch
    return Work(net, e.recipe.data.x, e.recipe.data.y, train, e.recipe.local)


def sum_of(work: Work, W: Mapping[str, Tensor], clients: Sequence[int]) -> dict[str, Tensor]:
    """Train these clients one after another from W; the sum of where they end."""
    total: dict[str, Tensor] = {}
    for i in clients:
        work.net.load_state_dict(W)
        work.net.train()
        optimiser = torch.optim.SGD(work.net.parameters(), lr=work.local.lr)
        for rows in batches(len(work.train[i]), work.local, stream(0, Use.BATCHES, 0, i)):
            at = work.train[i][rows]
            optimiser.zero_grad()
            F.cross_entropy(work.net(work.x[at]), work.y[at]).backward()
            nn.utils.clip_grad_norm_(work.net.parameters(), work.local.clip_norm)
            optimiser.step()
        for n, w in work.net.state_dict().items():
            total[n] = total[n].add_(w) if n in total else w.clone()
    return total


def one_process(e: Experiment, threads: int) -> Callable[[], None]:
    """A round in this process."""
    work, clients = work_of(e), sample(e.problem, 0)

    def bare() -> None:
        torch.set_num_threads(threads)
        total = sum_of(work, e.start.W, clients)
        _ = {n: w / len(clients) for n, w in total.items()}
        torch.set_num_threads(1)

    return bare


_mine: dict[str, Work] = {}


def _hold(work: Work) -> None:
    torch.set_num_threads(1)
    _mine["work"] = Work(copy.deepcopy(work.net), work.x, work.y, work.train, work.local)


def _sum(W: Mapping[str, Tensor], clients: Sequence[int]) -> dict[str, Tensor]:
    return sum_of(_mine["work"], W, clients)


def processes(e: Experiment, n: int = 2) -> tuple[Callable[[], None], Callable[[], None]]:
    """A round over processes of one thread each, data shared, and how to end them."""
    work, clients = work_of(e), sample(e.problem, 0)
    for w in (work.x, work.y):
        w.share_memory_()
    executor = ProcessPoolExecutor(n, multiprocessing.get_context("spawn"), _hold, (work,))

    def bare() -> None:
        parts = [executor.submit(_sum, e.start.W, clients[k::n]) for k in range(n)]
        sums = [part.result() for part in parts]
        _ = {name: sum(s[name] for s in sums) / len(clients) for name in sums[0]}

    return bare, executor.shutdown
