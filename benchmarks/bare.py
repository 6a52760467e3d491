"""The reference: the same SGD steps and a plain mean, as one writes them without a framework."""

import copy
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import fleets
from fedp3.client.batching import LocalSettings, batches
from fedp3.core.randomness import Stream, stream
from fedp3.experiment.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything that a bare loop needs."""

    net: nn.Module
    x: Tensor
    y: Tensor
    train: Mapping[int, Tensor]  # client -> indices of its training samples
    local: LocalSettings


def work_of(e: Experiment) -> Work:
    """The work of an experiment."""
    net = copy.deepcopy(e.client.net)
    return Work(
        net=net.to(memory_format=torch.contiguous_format),  # as PyTorch makes it
        x=e.client.data.x,
        y=e.client.data.y,
        train={i: shard.train for i, shard in e.shards.items()},
        local=e.client.local,
    )


def sum_of(work: Work, W: Mapping[str, Tensor], clients: Sequence[int]) -> dict[str, Tensor]:
    """Train these clients one after another from W; returns the sum of their final weights."""
    total: dict[str, Tensor] = {}
    for i in clients:
        work.net.load_state_dict(W)
        work.net.train()
        optimizer = torch.optim.SGD(work.net.parameters(), lr=work.local.lr)
        for rows in batches(len(work.train[i]), work.local, stream(0, Stream.BATCHES, 0, i)):
            indices = work.train[i][rows]
            optimizer.zero_grad()
            F.cross_entropy(work.net(work.x[indices]), work.y[indices]).backward()
            nn.utils.clip_grad_norm_(work.net.parameters(), work.local.clip_norm)
            optimizer.step()
        for n, w in work.net.state_dict().items():
            total[n] = total[n].add_(w) if n in total else w.clone()
    return total


def one_process(e: Experiment, threads: int) -> Callable[[], None]:
    """A round in this process."""
    work, clients = work_of(e), fleets.participants(e)

    def bare() -> None:
        torch.set_num_threads(threads)
        total = sum_of(work, e.start.W, clients)
        _ = {n: w / len(clients) for n, w in total.items()}
        torch.set_num_threads(1)

    return bare


_in_worker: dict[str, Work] = {}  # what a worker process holds


def _start_worker(work: Work) -> None:
    torch.set_num_threads(1)
    _in_worker["work"] = Work(
        net=copy.deepcopy(work.net), x=work.x, y=work.y, train=work.train, local=work.local
    )


def _sum_in_worker(W: Mapping[str, Tensor], clients: Sequence[int]) -> dict[str, Tensor]:
    return sum_of(_in_worker["work"], W, clients)


def processes(e: Experiment, n: int = 2) -> tuple[Callable[[], None], Callable[[], None]]:
    """A round over processes of one thread each with shared data, and a function that ends them."""
    work, clients = work_of(e), fleets.participants(e)
    for tensor in (work.x, work.y):
        tensor.share_memory_()
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(n, context, _start_worker, (work,))

    def bare() -> None:
        parts = [executor.submit(_sum_in_worker, e.start.W, clients[k::n]) for k in range(n)]
        sums = [part.result() for part in parts]
        _ = {name: sum(s[name] for s in sums) / len(clients) for name in sums[0]}

    return bare, executor.shutdown
