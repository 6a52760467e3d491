"""Algorithm 1 over any engine: sample, dispatch, execute, check, aggregate.

`run` yields the new state and the record of every round, so that the caller can save, show or stop
between two rounds.  Nothing but the state needs to be saved: random draws are addressed by round
and client, so that no generator has a state.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedp3.core.errors import RunError
from fedp3.core.memo import once_per_plan
from fedp3.core.types import AcceptedUpdate, ClientPlan, Execute, Params, Reply, Task
from fedp3.costs.traffic import exchange_bytes, traffic
from fedp3.devices.clock import RoundClock, next_available
from fedp3.devices.run_fleet import RunFleet, fleet_plans
from fedp3.planning.client_plans import client_plans, unscheduled
from fedp3.planning.dispatch import dispatched_tasks, global_tasks, training_tasks
from fedp3.planning.participation import eligible_clients, sample_clients
from fedp3.planning.pruning import deal_units
from fedp3.planning.revised_plans import continuing_layers, without_layers
from fedp3.privacy.client_level.budget import EVERYBODY
from fedp3.privacy.client_level.mechanism import poisson_clients
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
from fedp3.server.central import CentralScore, central_score
from fedp3.server.client_level import private_step
from fedp3.server.context import FinalEvaluation, RoundRecord, ServerContext, ServerState
from fedp3.server.evaluation import Scores, scores
from fedp3.server.gate import GateResult, admit, all_finite
from fedp3.server.publication import (
    against_weights,
    next_published,
    sent_weights,
    with_downloads,
    without_lost_copies,
)
from fedp3.server.virtual_time import in_virtual_time


def plans_for(context: ServerContext, t: int) -> tuple[ClientPlan, ...]:
    """The plan of every client in round t."""
    return tuple(
        deal_units(_plans(context, t), context.spec.pruning.selector, context.participants)
    )


def _plans(
    context: ServerContext, t: int, clients: Sequence[int] | None = None
) -> tuple[ClientPlan, ...]:
    fleet = context.fleet
    if fleet is not None and fleet.classes:
        plans = fleet_plans(fleet, context.spec.seed, t)
        return tuple(plans[i] for i in (range(context.clients) if clients is None else clients))
    return client_plans(context.plan, context.layers, context.keep, context.spec.seed, t, clients)


def _eligible(context: ServerContext, t: int, ledger: Ledger | None) -> list[int]:
    """Clients that have samples, a device that can take part, and under LDP budget left."""
    clients = eligible_clients(context.examples, t, None if ledger is None else ledger.can_pay)
    return clients if context.fleet is None else [i for i in clients if i in context.fleet.able]


def _participants(
    context: ServerContext, t: int, ledger: Ledger | None, clock: int
) -> tuple[list[int], int]:
    """C_t, and the virtual time at which the round begins.

    C_t is a fixed number of clients, or under client-level DP each client by its own coin.  Where
    devices are described, only those that are available are drawn from; if none is, the round
    begins when the first one becomes available.
    """
    eligible, run, fleet = _eligible(context, t, ledger), context.run, context.fleet
    mode = context.client_level
    if fleet is not None:
        clock, eligible = next_available(fleet.timings, eligible, clock)
        run = replace(run, clients_per_round=fleet.asked(context.participants))
    if mode is None:
        return sample_clients(eligible, run, t - t % context.aggregator.interval), clock
    mechanism = mode.budget.mechanism
    return poisson_clients(eligible, context.clients, mechanism, context.spec.seed, t), clock


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
    record = _record(context, t, happened.tasks, result, new)
    record = replace(record, clock=happened.clock)
    if evaluate:
        everyone = plans_for(context, new.t)
        G, D = _global_and_dispatched(context, new, execute, everyone)
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
    clients, start = _participants(context, t, ledger, state.clock)  # Alg. 1, l. 4
    plans = [fleet[i] for i in clients] if fleet is not None else _plans(context, t, clients)
    wanted = context.aggregator.next_round(state.aggregator)
    asked = without_layers(plans, wanted.left_out, context.plan, context.keep, stored=wanted.stored)
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
    eligible = _eligible(context, state.t, None)
    plans = {plan.client: plan for plan in _plans(context, state.t)}
    buffer = buffer_round(context, fleet, state, eligible, plans)
    used = used_flights(buffer)
    plans_of = {state.t: plans}
    for version in {flight.version for flight in used} - {state.t}:
        plans_of[version] = {plan.client: plan for plan in _plans(context, version)}
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
    fleet = None if context.redraws else _plans(context, 0)
    while state.t < context.run.rounds and _affordable(context, state.t, ledger, releases):
        state, record = run_round(context, state, execute, ledger, fleet, releases)
        yield state, record
        if record.void and state.void >= context.run.max_void:
            raise RunError(
                f"{state.void} rounds in a row had fewer than {context.run.quorum} usable updates; "
                f"the last reasons: {_reasons(record)}"
            )


def _affordable(
    context: ServerContext, t: int, ledger: Ledger | None, releases: Ledger | None
) -> bool:
    """Whether any client can pay for round t, and the released models may cost one more."""
    if releases is not None and not releases.can_pay(EVERYBODY, t):
        return False
    return ledger is None or bool(_eligible(context, t, ledger))


def initial_scores(
    context: ServerContext, state: ServerState, execute: Execute
) -> dict[str, Scores | CentralScore | None]:
    """G, D and C before the first round."""
    everyone = plans_for(context, state.t)
    G, D = _global_and_dispatched(context, state, execute, everyone)
    return {"G": G, "D": D, "C": central_score(context.central, state.W, state.t, everyone)}


def finish(
    context: ServerContext,
    state: ServerState,
    execute: Execute,
    ledger: Ledger | None = None,
    last: RoundRecord | None = None,
) -> FinalEvaluation:
    """C, and over all clients G, D and, if `run.final_p` is set, P, once training is over.

    Measuring P takes a local update, which under LDP is charged like a round.

    Args:
        context: the run.
        state: the state after the last round.
        execute: the engine.
        ledger: charged for P; None without LDP.
        last: the record of the last round; what it measured is not measured again.
    """
    everyone = plans_for(context, state.t)
    if last is not None and last.t + 1 == state.t and last.G is not None and last.D is not None:
        G: Scores | None = last.G
        D: Scores | None = last.D
        C = last.C
    else:
        G, D = _global_and_dispatched(context, state, execute, everyone)
        C = central_score(context.central, state.W, state.t, everyone)
    if not context.run.final_p:
        return FinalEvaluation(G, D, P=None, C=C)
    clients = _eligible(context, state.t, ledger)
    if ledger is not None:
        ledger.charge(clients, state.t, released="probe")
    P = scores(execute(probe_tasks(context, state, clients)), context.spec.objective)
    return FinalEvaluation(G, D, P, C)


def probe_tasks(context: ServerContext, state: ServerState, clients: Sequence[int]) -> list[Task]:
    """Tasks that score P of these clients, after a local update that is discarded.

    P must not depend on which layers happen to be due, so that it is measured after an update of
    all layers in L_i.
    """
    always = replace(context, plan=unscheduled(context.plan))
    trained = plans_for(always, state.t)
    return _dispatched(context, state, [trained[i] for i in clients], probe=True)


def dispatch_tasks(
    context: ServerContext, state: ServerState, clients: Sequence[int]
) -> list[Task]:
    """Tasks that score D of these clients: what they would be sent in the next round."""
    everyone = plans_for(context, state.t)
    return _dispatched(context, state, [everyone[i] for i in clients], probe=False)


def _global_and_dispatched(
    context: ServerContext, state: ServerState, execute: Execute, everyone: Sequence[ClientPlan]
) -> tuple[Scores | None, Scores | None]:
    """G, of the server's model, and D, of what devices are sent.

    If every layer is sent dense and uncoded, a device has the server's model, and D is G.
    """
    objective = context.spec.objective
    G = scores(execute(global_tasks(state.model, everyone, state.t, state.seen)), objective)
    dense = all(p.send == "dense" for plan in everyone for p in plan.layers.values())
    if dense and state.published is None and state.average is None:
        return G, G
    return G, scores(execute(_dispatched(context, state, everyone, probe=False)), objective)


def _evaluates(context: ServerContext, t: int) -> bool:
    every = context.run.eval_every
    return t + 1 == context.run.rounds or (every > 0 and (t + 1) % every == 0)


def _dispatched(
    context: ServerContext, state: ServerState, plans: Sequence[ClientPlan], *, probe: bool
) -> list[Task]:
    spec = context.spec
    return dispatched_tasks(
        sent_weights(state),
        plans,
        spec.layers,
        spec.pruning,
        state.t,
        spec.seed,
        state.seen,
        probe=probe,
        extra=state.extra if probe else None,
    )


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
    plans = _plans(context, state.t)
    return private_step(
        context.client_level, context.spec, plans, state.W, updates, state.aggregator, state.t
    )


def _record(
    context: ServerContext, t: int, tasks: Sequence[Task], result: GateResult, new: ServerState
) -> RoundRecord:
    spec = context.spec
    bytes_of = once_per_plan(
        lambda plan: traffic(plan, spec.layers, spec.pruning, spec.compression, spec.download)
    )

    def down_bytes(task: Task) -> int:
        return bytes_of(task.plan).down if task.download is None else task.download.bytes

    def mean(metric: str) -> float | None:
        values = [u.update.metrics[metric] for u in result.accepted if metric in u.update.metrics]
        return math.fsum(values) / len(values) if values else None

    extra = exchange_bytes(new.extra)
    return RoundRecord(
        t=t,
        sampled=tuple(task.plan.client for task in tasks),
        accepted=tuple(u.client for u in result.accepted),
        late=tuple(result.late),
        rejected=result.rejected,
        bytes_down=sum(down_bytes(task) + extra for task in tasks),
        bytes_up=sum((u.update.bytes or bytes_of(u.plan).up) + extra for u in result.accepted),
        loss=mean("loss"),
        density=mean("density"),
        void=new.void > 0,
        seconds=0.0,
        aggregator=context.aggregator.report(new.aggregator),
    )


def _reasons(record: RoundRecord) -> str:
    reasons = [f"client {i}: {r.text}" for i, r in list(record.rejected.items())[:3]]
    if record.late:
        reasons.append(f"{len(record.late)} late")
    return "; ".join(reasons) or "nobody answered"
