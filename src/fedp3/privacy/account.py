"""The epsilon of many private steps: the Poisson-subsampled Gaussian mechanism, composed.

A step is (z, q).  With neighbours that differ by one record (add/remove), its Rényi divergence of order α is
    log E_{x ~ N(0, z²)} [(1 - q + q e^{(2x - 1) / 2z²})^α] / (α - 1),
orders add up over steps, and epsilon(δ) = min_α R_α + log((α - 1) / α) - log(δ α) / (α - 1)  (RDP).  The whole privacy
loss distribution, composed by dp-accounting where it is installed, is tighter by a tenth and as safe (PLD); both bound
epsilon from above, so the smaller one holds.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedp3.errors import InputError
from fedp3.lookup import pick

Spent = Mapping[tuple[float, float], int]  # (z, q) -> steps taken with them
ADJACENCY = "add/remove one record"
SAMPLING = "Poisson"
WEAK = 150.0  # an epsilon so large that nobody needs it to the digit
LITTLE = 0.05  # noise below which one step costs more than WEAK; sampling, which can only help, is left out there
MANY = 1_000_000  # steps beyond which a loss distribution takes minutes, and RDP alone is asked
ENDLESS = 1 << 62  # as many steps as anybody could ask for
FINEST = 1e-5  # grid of a loss distribution
ORDERS = 1 + np.geomspace(0.03, 2000, 120)


def epsilon(spent: Spent, delta: float, accountant: str = "") -> float:
    """What these steps cost together."""
    real = tuple(sorted((z, q, k) for (z, q), k in spent.items() if k > 0 and q > 0))
    _check(delta, real)
    if not real:
        return 0.0
    if any(z == 0 for z, _, _ in real):
        return math.inf
    return pick(ACCOUNTANTS, accountant or best(), "accountant")(real, delta)


def best() -> str:
    """The tightest accountant that is installed."""
    return "PLD" if importlib.util.find_spec("dp_accounting") else "RDP"


def describe(accountant: str) -> str:
    """An accountant with what made its numbers."""
    if accountant != "PLD":
        return f"{accountant} (fedp3)"
    from importlib.metadata import version

    return f"{accountant} (dp-accounting {version('dp-accounting')}; RDP where that is less)"


def _check(delta: float, spent: tuple[tuple[float, float, int], ...] = ()) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta is a probability in (0, 1), got {delta:g}")
    for z, q, _ in spent:
        if not (z >= 0 and math.isfinite(z)):
            raise InputError(f"a noise multiplier is a number from 0, got {z:g}")
        if not q <= 1:
            raise InputError(f"a sample rate is in (0, 1], got {q:g}")


# --------------------------------------------------------------------------- the two accountants


@lru_cache(maxsize=256)
def _renyi(z: float, q: float) -> npt.NDArray[np.float64]:
    """R_α of one step, for every order."""
    if q == 1 or z < LITTLE:
        return ORDERS / (2 * z * z)
    # The integrand is analytic within πz² of the real line, so a plain sum over so fine a grid is exact to rounding.
    step = min(z, z * z) / 8
    top = min(ORDERS[-1], 4 + 4 * z * z * (10 - math.log(q)))  # beyond about 2 z² log(1/q) no order is the best
    x = np.arange(-12 * z, top + 12 * z + step, step)  # the mass lies around 0 and around α
    normal = -(x**2) / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) + math.log(step)
    mixture = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    each = [_log_sum(normal + a * mixture) / (a - 1) if a <= top else np.inf for a in ORDERS]
    return np.array(each).clip(min=0.0)


def _log_sum(logs: npt.NDArray[np.float64]) -> float:
    most = float(logs.max())
    return most + math.log(float(np.exp(logs - most).sum()))


def _offsets(delta: float) -> npt.NDArray[np.float64]:
    return np.asarray(np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1))


def rdp(spent: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon by Rényi divergences: an upper bound that needs nothing installed."""
    total = sum(k * _renyi(z, q) for z, q, k in spent)
    return float(max(0.0, np.min(total + _offsets(delta))))


