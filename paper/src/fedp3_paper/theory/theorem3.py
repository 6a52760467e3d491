"""Theorem 3, global pruning P with S = I, on quadratics with b = 0: w <- Pbar w - gamma B w.

Pbar = (1/n) sum P_i, B = (1/n) sum P_i L_i P_i, Lbar = (1/n) sum L_i.  Expanding f(w^{k+1}) needs

    W = E[Pbar Lbar B + B Lbar Pbar] / 2 >= 0  (the printed Pbar B Lbar is not the transpose),
    E[B Lbar B] <= theta W,
    E f(Pbar w) <= a f(w) with a = 1 + gamma^2 h,

and gives

    sum_k p_k E||grad f(w^k)||^2_{Lbar^-1 W Lbar^-1} <= 2 a^K Delta / (gamma S_K)
                                                     <= 4 Delta / (gamma K)

for gamma <= 1/theta and p_k = a^{K-1-k} / S_K, if (a - 1) K <= log 2.  a does not depend on gamma,
so h is no constant: the theorem needs a <= 1 + log 2 / K.  All expectations are exact; they follow
from the probability q_s that s given coordinates are all retained.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array, Ints
from fedp3_paper.theory.problems import Quadratics


@dataclass(frozen=True, slots=True)
class Moments:
    """Exact expectations over independent masks that retain `keep` of d coordinates."""

    share: float  # q_1, so that E[Pbar] = q_1 I
    B: Array  # E[B]
    PLP: Array  # E[Pbar Lbar Pbar]
    PLB: Array  # E[Pbar Lbar B]
    PBL: Array  # E[Pbar B Lbar], as printed
    BLB: Array  # E[B Lbar B]

    @property
    def W(self) -> Array:
        return (self.PLB + self.PLB.T) / 2

    @property
    def W_printed(self) -> Array:
        """Half of E[PLB + PBL], which is not symmetric and is another quadratic form."""
        return (self.PLB + self.PBL) / 2


def retained_together(d: int, keep: int) -> Array:
    """q_s for s = 0..4, the probability that s given coordinates are all among `keep` of d."""
    if not 1 <= keep <= d:
        raise InputError(f"pruning: want 1 <= keep <= d = {d}, got {keep}")
    q = [1.0]
    for s in range(4):
        q.append(q[-1] * max(0, keep - s) / (d - s) if s < d else 0.0)
    return np.array(q)


def distinct(d: int, order: int) -> Ints:
    """The number of different indices in every tuple (j_1, ..., j_order), shape (d,) * order."""
    index = np.indices((d,) * order).reshape(order, -1)
    index.sort(axis=0)
    return np.asarray(1 + (np.diff(index, axis=0) != 0).sum(axis=0)).reshape((d,) * order)


def moments(L: Array, keep: int) -> Moments:
    """The expectations for client matrices L (n, d, d); memory d^4."""
    n, d = L.shape[:2]
    q = retained_together(d, keep)
    q2, q3, q4 = (q[distinct(d, order)] for order in (2, 3, 4))
    Lbar = L.mean(axis=0)
    pruned = q2 * L  # E[P_i L_i P_i], (n, d, d)
    total = pruned.sum(axis=0)
    # Sums over pairs (i, i) of a client with itself:
    same = np.einsum("jk,nkl,jkl->jl", Lbar, L, q3, optimize=True)  # E[P_i Lbar P_i L_i P_i]
    same_printed = np.einsum("njk,kl,jk->jl", L, Lbar, q2, optimize=True)  # E[P_i L_i P_i Lbar]
    same_square = np.einsum("njk,kl,nlm,jklm->jm", L, Lbar, L, q4, optimize=True)
    # The sum over pairs of different clients:
    others = total @ Lbar @ total - np.einsum("nij,jk,nkl->il", pruned, Lbar, pruned, optimize=True)
    return Moments(
        share=float(q[1]),
        B=total / n,
        PLP=((n - 1) * q[1] ** 2 * Lbar + q2 * Lbar) / n,
        PLB=((n - 1) * q[1] * Lbar @ total + same) / n**2,
        PBL=((n - 1) * q[1] * total @ Lbar + same_printed) / n**2,
        BLB=(others + same_square) / n**2,
    )


def relative(X: Array, Y: Array) -> float:
    """The least t with X <= t Y, Y positive definite."""
    R = np.linalg.inv(np.linalg.cholesky(Y))
    return float(np.linalg.eigvalsh(R @ ((X + X.T) / 2) @ R.T)[-1])


def theta(m: Moments) -> float:
    """The least theta with E[B Lbar B] <= theta W; an error where W is not positive definite."""
    least = float(np.linalg.eigvalsh(m.W)[0])
    if least <= 0:
        raise InputError(
            f"Theorem 3 does not apply: W has the eigenvalue {least:.3g}, and wants all above 0"
        )
    return relative(m.BLB, m.W)


def a_expected(L: Array, m: Moments) -> float:
    """The least a with E f(Pbar w) <= a f(w) for all w: what the proof uses."""
    return relative(m.PLP, L.mean(axis=0))


def a_every_draw(L: Array, keep: int) -> float:
    """The least a with f(Pbar w) <= a f(w) for every draw: what Assumption 5 needs.

    ||Lbar^{1/2} Pbar Lbar^{-1/2}||^2 is convex in Pbar, so that in the worst draw all clients have
    the same mask.
    """
    Lbar = L.mean(axis=0)
    return max(relative(P[:, None] * Lbar * P, Lbar) for P in masks(len(Lbar), keep))


def masks(d: int, keep: int) -> Iterator[Array]:
    """All 0/1 diagonals with `keep` ones."""
    for chosen in combinations(range(d), keep):
        P = np.zeros(d)
        P[list(chosen)] = 1.0
        yield P


def horizon(a: float) -> float:
    """The largest K for which some gamma > 0 meets gamma^2 h K <= log 2, h = (a - 1) / gamma^2."""
    return float("inf") if a <= 1 else log(2) / (a - 1)


def recursion_weights(a: float, K: int) -> Array:
    """p_k = a^{K-1-k} / S_K of the weighted recursion lemma."""
    p = a ** np.arange(K - 1, -1, -1, dtype=np.float64)
    return np.asarray(p / p.sum())


def recursion_bound(a: float, c: float, X_0: float, K: int) -> float:
    """If X_{k+1} <= a X_k - Y_k + c then sum_k p_k Y_k <= a^K X_0 / S_K + c."""
    S_K = float((a ** np.arange(K, dtype=np.float64)).sum())
    return a**K * X_0 / S_K + c


def bound(gamma: float, K: int, gap: float) -> float:
    """4 Delta_0 / (gamma K)."""
    return 4 * gap / (gamma * K)


def rest_point(q: Quadratics, keep: int, gamma: float, *, scaled: bool = False) -> Array:
    """The point at which E[w^k] comes to rest if b != 0, away from the optimum.

    It solves w = E[Pbar] w - gamma (E[B] w - E[Pbar] b).  Unscaled, this is
    ((1 - q_1) I + gamma E[B]) w = gamma q_1 b: pruning pulls to 0.  Divided by q_1, E[B] gains
    (1/q_1 - 1) Diag(L): a ridge.  The point depends on single clients only, so that it is right for
    Perm-K with keep = d / n too.
    """
    m = moments(q.A, keep)
    b = q.b.mean(axis=0)
    if scaled:
        return np.linalg.solve(m.B / m.share**2, b)
    return np.linalg.solve((1 - m.share) * np.eye(b.size) + gamma * m.B, gamma * m.share * b)
