"""Experiments on Theorem 3: the bound on quadratics, pruning alone as a control, and b != 0.

- `diagonal`: the mean matrix is diagonal and clients deviate from it in pairs of opposite sign, so
  that f(P w) <= f(w) for every mask.
- `random`: rotated spectra, where this is true on average but not for every draw.
- `correlated`: two coupled coordinates.  With two clients and 0.718 the assumption allows short
  horizons only, with one client and 0.9 none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array, For, draw
from fedp3_paper.theory.framework import fedp3_step, grad_norm, iterate
from fedp3_paper.theory.problems import Quadratics, as_problem, random_quadratics
from fedp3_paper.theory.sketches import Sketch, identity, perm_k, random_prune
from fedp3_paper.theory.stats import Check, check, estimate
from fedp3_paper.theory.theorem3 import (
    a_every_draw,
    a_expected,
    bound,
    horizon,
    moments,
    recursion_weights,
    rest_point,
    theta,
)


def diagonal_mean(seed: int, n: int, d: int) -> Quadratics:
    """Clients D + E, D - E in pairs with D diagonal; b = 0."""
    if n % 2:
        raise InputError(f"diagonal mean: want an even number of clients, got {n}")
    D = np.diag(np.geomspace(0.2, 1.0, d))
    E = draw(seed, For.PROBLEM, 3).standard_normal((n // 2, d, d))
    E = E + E.transpose(0, 2, 1)
    largest = np.abs(np.linalg.eigvalsh(E)).max(axis=1)
    E *= 0.15 / largest[:, None, None]  # so that D - E is positive definite
    return Quadratics(A=np.concatenate([D + E, D - E]), c=np.zeros((n, d)))


def rotated(seed: int, n: int, d: int) -> Quadratics:
    """Random rotations of one spectrum; b = 0."""
    q = random_quadratics(seed, n, np.geomspace(0.2, 1.0, d), shapes=0.5, centres=0.0)
    return Quadratics(A=q.A, c=np.zeros((n, d)))


def correlated(n: int, r: float) -> Quadratics:
    """[[1, r], [r, 1]] for every client.

    Pruning a coordinate of w = (1, -1) multiplies f by 1 / (2 - 2 r).
    """
    return Quadratics(A=np.tile(np.array([[1.0, r], [r, 1.0]]), (n, 1, 1)), c=np.zeros((n, 2)))


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of Theorem 3 for one problem and one mask size."""

    case: str
    theta: float
    a_expected: float
    a_every_draw: float
    horizon: float  # the largest K that the theorem covers with a_expected


def constants(case: str, q: Quadratics, keep: int) -> Constants:
    m = moments(q.A, keep)
    a = a_expected(q.A, m)
    return Constants(
        case=case,
        theta=theta(m),
        a_expected=a,
        a_every_draw=a_every_draw(q.A, keep),
        horizon=horizon(a),
    )


def measure(case: str, q: Quadratics, keep: int, *, K: int, runs: int, seed: int) -> Check:
    """The weighted gradient norm at an iterate drawn with p_k, against 4 Delta_0 / (gamma K)."""
    n, d = q.c.shape
    m = moments(q.A, keep)
    a = max(1.0, a_expected(q.A, m))
    if horizon(a) < K:
        raise InputError(
            f"Theorem 3 on {case!r}: a = {a:.4g} allows K <= {horizon(a):.3g}, got {K}"
        )
    gamma = 1 / theta(m)  # gamma <= sqrt(log 2 / (h K)) is (a - 1) K <= log 2 for every gamma
    start = np.resize([1.0, -1.0], d)  # in a correlated pair, the direction that pruning hurts
    problem = as_problem(q, case, start)
    step = fedp3_step(problem, gamma, random_prune(n, d, keep), identity(n, d), seed=seed)

    def weighted(w: Array) -> Array:
        """||grad f||^2 in the metric Lbar^-1 W Lbar^-1, as grad f = Lbar w."""
        return np.asarray(np.einsum("ri,ij,rj->r", w, m.W, w))

    seen = iterate(problem, step, K, runs, watch=weighted).seen
    gap = 0.5 * float(problem.start @ q.A_bar @ problem.start)
    return check(case, K, estimate(recursion_weights(a, K) @ seen), bound(gamma, K, gap))


