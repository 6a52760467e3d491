"""Theorem 2, LDP-FedP3: noise, schedule, bound and communication, printed and correct.

The noise on the mean *gradient* is sigma^2 = c K C^2 log(1/delta) / (m eps)^2 (the printed
log(1/eps) is a misprint: it is not positive for eps >= 1).  Write A = c d log(1/delta) / (m eps)^2.
With K = max(sqrt(L Delta / A) / C, 1 / A) and gamma = min(1 / L, sqrt(Delta A / L) / C),

    (1/K) sum_k E||grad f(w^k)||^2 <= Delta / (gamma K) + gamma L C^2 (kappa + A K) / 2
                                   <= 2 C sqrt(Delta L A)

where E||g_i||^2 <= kappa C^2.  kappa is 1 for batches of fixed size if every *sample's* gradient is
clipped to C, and at most 1 + (1 - b/m) / b for Poisson batches, which makes the 2 a 2.5.  The
printed bound has log(1/sigma) and lacks sqrt(Delta).
"""

from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import NormalDist

from fedp3.core.errors import InputError
from fedp3_paper.theory.framework import Perturbation, iterate, ldp_step
from fedp3_paper.theory.problems import Problem, objective
from fedp3_paper.theory.sketches import perm_k
from fedp3_paper.theory.stats import Check, check, estimate


