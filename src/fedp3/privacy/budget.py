"""What a run may cost each client, and the noise that it needs for that."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedp3.client.batching import LocalSettings
from fedp3.core.settings import RunSettings
from fedp3.planning.participation import eligible_clients, sample_clients
from fedp3.privacy import accountant, requirements
from fedp3.privacy.ledger import Ledger
from fedp3.privacy.settings import Budget, Mechanism


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who may take part in which round: with the mechanism, all that a run's cost depends on."""

    run: RunSettings
    examples: Mapping[int, int]  # training samples of each client


def count_tasks(schedule: Schedule, ledger: Ledger | None = None, first: int = 0) -> Counter[int]:
    """Count the tasks that each client gets if nothing fails, including those that measure P.

    Args:
        schedule: the rounds and the clients.
        ledger: if given, tasks are charged to it, and clients that cannot pay are left out.
        first: the round to count from.
    """
    tasks: Counter[int] = Counter()
    for t in range(first, schedule.run.rounds + schedule.run.final_p):
        clients = eligible_clients(schedule.examples, t, None if ledger is None else ledger.can_pay)
        if t < schedule.run.rounds:
            clients = sample_clients(clients, schedule.run, t)
        tasks.update(clients)
        if ledger is not None:
            ledger.charge(clients, t)
    return tasks


def plan_budget(
    schedule: Schedule,
    local: LocalSettings,
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    *,
    find_noise: bool,
) -> Budget:
    """Compute what each client may spend.

    Args:
        schedule: the rounds and the clients.
        local: how a client trains.
        mechanism: the private step.
        epsilon: the limit of each client.
        delta: the delta at which epsilon holds.
        find_noise: replace the mechanism's noise by the least noise under which all rounds fit.
    """
    steps = mechanism.steps_per_task(local)
    rate = mechanism.sample_rate
    planned_steps = None
    if find_noise:
        planned_steps = steps * max(count_tasks(schedule).values(), default=0)
        noise = accountant.noise_multiplier(epsilon, delta, rate, planned_steps)
        mechanism = replace(mechanism, noise_multiplier=noise)
    allowed_steps = accountant.allowed_steps(mechanism.noise_multiplier, rate, epsilon, delta)
    budget = Budget(
        mechanism=mechanism,
        steps_per_task=steps,
        epsilon=epsilon,
        delta=delta,
        allowed_steps=allowed_steps,
    )
    requirements.check_budget(budget, planned_steps)
    return budget


def planned_epsilons(budget: Budget, schedule: Schedule) -> dict[int, float]:
    """The epsilon of each client at the end of the run, if nothing fails and nothing is redone."""
    ledger = Ledger(budget)
    count_tasks(schedule, ledger)
    return dict.fromkeys(sorted(schedule.examples), 0.0) | ledger.epsilons()
