"""Algorithm 4 (general framework), Algorithm 5 (LDP-FedP3) and distributed gradient descent.

FedP3:  u_i = P_i w - gamma P_i grad f_i(P_i w), repeated for several local steps, and then
        w <- (1/n) sum_i S_i u_i.
LDP:    u_i = w - gamma (g_i + zeta_i), where g_i is a minibatch mean of clipped gradients and
        zeta_i ~ N(0, sigma^2 I).
DGD:    w <- w - gamma (1/n) sum_i R_i grad f_i(w), where R_i is I or a compressor.

R independent runs advance together as the rows of w, and each may have its step size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array, For, Ints, draw
from fedp3_paper.theory.problems import Problem, everywhere, gradient
from fedp3_paper.theory.sketches import Sketch

Step = Callable[[int, Array], Array]  # (k, w^k) -> w^{k+1}, w (R, d)
Watch = Callable[[Array], Array]  # w (R, d) -> a number per run


@dataclass(frozen=True, slots=True)
class Trace:
    """The record of K steps of R runs."""

    seen: Array  # (K, R), before each step: ||grad f(w^k)||^2, or what else was watched
    last: Array  # w^K, (R, d)


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Minibatch size b, clip norm C and noise sigma of Algorithm 5, and where noise is added."""

    b: int
    C: float
    sigma: float
    on_weights: bool = False  # l. 8 as printed; the proof and the privacy need gradient noise


def per_run(gamma: float | Array) -> Array:
    """A step size, or one per run, shaped to multiply (R, n, d)."""
    return np.asarray(gamma, dtype=np.float64).reshape(-1, 1, 1)


def fedp3_step(
    problem: Problem,
    gamma: float | Array,
    prune: Sketch,
    aggregate: Sketch,
    *,
    seed: int,
    local_steps: int = 1,
) -> Step:
    """One iteration of Algorithm 4."""
    size = per_run(gamma)

    def step(k: int, w: Array) -> Array:
        P = prune(draw(seed, For.PRUNE, k), w.shape[0])
        S = aggregate(draw(seed, For.AGGREGATE, k), w.shape[0])
        u = P * w[:, None, :]  # Alg. 4, l. 3
        for _ in range(local_steps):
            u = u - size * P * problem.grads(u)  # Alg. 4, ll. 5-6
        return np.asarray((S * u).mean(axis=1))  # Alg. 4, ll. 7 and 9

    return step


def gradient_step(problem: Problem, gamma: float | Array, compress: Sketch, *, seed: int) -> Step:
    """One iteration of distributed gradient descent in which every client sends R_i grad f_i(w)."""
    size = per_run(gamma)[:, 0]

    def step(k: int, w: Array) -> Array:
        R = compress(draw(seed, For.AGGREGATE, k), w.shape[0])
        return np.asarray(w - size * (R * problem.grads(everywhere(problem, w))).mean(axis=1))

    return step


def clipped(g: Array, C: float) -> Array:
    """Shorten every vector along the last axis to a norm of at most C."""
    norm = np.linalg.norm(g, axis=-1, keepdims=True)
    return np.asarray(g * np.divide(C, norm, out=np.ones_like(norm), where=norm > C))


def batches(rng: np.random.Generator, shape: tuple[int, int], m: int, b: int) -> Ints:
    """Uniform batches of b distinct samples of m, (*shape, b)."""
    if b * b > m:
        return np.asarray(rng.random((*shape, m)).argsort(axis=-1)[..., :b])
    chosen = rng.integers(m, size=(*shape, b))
    while True:  # few batches repeat a sample; drawing those again keeps all of them uniform
        repeats = (np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any(axis=-1)
        if not repeats.any():
            return chosen
        chosen[repeats] = rng.integers(m, size=(int(repeats.sum()), b))


def ldp_step(
    problem: Problem, gamma: float, aggregate: Sketch, noise: Perturbation, *, seed: int
) -> Step:
    """One iteration of Algorithm 5."""
    samples = problem.samples
    if samples is None or not 1 <= noise.b <= samples.m:
        have = "no samples" if samples is None else f"m = {samples.m} samples"
        raise InputError(
            f"LDP-FedP3 on {problem.name!r}: want 1 <= b <= m, got b = {noise.b} and {have}"
        )
    scale = 1.0 if noise.on_weights else gamma
    m, grads = samples.m, samples.grads

    def step(k: int, w: Array) -> Array:
        R = w.shape[0]
        chosen = batches(draw(seed, For.BATCH, k), (R, problem.n), m, noise.b)
        g = clipped(grads(w, chosen), noise.C).mean(axis=2)  # Alg. 5, ll. 5-6
        zeta = noise.sigma * draw(seed, For.NOISE, k).standard_normal(g.shape)
        # Unlike Alg. 5, l. 8, noise is scaled by gamma, as in the proof (errata.md, T12).
        u = w[:, None, :] - gamma * g - scale * zeta
        S = aggregate(draw(seed, For.AGGREGATE, k), R)
        return np.asarray((S * u).mean(axis=1))  # Alg. 5, ll. 9 and 11

    return step


def grad_norm(problem: Problem) -> Watch:
    """||grad f(w)||^2."""

    def watch(w: Array) -> Array:
        return np.asarray(np.square(gradient(problem, w)).sum(axis=1))

    return watch


def iterate(
    problem: Problem,
    step: Step,
    K: int,
    runs: int,
    start: Array | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Take K steps in independent runs.

    Args:
        problem: the problem.
        step: one step of all runs.
        K: the number of steps.
        runs: the number of runs.
        start: where they start; None: at w^0 of the problem.
        watch: the number that is recorded before every step; None: ||grad f(w)||^2.
    """
    look = watch or grad_norm(problem)
    w = np.tile(problem.start if start is None else start, (runs, 1))
    seen = np.empty((K, runs))
    for k in range(K):
        seen[k] = look(w)
        w = step(k, w)
    return Trace(seen=seen, last=w)
