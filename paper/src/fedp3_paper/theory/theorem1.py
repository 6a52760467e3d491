"""Theorem 1, model aggregation by S: bounds, iteration counts and costs, printed and correct.

With A = L_max and B = 0 in the ABC assumption,

    E[f(w^{k+1})] - m <= (1 + L L_max gamma^2) (f(w^k) - m) - gamma ||grad||^2,

where m is a lower bound of *every* f_i and L is the mean of L_i.  Hence

    min_k E||grad f(w^k)||^2 <= (1 + L L_max gamma^2)^K (f(w^0) - m) / (gamma K),

half of what is printed (the 2 is needed only for B > 0).  With m = inf f instead, a term
L gamma Z / 2 must be added, where Z = 2 L_max (inf f - mean_i inf f_i); the printed theorem omits
it.  gamma = 1 / sqrt(L L_max K) makes the power <= e, so that K >= 36 Delta^2 L L_max / eps^2 steps
suffice for eps.
"""

from dataclasses import dataclass
from math import ceil, e, sqrt

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.digits import logistic, network
from fedp3_paper.theory.draws import Array
from fedp3_paper.theory.framework import fedp3_step, iterate
from fedp3_paper.theory.problems import (
    Problem,
    Quadratics,
    as_problem,
    objective,
    random_quadratics,
    scaled,
)
from fedp3_paper.theory.sketches import identity, perm_k
from fedp3_paper.theory.stats import Check, check, smallest_mean


def step_size(problem: Problem, K: int) -> float:
    """The step 1 / sqrt(L_bar L_max K), the largest that Theorem 1 allows."""
    return 1 / sqrt(problem.L_bar * problem.L_max * K)


def bound(problem: Problem, gamma: float, K: int, start: Array | None = None) -> float:
    """Theorem 1 with the factor 2 as printed, and Delta_0 above a lower bound of all f_i."""
    gap = start_loss(problem, start) - float(problem.lower.min())
    return 2 * power(problem, gamma, K) * gap / (gamma * K)


def bound_tight(problem: Problem, gamma: float, K: int, start: Array | None = None) -> float:
    """Half of `bound`: B = 0 needs no factor 2."""
    return bound(problem, gamma, K, start) / 2


def bound_inf_f(problem: Problem, gamma: float, K: int, start: Array | None = None) -> float:
    """Theorem 1 read literally, f^inf = inf f: false when the clients' minima differ."""
    return (
        2 * power(problem, gamma, K) * (start_loss(problem, start) - inf_f(problem)) / (gamma * K)
    )


def bound_heterogeneous(
    problem: Problem, gamma: float, K: int, start: Array | None = None
) -> float:
    """The same with the omitted term L_bar gamma Z."""
    return bound_inf_f(problem, gamma, K, start) + problem.L_bar * gamma * heterogeneity(problem)


def heterogeneity(problem: Problem) -> float:
    """Z = 2 L_max (inf f - mean_i inf f_i) >= 0, zero only if one point minimises every f_i."""
    return 2 * problem.L_max * (inf_f(problem) - float(problem.lower.mean()))


def power(problem: Problem, gamma: float, K: int) -> float:
    return float((1 + problem.L_bar * problem.L_max * gamma**2) ** K)


def start_loss(problem: Problem, start: Array | None) -> float:
    return float(objective(problem, (problem.start if start is None else start)[None])[0])


def inf_f(problem: Problem) -> float:
    if problem.f_inf is None:
        raise InputError(
            f"problem {problem.name!r}: inf f is not known; use the common lower bound"
        )
    return problem.f_inf


def iterations(gap: float, L_bar: float, L_max: float, eps: float) -> int:
    """Steps after which Theorem 1 guarantees min_k E||grad||^2 <= eps."""
    return max(1, ceil(36 * gap**2 * L_bar * L_max / eps**2))


