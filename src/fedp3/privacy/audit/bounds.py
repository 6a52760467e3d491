"""Lower bounds of epsilon, none of which uses the accountant.

A test of two neighbours has error rates A (false alarms) and B (misses), which are bounded from
above by the number of its errors.  A mechanism that is as private as a Gaussian of shift mu
satisfies Φ⁻¹(1 - A) - Φ⁻¹(B) <= mu, and mu gives epsilon by
δ = Φ(-ε/mu + mu/2) - e^ε Φ(-ε/mu - mu/2).

`composed_lower` is the epsilon of many subsampled steps, from the distribution of their privacy
loss.  Everything in it is rounded downwards.
"""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from fedp3.privacy.audit.findings import LEVEL

ERROR_PROBABILITY = LEVEL / 2  # the probability that an error rate is above its bound
MOST_CELLS = 1 << 21  # of a discretised privacy loss
MOST_STEPS = 20_000  # above this number of steps the bound is that of this number
LEAST_DELTA = 1e-9  # below it, rounding errors of a Fourier transform would show

_normal = NormalDist()


def gaussian_lower(alarms: int, misses: int, runs: int, delta: float) -> float:
    """The epsilon that a test with these errors proves.

    Args:
        alarms: runs without the canary in which the test reported it.
        misses: runs with the canary in which the test did not report it.
        runs: number of runs of each kind.
        delta: the delta at which epsilon holds.
    """
    A, B = rate_above(alarms, runs), rate_above(misses, runs)
    if A >= 1 or B >= 1:
        return 0.0
    mu = _normal.inv_cdf(1 - A) - _normal.inv_cdf(B)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def refutable(runs: int, delta: float) -> float:
    """The largest epsilon that a test with so many runs of each kind can prove: without errors."""
    return gaussian_lower(0, 0, runs, delta)


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


# --------------------------------------------------------------------------- composed steps


def composed_lower(z: float, q: float, steps: int, delta: float) -> float:
    """A lower bound of the epsilon of so many Poisson-subsampled Gaussian steps.

    It is the hockey-stick divergence of removing one record.  The privacy loss of a step is
    L = log(1 - q + q e^{(2x - 1) / 2z²}) with x ~ (1 - q) N(0, z²) + q N(1, z²), and
    δ(ε) = E[max(0, 1 - e^{ε - sum L})].  Losses are rounded down to a grid and cut off above, which
    only makes δ smaller.  For q = 1 the formula of the Gaussian mechanism is exact.
    """
    if not steps:
        return 0.0
    if q == 1:
        return gaussian_epsilon(math.sqrt(steps) / z, delta)
    steps, delta = min(steps, MOST_STEPS), max(delta, LEAST_DELTA)
    low = math.log1p(-q)
    # The mean and deviation of a coarse loss give the window that a fine one needs.
    top = _loss(1 + 9 * z, z, q)
    losses, masses = _loss_cells(z, q, (top - low) / 20_000, low, top)
    mean = float(losses @ masses)
    deviation = math.sqrt(max(0.0, float(losses**2 @ masses) - mean**2))
    width = 2 * (top - low) + 30 * math.sqrt(steps) * deviation
    interval = max(
        width / MOST_CELLS, min(width / 4096, 0.02 * math.sqrt(steps) * deviation / steps)
    )
    losses, masses = _loss_cells(z, q, interval, low, top)
    cells = 1 << math.ceil(math.log2(max(width / interval, 2 * len(losses))))
    padded = np.zeros(cells)
    padded[: len(masses)] = masses
    composed = np.fft.irfft(np.fft.rfft(padded) ** steps, cells).clip(min=0.0)
    # Cell j stands for steps * low + j * interval, modulo the width of the window.
    begin = steps * mean - width / 2
    offset = math.floor((begin - steps * losses[0]) / interval)
    order = (offset + np.arange(cells)) % cells
    sums = steps * losses[0] + (offset + np.arange(cells)) * interval
    return _epsilon_of(sums, composed[order], delta)


def _loss(x: float, z: float, q: float) -> float:
    return float(np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z)))


def _loss_cells(
    z: float, q: float, interval: float, low: float, top: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The lower ends of cells of the loss, and the probability of each."""
    count = math.ceil((top - low) / interval)
    ends = low + interval * np.arange(count + 1)
    # The inverse of the loss: x(l) = z² log((e^l - 1 + q) / q) + 1/2
    with np.errstate(divide="ignore"):
        x = z * z * (np.log(np.expm1(ends).clip(min=-q) + q) - math.log(q)) + 0.5
    x[0], x[-1] = -math.inf, math.inf  # what is above the last cell counts as if it were in it
    cdf = (1 - q) * _normal_cdf(x / z) + q * _normal_cdf((x - 1) / z)
    masses: npt.NDArray[np.float64] = np.diff(cdf).clip(min=0.0)
    return np.asarray(ends[:-1], dtype=np.float64), masses


def _normal_cdf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(torch.special.ndtr(torch.from_numpy(x)).numpy())


def _epsilon_of(
    sums: npt.NDArray[np.float64], masses: npt.NDArray[np.float64], delta: float
) -> float:
    """The epsilon at which the hockey-stick divergence of this loss is delta."""

    def delta_of(epsilon: float) -> float:
        above = sums > epsilon
        return float((-np.expm1(epsilon - sums[above])) @ masses[above])

    if delta_of(0.0) <= delta:
        return 0.0
    low, high = 0.0, float(sums[-1])
    for _ in range(60):
        middle = (low + high) / 2
        if delta_of(middle) > delta:
            low = middle
        else:
            high = middle
    return low
