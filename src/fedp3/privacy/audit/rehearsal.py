"""Whole runs on made-up records, in which everything that leaves a client is recorded.

A rehearsal is a run as a user starts it, from the first task to the final probe, with its ledger on
disk.  The server's code comes after this package, so a caller passes a function that runs it
(`fedp3.runs.rehearsal` has the one of the command line).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3.client.context import ClientContext
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import ClientState, Failure, Reply, Task
from fedp3.data.inputs import only_tensor
from fedp3.data.shards import Shard
from fedp3.privacy.ledger import Charge
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Budget, Mechanism

RECORDS, TESTED = 8, 3  # records of each client that train, and that are tested


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A task as it was carried to a client, and what came back.

    Args:
        task: the task.
        reply: the reply.
        state: the client's state from which the task started.
        charges: the charges of the task that were on disk before the client began.
    """

    task: Task
    reply: Reply
    state: ClientState | None
    charges: Sequence[Charge]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A finished run.

    Args:
        exchanges: every task, in the order in which they were answered.
        charges: what the ledger's file says at the end.
        epsilons: the epsilon of each client that the result reports; None stands for infinity.
    """

    exchanges: Sequence[Exchange]
    charges: Sequence[Charge]
    epsilons: Mapping[int, float | None]

    @property
    def failures(self) -> list[Failure]:
        """The replies that are failures."""
        return [e.reply for e in self.exchanges if isinstance(e.reply, Failure)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a rehearsal runs.

    Args:
        context: the clients' network and settings, with made-up records.
        shards: the records of each client that takes part.
        budget: what each client may spend.
        rounds: number of rounds, after which the final probe follows.
        observe: is called after every task.
    """

    context: ClientContext
    shards: Mapping[int, Shard]
    budget: Budget
    rounds: int
    observe: Callable[[Exchange], None] = lambda exchange: None


Rehearse = Callable[[Scene], Rehearsal]


def scene(
    context: ClientContext,
    clients: Sequence[int],
    budget: Budget,
    rounds: int,
    train: Callable[[Tensor], Tensor],
    seed: int,
    label_shift: int = 0,
) -> Scene:
    """A run on made-up records.

    Args:
        context: the run's network and settings.
        clients: the clients that have records; the others take no part.
        budget: what each client may spend, and the mechanism.
        rounds: number of rounds.
        train: takes random training records and returns the ones to train on.
        seed: of the records.
        label_shift: is added to the labels of training records.
    """
    rng = stream(seed, Stream.AUDIT, 2)
    shape, classes = only_tensor(context.data.x, "an audit").shape[1:], context.data.classes
    tested = torch.randn((TESTED, *shape), generator=rng)
    # Each client has its own records, since a leak may depend on which client it is.
    trained = [train(torch.randn((RECORDS, *shape), generator=rng)) for _ in clients]
    x = torch.cat([tested, *trained])
    y = torch.arange(len(x))
    y[TESTED:] += label_shift
    y %= classes
    shards = {}
    for k, i in enumerate(clients):
        begin = TESTED + k * RECORDS
        shards[i] = Shard(torch.arange(begin, begin + RECORDS), torch.arange(TESTED))
    context = replace(
        context,
        data=replace(context.data, x=x, y=y, mean=(), std=()),
        spec=replace(context.spec, rounds=rounds),
        steps=PrivateSteps(budget.mechanism),
    )
    return Scene(context=context, shards=shards, budget=budget, rounds=rounds)


def unlimited(budget: Budget, mechanism: Mechanism, steps: int) -> Budget:
    """A budget that pays for every task of this many steps."""
    return replace(
        budget,
        mechanism=mechanism,
        steps_per_task=steps,
        epsilon=math.inf,
        allowed_steps=1 << 40,
    )


def without_gradient(x: Tensor) -> Tensor:
    """Records that are not numbers count as zero, so that uploads are noise alone."""
    return torch.full_like(x, math.nan)
