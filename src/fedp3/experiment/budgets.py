"""What a run under differential privacy may cost, and the noise that follows from it."""

from dataclasses import replace

from fedp3.config.contradictions import contradictions
from fedp3.core.errors import ConfigError
from fedp3.experiment.experiment import Experiment
from fedp3.privacy import accountant, trial
from fedp3.privacy.budget import plan_budget
from fedp3.privacy.client_level import requirements as client_requirements
from fedp3.privacy.client_level.budget import plan_release_budget
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import AUTO, Mechanism
from fedp3.server.client_level import ClientLevel


def with_budget(experiment: Experiment, noise: float | str) -> Experiment:
    """The experiment with its mechanism and budget.

    Args:
        experiment: the run, whose requirements were checked.
        noise: the noise multiplier, or "auto" to find it.
    """
    accountant.require()
    settings = experiment.config.privacy
    mechanism = Mechanism(
        clip=settings.clip,
        noise_multiplier=0.0 if noise == AUTO else float(noise),
        sample_rate=settings.sample_rate,
        randomness=settings.randomness,
        ghost=trial.uses_ghost(experiment.client),
    )
    budget = plan_budget(
        experiment.schedule,
        experiment.client.local,
        mechanism,
        settings.epsilon,
        settings.delta,
        find_noise=noise == AUTO,
    )
    client = replace(experiment.client, stacked=False, steps=PrivateSteps(budget.mechanism))
    return replace(experiment, server=replace(experiment.server, budget=budget), client=client)


def with_noise(experiment: Experiment, noise: float | None) -> Experiment:
    """The experiment under this noise multiplier, which its run was begun with."""
    budget = experiment.server.budget
    if budget is None or noise is None or noise == budget.mechanism.noise_multiplier:
        return experiment
    return with_budget(experiment, noise)


def with_client_privacy(experiment: Experiment) -> Experiment:
    """The experiment under client-level DP; refused if the guarantee would not hold."""
    config, server = experiment.config, experiment.server
    mistakes = contradictions(config)  # a `Config` that was built in Python is not checked yet
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    budget = plan_release_budget(config.client_privacy, config.run.rounds)
    client_requirements.check(server.spec, experiment.first_plans, budget)
    mode = ClientLevel(budget=budget, optimizer=config.aggregate)
    return replace(experiment, server=replace(server, client_level=mode))
