"""The paper's table of LDP algorithms: communication to the same utility, without constants.

The utility is C sqrt(L d log(1/delta)) / (m eps).  Every row is the printed formula with natural
logarithms.  Four rows count values sent.  Q-DPSGD-1's is smaller than theirs by a factor of n d and
looks like a number of *rounds* (compare K = m^2 eps^2 / (d log(1/delta)) of Theorem 2), so
`in_values` multiplies it by the n d values that n clients send uncompressed in a round.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, sqrt

from fedp3.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments of the formulas.

    Args:
        n: the number of clients.
        m: the number of samples per client.
        d: the number of parameters.
        epsilon: of (epsilon, delta)-LDP.
        delta: of (epsilon, delta)-LDP.
        omega: the variance of the compression.
        sigma2: the variance of the gradient.
    """

    n: int
    m: int
    d: int
    epsilon: float
    delta: float
    omega: float
    sigma2: float = 1.0

    def __post_init__(self) -> None:
        if min(self.n, self.m, self.d) < 1 or self.epsilon <= 0 or not 0 < self.delta < 1:
            raise InputError(
                "ldp-table: want n, m, d >= 1, epsilon > 0 and 0 < delta < 1, got "
                f"n={self.n} m={self.m} d={self.d} epsilon={self.epsilon} delta={self.delta}"
            )
        if self.omega < 0 or self.sigma2 <= 0:
            raise InputError(
                f"ldp-table: want omega >= 0 and sigma2 > 0, got {self.omega} and {self.sigma2}"
            )


def first_order(s: Setting) -> float:
    """The term m eps sqrt(d) / sqrt(log(1/delta))."""
    return s.m * s.epsilon * sqrt(s.d) / sqrt(log(1 / s.delta))


def second_order(s: Setting) -> float:
    """The term m^2 eps^2 / log(1/delta)."""
    return (s.m * s.epsilon) ** 2 / log(1 / s.delta)


def ratio(s: Setting) -> float:
    """The factor (n / (1 + omega))^(3/2)."""
    share = s.n / (1 + s.omega)
    return share * sqrt(share)


def q_dpsgd_1(s: Setting) -> float:
    return (1 + s.n / (s.m * s.sigma2)) * second_order(s) / s.d


def ldp_svrg_spider(s: Setting) -> float:
    return s.n * sqrt(s.n) * first_order(s)


def sdm_dsgd(s: Setting) -> float:
    return s.n**2 * ratio(s) * first_order(s) + s.n / (1 + s.omega) * second_order(s)


def cdp_sgd(s: Setting) -> float:
    return ratio(s) * first_order(s) + s.n / (1 + s.omega) * second_order(s)


def ldp_fedp3(s: Setting) -> float:
    return first_order(s) + second_order(s)


ROWS: Mapping[str, Callable[[Setting], float]] = {
    "Q-DPSGD-1": q_dpsgd_1,
    "LDP SVRG/SPIDER": ldp_svrg_spider,
    "SDM-DSGD": sdm_dsgd,
    "CDP-SGD": cdp_sgd,
    "LDP-FedP3": ldp_fedp3,
}
IN_ROUNDS = frozenset({"Q-DPSGD-1"})


def table(s: Setting) -> dict[str, float]:
    """Every row as printed."""
    return {name: row(s) for name, row in ROWS.items()}


def in_values(s: Setting) -> dict[str, float]:
    """Every row in values sent; those that look like rounds are multiplied by n d."""
    values = table(s)
    for name in IN_ROUNDS:
        values[name] *= s.n * s.d
    return values
