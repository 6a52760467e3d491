"""What the theory leaves out: layer sets L_i that are fixed for the run, as in the paper's experiments.

With S redrawn at every step the mean direction is grad f.  With fixed sets, layer l follows the mean gradient of the
clients G_l that hold it,  w_l <- w_l - gamma mean_{i in G_l} [grad f_i(w)]_l,  which is the gradient of no function:
on quadratics a linear map with matrix M, rows of layer l taken from mean_{i in G_l} A_i.  Its fixed point solves
M w = r and is not stationary for f; and M may have an eigenvalue of negative real part although every A_i is
positive definite, so that no step size converges.
"""

from dataclasses import dataclass

import numpy as np

from fedp3.errors import InputError
from fedp3.theory.draws import Array
from fedp3.theory.framework import fedp3_step, iterate
from fedp3.theory.problems import Quadratics, as_problem, random_quadratics
from fedp3.theory.sketches import fixed, identity, normalised, perm_k


def windows(n: int, layers: int, width: int) -> Array:
    """Who trains what, (n, layers) of 0/1: client i holds `width` layers from floor(i layers / n) on, cyclically."""
    if not 1 <= width <= layers or n < layers:
        raise InputError(f"layer sets: want 1 <= width <= layers <= n, got {width}, {layers} and {n}")
    first = np.arange(n) * layers // n
    held = (np.arange(layers)[None, :] - first[:, None]) % layers < width
    return held.astype(np.float64)


def field(q: Quadratics, train: Array) -> tuple[Array, Array]:
    """(M, r) of the averaged update w <- w - gamma (M w - r) when coordinates `train` (n, d) are held for good."""
    S = normalised(train)
    return np.asarray(np.einsum("ni,nij->ij", S, q.A) / len(S)), np.asarray((S * q.b).mean(axis=0))


def fixed_point(q: Quadratics, train: Array) -> Array:
    """Where fixed layer sets come to rest."""
    M, r = field(q, train)
    return np.asarray(np.linalg.solve(M, r), dtype=np.float64)


def residual(q: Quadratics, w: Array) -> float:
    """||grad f(w)||^2."""
    return float(np.square(q.A_bar @ (w - q.optimum)).sum())


def unstable_pair(coupling: float = 2.0) -> tuple[Quadratics, Array]:
    """Two convex clients, a coordinate each, for which fixed sets diverge at every step size: det M = 1 - coupling^2.

    A_1 = [[1, a], [a, 1 + a^2]] and A_2 its mirror image; f itself is strongly convex.
    """
    a = coupling
    A = np.array([[[1.0, a], [a, 1 + a * a]], [[1 + a * a, a], [a, 1.0]]])
    return Quadratics(A=A, c=np.zeros((2, 2))), np.eye(2)


def drift_point(q: Quadratics, gamma: float, steps: int) -> Array:
    """Where several local steps rest when all is sent: sum_i (I - (I - gamma A_i)^steps) (w - c_i) = 0."""
    moved = np.eye(q.c.shape[1]) - np.linalg.matrix_power(np.eye(q.c.shape[1]) - gamma * q.A, steps)
    return np.linalg.solve(moved.sum(axis=0), np.einsum("nij,nj->i", moved, q.c))


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sends what: `held` layers for good or (None) S redrawn every step; several local steps if all is held."""

    name: str
    held: int | None
    gamma: float
    local_steps: int = 1


# S redrawn takes short steps, so that its noise, which is Theorem 1's subject, stays small.
PLANS = (
    Plan("1 of 4 layers, fixed", 1, 0.2),
    Plan("2 of 4 layers, fixed", 2, 0.2),
    Plan("3 of 4 layers, fixed", 3, 0.2),
    Plan("all layers", 4, 0.2),
    Plan("all layers, 10 local steps", 4, 0.2, local_steps=10),
    Plan("S redrawn every step", None, 0.03),
)


@dataclass(frozen=True, slots=True)
class Rest:
    """Where one plan ends on one problem: ||grad f||^2 of the mean iterate relative to the start."""

    plan: str
    spread: float
    measured: float
    closed_form: float
    path: Array  # mean over runs of ||grad f(w^k)||^2, relative to the start


def follow(seed: int, spread: float, plan: Plan, *, K: int, runs: int) -> Rest:
    """Run one plan to rest on 12 clients and 4 layers of 4 coordinates."""
    n, layers, size = 12, 4, 4
    d = layers * size
    q = random_quadratics(seed, n, np.geomspace(0.2, 1.0, d), shapes=min(1.0, spread), centres=spread)
    problem = as_problem(q, plan.name, np.full(d, 3.0), blocks=(size,) * layers)
    if plan.held is None:
        aggregate, repeats, rest = perm_k(n, problem.blocks), runs, q.optimum
    else:
        train = np.repeat(windows(n, layers, plan.held), size, axis=1)
        aggregate, repeats = fixed(normalised(train)), 1
        rest = fixed_point(q, train) if plan.local_steps == 1 else drift_point(q, plan.gamma, plan.local_steps)
    step = fedp3_step(problem, plan.gamma, identity(n, d), aggregate, seed=seed, local_steps=plan.local_steps)
    trace = iterate(problem, step, K, repeats)
    scale = residual(q, problem.start)
    return Rest(
        plan=plan.name,
        spread=spread,
        measured=residual(q, trace.last.mean(axis=0)) / scale,
        closed_form=residual(q, rest) / scale,
        path=trace.seen.mean(axis=1) / scale,
    )


def survey(spreads: tuple[float, ...], *, K: int, runs: int, seed: int) -> list[Rest]:
    """Every plan at every spread."""
    return [follow(seed, spread, plan, K=K, runs=runs) for spread in spreads for plan in PLANS]


def growth(coupling: float, gamma: float) -> float:
    """Spectral radius of one step on the unstable pair: above 1 for every gamma > 0 when coupling > 1."""
    q, train = unstable_pair(coupling)
    M, _ = field(q, train)
    return float(np.abs(np.linalg.eigvals(np.eye(2) - gamma * M)).max())
