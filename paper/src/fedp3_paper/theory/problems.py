"""Problems f = (1/n) sum_i f_i, given as the losses of n clients, every f_i being L_i-smooth.

`losses` and `grads` take a point per run and client, shape (R, n, d), since pruned clients are at
different points.  Quadratics are f_i(w) = (w - c_i)' A_i (w - c_i) / 2, which is L_i = A_i and
b_i = A_i c_i in eq. (quadratic objective) up to a constant; it makes inf f_i = 0 for every client.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array, For, Ints, draw

SampleGrads = Callable[[Array, Ints], Array]  # w (R, d), chosen (R, n, b) -> (R, n, b, d)


@dataclass(frozen=True, slots=True)
class Samples:
    """A client's loss as a mean over m samples, for Algorithm 5."""

    m: int
    grads: SampleGrads
    bound: float  # C: no sample's gradient is longer, anywhere; inf where unknown


@dataclass(frozen=True, slots=True)
class Problem:
    """The losses of n clients with the constants that the theorems need."""

    name: str
    losses: Callable[[Array], Array]  # (R, n, d) -> (R, n)
    grads: Callable[[Array], Array]  # (R, n, d) -> (R, n, d)
    smooth: Array  # L_i, (n,)
    lower: Array  # a lower bound of every f_i, (n,)
    start: Array  # w^0, (d,)
    blocks: tuple[int, ...]  # sizes of the layers, in order
    f_inf: float | None = None  # inf f where it is known
    samples: Samples | None = None

    @property
    def n(self) -> int:
        return self.smooth.size

    @property
    def d(self) -> int:
        return self.start.size

    @property
    def L_bar(self) -> float:
        """The mean of L_i, a smoothness constant of f."""
        return float(self.smooth.mean())

    @property
    def L_max(self) -> float:
        return float(self.smooth.max())


def everywhere(problem: Problem, w: Array) -> Array:
    """The common point w (R, d) as a point per client, (R, n, d)."""
    return np.broadcast_to(w[:, None, :], (w.shape[0], problem.n, problem.d))


def objective(problem: Problem, w: Array) -> Array:
    """f(w), (R,)."""
    return np.asarray(problem.losses(everywhere(problem, w)).mean(axis=1))


def gradient(problem: Problem, w: Array) -> Array:
    """The gradient of f, (R, d)."""
    return np.asarray(problem.grads(everywhere(problem, w)).mean(axis=1))


def scaled(problem: Problem, s: float) -> Problem:
    """The problem s f, which has the same minimisers and every constant times s.

    A statement whose units are right is true of s f if it is true of f.
    """
    more = problem.samples and replace(
        problem.samples, grads=_times(s, problem.samples.grads), bound=s * problem.samples.bound
    )
    return replace(
        problem,
        losses=lambda w: s * problem.losses(w),
        grads=lambda w: s * problem.grads(w),
        smooth=s * problem.smooth,
        lower=s * problem.lower,
        f_inf=None if problem.f_inf is None else s * problem.f_inf,
        samples=more,
    )


def _times(s: float, grads: SampleGrads) -> SampleGrads:
    return lambda w, chosen: s * grads(w, chosen)


@dataclass(frozen=True, slots=True)
class Quadratics:
    """f_i(w) = (w - c_i)' A_i (w - c_i) / 2 with symmetric positive definite A_i."""

    A: Array  # (n, d, d)
    c: Array  # (n, d)

    @property
    def A_bar(self) -> Array:
        return np.asarray(self.A.mean(axis=0))

    @property
    def b(self) -> Array:
        """b_i = A_i c_i, (n, d)."""
        return np.asarray(np.einsum("nij,nj->ni", self.A, self.c))

    @property
    def optimum(self) -> Array:
        """The minimiser of f."""
        return np.linalg.solve(self.A_bar, self.b.mean(axis=0))


def as_problem(
    q: Quadratics, name: str, start: Array, blocks: tuple[int, ...] | None = None
) -> Problem:
    """Quadratics with exact constants: L_i (largest eigenvalue of A_i), inf f_i = 0, inf f."""

    def grads(w: Array) -> Array:
        return np.asarray(np.einsum("nij,rnj->rni", q.A, w - q.c, optimize=True))

    def losses(w: Array) -> Array:
        e = w - q.c
        return np.asarray(0.5 * np.einsum("rni,rni->rn", e, grads(w)))

    n, d = q.c.shape
    at_optimum = np.broadcast_to(q.optimum, (1, n, d))
    return Problem(
        name=name,
        losses=losses,
        grads=grads,
        smooth=np.asarray(np.linalg.eigvalsh(q.A)[:, -1], dtype=np.float64),
        lower=np.zeros(n),
        start=start,
        blocks=blocks or (1,) * d,
        f_inf=float(losses(at_optimum).mean()),
    )


def with_samples(problem: Problem, q: Quadratics, seed: int, *, m: int, spread: float) -> Problem:
    """The quadratics as means over m samples with grad f_ij(w) = A_i (w - a_ij).

    The a_ij spread about c_i, and no C bounds the samples' gradients.
    """
    a = spread * draw(seed, For.PROBLEM, 4).standard_normal((*q.c.shape[:1], m, q.c.shape[1]))
    a += (q.c - a.mean(axis=1))[:, None, :]

    def grads(w: Array, chosen: Ints) -> Array:
        picked = a[np.arange(len(a))[:, None], chosen]  # (R, n, b, d)
        return np.asarray(
            np.einsum("nij,rnbj->rnbi", q.A, w[:, None, None, :] - picked, optimize=True)
        )

    return replace(problem, samples=Samples(m=m, grads=grads, bound=float("inf")))


def random_quadratics(
    seed: int, n: int, spectrum: Array, *, shapes: float, centres: float
) -> Quadratics:
    """Quadratics of one spectrum with random rotations Q.

    A_i = (1 - shapes) Q_0 D Q_0' + shapes Q_i D Q_i' and c_i = c + centres * N(0, I).

    Args:
        seed: the seed of the rotations and minima.
        n: the number of clients.
        spectrum: the diagonal of D.
        shapes: how much the clients' matrices differ, from 0 (one matrix for all) to 1.
        centres: how far their minima differ; 0 is interpolation, where one point minimises all.
    """
    if not 0 <= shapes <= 1 or centres < 0:
        raise InputError(
            f"quadratics: want shapes in [0, 1] and centres >= 0, got {shapes} and {centres}"
        )
    rng = draw(seed, For.PROBLEM, 0)
    d = spectrum.size
    Q = np.linalg.qr(rng.standard_normal((n + 1, d, d)))[0]
    M = np.einsum("nij,j,nkj->nik", Q, spectrum, Q)
    A = (1 - shapes) * M[0] + shapes * M[1:]
    c = rng.standard_normal(d) + centres * rng.standard_normal((n, d))
    return Quadratics(A=(A + A.transpose(0, 2, 1)) / 2, c=c)
