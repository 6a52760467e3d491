"""What a distinguishing test proves: error rates with certainty, and the epsilon below which they cannot be had.

From the scores of two neighbouring inputs, a threshold is chosen on one half of the runs and its errors A (false
alarms) and B (misses) are bounded from above on the other.  A mechanism as good as a Gaussian of shift mu satisfies
Φ⁻¹(1 - A) - Φ⁻¹(B) <= mu, and mu gives epsilon by δ = Φ(-ε/mu + mu/2) - e^ε Φ(-ε/mu - mu/2).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import NormalDist

SURE = 1e-7  # the chance that an error rate is above its bound

_normal = NormalDist()


def gaussian_lower(outs: Sequence[float], ins: Sequence[float], delta: float) -> float:
    """The epsilon that these scores prove; the scores of inputs with the canary should be the larger ones."""
    A, B = error_bounds(outs, ins)
    mu = _normal.inv_cdf(1 - A) - _normal.inv_cdf(B) if A < 1 and B < 1 else 0.0
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def error_bounds(outs: Sequence[float], ins: Sequence[float]) -> tuple[float, float]:
    """Upper bounds of false alarms and misses of the threshold that the first half of the runs likes best."""
    half = len(outs) // 2
    low, high = sorted(outs[:half]), sorted(ins[:half])
    best = max([*low, *high], key=lambda c: bisect_right(low, c) - bisect_right(high, c))
    alarms, misses = sum(x > best for x in outs[half:]), sum(x <= best for x in ins[half:])
    return rate_above(alarms, len(outs) - half), rate_above(misses, len(ins) - half)


def rate_above(errors: int, n: int) -> float:
    """Clopper-Pearson: the rate under which so few errors would have a chance of SURE."""
    if errors >= n:
        return 1.0
    low, high = errors / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - binomial_tail(errors + 1, n, middle) > SURE else (low, middle)
    return high


def binomial_tail(k: int, n: int, p: float) -> float:
    """P[Bin(n, p) >= k]."""
    if k <= 0 or p >= 1:
        return 1.0
    log = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(p) + (n - i) * math.log1p(-p)
        for i in range(k, n + 1)
    )
    return min(1.0, math.fsum(map(math.exp, log)))


def _cdf(x: float) -> float:
    """Φ, also far out to the left: `NormalDist.cdf` loses its digits there, and e^ε would bring the loss back."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at delta of a Gaussian mechanism whose neighbours are mu deviations apart."""

    def reached(e: float) -> float:
        far = _cdf(-e / mu - mu / 2)
        return _cdf(-e / mu + mu / 2) - (math.exp(e) * far if far else 0.0)

    low, high = 0.0, mu * mu / 2 + mu * 10 + 10
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > delta else (low, middle)
    return high
