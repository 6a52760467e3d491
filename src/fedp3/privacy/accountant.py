"""The epsilon of many private steps: the composed Poisson-subsampled Gaussian mechanism.

A step has a noise multiplier z and a sample rate q.  Neighbouring data sets differ by one record
(add/remove).  There are two accountants:

- RDP: the Rényi divergence of order α of one step is
      R_α = log E_{x ~ N(0, z²)} [(1 - q + q e^{(2x - 1) / 2z²})^α] / (α - 1).
  Divergences add up over steps, and
      epsilon(δ) = min_α R_α + log((α - 1) / α) - log(δ α) / (α - 1).
- PLD: dp-accounting composes the entire privacy loss distribution, which gives an epsilon about a
  tenth smaller.

Both bound epsilon from above.  PLD is what every number in this package is; RDP is our own code and
checks it: no epsilon is ever stated that is above RDP's.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from fedp3.core.errors import InputError
from fedp3.core.registry import pick

Spent = Mapping[tuple[float, float], int]  # (noise multiplier, sample rate) -> number of steps
Steps = tuple[tuple[float, float, int], ...]  # the same, sorted: (z, q, number of steps)
ADJACENCY = "add/remove one record"
SAMPLING = "Poisson"

# Above this epsilon the RDP bound is not refined: nobody needs such a number to the digit, and with
# so little noise the grid of a loss distribution would not fit into memory.
LARGE_EPSILON = 150.0
# Below this noise multiplier one step costs more than LARGE_EPSILON.  There the gain from sampling
# is ignored, which only makes the bound larger.
TINY_NOISE = 0.05
# Above this number of steps RDP is used alone: composing loss distributions would take minutes.
MAX_PLD_STEPS = 1_000_000
# More noise is counted as this much, which only makes the bound larger: above 1e154 its square
# overflows.  What anybody draws is below 1e5.
LARGEST_NOISE = 1e6
UNLIMITED_STEPS = 1 << 62  # stands for "as many steps as wanted"
FINEST_GRID = 1e-5  # the smallest grid interval of a loss distribution
ORDERS = 1 + np.geomspace(0.03, 2000, 120)  # the orders α that are tried


def epsilon(spent: Spent, delta: float, accountant: str = "PLD") -> float:
    """The epsilon of these steps together.

    Args:
        spent: number of steps by noise multiplier and sample rate.
        delta: the delta at which epsilon holds.
        accountant: "PLD", or "RDP" for the bound that checks it.
    """
    steps = tuple(sorted((z, q, k) for (z, q), k in spent.items() if k > 0 and q > 0))
    _check(delta, steps)
    if not steps:
        return 0.0
    if any(z == 0 for z, _, _ in steps):
        return math.inf
    steps = tuple((min(z, LARGEST_NOISE), q, k) for z, q, k in steps)
    return pick(ACCOUNTANTS, accountant, "accountant")(steps, delta)


def require() -> None:
    """Raise an error if the package that accounts for LDP is not installed."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise InputError(
            "LDP is accounted with dp-accounting, which is not installed; add it with: "
            "pip install 'fedp3[privacy]'"
        )


def describe() -> str:
    """The accountant, with the software behind it."""
    return f"PLD (dp-accounting {version('dp-accounting')}; RDP (fedp3) where that is less)"


def _check(delta: float, steps: Steps = ()) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta is a probability in (0, 1), got {delta:g}")
    for z, q, _ in steps:
        if not (z >= 0 and math.isfinite(z)):
            raise InputError(f"a noise multiplier is a finite number of at least 0, got {z:g}")
        if not q <= 1:
            raise InputError(f"a sample rate is in (0, 1], got {q:g}")


# --------------------------------------------------------------------------- the two accountants


@lru_cache(maxsize=256)
def _renyi(z: float, q: float) -> npt.NDArray[np.float64]:
    """R_α of one step, for every order."""
    if q == 1 or z < TINY_NOISE:
        return ORDERS / (2 * z * z)
    # The integrand is analytic within πz² of the real line, so that a plain sum over a grid as
    # fine as this one is exact up to rounding.
    step = min(z, z * z) / 8
    # Beyond about 2 z² log(1/q) no order is the best.
    top = min(ORDERS[-1], 4 + 4 * z * z * (10 - math.log(q)))
    x = np.arange(-12 * z, top + 12 * z + step, step)  # the mass lies around 0 and around α
    normal = -(x**2) / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) + math.log(step)
    mixture = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    divergences = [_log_sum(normal + a * mixture) / (a - 1) if a <= top else np.inf for a in ORDERS]
    return np.array(divergences).clip(min=0.0)


def _log_sum(logs: npt.NDArray[np.float64]) -> float:
    """The logarithm of a sum, from the logarithms of its terms."""
    largest = float(logs.max())
    return largest + math.log(float(np.exp(logs - largest).sum()))


def _offsets(delta: float) -> npt.NDArray[np.float64]:
    """What is added to R_α to get epsilon(δ), for every order."""
    return np.asarray(np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1))


def rdp(steps: Steps, delta: float) -> float:
    """Epsilon by Rényi divergences: an upper bound that needs no further package."""
    total = sum(k * _renyi(z, q) for z, q, k in steps)
    bound = float(np.min(total + _offsets(delta)))
    return math.inf if math.isnan(bound) else max(0.0, bound)  # what is unknown has no bound


