"""Bytes that FedP3, DGD and DGD with Rand-t need to reach ||grad||^2 <= eps.

A step of FedP3 or of DGD with Rand-t (t = d/n) sends n * d/n = d values up, and a step of DGD n d;
every method sends n d values down.  Every method uses its best constant step size of a grid, so
that tuning favours none.  Perm-K's error is mean ||g_i||^2 - ||g||^2, which is zero for equal
clients; Rand-t's is (n-1)/n mean ||g_i||^2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array
from fedp3_paper.theory.framework import Step, fedp3_step, gradient_step, iterate
from fedp3_paper.theory.problems import Problem, as_problem, random_quadratics
from fedp3_paper.theory.sketches import identity, perm_k, rand_t

BYTES = 4  # a value is sent as a 32-bit float
STEPS = 2.0 ** -np.arange(0, 9)  # step sizes tried, in units of 1 / L_bar


@dataclass(frozen=True, slots=True)
class Reach:
    """The least cost at which a method reached eps; None if it did not within the horizon."""

    method: str
    n: int
    spread: float
    eps: float
    steps: int | None
    up: int | None  # bytes, uplink of all clients
    both: int | None  # bytes, uplink and downlink


def fedp3_maker(problem: Problem, gamma: Array, seed: int) -> Step:
    n, d = problem.n, problem.d
    return fedp3_step(problem, gamma, identity(n, d), perm_k(n, problem.blocks), seed=seed)


def dgd_maker(problem: Problem, gamma: Array, seed: int) -> Step:
    return gradient_step(problem, gamma, identity(problem.n, problem.d), seed=seed)


def rand_t_maker(problem: Problem, gamma: Array, seed: int) -> Step:
    n, d = problem.n, problem.d
    return gradient_step(problem, gamma, rand_t(n, d, max(1, d // n)), seed=seed)


@dataclass(frozen=True, slots=True)
class Method:
    """One way to communicate.

    Args:
        step: makes a step from a problem, step sizes and a seed.
        draws: whether steps are random.
        share: the share of d values that each of n clients sends.
    """

    step: Callable[[Problem, Array, int], Step]
    draws: bool
    share: Callable[[int], float]


METHODS: Mapping[str, Method] = {
    "FedP3": Method(fedp3_maker, True, lambda n: 1 / n),
    "DGD": Method(dgd_maker, False, lambda n: 1.0),
    "DGD + Rand-t": Method(rand_t_maker, True, lambda n: 1 / n),
}


def first_below(grad_sq: Array, eps: float) -> int | None:
    """Steps until the mean over runs of ||grad||^2, (K, runs), is first at most eps."""
    hit = np.flatnonzero(grad_sq.mean(axis=1) <= eps)
    return int(hit[0]) if hit.size else None


def reach(
    problem: Problem, name: str, eps: Array, *, K: int, runs: int, seed: int
) -> list[int | None]:
    """For every eps the fewest steps over the grid of step sizes."""
    method = METHODS[name]
    repeats = runs if method.draws else 1
    gamma = np.repeat(STEPS / problem.L_bar, repeats)
    # Too long a step diverges and overflows; it never reaches eps.
    with np.errstate(over="ignore", invalid="ignore"):
        trace = iterate(problem, method.step(problem, gamma, seed), K, gamma.size)
    grad_sq = trace.seen.reshape(K, STEPS.size, repeats)
    best: list[int | None] = []
    for target in eps:
        hits = [first_below(grad_sq[:, j], float(target)) for j in range(STEPS.size)]
        best.append(min((h for h in hits if h is not None), default=None))
    return best


def compare(
    n: int, spread: float, eps: Array, *, K: int, runs: int, seed: int, d: int = 32
) -> list[Reach]:
    """All methods on one set of quadratics; eps is relative to ||grad f(w^0)||^2."""
    if d % n:
        raise InputError(
            f"gain: want n dividing d = {d}, so that shares are whole numbers; got n = {n}"
        )
    # One client's matrix for all when spread is 0: then every f_i is f itself.
    q = random_quadratics(
        seed, n, np.geomspace(0.1, 1.0, d), shapes=0.5 if spread else 0.0, centres=spread
    )
    problem = as_problem(q, f"n={n}", np.full(d, -2.0))
    scale = float(np.square(q.A_bar @ (problem.start - q.optimum)).sum())
    rows = []
    for name, method in METHODS.items():
        steps = reach(problem, name, eps * scale, K=K, runs=runs, seed=seed)
        sent = round(method.share(n) * d) * n * BYTES
        both = sent + n * d * BYTES
        for target, k in zip(eps, steps, strict=True):
            rows.append(
                Reach(
                    method=name,
                    n=n,
                    spread=spread,
                    eps=float(target),
                    steps=k,
                    up=None if k is None else k * sent,
                    both=None if k is None else k * both,
                )
            )
    return rows
