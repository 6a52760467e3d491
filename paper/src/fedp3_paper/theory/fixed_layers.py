"""Layer sets L_i that are fixed for the run, as in the paper's experiments but not in its theory.

With S redrawn at every step the mean direction is grad f.  With fixed sets, layer l follows the
mean gradient of the clients G_l that train it,

    w_l <- w_l - gamma mean_{i in G_l} [grad f_i(w)]_l,

which is the gradient of no function.  On quadratics it is a linear map with a matrix M, whose rows
of layer l come from mean_{i in G_l} A_i.  Its fixed point solves M w = r and is not stationary for
f.  M may even have an eigenvalue of negative real part although every A_i is positive definite, so
that no step size converges.
"""

from dataclasses import dataclass

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array
from fedp3_paper.theory.framework import fedp3_step, iterate
from fedp3_paper.theory.problems import Quadratics, as_problem, random_quadratics
from fedp3_paper.theory.sketches import fixed, identity, normalised, perm_k


def windows(n: int, layers: int, width: int) -> Array:
    """Which client trains which layer, (n, layers) of 0/1.

    Client i trains `width` layers from floor(i layers / n) on, cyclically.
    """
    if not 1 <= width <= layers or n < layers:
        raise InputError(
            f"layer sets: want 1 <= width <= layers <= n, got {width}, {layers} and {n}"
        )
    first = np.arange(n) * layers // n
    trained = (np.arange(layers)[None, :] - first[:, None]) % layers < width
    return trained.astype(np.float64)


def field(q: Quadratics, train: Array) -> tuple[Array, Array]:
    """(M, r) of the averaged update w <- w - gamma (M w - r) under fixed sets.

    Args:
        q: the clients' quadratics.
        train: which client trains which coordinate, (n, d) of 0/1.
    """
    S = normalised(train)
    return np.asarray(np.einsum("ni,nij->ij", S, q.A) / len(S)), np.asarray((S * q.b).mean(axis=0))


def fixed_point(q: Quadratics, train: Array) -> Array:
    """The point at which fixed layer sets come to rest."""
    M, r = field(q, train)
    return np.asarray(np.linalg.solve(M, r), dtype=np.float64)


def residual(q: Quadratics, w: Array) -> float:
    """||grad f(w)||^2."""
    return float(np.square(q.A_bar @ (w - q.optimum)).sum())


def unstable_pair(coupling: float = 2.0) -> tuple[Quadratics, Array]:
    """Two convex clients with a coordinate each, for which fixed sets diverge at every step size.

    A_1 = [[1, a], [a, 1 + a^2]] with a = coupling, A_2 is its mirror image, and
    det M = 1 - coupling^2.  f itself is strongly convex.
    """
    a = coupling
    A = np.array([[[1.0, a], [a, 1 + a * a]], [[1 + a * a, a], [a, 1.0]]])
    return Quadratics(A=A, c=np.zeros((2, 2))), np.eye(2)


def drift_point(q: Quadratics, gamma: float, steps: int) -> Array:
    """The point at which several local steps come to rest if every client trains all layers.

    It solves sum_i (I - (I - gamma A_i)^steps) (w - c_i) = 0.
    """
    moved = np.eye(q.c.shape[1]) - np.linalg.matrix_power(np.eye(q.c.shape[1]) - gamma * q.A, steps)
    return np.linalg.solve(moved.sum(axis=0), np.einsum("nij,nj->i", moved, q.c))


@dataclass(frozen=True, slots=True)
class Plan:
    """Which layers a client trains.

    Args:
        name: the name in tables and figures.
        width: the number of layers that a client trains in the whole run; None redraws S every
            step.
        gamma: the step size.
        local_steps: the number of local steps; more than one only where clients train all layers.
    """

    name: str
    width: int | None
    gamma: float
    local_steps: int = 1


# With S redrawn, steps are short so that its noise, the subject of Theorem 1, stays small.
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
    """The end of a plan on a problem: ||grad f||^2 of the mean iterate, relative to the start."""

    plan: str
    spread: float
    measured: float
    closed_form: float
    path: Array  # mean over runs of ||grad f(w^k)||^2, relative to the start


def follow(seed: int, spread: float, plan: Plan, *, K: int, runs: int) -> Rest:
    """Run one plan to rest on 12 clients and 4 layers of 4 coordinates."""
    n, layers, size = 12, 4, 4
    d = layers * size
    q = random_quadratics(
        seed, n, np.geomspace(0.2, 1.0, d), shapes=min(1.0, spread), centres=spread
    )
    problem = as_problem(q, plan.name, np.full(d, 3.0), blocks=(size,) * layers)
    if plan.width is None:
        aggregate, repeats, rest = perm_k(n, problem.blocks), runs, q.optimum
    else:
        train = np.repeat(windows(n, layers, plan.width), size, axis=1)
        aggregate, repeats, rest = fixed(normalised(train)), 1, fixed_point(q, train)
        if plan.local_steps > 1:
            rest = drift_point(q, plan.gamma, plan.local_steps)
    step = fedp3_step(
        problem, plan.gamma, identity(n, d), aggregate, seed=seed, local_steps=plan.local_steps
    )
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
    """The spectral radius of one step on the unstable pair.

    It is above 1 for every gamma > 0 if coupling > 1.
    """
    q, train = unstable_pair(coupling)
    M, _ = field(q, train)
    return float(np.abs(np.linalg.eigvals(np.eye(2) - gamma * M)).max())