@lru_cache(maxsize=64)
def _loss_distribution(z: float, q: float, interval: float) -> Any:
    require()
    from dp_accounting.pld import privacy_loss_distribution as distributions

    return distributions.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval
    )


@lru_cache(maxsize=4096)
def pld(steps: Steps, delta: float) -> float:
    """Epsilon by the composed privacy loss distribution, or by RDP where that is smaller.

    Both are certified upper bounds.
    """
    bound = rdp(steps, delta)
    count = sum(k for _, _, k in steps)
    if not bound or bound > LARGE_EPSILON or count > MAX_PLD_STEPS:
        return bound
    interval = _grid_interval(bound, count)
    parts = [_loss_distribution(z, q, interval).self_compose(k) for z, q, k in steps]
    composed = parts[0]
    for part in parts[1:]:
        composed = composed.compose(part)
    return min(bound, float(composed.get_epsilon_for_delta(delta)))


def _grid_interval(bound: float, count: int) -> float:
    """A grid interval for an epsilon of about this size; its error is always upwards.

    The grid shifts the sum of all losses by about count * interval² / 8 and widens it by
    sqrt(count) * interval / 2.  Losses vary by about a fifth of epsilon, which must be much more.
    """
    usual = 1e-3 if count <= 10_000 else 1e-4
    if bound > 20:
        usual *= 10
    wanted = bound / (20 * math.sqrt(count))
    if wanted >= usual:
        return max(usual, FINEST_GRID)
    # Only powers of two below the usual interval: few different grids, which the cache retains.
    halvings = math.ceil(math.log2(usual / wanted))
    return max(usual / 2.0**halvings, FINEST_GRID)


ACCOUNTANTS: Mapping[str, Callable[[Steps, float], float]] = {"PLD": pld, "RDP": rdp}


# --------------------------------------------------------------------------- the inverse functions


def noise_multiplier(
    target: float, delta: float, rate: float, steps: int, accountant: str = "PLD"
) -> float:
    """The least noise multiplier, to four digits, under which the steps stay within the target.

    Args:
        target: the epsilon that is allowed; an infinite one needs no noise.
        delta: the delta at which epsilon holds.
        rate: the sample rate.
        steps: number of steps.
        accountant: "PLD", or "RDP" for the bound that checks it.
    """
    _check(delta, ((0.0, rate, steps),))
    if not target > 0:
        raise InputError(f"a target epsilon is above 0, got {target:g}")
    if math.isinf(target) or steps == 0:
        return 0.0

    def cost_by(name: str) -> Callable[[float], float]:
        return lambda z: epsilon({(z, rate): steps}, delta, name)

    by_rdp = _least_noise(cost_by("RDP"), target, 0.01, 1e5)
    if accountant == "RDP":
        return by_rdp
    # RDP needs about a tenth more noise than PLD, and never a third more.
    return _least_noise(cost_by("PLD"), target, 0.7 * by_rdp, by_rdp)


def _least_noise(cost: Callable[[float], float], target: float, low: float, high: float) -> float:
    """A noise multiplier in [low, high] that costs the target or up to a thousandth less.

    It is found by false position on logarithms.
    """
    cost_low, cost_high = cost(low), cost(high)
    if cost_high > target:
        raise InputError(
            f"no noise multiplier up to {high:g} is enough; take fewer steps or a larger epsilon"
        )
    while cost_high < 0.999 * target and high / low > 1.0001:
        share = 0.5
        if cost_high > 0 and cost_low < 1e6:
            share = math.log(cost_low / (0.9995 * target)) / math.log(cost_low / cost_high)
        z = low * (high / low) ** min(max(share, 0.02), 0.98)
        cost_z = cost(z)
        if cost_z > target:
            low, cost_low = z, cost_z
        else:
            high, cost_high = z, cost_z
    digits = 3 - math.floor(math.log10(high))
    return float(math.ceil(high * 10.0**digits) / 10.0**digits)


def allowed_steps(
    z: float, rate: float, target: float, delta: float, accountant: str = "PLD"
) -> int:
    """The largest number of steps that stays within the target.

    Args:
        z: the noise multiplier.
        rate: the sample rate.
        target: the epsilon that is allowed.
        delta: the delta at which epsilon holds.
        accountant: "PLD", or "RDP" for the bound that checks it.
    """
    if math.isinf(target):
        return UNLIMITED_STEPS
    if z == 0:
        return 0
    # For each order, epsilon is linear in the steps: so RDP needs no search, and PLD allows
    # slightly more.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        by_order = (target - _offsets(delta)) / _renyi(z, rate)
    low = int(min(max(0.0, np.nanmax(by_order)), UNLIMITED_STEPS))
    if accountant == "RDP" or low >= MAX_PLD_STEPS:
        return low

    def fits(steps: int) -> bool:
        return epsilon({(z, rate): steps}, delta, "PLD") <= target

    high = max(1, low)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def paper_noise(target: float, delta: float, rate: float, steps: int, c: float = 2.0) -> float:
    """The paper's closed form as a noise multiplier, z = q sqrt(c K log(1/δ)) / epsilon.

    The paper does not name the constant c (see docs/privacy.md).
    """
    return rate * math.sqrt(c * steps * math.log(1 / delta)) / target