def iterations_printed(gap: float, L_bar: float, L_max: float, eps: float) -> int:
    """The same as printed after Theorem 1, with L_bar L_max in the denominator."""
    return max(1, ceil(36 * gap**2 / (L_bar * L_max * eps**2)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Values sent up after which the bounds guarantee min_k E||grad||^2 <= eps."""

    fedp3: float
    dgd: float
    dgd_same_lemma: float  # gradient descent analysed with the looser Lemma 1, as FedP3 is

    @property
    def gain(self) -> float:
        """DGD over FedP3, of order n eps: above 1 is a saving."""
        return self.dgd / self.fedp3

    @property
    def gain_same_lemma(self) -> float:
        """Exactly of order n."""
        return self.dgd_same_lemma / self.fedp3


def costs(n: int, d: int, gap: float, L: float, eps: float) -> Costs:
    """The costs if L_i = L: FedP3 sends d values a step (Perm-K), DGD n d in 2 L Delta / eps."""
    k_fedp3 = (2 * e * gap * L / eps) ** 2
    return Costs(fedp3=d * k_fedp3, dgd=n * d * 2 * L * gap / eps, dgd_same_lemma=n * d * k_fedp3)


def measure(problem: Problem, K: int, *, runs: int, seed: int, case: str) -> Check:
    """FedP3 with Perm-K over the problem's blocks, against Theorem 1."""
    limit = bound(problem, step_size(problem, K), K)
    measured = smallest_mean(squared_norms(problem, K, runs, seed))
    return check(case, K, measured, limit)


def squared_norms(
    problem: Problem, K: int, runs: int, seed: int, start: Array | None = None
) -> Array:
    """||grad f(w^k)||^2, (K, runs), of FedP3 under the step size of Theorem 1."""
    prune, aggregate = identity(problem.n, problem.d), perm_k(problem.n, problem.blocks)
    step = fedp3_step(problem, step_size(problem, K), prune, aggregate, seed=seed)
    return iterate(problem, step, K, runs, start).seen


def quadratics(n: int, spread: float, seed: int, d: int = 32) -> Quadratics:
    """Quadratics of spectrum 0.05..1 with half-shared matrices and minima `spread` apart."""
    return random_quadratics(seed, n, np.geomspace(0.05, 1.0, d), shapes=0.5, centres=spread)


def grid(*, runs: int, seed: int, horizons: tuple[int, ...] = (10, 100, 1000)) -> list[Check]:
    """The bound on quadratics by clients, heterogeneity and horizon, and then on digits.

    L_i of the network on digits is an estimate.
    """
    cells = []
    for n in (4, 16):
        for spread in (0.0, 1.0, 3.0):
            name = f"quadratics n={n} spread={spread:g}"
            problem = as_problem(quadratics(n, spread, seed), name, np.zeros(32))
            cells += [measure(problem, K, runs=runs, seed=seed, case=name) for K in horizons]
    digits = logistic(seed, 10, 1.0)
    cells += [measure(digits, K, runs=runs, seed=seed, case="logistic, digits") for K in horizons]
    layers, case = network(seed, 10, 0.8), "network, by layers (L_i estimated)"
    cells.append(measure(layers, 60, runs=min(runs, 20), seed=seed, case=case))
    return cells


def sharpness(*, runs: int, seed: int, horizons: tuple[int, ...] = (10, 100, 1000)) -> list[Check]:
    """The hardest case we know: one curvature, far minima, a start in the steady state.

    There E||grad||^2 tends to gamma L inf f, so that the bound is too large by about 2 e at most.
    """
    n, d = 16, 32
    q = random_quadratics(seed, n, np.ones(d), shapes=0.0, centres=3.0)
    problem = as_problem(q, "one curvature", np.zeros(d))
    cells = []
    for K in horizons:
        start = q.optimum + sqrt(inf_f(problem) * step_size(problem, K) / d)
        measured = smallest_mean(squared_norms(problem, K, runs, seed, start))
        limit = bound(problem, step_size(problem, K), K, start)
        cells.append(check(problem.name, K, measured, limit))
    return cells


def literal_reading(
    *, runs: int, seed: int, horizons: tuple[int, ...] = (10, 100, 1000)
) -> list[Check]:
    """Three readings of f^inf near the optimum of heterogeneous quadratics.

    With f^inf = inf f the bound is false; the two corrected forms hold.
    """
    q = quadratics(16, 3.0, seed)
    problem = as_problem(q, "near the optimum", np.zeros(32))
    start = q.optimum + 0.03
    cells = []
    for K in horizons:
        measured = smallest_mean(squared_norms(problem, K, runs, seed, start))
        cells += [
            check(name, K, measured, reading(problem, step_size(problem, K), K, start))
            for name, reading in READINGS.items()
        ]
    return cells


READINGS = {
    "f^inf = inf f, as printed": bound_inf_f,
    "f^inf = inf f, plus L gamma Z": bound_heterogeneous,
    "f^inf below every f_i": bound,
}


def printed_count(*, runs: int, seed: int, scale: float = 10.0, steps: int = 1000) -> list[Check]:
    """Whether eps is reached after the printed and after the correct number of steps.

    eps is chosen so that the correct number for f is `steps`.  For `scale` times f, eps scales with
    f^2 and the number must not change.
    """
    plain = as_problem(quadratics(16, 1.0, seed), "f", np.zeros(32))
    cells = []
    for name, problem in (("f", plain), (f"{scale:g} f", scaled(plain, scale))):
        gap = start_loss(problem, None) - float(problem.lower.min())
        eps = 6 * gap * sqrt(problem.L_bar * problem.L_max / steps)
        for kind, count in (("correct K", iterations), ("printed K", iterations_printed)):
            K = count(gap, problem.L_bar, problem.L_max, eps * (1 + 1e-12))
            measured = smallest_mean(squared_norms(problem, K, runs, seed))
            cells.append(check(f"{name}, {kind}", K, measured, eps))
    return cells
