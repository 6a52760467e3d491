"""Reasons to refuse a run under client-level DP that show only once it is assembled.

The contradictions of settings are in `fedp3.config.contradictions`.
"""

from collections.abc import Iterator, Sequence

from fedp3.client.context import RunSpec
from fedp3.core.errors import InputError
from fedp3.core.types import ClientPlan
from fedp3.privacy.client_level.mechanism import uploaders
from fedp3.privacy.client_level.settings import ClientPrivacySettings
from fedp3.privacy.settings import Budget


def check(spec: RunSpec, plans: Sequence[ClientPlan], budget: Budget) -> None:
    """Raise one error with every reason not to start this run under client-level DP.

    Args:
        spec: the run.
        plans: the plans of all clients in round 0.
        budget: what the run may cost.
    """
    lines = [f"client-level DP refused: {reason}" for reason in _reasons(spec, plans, budget)]
    if lines:
        raise InputError("\n".join(lines))


def _reasons(spec: RunSpec, plans: Sequence[ClientPlan], budget: Budget) -> Iterator[str]:
    if spec.hooks.exchange is not None:
        yield (
            "the method's own tensors would be combined without a clip and without noise "
            "(hooks.exchange)"
        )
    if not uploaders(plans):
        yield "no client uploads any layer, so that nothing is released"
    if budget.delta >= 1 / len(plans):
        yield (
            f"client_privacy.delta={budget.delta:g} is not below 1/n: there are {len(plans)} "
            "clients, and a mechanism that publishes all data of one random client would satisfy "
            f"such a delta; set it to {min(1e-5, 0.1 / len(plans)):.1g} or less"
        )
    if budget.allowed_steps < 1:
        mechanism = budget.mechanism
        yield (
            f"one round with noise multiplier {mechanism.noise_multiplier:g} and sample rate "
            f"{mechanism.sample_rate:g} costs more than client-level epsilon={budget.epsilon:g}; "
            "use more noise, or set client_privacy.noise_multiplier to 'auto'"
        )


def refused_deployment(settings: ClientPrivacySettings) -> str:
    """Why these settings must not be used outside a simulation; empty if they may."""
    if not settings.enabled or settings.randomness == "os":
        return ""
    return (
        f"[client_privacy] randomness = {settings.randomness!r} is for simulation: every node has "
        "the config, and with its seed the noise and the participants; set 'os'"
    )
