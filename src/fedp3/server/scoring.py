"""Measure G, D, P and C of a state: the tasks that clients are sent for it, and what they score."""

from collections.abc import Sequence
from dataclasses import replace

from fedp3.core.types import ClientPlan, Execute, Task
from fedp3.planning.client_plans import unscheduled
from fedp3.planning.dispatch import dispatched_tasks, global_tasks
from fedp3.privacy.ledger import Ledger
from fedp3.server.central import CentralScore, central_score
from fedp3.server.context import FinalEvaluation, RoundRecord, ServerContext, ServerState
from fedp3.server.evaluation import Scores, scores
from fedp3.server.publication import sent_weights
from fedp3.server.round_plans import eligible_in, plans_for


def initial_scores(
    context: ServerContext, state: ServerState, execute: Execute
) -> dict[str, Scores | CentralScore | None]:
    """G, D and C before the first round."""
    everyone = plans_for(context, state.t)
    G, D = global_and_dispatched(context, state, execute, everyone)
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
        G, D = global_and_dispatched(context, state, execute, everyone)
        C = central_score(context.central, state.W, state.t, everyone)
    if not context.run.final_p:
        return FinalEvaluation(G, D, P=None, C=C)
    clients = eligible_in(context, state.t, ledger)
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
    return dispatched(context, state, [trained[i] for i in clients], probe=True)


def dispatch_tasks(
    context: ServerContext, state: ServerState, clients: Sequence[int]
) -> list[Task]:
    """Tasks that score D of these clients: what they would be sent in the next round."""
    everyone = plans_for(context, state.t)
    return dispatched(context, state, [everyone[i] for i in clients], probe=False)


def global_and_dispatched(
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
    return G, scores(execute(dispatched(context, state, everyone, probe=False)), objective)


def dispatched(
    context: ServerContext, state: ServerState, plans: Sequence[ClientPlan], *, probe: bool
) -> list[Task]:
    """Tasks that score what these plans are sent or, under `probe`, that after a local update."""
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
