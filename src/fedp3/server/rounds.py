"""Algorithm 1 over any engine: sample, dispatch, execute, check, aggregate.

`run` yields the new state and the record of every round, so that the caller can save, show or stop
between two rounds.  Nothing but the state needs to be saved: random draws are addressed by round
and client, so that no generator has a state.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedp3.core.errors import RunError
from fedp3.core.types import AcceptedUpdate, ClientPlan, Execute, Params, Reply, Task
from fedp3.devices.clock import RoundClock
from fedp3.devices.run_fleet import RunFleet
from fedp3.planning.dispatch import training_tasks
from fedp3.planning.pruning import deal_units
from fedp3.planning.revised_plans import continuing_layers, only_layers, without_layers
from fedp3.privacy.client_level.budget import EVERYBODY
from fedp3.privacy.ledger import Ledger
from fedp3.server.averaged_weights import next_average
from fedp3.server.buffered import (
    arrived_tasks,
    buffer_round,
    moved,
    recorded_buffer,
    used_flights,
    versions_in_use,
)
from fedp3.server.central import central_score
from fedp3.server.client_level import private_step
from fedp3.server.context import RoundRecord, ServerContext, ServerState
from fedp3.server.evaluation import scores
from fedp3.server.gate import GateResult, admit, all_finite
from fedp3.server.publication import (
    against_weights,
    next_published,
    sent_weights,
    with_downloads,
    without_lost_copies,
)
from fedp3.server.round_plans import eligible_in, participants_in, plans_for, undealt_plans
from fedp3.server.round_record import reasons_of, record_of
from fedp3.server.scoring import global_and_dispatched
from fedp3.server.virtual_time import in_virtual_time


def run_round(
    context: ServerContext,
    state: ServerState,
    execute: Execute,
    ledger: Ledger | None = None,
    fleet: Sequence[ClientPlan] | None = None,
    releases: Ledger | None = None,
) -> tuple[ServerState, RoundRecord]:
    """One round of Algorithm 1.

    Args:
        context: the run.
        state: the state before the round.
        execute: the engine.
        ledger: charged before anything is sent; None without LDP.
        fleet: the plans of all clients, where they do not change from round to round.
        releases: charged for the model of this round; None without client-level DP.
    """
    began, t = time.perf_counter(), state.t
    evaluate = _evaluates(context, t)
    if context.fleet is not None and context.fleet.mode.end is None:
        happened = _overlapping_round(context, context.fleet, state, execute, evaluate=evaluate)
    else:
        happened = _separate_round(
            context, state, execute, ledger, fleet, releases, evaluate=evaluate
        )
    new, result = happened.state, happened.result
    record = record_of(context, t, happened.tasks, result, new)
    record = replace(record, clock=happened.clock)
    if evaluate:
        everyone = plans_for(context, new.t)
        G, D = global_and_dispatched(context, new, execute, everyone)
        P = scores((u.update for u in result.accepted), context.spec.objective)
        C = central_score(context.central, new.W, new.t, everyone)
        record = replace(record, G=G, D=D, P=P, C=C)
    if ledger is not None:
        record = replace(record, epsilon=ledger.epsilon_max())
    if releases is not None:
        record = replace(record, client_epsilon=releases.epsilon_max())
    return new, replace(record, seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Happened:
    """What happened in a round, before it is recorded."""

    state: ServerState
    tasks: Sequence[Task]
    result: GateResult
    clock: RoundClock | None


def _separate_round(
    context: ServerContext,
    state: ServerState,
    execute: Execute,
    ledger: Ledger | None,
    fleet: Sequence[ClientPlan] | None,
    releases: Ledger | None,
    *,
    evaluate: bool,
) -> _Happened:
    """A round that begins when the one before it has ended."""
    t, spec = state.t, context.spec
    clients, start = participants_in(context, t, ledger, state.clock)  # Alg. 1, l. 4
    plans = [fleet[i] for i in clients] if fleet is not None else undealt_plans(context, t, clients)
    wanted = context.aggregator.next_round(state.aggregator)
    asked = without_layers(plans, wanted.left_out, context.plan, context.keep, stored=wanted.stored)
    if wanted.trained is not None:
        asked = only_layers(asked, wanted.trained(clients), context.plan, context.keep)
    asked = continuing_layers(asked, wanted.continued, state.seen, wanted.since)
    dealt = deal_units(asked, spec.pruning.selector, len(clients))
    tasks = training_tasks(  # Alg. 1, ll. 5-6
        sent_weights(state),
        dealt,
        spec.layers,
        spec.pruning,
        t,
        spec.seed,
        state.seen,
        evaluate=evaluate,
        extra=state.extra,
    )
    tasks = with_downloads(context, state, tasks)
    if ledger is not None:
        ledger.charge(clients, t)
    if releases is not None:
        releases.charge([EVERYBODY], t)
    timed, replies = in_virtual_time(context, tasks, start, execute)
    in_time = [task for task in tasks if task.plan.client in timed.used]
    new, result = _advance(context, state, in_time, replies)  # Alg. 1, ll. 7-14
    result.late = sorted([*result.late, *timed.late])
    new = replace(new, clock=timed.ended)
    return _Happened(state=new, tasks=tasks, result=result, clock=timed.record)


def _overlapping_round(
    context: ServerContext,
    fleet: RunFleet,
    state: ServerState,
    execute: Execute,
    *,
    evaluate: bool,
) -> _Happened:
    """A round whose clients may have started in earlier ones."""
    eligible = eligible_in(context, state.t, None)
    plans = {plan.client: plan for plan in undealt_plans(context, state.t)}
    buffer = buffer_round(context, fleet, state, eligible, plans)
    used = used_flights(buffer)
    plans_of = {state.t: plans}
    for version in {flight.version for flight in used} - {state.t}:
        plans_of[version] = {plan.client: plan for plan in undealt_plans(context, version)}
    tasks = arrived_tasks(context, state, used, plans_of, evaluate=evaluate)
    new, result = _advance(context, state, tasks, execute(tasks))
    gone = [f.visit.client for f in buffer.arrived if f not in used]
    result.late = sorted([*result.late, *gone])
    clock = recorded_buffer(buffer, fleet, state.clock)
    versions = versions_in_use(state, buffer.flying)
    new = replace(new, clock=buffer.ended, flying=buffer.flying, versions=versions)
    return _Happened(state=new, tasks=tasks, result=result, clock=clock)


def run(
    context: ServerContext,
    state: ServerState,
    execute: Execute,
    ledger: Ledger | None = None,
    releases: Ledger | None = None,
) -> Iterator[tuple[ServerState, RoundRecord]]:
    """Rounds until T, or until no privacy budget is left.

    Args:
        context: the run.
        state: the state to start from.
        execute: the engine.
        ledger: what each client has spent; None without LDP.
        releases: what the released models have cost; None without client-level DP.

    Raises:
        RunError: after `max_void` void rounds in a row.
    """
    fleet = None if context.redraws else undealt_plans(context, 0)
    while state.t < context.run.rounds and _affordable(context, state.t, ledger, releases):
        state, record = run_round(context, state, execute, ledger, fleet, releases)
        yield state, record
        if record.void and state.void >= context.run.max_void:
            raise RunError(
                f"{state.void} rounds in a row had fewer than {context.run.quorum} usable updates; "
                f"the last reasons: {reasons_of(record)}"
            )


def _affordable(
    context: ServerContext, t: int, ledger: Ledger | None, releases: Ledger | None
) -> bool:
    """Whether any client can pay for round t, and the released models may cost one more."""
    if releases is not None and not releases.can_pay(EVERYBODY, t):
        return False
    return ledger is None or bool(eligible_in(context, t, ledger))


def _evaluates(context: ServerContext, t: int) -> bool:
    every = context.run.eval_every
    return t + 1 == context.run.rounds or (every > 0 and (t + 1) % every == 0)


def _advance(
    context: ServerContext, state: ServerState, tasks: Sequence[Task], replies: Iterable[Reply]
) -> tuple[ServerState, GateResult]:
    """W_{t+1}, or W_t bit for bit if too few updates were accepted or the sum overflows.

    Under client-level DP there is no quorum: a round must not tell how many answered.  Whether the
    next model overflows follows from its noised values.
    """
    result = GateResult()
    started_from = None if state.published is None else state.W
    updates = admit(
        *(replies, tasks, context.spec, context.examples, state.extra, result), started_from
    )
    started_alike = against_weights(moved(updates, state), state, context)
    W, aggregator_state = _aggregate(context, state, started_alike)
    for _ in updates:  # an aggregator may stop early; the gate must see every reply
        pass
    result.late.sort()
    state = without_lost_copies(context, state, result)
    # sums of finite numbers can be infinite
    quorum = context.run.quorum if context.client_level is None else 0
    if len(result.accepted) < quorum or not all_finite(W):
        return replace(state, t=state.t + 1, void=state.void + 1), result
    extra, exchange = state.extra, context.spec.hooks.exchange
    if exchange is not None:
        combined = exchange.combine(
            extra, [u.update.extra for u in result.accepted], context.clients
        )
        extra = combined if all_finite(combined) else extra
    seen = {**state.seen, **{u.client: u.update.t for u in result.accepted}}
    new = ServerState(
        t=state.t + 1,
        W=W,
        aggregator=aggregator_state,
        seen=seen,
        void=0,
        extra=extra,
        published=next_published(context, state, W, result),
        average=next_average(state.average, W, state.t + 1, context.aggregator.average),
    )
    return new, result


def _aggregate(
    context: ServerContext, state: ServerState, updates: Iterable[AcceptedUpdate]
) -> tuple[Params, Any]:
    if context.client_level is None:
        return context.aggregator.apply(state.W, updates, state.aggregator)
    plans = undealt_plans(context, state.t)
    return private_step(
        context.client_level, context.spec, plans, state.W, updates, state.aggregator, state.t
    )