@dataclass(frozen=True, slots=True)
class Privacy:
    """(epsilon, delta) for one of m samples of a client, and c of the moments accountant."""

    epsilon: float
    delta: float
    m: int
    c: float = 8.0

    def __post_init__(self) -> None:
        if self.epsilon <= 0 or not 0 < self.delta < 1 or self.m < 1 or self.c <= 0:
            raise InputError(
                "privacy: want epsilon > 0, 0 < delta < 1, m >= 1 and c > 0, "
                f"got {self.epsilon}, {self.delta}, {self.m} and {self.c}"
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps, step size and noise of Theorem 2."""

    K: int
    gamma: float
    sigma: float


def sigma_sq(p: Privacy, K: int, C: float) -> float:
    """The variance c K C^2 log(1/delta) / (m eps)^2, eq. (dp_fedp3_privacy_guarantee)."""
    return p.c * K * C**2 * log(1 / p.delta) / (p.m * p.epsilon) ** 2


def sigma_sq_printed(p: Privacy, K: int, C: float) -> float:
    """As in the statement of Theorem 2, with log(1/eps)."""
    return p.c * K * C**2 * log(1 / p.epsilon) / (p.m * p.epsilon) ** 2


def noise_level(p: Privacy, d: int) -> float:
    """A = c d log(1/delta) / (m eps)^2."""
    return p.c * d * log(1 / p.delta) / (p.m * p.epsilon) ** 2


def schedule(p: Privacy, d: int, L: float, gap: float, C: float) -> Schedule:
    """K rounded up; max for K and min for gamma, as printed."""
    A = noise_level(p, d)
    K = ceil(max(sqrt(L * gap / A) / C, 1 / A))
    gamma = min(1 / L, sqrt(gap * A / L) / C)
    return Schedule(K=K, gamma=gamma, sigma=sqrt(sigma_sq(p, K, C)))


def kappa(b: int, m: int, *, poisson: bool) -> float:
    """The bound of E||g_i||^2 / C^2.

    It is 1 for b distinct samples, and (b + 1 - b/m) / b in (1, 2] for Poisson batches.
    """
    return (b + 1 - b / m) / b if poisson else 1.0


def bound_at(
    s: Schedule, A: float, L: float, gap: float, C: float, second_moment: float = 1.0
) -> float:
    """The bound of eq. (potato) with kappa in it, for any K and gamma <= 1/L."""
    return gap / (s.gamma * s.K) + s.gamma * L * C**2 * (second_moment + A * s.K) / 2


def bound(p: Privacy, d: int, L: float, gap: float, C: float) -> float:
    """2 C sqrt(Delta L c d log(1/delta)) / (m eps)."""
    return 2 * C * sqrt(gap * L * noise_level(p, d))


def bound_without_gap(p: Privacy, d: int, L: float, C: float) -> float:
    """As printed but with log(1/delta): sqrt(Delta_0) is missing, so it does not scale with f."""
    return 2 * C * sqrt(L * noise_level(p, d))


def communication(p: Privacy, d: int, L: float, gap: float, C: float) -> float:
    """Values sent up, d K.

    With l = log(1/delta) they are max(m eps sqrt(d L Delta / (c l)) / C, (m eps)^2 / (c l)).
    """
    A = noise_level(p, d)
    return d * max(sqrt(L * gap / A) / C, 1 / A)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The exact delta of K Gaussian releases without subsampling.

    Args:
        epsilon: the epsilon that delta belongs to.
        mu: sqrt(K) * sensitivity / sigma.
    """
    Phi = NormalDist().cdf
    return Phi(-epsilon / mu + mu / 2) - exp(epsilon) * Phi(-epsilon / mu - mu / 2)


def largest_mu(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-private, by bisection."""
    low, high = 1e-6, 100.0
    for _ in range(200):
        mid = (low + high) / 2
        low, high = (low, mid) if gaussian_delta(epsilon, mid) > delta else (mid, high)
    return low


def true_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon for which mu is (epsilon, delta)-private."""
    low, high = 0.0, 500.0
    for _ in range(200):
        mid = (low + high) / 2
        low, high = (mid, high) if gaussian_delta(mid, mu) > delta else (low, mid)
    return high


def c_needed(epsilon: float, delta: float) -> float:
    """The c that makes the closed form exact for full batches (b = m); it is no constant.

    Neighbouring data sets differ in the value of one sample.
    """
    # The sensitivity is 2C/m, and sigma^2 = c K C^2 log(1/delta)/(m eps)^2.
    # So mu = 2 eps / sqrt(c log(1/delta)).
    return 4 * epsilon**2 / (largest_mu(epsilon, delta) ** 2 * log(1 / delta))


@dataclass(frozen=True, slots=True)
class Planned:
    """The schedule and bound of Theorem 2 for one problem."""

    epsilon: float
    K: int
    gamma: float
    sigma: float  # on the mean gradient
    C: float
    values: int  # sent up by all clients together, d K
    bound: float


def planned(problem: Problem, p: Privacy) -> Planned:
    """The schedule and the bound for a problem with samples, C being the bound of its samples."""
    if problem.samples is None:
        raise InputError(f"Theorem 2 on {problem.name!r}: the problem has no samples")
    C, L, d = problem.samples.bound, problem.L_max, problem.d
    gap = float(objective(problem, problem.start[None])[0]) - float(problem.lower.min())
    s = schedule(p, d, L, gap, C)
    limit = bound_at(s, noise_level(p, d), L, gap, C)
    return Planned(
        epsilon=p.epsilon,
        K=s.K,
        gamma=s.gamma,
        sigma=s.sigma,
        C=C,
        values=d * s.K,
        bound=limit,
    )


def measure(
    problem: Problem, p: Privacy, *, b: int, runs: int, seed: int, on_weights: bool = False
) -> Check:
    """Algorithm 5 under the schedule of Theorem 2: mean ||grad||^2 over steps, and the bound."""
    s = planned(problem, p)
    noise = Perturbation(b=b, C=s.C, sigma=s.sigma, on_weights=on_weights)
    step = ldp_step(problem, s.gamma, perm_k(problem.n, problem.blocks), noise, seed=seed)
    trace = iterate(problem, step, s.K, runs)
    where = "weights" if on_weights else "gradient"
    case = f"eps={p.epsilon:g}, noise on the {where}"
    return check(case, s.K, estimate(trace.seen.mean(axis=0)), s.bound)
