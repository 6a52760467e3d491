"""The accountant against an independent bound, and the budget against both.

`bounds.composed_lower` computes epsilon in another way, from below.  A claimed epsilon must not be
below it.  Where it is far above, noise is wasted but no promise broken.
"""

import math

from fedp3.client.batching import LocalSettings
from fedp3.privacy import accountant
from fedp3.privacy.audit.bounds import composed_lower
from fedp3.privacy.audit.findings import Finding, equal
from fedp3.privacy.settings import Budget

PART = "accountant"
# (noise multiplier, sample rate, steps, delta) at which the accountant is checked
POINTS = ((1.0, 1.0, 10, 1e-5), (1.0, 0.1, 100, 1e-5), (0.7, 0.02, 400, 1e-6), (4.0, 0.5, 50, 1e-5))
ROUNDING = 1e-6  # relative error of the bound


def accounting(budget: Budget, local: LocalSettings) -> list[Finding]:
    """Every epsilon that is claimed, against what the steps cost at least."""
    z, q, delta = budget.mechanism.noise_multiplier, budget.mechanism.sample_rate, budget.delta
    findings = [_claim(*point) for point in POINTS]
    findings.append(
        equal(
            PART,
            "steps that a task is charged for; wanted are those that it trains",
            budget.steps_per_task,
            budget.mechanism.steps_per_task(local),
        )
    )
    if not z or math.isinf(budget.epsilon):
        return findings
    allowed = budget.allowed_steps
    counts = sorted({1, budget.steps_per_task, min(allowed, 20_000)})
    findings += [_claim(z, q, steps, delta) for steps in counts]
    least = composed_lower(z, q, allowed, delta)
    findings.append(
        Finding(
            part=PART,
            what=f"least epsilon of the {allowed} steps that the budget allows; limit is its own",
            measured=least,
            high=budget.epsilon * (1 + ROUNDING),
            refutable=least,
        )
    )
    return findings


def _claim(z: float, q: float, steps: int, delta: float) -> Finding:
    claimed = accountant.epsilon({(z, q): steps}, delta)
    least = composed_lower(z, q, steps, delta)
    return Finding(
        part=PART,
        what=f"epsilon claimed for {steps} steps with z = {z:g} at rate {q:g}; at least the bound",
        measured=claimed,
        low=least * (1 - ROUNDING),
        refutable=least,
    )
