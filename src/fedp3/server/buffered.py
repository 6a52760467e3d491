"""Rounds that overlap: updates that started from older models (FedBuff).

An update that started from W_v and arrives in round t is moved to where the model is now,

    W_t + (W_i - W_v) / sqrt(1 + t - v),

and then aggregated as any other.  Of a round that does not overlap nothing changes.  Rules whose
weights depend on where an update is, relative to the model, have no meaning for such an update.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from fedp3.core.randomness import Stream, stream
from fedp3.core.types import AcceptedUpdate, ClientPlan, Params, Task
from fedp3.devices.buffer import Buffer, Flight, fill_buffer
from fedp3.devices.clock import RoundClock, recorded, visit
from fedp3.devices.round_ends import USED
from fedp3.devices.run_fleet import RunFleet
from fedp3.planning.dispatch import training_tasks
from fedp3.server.context import ServerContext, ServerState


def buffer_round(
    context: ServerContext,
    fleet: RunFleet,
    state: ServerState,
    eligible: list[int],
    plans: Mapping[int, ClientPlan],
) -> Buffer:
    """Who arrives in this round, and who goes on computing.

    Args:
        context: the run.
        fleet: its devices.
        state: the state before the round.
        eligible: the clients that may start.
        plans: the plans of all clients in this round.
    """
    rng = stream(context.run.seed, Stream.SAMPLE, state.t)
    order = [eligible[j] for j in torch.randperm(len(eligible), generator=rng).tolist()]
    concurrency = min(context.participants, len(eligible))
    return fill_buffer(
        state.flying,
        order,
        fleet.timings,
        lambda i, start: visit(i, fleet.timings[i], fleet.work_of(plans[i]), start),
        version=state.t,
        now=state.clock,
        concurrency=concurrency,
        size=fleet.settings.buffer or max(1, math.ceil(concurrency / 2)),
    )


def arrived_tasks(
    context: ServerContext,
    state: ServerState,
    flights: Iterable[Flight],
    plans_of: Mapping[int, Mapping[int, ClientPlan]],
    *,
    evaluate: bool,
) -> list[Task]:
    """The tasks of the clients that arrive, each with the model that it started from.

    Args:
        context: the run.
        state: the state before the round.
        flights: the clients whose updates arrive.
        plans_of: for each version the plans of its clients.
        evaluate: whether clients also score what they trained.
    """
    spec = context.spec
    by_version: dict[int, list[int]] = {}
    for flight in flights:
        by_version.setdefault(flight.version, []).append(flight.visit.client)
    tasks: list[Task] = []
    for version, clients in by_version.items():
        tasks += training_tasks(
            version_of(state, version),
            [plans_of[version][i] for i in clients],
            spec.layers,
            spec.pruning,
            version,
            spec.seed,
            state.seen,
            evaluate=evaluate,
            extra={},
        )
    return sorted(tasks, key=lambda task: task.plan.client)


def version_of(state: ServerState, version: int) -> Params:
    """The model of an earlier round, or the current one."""
    return state.W if version == state.t else state.versions[version]


def versions_in_use(state: ServerState, flying: Iterable[Flight]) -> dict[int, Params]:
    """The models that clients in flight started from."""
    return {v: version_of(state, v) for v in sorted({flight.version for flight in flying})}


def moved(updates: Iterable[AcceptedUpdate], state: ServerState) -> Iterator[AcceptedUpdate]:
    """The updates as if they had started from the current model."""
    for accepted in updates:
        update = accepted.update
        staleness = state.t - update.t
        if staleness == 0:
            yield accepted
            continue
        old, weight = version_of(state, update.t), 1 / math.sqrt(1 + staleness)
        tensors = {n: state.W[n] + weight * (w - old[n]) for n, w in update.tensors.items()}
        yield replace(accepted, update=replace(update, tensors=tensors))


def recorded_buffer(buffer: Buffer, fleet: RunFleet, began: int) -> RoundClock:
    """An asynchronous round as its run records it."""
    visits = [flight.visit for flight in buffer.arrived]
    return recorded(visits, buffer.outcomes, fleet.timings, began, buffer.ended)


def used_flights(buffer: Buffer) -> list[Flight]:
    """The flights whose updates count."""
    pairs = zip(buffer.arrived, buffer.outcomes, strict=True)
    return [flight for flight, outcome in pairs if outcome == USED]
