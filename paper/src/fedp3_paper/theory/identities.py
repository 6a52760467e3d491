"""The identities and lemmas behind the theorems, checked by enumeration or by sampling.

- (1/n) sum S_i = I
- E[S_i x] = x
- E||(1/n) sum S_i y_i||^2 = (1/n) sum ||y_i||^2, with equality
- Rand-t: E||R x - x||^2 = (d/t - 1) ||x||^2
- Lemma 1: ||grad f_i||^2 <= 2 L_i (f_i - inf f_i), with the infimum of each client
- Lemma 9 (minibatch variance) and the weighted recursion lemma
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from fedp3_paper.theory import theorem1
from fedp3_paper.theory.digits import logistic
from fedp3_paper.theory.draws import Array, For, Ints, draw
from fedp3_paper.theory.problems import Problem, as_problem, everywhere, random_quadratics
from fedp3_paper.theory.sketches import perm_k, rand_t
from fedp3_paper.theory.stats import estimate
from fedp3_paper.theory.theorem3 import recursion_bound, recursion_weights


@dataclass(frozen=True, slots=True)
class Identity:
    """One checked statement: `value` equals `expected` or, for a bound, is not above it."""

    statement: str
    setting: str
    value: float
    expected: float
    holds: bool


def all_deals(n: int, blocks: Sequence[int]) -> Ints:
    """All deals that `deal` draws from uniformly, as owners (deals, d)."""
    per_client = -(-len(blocks) // n)
    slots = np.repeat(np.arange(n), per_client)
    owners = np.array(list(permutations(slots)))[:, : len(blocks)]
    return np.repeat(owners, blocks, axis=1)


def diagonals(owner: Ints, n: int) -> Array:
    """S_i of given owners, (draws, n, d)."""
    return np.asarray(n * (owner[:, None, :] == np.arange(n)[:, None]), dtype=np.float64)


def equal(
    statement: str, setting: str, value: float, expected: float, slack: float = 1e-10
) -> Identity:
    return Identity(
        statement,
        setting,
        value,
        expected,
        abs(value - expected) <= slack * max(1.0, abs(expected)),
    )


def at_most(statement: str, setting: str, value: float, limit: float) -> Identity:
    return Identity(statement, setting, value, limit, value <= limit * (1 + 1e-9))


def by_enumeration(seed: int, n: int, blocks: Sequence[int]) -> list[Identity]:
    """The three identities of S over all permutations."""
    S = diagonals(all_deals(n, blocks), n)
    d = sum(blocks)
    y = draw(seed, For.VECTORS, 0).standard_normal((n, d))
    where = f"all {len(S)} permutations, n={n}, blocks {tuple(blocks)}"
    mean = (S * y).mean(axis=1)
    drift = np.abs((S * y[0]).mean(axis=0) - y[0]).max()  # every client, the same x
    return [
        equal("max |(1/n) sum S_i - I| = 0", where, float(np.abs(S.mean(axis=1) - 1).max()), 0.0),
        equal("max |E[S_i x] - x| = 0", where, float(drift), 0.0),
        equal(
            "E||(1/n) sum S_i y_i||^2 = (1/n) sum ||y_i||^2",
            where,
            float(np.square(mean).sum(axis=1).mean()),
            float(np.square(y).sum(axis=1).mean()),
        ),
    ]


def by_sampling(seed: int, n: int, blocks: Sequence[int], draws: int = 4000) -> list[Identity]:
    """The second moment of Perm-K and the error of Rand-t, by confidence limits of a sample."""
    d = sum(blocks)
    y = draw(seed, For.VECTORS, 1).standard_normal((n, d))
    S = perm_k(n, blocks)(draw(seed, For.AGGREGATE, 0), draws)
    t = max(1, d // n)
    R = rand_t(1, d, t)(draw(seed, For.AGGREGATE, 1), draws)[:, 0]
    rows = []
    for statement, seen, expected in (
        (
            "E||(1/n) sum S_i y_i||^2 = (1/n) sum ||y_i||^2",
            np.square((S * y).mean(axis=1)).sum(axis=1),
            float(np.square(y).sum(axis=1).mean()),
        ),
        (
            f"E||R_t x - x||^2 = (d/t - 1) ||x||^2, t={t}",
            np.square(R * y[0] - y[0]).sum(axis=1),
            (d / t - 1) * float(np.square(y[0]).sum()),
        ),
    ):
        e = estimate(seen)
        setting = f"{draws} draws, n={n}, d={d}"
        rows.append(Identity(statement, setting, e.mean, expected, e.low <= expected <= e.high))
    return rows


def lemma_1_ratio(problem: Problem, points: Array, lower: Array) -> float:
    """The largest ||grad f_i||^2 / (2 L_i (f_i - lower_i)) over points (R, d) and clients.

    A value above 1 contradicts Lemma 1.
    """
    w = everywhere(problem, points)
    gap = np.maximum(problem.losses(w) - lower, 1e-300)
    return float((np.square(problem.grads(w)).sum(axis=2) / (2 * problem.smooth * gap)).max())


def second_moment_ratio(problem: Problem, w: Array, f_inf: float) -> float:
    """E||g||^2 / (2 L_max (f(w) - f_inf)) at w (1, d).

    A value above 1 contradicts the ABC assumption with A = L_max.
    """
    points = everywhere(problem, w)
    second_moment = float(np.square(problem.grads(points)).sum(axis=2).mean())
    return second_moment / (2 * problem.L_max * (float(problem.losses(points).mean()) - f_inf))


def lemma_1(seed: int) -> list[Identity]:
    """Lemma 1 with the infimum of each client.

    With inf f instead, the bound on the second moment is false near the optimum.
    """
    q = random_quadratics(seed, 6, np.geomspace(0.1, 1.0, 10), shapes=0.5, centres=1.0)
    problem = as_problem(q, "quadratics", np.zeros(10))
    points = 3 * draw(seed, For.VECTORS, 2).standard_normal((200, 10))
    digits = logistic(seed, 10, 1.0)
    anywhere = 5 * draw(seed, For.VECTORS, 3).standard_normal((50, digits.d))
    near = q.optimum[None] + 0.1
    literal = second_moment_ratio(problem, near, theorem1.inf_f(problem))
    common = second_moment_ratio(problem, near, float(problem.lower.min()))
    second = "(1/n) sum ||grad f_i||^2 / (2 L_max (f - f^inf)) <= 1"
    name = "max ||grad f_i||^2 / (2 L_i (f_i - inf f_i)) <= 1"
    return [
        at_most(name, "quadratics, 200 points", lemma_1_ratio(problem, points, problem.lower), 1.0),
        at_most(
            name, "logistic digits, 50 points", lemma_1_ratio(digits, anywhere, digits.lower), 1.0
        ),
        at_most(second, "f^inf below every f_i, near the optimum", common, 1.0),
        Identity(
            "the same is above 1", "f^inf = inf f, near the optimum", literal, 1.0, literal > 1
        ),
    ]


def batch_variance(g: Array, b: int) -> float:
    """The variance of a batch mean over all batches of b distinct vectors of g (m, d)."""
    centre = g.mean(axis=0)
    batches = np.array(list(combinations(range(len(g)), b)))
    return float(np.square(g[batches].mean(axis=1) - centre).sum(axis=1).mean())


def poisson_variance(g: Array, b: int) -> float:
    """The same for Poisson batches of rate q = b/m: (1 - q) / b times the mean square.

    The sum over a batch is divided by b.
    """
    m = len(g)
    inside = ((np.arange(2**m)[:, None] >> np.arange(m)) & 1).astype(np.float64)
    chance = np.prod(np.where(inside == 1, b / m, 1 - b / m), axis=1)
    return float(chance @ np.square(inside @ g / b - g.mean(axis=0)).sum(axis=1))


def lemma_9() -> list[Identity]:
    """Lemma 9's (1 - q) C^2 / b on opposite gradients.

    It is right for Poisson batches, and too small by m/(m-1) for batches of fixed size.
    """
    m, b = 4, 2
    g = np.array([[1.0], [1.0], [-1.0], [-1.0]])  # C = 1, mean 0
    limit = (1 - b / m) / b
    fixed = batch_variance(g, b)
    return [
        at_most(
            "minibatch variance <= (1 - q) C^2 / b",
            "Poisson, m=4, b=2",
            poisson_variance(g, b),
            limit,
        ),
        equal(
            "... = m/(m-1) (1 - q) C^2 / b",
            "b distinct samples, m=4, b=2",
            fixed,
            m / (m - 1) * limit,
        ),
    ]


def recursion(seed: int) -> list[Identity]:
    """The weighted recursion lemma on a random sequence for which the recursion is an equality."""
    rng = draw(seed, For.VECTORS, 4)
    a, c, K = 1.05, 0.1, 40
    X, Y = [2.0], []
    for _ in range(K):
        Y.append(float(rng.uniform(0, a * X[-1] + c)))
        X.append(a * X[-1] - Y[-1] + c)
    drawn = float(recursion_weights(a, K) @ np.array(Y))
    exact = recursion_bound(a, c, X[0], K) - X[K] / float(
        (a ** np.arange(K, dtype=np.float64)).sum()
    )
    return [
        equal("sum p_k Y_k = (a^K X_0 - X_K)/S_K + c", "equality recursion, K=40", drawn, exact),
        at_most(
            "sum p_k Y_k <= a^K X_0/S_K + c",
            "equality recursion, K=40",
            drawn,
            recursion_bound(a, c, X[0], K),
        ),
    ]


def everything(seed: int) -> list[Identity]:
    """All checks: n divides d or not, blocks of unequal size, more clients than blocks."""
    return [
        *by_enumeration(seed, 3, (1,) * 6),
        *by_enumeration(seed, 3, (1,) * 5),
        *by_enumeration(seed, 2, (4, 1, 3)),
        *by_enumeration(seed, 5, (4, 1, 3)),
        *by_sampling(seed, 16, (1,) * 100),
        *by_sampling(seed, 4, (50, 10, 30, 7, 3)),
        *lemma_1(seed),
        *lemma_9(),
        *recursion(seed),
    ]
