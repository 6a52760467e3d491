"""Means over seeds with confidence limits, and verdicts on bounds.

A bound on an expectation *holds* if the upper limit of the mean is below it, is *violated* if the
lower limit is above it, and is *undecided* otherwise.  Limits are one-sided, by Student's t on
independent runs.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array

CONFIDENCE = 0.999


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over independent runs, and its one-sided limits."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Check:
    """One cell of an experiment: a measured expectation against a bound."""

    case: str
    K: int
    measured: float
    low: float
    high: float
    bound: float
    verdict: str


def t_quantile(p: float, freedom: int) -> float:
    """A quantile of Student's t, to 1 % from 9 degrees of freedom on.

    It is the Cornish-Fisher series about the normal distribution.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**i for i, term in enumerate(terms)))


def estimate(samples: Array, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent samples (R,) with limits that each hold with the given confidence."""
    R = samples.size
    if R < 10:
        raise InputError(
            f"estimate: want at least 10 independent runs for a confidence limit, got {R}"
        )
    mean = float(samples.mean())
    reach = t_quantile(confidence, R - 1) * float(samples.std(ddof=1)) / sqrt(R)
    return Estimate(mean=mean, low=mean - reach, high=mean + reach)


def smallest_mean(grad_sq: Array) -> Estimate:
    """min_k E[grad_sq_k] from (K, R).

    k is chosen on half of the runs and the mean is taken over the others: choosing and measuring on
    the same runs would favour a lucky k.
    """
    half = grad_sq.shape[1] // 2
    k = int(grad_sq[:, :half].mean(axis=1).argmin())
    return estimate(grad_sq[k, half:])


def verdict(e: Estimate, bound: float) -> str:
    """`holds`, `violated` or `undecided`, at the confidence of the estimate."""
    # Deterministic cells have no spread, and rounding must not decide them.
    slack = 1e-9 * max(abs(bound), 1e-300)
    if e.high <= bound + slack:
        return "holds"
    return "violated" if e.low > bound + slack else "undecided"


def check(case: str, K: int, e: Estimate, bound: float) -> Check:
    """The cell that compares an estimate with its bound."""
    return Check(
        case=case,
        K=K,
        measured=e.mean,
        low=e.low,
        high=e.high,
        bound=bound,
        verdict=verdict(e, bound),
    )
