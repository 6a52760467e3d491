"""The epsilon that a test of two neighbours proves.

From the scores of two neighbouring inputs, a threshold is chosen on one half of the runs.  Its
error rates A (false alarms) and B (misses) are bounded from above on the other half.  A mechanism
that is as private as a Gaussian of shift mu satisfies Φ⁻¹(1 - A) - Φ⁻¹(B) <= mu, and mu gives
epsilon by δ = Φ(-ε/mu + mu/2) - e^ε Φ(-ε/mu - mu/2).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import NormalDist

ERROR_PROBABILITY = 1e-7  # the probability that an error rate is above its bound

_normal = NormalDist()


def gaussian_lower(without: Sequence[float], with_canary: Sequence[float], delta: float) -> float:
    """The epsilon that these scores prove.

    Args:
        without: scores of inputs without the canary.
        with_canary: scores of inputs with the canary, which should be larger.
        delta: the delta at which epsilon holds.
    """
    A, B = error_bounds(without, with_canary)
    if A >= 1 or B >= 1:
        return 0.0
    mu = _normal.inv_cdf(1 - A) - _normal.inv_cdf(B)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def error_bounds(without: Sequence[float], with_canary: Sequence[float]) -> tuple[float, float]:
    """Upper bounds on false alarms and misses of the best threshold of the first half."""
    half = len(without) // 2
    low, high = sorted(without[:half]), sorted(with_canary[:half])
    best = max([*low, *high], key=lambda c: bisect_right(low, c) - bisect_right(high, c))
    alarms = sum(score > best for score in without[half:])
    misses = sum(score <= best for score in with_canary[half:])
    return (
        rate_above(alarms, len(without) - half),
        rate_above(misses, len(with_canary) - half),
    )


def rate_above(errors: int, n: int) -> float:
    """Clopper-Pearson: the rate at which so few errors have a chance of ERROR_PROBABILITY."""
    if errors >= n:
        return 1.0
    low, high = errors / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 - binomial_tail(errors + 1, n, middle) > ERROR_PROBABILITY:
            low = middle
        else:
            high = middle
    return high


def binomial_tail(k: int, n: int, p: float) -> float:
    """P[Bin(n, p) >= k]."""
    if k <= 0 or p >= 1:
        return 1.0
    log_n = math.lgamma(n + 1)
    terms = []
    for i in range(k, n + 1):
        log_choose = log_n - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        terms.append(math.exp(log_choose + i * math.log(p) + (n - i) * math.log1p(-p)))
    return min(1.0, math.fsum(terms))


def _cdf(x: float) -> float:
    """Φ; `NormalDist.cdf` is inexact in the left tail, which a factor of e^ε would reveal."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at delta of a Gaussian mechanism whose neighbours are mu deviations apart."""

    def delta_of(epsilon: float) -> float:
        tail = _cdf(-epsilon / mu - mu / 2)
        scaled = math.exp(epsilon) * tail if tail else 0.0  # e^ε may overflow where the tail is 0
        return _cdf(-epsilon / mu + mu / 2) - scaled

    low, high = 0.0, mu * mu / 2 + mu * 10 + 10
    for _ in range(80):
        middle = (low + high) / 2
        if delta_of(middle) > delta:
            low = middle
        else:
            high = middle
    return high
