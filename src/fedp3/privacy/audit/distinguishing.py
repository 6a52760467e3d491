"""Distinguishing: no test tells neighbours apart better than epsilon allows.

The tests have thresholds that are fixed before the runs that count, so that their errors are
binomial.  Each finding names the largest epsilon that its number of runs could have refuted: a test
that passes says nothing about a larger one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedp3.privacy import accountant
from fedp3.privacy.audit.bounds import gaussian_lower, refutable
from fedp3.privacy.audit.findings import Finding
from fedp3.privacy.audit.neighbours import RECORDS, Bench, flat
from fedp3.privacy.settings import Mechanism

PART, COMPOSITION = "distinguishing", "composition"
DELTA = 1e-5
STEPS, RATE, COMPOSED_DELTA = 20, 0.1, 1e-3
CALIBRATION = 30  # runs that only choose a threshold


def one_step(bench: Bench, mechanism: Mechanism, runs: int) -> list[Finding]:
    """Tell neighbours apart by one step's projection on the canary's direction; z = 1."""
    visible = replace(mechanism, noise_multiplier=1.0, sample_rate=1.0)
    noiseless = replace(visible, noise_multiplier=0.0)
    direction = _canary_direction(bench, noiseless)
    middle = sum(float(flat(bench.update(noiseless, c)) @ direction) for c in (False, True)) / 2

    def reported(canary: bool) -> int:
        """Number of runs in which the test detects the canary."""
        return sum(
            float(flat(bench.update(visible, canary)) @ direction) > middle for _ in range(runs)
        )

    alarms, misses = reported(False), runs - reported(True)
    claimed = accountant.epsilon({(1.0, 1.0): 1}, DELTA)
    what = "epsilon that a test of one step proves; claimed for z = 1"
    return [_proven(PART, what, alarms, misses, runs, DELTA, claimed)]


def composition(bench: Bench, mechanism: Mechanism, runs: int) -> list[Finding]:
    """Subsampled steps, all of which the adversary sees, against the epsilon they claim."""
    mechanism = replace(mechanism, noise_multiplier=1.0, sample_rate=RATE)
    noiseless = replace(mechanism, noise_multiplier=0.0, sample_rate=1.0)
    moved = (bench.steps(noiseless, True, 1) - bench.steps(noiseless, False, 1))[0]
    direction = moved / moved.norm() / mechanism.clip
    others = torch.stack([_alone(bench, noiseless, j) for j in range(RECORDS - 1)])
    # What the other records add on average.
    center = float((others @ direction).mean()) * RATE * (RECORDS - 1)

    def statistic(canary: bool) -> float:
        """The log likelihood ratio; the best statistic if the other records added nothing."""
        seen = bench.steps(mechanism, canary, STEPS) @ direction - center
        return float(torch.log1p(RATE * torch.expm1(seen - 0.5)).sum())

    threshold = _best_threshold(
        [statistic(False) for _ in range(CALIBRATION)],
        [statistic(True) for _ in range(CALIBRATION)],
    )
    alarms = sum(statistic(False) > threshold for _ in range(runs))
    misses = sum(statistic(True) <= threshold for _ in range(runs))
    claimed = accountant.epsilon({(1.0, RATE): STEPS}, COMPOSED_DELTA)
    what = f"epsilon that a test of {STEPS} steps at rate {RATE:g} proves; claimed for z = 1"
    return [_proven(COMPOSITION, what, alarms, misses, runs, COMPOSED_DELTA, claimed)]


def _best_threshold(without: Sequence[float], with_canary: Sequence[float]) -> float:
    """The threshold with the fewest errors on these values."""
    return max(
        [*without, *with_canary],
        key=lambda c: sum(v <= c for v in without) - sum(v <= c for v in with_canary),
    )


def _proven(
    part: str, what: str, alarms: int, misses: int, runs: int, delta: float, claimed: float
) -> Finding:
    return Finding(
        part=part,
        what=what,
        measured=gaussian_lower(alarms, misses, runs, delta),
        low=0.0,
        high=claimed,
        refutable=refutable(runs, delta),
    )


def _canary_direction(bench: Bench, noiseless: Mechanism) -> Tensor:
    """The direction in which the canary moves an upload, scaled so that C has length 1."""
    moved = flat(bench.update(noiseless, True)) - flat(bench.update(noiseless, False))
    direction: Tensor = moved / moved.norm() / noiseless.clip
    return direction


def _alone(bench: Bench, noiseless: Mechanism, j: int) -> Tensor:
    """What record j adds to a step by itself."""
    alone = torch.full_like(bench.without, math.nan)
    alone[j] = bench.without[j]
    return replace(bench, without=alone).steps(noiseless, False, 1)[0]