@lru_cache(maxsize=64)
def _loss_distribution(z: float, q: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=interval)


@lru_cache(maxsize=4096)
def pld(spent: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon by the composed privacy loss distribution: a certified upper bound; RDP's if smaller."""
    bound, steps = rdp(spent, delta), sum(k for _, _, k in spent)
    # with so little noise the grid would not fit into memory, and the number says enough
    if not bound or bound > WEAK or steps > MANY:
        return bound
    interval = _interval(bound, steps)
    parts = [_loss_distribution(z, q, interval).self_compose(k) for z, q, k in spent]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return min(bound, float(whole.get_epsilon_for_delta(delta)))


def _interval(bound: float, steps: int) -> float:
    """A grid for an epsilon of about this size; its error is always upwards.

    It shifts the sum of all losses by about steps * interval² / 8 and widens it by sqrt(steps) * interval / 2, where
    losses vary by about a fifth of epsilon: that must be much more.
    """
    usual = (1e-3 if steps <= 10_000 else 1e-4) * (10 if bound > 20 else 1)
    wanted = bound / (20 * math.sqrt(steps))
    halvings = math.ceil(math.log2(usual / wanted)) if wanted < usual else 0  # few different ones, which are kept
    return max(usual / 2.0**halvings, FINEST)


ACCOUNTANTS: Mapping[str, Callable[[tuple[tuple[float, float, int], ...], float], float]] = {"PLD": pld, "RDP": rdp}


# --------------------------------------------------------------------------- the other way round


def noise_multiplier(target: float, delta: float, rate: float, steps: int, accountant: str = "") -> float:
    """The least z, to four digits, that keeps so many steps within the target; 0 for an infinite one."""
    _check(delta, ((0.0, rate, steps),))
    if not target > 0:
        raise InputError(f"a target epsilon is above 0, got {target:g}")
    if math.isinf(target) or steps == 0:
        return 0.0

    def cost(by: str) -> Callable[[float], float]:
        return lambda z: epsilon({(z, rate): steps}, delta, by)

    enough = _least(cost("RDP"), target, 0.01, 1e5)
    if (accountant or best()) == "RDP":
        return enough
    return _least(cost("PLD"), target, 0.7 * enough, enough)  # RDP wastes a tenth, never a third


def _least(cost: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The z in [low, high] that costs the target or up to a thousandth less, by false position on logarithms."""
    above, below = cost(low), cost(high)
    if below > target:
        raise InputError(f"no noise multiplier up to {high:g} is enough; take fewer steps or a larger epsilon")
    while below < 0.999 * target and high / low > 1.0001:
        share = math.log(above / (0.9995 * target)) / math.log(above / below) if below > 0 and above < 1e6 else 0.5
        z = low * (high / low) ** min(max(share, 0.02), 0.98)
        now = cost(z)
        low, above, high, below = (z, now, high, below) if now > target else (low, above, z, now)
    digits = 3 - math.floor(math.log10(high))
    return float(math.ceil(high * 10.0**digits) / 10.0**digits)


def allowed_steps(z: float, rate: float, target: float, delta: float, accountant: str = "") -> int:
    """The most steps that stay within the target; found once, so that a run only compares integers."""
    if math.isinf(target):
        return ENDLESS
    if z == 0:
        return 0
    # Per order, epsilon is linear in the steps: RDP's answer needs no search, and PLD's is not far above it.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        each = (target - _offsets(delta)) / _renyi(z, rate)
    low = int(min(max(0.0, np.nanmax(each)), ENDLESS))
    if (accountant or best()) == "RDP" or low >= MANY:
        return low
    high = max(1, low)
    while epsilon({(z, rate): high}, delta, "PLD") <= target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon({(z, rate): middle}, delta, "PLD") <= target else (low, middle)
    return low


def paper_noise(target: float, delta: float, rate: float, steps: int, c: float = 2.0) -> float:
    """The paper's closed form as a multiplier, z = q sqrt(c K log(1/δ)) / epsilon; it names no c (docs/privacy.md)."""
    return rate * math.sqrt(c * steps * math.log(1 / delta)) / target
