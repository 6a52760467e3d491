"""Who takes part in a round, and what each client is asked to do."""

from collections.abc import Sequence
from dataclasses import replace

from fedp3.core.types import ClientPlan
from fedp3.devices.clock import next_available
from fedp3.devices.run_fleet import fleet_plans
from fedp3.planning.client_plans import client_plans
from fedp3.planning.participation import eligible_clients, sample_clients
from fedp3.planning.pruning import deal_units
from fedp3.privacy.client_level.mechanism import poisson_clients
from fedp3.privacy.ledger import Ledger
from fedp3.server.context import ServerContext


def plans_for(context: ServerContext, t: int) -> tuple[ClientPlan, ...]:
    """The plan of every client in round t."""
    return tuple(
        deal_units(undealt_plans(context, t), context.spec.pruning.selector, context.participants)
    )


def undealt_plans(
    context: ServerContext, t: int, clients: Sequence[int] | None = None
) -> tuple[ClientPlan, ...]:
    """The plans of round t, before units are dealt out among those who take part.

    Args:
        context: the run.
        t: the round.
        clients: whose plans; None means all clients.
    """
    fleet = context.fleet
    if fleet is not None and fleet.classes:
        plans = fleet_plans(fleet, context.spec.seed, t)
        return tuple(plans[i] for i in (range(context.clients) if clients is None else clients))
    return client_plans(context.plan, context.layers, context.keep, context.spec.seed, t, clients)


def eligible_in(context: ServerContext, t: int, ledger: Ledger | None) -> list[int]:
    """Clients that have samples, a device that can take part, and under LDP budget left."""
    clients = eligible_clients(context.examples, t, None if ledger is None else ledger.can_pay)
    return clients if context.fleet is None else [i for i in clients if i in context.fleet.able]


def participants_in(
    context: ServerContext, t: int, ledger: Ledger | None, clock: int
) -> tuple[list[int], int]:
    """C_t, and the virtual time at which the round begins.

    C_t is a fixed number of clients, or under client-level DP each client by its own coin.  Where
    devices are described, only those that are available are drawn from; if none is, the round
    begins when the first one becomes available.
    """
    eligible, run, fleet = eligible_in(context, t, ledger), context.run, context.fleet
    mode = context.client_level
    if fleet is not None:
        clock, eligible = next_available(fleet.timings, eligible, clock)
        run = replace(run, clients_per_round=fleet.asked(context.participants))
    if mode is None:
        return sample_clients(eligible, run, t - t % context.aggregator.interval), clock
    mechanism = mode.budget.mechanism
    return poisson_clients(eligible, context.clients, mechanism, context.spec.seed, t), clock
