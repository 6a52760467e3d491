"""Findings of an audit, and the probability that correct code would be found so far off.

Every probability here is an upper bound that holds for finite samples.  None is a normal
approximation, so that the rate of false alarms is known.  A finding fails below `LEVEL`, and an
audit has at most `MOST_FINDINGS` findings: correct code fails in at most LEVEL * MOST_FINDINGS =
1e-4 of all audits.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

LEVEL = 1e-7  # correct code fails one finding with at most this probability
MOST_FINDINGS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of an audit.

    Args:
        part: the part of the audit.
        what: what was measured.
        where: in which network and for which client; empty if in no particular one.
        note: what the worst case was.
        measured: the measured value.
        low: the smallest value that passes.
        high: the largest value that passes.
        p_value: an upper bound on the probability that correct code gives a value at least this
            far from its expectation; None where correct code can only give values within the
            limits.
        refutable: the largest epsilon that this check could have refuted; None where it compares
            no epsilon.
        error: the text of the exception that ended the check; empty if there was none.
    """

    part: str
    what: str
    measured: float
    low: float = -math.inf
    high: float = math.inf
    p_value: float | None = None
    refutable: float | None = None
    error: str = ""
    where: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is within its limits and not improbable; NaN never passes."""
        probable = self.p_value is None or self.p_value >= LEVEL
        return not self.error and probable and self.low <= self.measured <= self.high


def improbable(part: str, what: str, measured: float, p_value: float, note: str = "") -> Finding:
    """A value that fails if correct code would rarely give it."""
    p_value = _probability(p_value)
    return Finding(part=part, what=what, measured=measured, p_value=p_value, note=note)


def least_probable(findings: Sequence[Finding]) -> list[Finding]:
    """The least probable of several findings, of which there may be none.

    Its probability is that of any of them being so far off.
    """
    if not findings:
        return []
    worst = min(findings, key=lambda f: 1.0 if f.p_value is None else f.p_value)
    return [replace(worst, p_value=min(1.0, len(findings) * (worst.p_value or 0.0)))]


def located(findings: Iterable[Finding], where: str) -> list[Finding]:
    """The same findings, with where they were made."""
    return [replace(f, where=where) for f in findings]


def at_most(part: str, what: str, measured: float, high: float) -> Finding:
    """A value that must not be above a limit."""
    return Finding(part=part, what=what, measured=measured, high=high)


def equal(part: str, what: str, measured: float, expected: float) -> Finding:
    """A value that must be exactly this one."""
    return Finding(part=part, what=what, measured=measured, low=expected, high=expected)


def crashed(part: str, error: Exception) -> Finding:
    """A part that ended in an exception, which is a failure like any other."""
    text = f"{type(error).__name__}: {error}".strip()
    return Finding(part=part, what="the check ran to its end", measured=0.0, low=1.0, error=text)


def _probability(p: float) -> float:
    return 0.0 if math.isnan(p) else min(1.0, p)


# --------------------------------------------------------------------------- tail probabilities


def energy_tail(squares: float, count: float) -> float:
    """P of a sum of `count` squared standard normal draws at least this far from its mean.

    The bounds are those of Laurent and Massart (2000), Lemma 1.
    """
    if not count:
        return 1.0 if squares == 0 else 0.0
    excess = squares - count
    if excess < 0:
        return 2 * math.exp(-(excess * excess) / (4 * count))
    return 2 * math.exp(-quadratic_exponent(excess, math.sqrt(count), 1.0))


def product_tail(total: float, count: float) -> float:
    """P of a sum of `count` products of two independent standard normal draws at least this far."""
    if not count:
        return 1.0
    return 2 * math.exp(-quadratic_exponent(abs(total), math.sqrt(count / 2), 0.5))


def quadratic_exponent(excess: float, frobenius: float, operator: float) -> float:
    """The exponent u such that P[x'Ax - tr A >= excess] <= exp(-u), for a standard normal vector x.

    Args:
        excess: the distance above the mean.
        frobenius: the Frobenius norm of A.
        operator: the operator norm of A.
    """
    if math.isnan(excess):
        return math.inf
    root = (math.sqrt(frobenius**2 + 2 * operator * max(0.0, excess)) - frobenius) / (2 * operator)
    return root * root


def binomial_two_sided(k: float, n: float, p: float) -> float:
    """P of a binomial count at least as far from its mean as k (Chernoff, both sides)."""
    if not n:
        return 1.0
    share = min(1.0, k / n)
    if p <= 0 or p >= 1:
        return 1.0 if share == p else 0.0
    divergence = 0.0
    if share > 0:
        divergence += share * math.log(share / p)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - p))
    return 2 * math.exp(-n * divergence)


def cosine_tail(cosine: float, dimension: int, pairs: int) -> float:
    """P that any of so many pairs of independent normal vectors has an angle this small.

    A cap of the unit sphere is at most half of a sphere that has the radius of its rim.
    """
    if math.isnan(cosine):
        return 0.0
    left = max(0.0, 1 - min(1.0, abs(cosine)) ** 2)
    return pairs * float(left ** ((dimension - 1) / 2))


def kolmogorov_tail(distance: float, count: int) -> float:
    """P that an empirical distribution is so far from the true one (Massart's inequality)."""
    return 2 * math.exp(-2 * count * distance * distance)