def cases(seed: int) -> list[tuple[str, Quadratics, int]]:
    """(name, problem, retained coordinates) of each case; the theorem does not cover the last."""
    d = 8
    problems = []
    for n in (2, 8):
        for keep in (6, 4):
            problems.append((f"diagonal, n={n}, keep {keep}/{d}", diagonal_mean(seed, n, d), keep))
            problems.append((f"random, n={n}, keep {keep}/{d}", rotated(seed, n, d), keep))
    problems.append(("correlated 0.718, n=2, keep 1/2", correlated(2, 0.718), 1))
    problems.append(("correlated 0.9, n=1, keep 1/2", correlated(1, 0.9), 1))
    return problems


def bounds(
    *, runs: int, seed: int, horizons: tuple[int, ...] = (5, 50, 200)
) -> tuple[list[Constants], list[Check]]:
    """The constants of every case, and the bound wherever the theorem covers it."""
    by_case, cells = [], []
    for case, q, keep in cases(seed):
        of_case = constants(case, q, keep)
        by_case.append(of_case)
        covered = [K for K in horizons if of_case.horizon >= K]
        cells += [measure(case, q, keep, K=K, runs=runs, seed=seed) for K in covered]
    return by_case, cells


@dataclass(frozen=True, slots=True)
class Curve:
    """The path of ||grad f||^2 under one sketch, relative to the start.

    Args:
        name: the name of the sketch.
        path: ||grad f(w^k)||^2 as a mean over runs, (K,).
        rest: ||grad f||^2 at the point where the mean iterate comes to rest, in closed form.
    """

    name: str
    path: Array
    rest: float | None


def sketches(n: int, d: int, keep: int) -> Mapping[str, tuple[Sketch, int, bool]]:
    """The pruning sketches: (P, retained coordinates, whether P is divided by their share)."""
    return {
        "no pruning": (identity(n, d), d, False),
        "random, as in Definition 1": (random_prune(n, d, keep), keep, False),
        "random, rescaled": (random_prune(n, d, keep, scaled=True), keep, True),
        "Perm-K": (perm_k(n, (1,) * d, scaled=False), d // n, False),
        "Perm-K, rescaled": (perm_k(n, (1,) * d), d // n, True),
    }


def controls(*, K: int, runs: int, seed: int) -> list[Curve]:
    """For b = 0: gradient steps without and with pruning, and pruning alone (gamma = 0)."""
    n, d, keep = 4, 8, 6
    q = rotated(seed, n, d)
    problem = as_problem(q, "b = 0", np.ones(d))
    curves = []
    for name, gamma, P in (
        ("gradient steps, no pruning", 0.5, identity(n, d)),
        ("gradient steps and pruning", 0.5, random_prune(n, d, keep)),
        ("pruning alone, step size 0", 0.0, random_prune(n, d, keep)),
    ):
        trace = iterate(problem, fedp3_step(problem, gamma, P, identity(n, d), seed=seed), K, runs)
        curves.append(Curve(name, trace.seen.mean(axis=1) / trace.seen[0, 0], None))
    return curves


def stalls(*, K: int, runs: int, seed: int, gamma: float = 0.1) -> list[Curve]:
    """For b != 0: the path of each sketch, and where it comes to rest."""
    n, d, keep = 4, 8, 6
    q = random_quadratics(seed, n, np.geomspace(0.5, 1.0, d), shapes=0.5, centres=0.5)
    problem = as_problem(q, "b != 0", np.zeros(d))
    look = grad_norm(problem)
    curves = []
    for name, (P, retained, scaled) in sketches(n, d, keep).items():
        trace = iterate(problem, fedp3_step(problem, gamma, P, identity(n, d), seed=seed), K, runs)
        rest = rest_point(q, retained, gamma, scaled=scaled)
        scale = float(trace.seen[0, 0])
        curves.append(
            Curve(name, trace.seen.mean(axis=1) / scale, float(look(rest[None])[0]) / scale)
        )
    return curves
