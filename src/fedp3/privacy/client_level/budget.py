"""The noise of a run under client-level DP, what it may cost, and the ledger of its releases."""

from pathlib import Path

from fedp3.privacy import accountant
from fedp3.privacy.client_level.settings import ClientPrivacySettings
from fedp3.privacy.ledger import Ledger, open_ledger
from fedp3.privacy.settings import AUTO, Budget, Mechanism

FOLDER = "client_level"  # in a run folder: apart from the ledger of LDP, which is per client
# A release costs every client the same, whether or not it took part, so that there is one account.
EVERYBODY = 0


def plan_release_budget(settings: ClientPrivacySettings, rounds: int) -> Budget:
    """The mechanism of each round, and how many rounds it pays for.

    Args:
        settings: the run's [client_privacy].
        rounds: the number of rounds, each of which is one release.
    """
    accountant.require()
    rate, noise = settings.sample_rate, settings.noise_multiplier
    if noise == AUTO:
        noise = accountant.noise_multiplier(settings.epsilon, settings.delta, rate, rounds)
    mechanism = Mechanism(
        clip=settings.clip,
        noise_multiplier=float(noise),
        sample_rate=rate,
        randomness=settings.randomness,
    )
    allowed = accountant.allowed_steps(
        mechanism.noise_multiplier, rate, settings.epsilon, settings.delta
    )
    return Budget(
        mechanism=mechanism,
        steps_per_task=1,
        epsilon=settings.epsilon,
        delta=settings.delta,
        allowed_steps=allowed,
    )


def planned_epsilon(budget: Budget, rounds: int) -> float:
    """The client-level epsilon at the end of a run, if no round is repeated."""
    mechanism, steps = budget.mechanism, min(rounds, budget.allowed_steps)
    spent = {(mechanism.noise_multiplier, mechanism.sample_rate): steps}
    return accountant.epsilon(spent, budget.delta)


def open_releases(budget: Budget, run: str, folder: Path | None, rounds: int = 0) -> Ledger:
    """The ledger of a run's releases: one charge per round, on the account of `EVERYBODY`."""
    if folder is None:
        return open_ledger(budget, run, None)
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    return open_ledger(budget, run, place, rounds)
