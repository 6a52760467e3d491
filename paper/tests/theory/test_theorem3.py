"""Theorem 3: exact moments, the corrected W, the bound, and what the theorem cannot cover."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3_paper.theory import identities, pruning
from fedp3_paper.theory.framework import fedp3_step
from fedp3_paper.theory.problems import Quadratics, as_problem, random_quadratics
from fedp3_paper.theory.sketches import identity, random_prune
from fedp3_paper.theory.stats import estimate
from fedp3_paper.theory.theorem3 import (
    a_every_draw,
    a_expected,
    bound,
    horizon,
    moments,
    recursion_bound,
    recursion_weights,
    rest_point,
    retained_together,
    theta,
)


def matrices(seed: int, n: int, d: int) -> np.ndarray:
    return random_quadratics(seed, n, np.geomspace(0.2, 1, d), shapes=0.7, centres=0.0).A


def all_masks(d: int, keep: int) -> list[np.ndarray]:
    return [
        np.diag([1.0 if j in chosen else 0.0 for j in range(d)])
        for chosen in combinations(range(d), keep)
    ]


def enumerated(L: np.ndarray, keep: int, what) -> np.ndarray:
    """E over every combination of the clients' masks, with dense matrices."""
    n, d = L.shape[:2]
    Lbar = sum(L) / n
    draws = list(product(all_masks(d, keep), repeat=n))
    total = 0
    for P in draws:
        Pbar = sum(P) / n
        B = sum(P[i] @ L[i] @ P[i] for i in range(n)) / n
        total = total + what(Pbar, Lbar, B)
    return total / len(draws)


@pytest.mark.parametrize(
    ("n", "d", "keep"), [(1, 4, 2), (2, 4, 3), (2, 3, 1), (3, 3, 2), (2, 4, 4)]
)
def test_moments_are_those_of_enumeration(n, d, keep):
    L = matrices(n + d, n, d)
    m = moments(L, keep)
    for name, what in {
        "B": lambda P, Lbar, B: B,
        "PLP": lambda P, Lbar, B: P @ Lbar @ P,
        "PLB": lambda P, Lbar, B: P @ Lbar @ B,
        "PBL": lambda P, Lbar, B: P @ B @ Lbar,
        "BLB": lambda P, Lbar, B: B @ Lbar @ B,
        "W": lambda P, Lbar, B: (P @ Lbar @ B + B @ Lbar @ P) / 2,
    }.items():
        np.testing.assert_allclose(
            getattr(m, name), enumerated(L, keep, what), atol=1e-12, err_msg=name
        )


@given(st.integers(0, 500))
def test_corrected_W_is_the_form_in_the_proof_and_the_printed_one_is_not(seed):
    """T16: w'E[P L B]w = w'W w for the corrected W, for every w.

    The printed W is not even symmetric.
    """
    L = matrices(seed, 2, 4)
    m = moments(L, 2)
    np.testing.assert_allclose(m.W, m.W.T)
    for w in np.random.Generator(np.random.PCG64(seed)).standard_normal((5, 4)):
        assert w @ m.W @ w == pytest.approx(w @ m.PLB @ w)
    assert np.abs(m.W_printed - m.W_printed.T).max() > 1e-5
    symmetric = (m.W_printed + m.W_printed.T) / 2
    assert np.abs(symmetric - m.W).max() > 1e-6


@given(st.integers(1, 8), st.data())
def test_chances_of_being_retained_together_count_subsets(d, data):
    keep = data.draw(st.integers(1, d))
    q = retained_together(d, keep)
    masks = [set(c) for c in combinations(range(d), keep)]
    for s in range(min(4, d) + 1):
        assert q[s] == pytest.approx(np.mean([set(range(s)) <= m for m in masks]))


@pytest.mark.parametrize("case", range(10))
def test_bound_holds_wherever_the_theorem_speaks(case):
    name, q, keep = pruning.cases(0)[case]
    allowed = [K for K in (5, 50) if pruning.constants(name, q, keep).horizon >= K]
    cells = [pruning.measure(name, q, keep, K=K, runs=24, seed=1) for K in allowed]
    assert [c.verdict for c in cells] == ["holds"] * len(allowed)
    assert bool(allowed) == (name != "correlated 0.9, n=1, keep 1/2")


def test_bound_is_sharp_to_a_factor_of_two_on_the_borderline_case():
    name, q, keep = next(c for c in pruning.cases(0) if "0.718" in c[0])
    cell = pruning.measure(name, q, keep, K=50, runs=24, seed=1)
    assert cell.low > cell.bound / 2


def test_one_step_descends_as_the_proof_says():
    """E f(w+) <= a f - gamma (1 - theta gamma / 2) w'W w for every w, expectation exact."""
    for _, q, keep in pruning.cases(3):
        m = moments(q.A, keep)
        a, t = a_expected(q.A, m), theta(m)
        for gamma in (0.3 / t, 1 / t):
            # E f(w+) as a quadratic form
            after = (m.PLP - gamma * (m.PLB + m.PLB.T) + gamma**2 * m.BLB) / 2
            limit = a * q.A_bar / 2 - gamma * (1 - t * gamma / 2) * m.W
            assert np.linalg.eigvalsh(limit - after)[0] > -1e-12


def test_assumption_on_h_fails_for_every_step_size():
    """T18: w = (1, -1) has f(w) = 0.1 and f(P w) = 0.5, so gamma^2 h >= 4 for every gamma."""
    q = pruning.correlated(1, 0.9)
    w, P = np.array([1.0, -1.0]), np.diag([1.0, 0.0])
    assert 0.5 * w @ q.A[0] @ w == pytest.approx(0.1)
    assert 0.5 * (P @ w) @ q.A[0] @ (P @ w) == pytest.approx(0.5)
    assert a_every_draw(q.A, 1) >= 5
    assert horizon(a_expected(q.A, moments(q.A, 1))) < 1
    with pytest.raises(InputError, match="allows K"):
        pruning.measure("correlated", q, 1, K=1, runs=20, seed=0)


@given(st.integers(0, 300), st.integers(2, 4))
def test_every_draw_is_harmless_only_if_the_mean_matrix_is_diagonal(seed, d):
    """T18, sharper: L - PLP has a zero block beside L_12, so it is positive semidefinite only if
    L_12 = 0.
    """
    L = matrices(seed, 2, d)
    assert a_every_draw(L, d - 1) > 1 + 1e-9
    D = np.stack([np.diag(np.diag(M)) for M in L])
    assert a_every_draw(D, d - 1) == pytest.approx(1)


def test_worst_draw_is_one_mask_for_all():
    """The convexity argument of `a_every_draw`, against all pairs of masks."""
    L = matrices(1, 2, 4)
    Lbar = L.mean(axis=0)
    half = np.linalg.cholesky(np.linalg.inv(Lbar))
    worst = max(
        np.linalg.eigvalsh(half.T @ Pbar @ Lbar @ Pbar @ half)[-1]
        for P in product(all_masks(4, 2), repeat=2)
        for Pbar in [sum(P) / 2]
    )
    assert a_every_draw(L, 2) == pytest.approx(worst)


def test_pruning_alone_drives_the_gradient_to_zero_when_b_is_zero():
    """T21."""
    curves = {c.name: c.path for c in pruning.controls(K=80, runs=20, seed=0)}
    assert curves["pruning alone, step size 0"][-1] < 1e-12
    assert curves["pruning alone, step size 0"][-1] < curves["gradient steps, no pruning"][-1]


def test_pruning_stalls_when_b_is_not_zero():
    """T21: away from the optimum, and as the closed form says.

    Without pruning the gradient vanishes.
    """
    curves = {c.name: c for c in pruning.stalls(K=300, runs=20, seed=0)}
    assert curves["no pruning"].path[-1] < 1e-12
    for name in ("random, as in Definition 1", "Perm-K", "Perm-K, rescaled"):
        c = curves[name]
        assert c.rest > 0.5
        assert c.path[-50:].mean() == pytest.approx(c.rest, rel=0.1)
    rescaled = curves["random, rescaled"]
    assert (
        0.01 < rescaled.rest < rescaled.path[-50:].mean()
    )  # unbiased weights, but noise as large as the weights


@pytest.mark.parametrize("scaled_", [False, True])
def test_mean_rest_point_is_where_the_mean_iterate_rests(scaled_):
    q = random_quadratics(0, 4, np.geomspace(0.5, 1.0, 6), shapes=0.5, centres=0.5)
    p = as_problem(q, "b", np.zeros(6))
    w = rest_point(q, 4, 0.1, scaled=scaled_)
    step = fedp3_step(p, 0.1, random_prune(4, 6, 4, scaled=scaled_), identity(4, 6), seed=0)
    moved = step(0, np.tile(w, (40_000, 1)))
    for j in range(6):
        e = estimate(moved[:, j])
        assert e.low <= w[j] <= e.high
    assert np.abs(w - q.optimum).max() > 0.05


def test_a_smaller_step_makes_the_stall_worse():
    """The pull of pruning is there at every step, that of the gradient is scaled by gamma: gamma ->
    0 leaves w = 0.
    """
    q = random_quadratics(0, 4, np.geomspace(0.5, 1.0, 6), shapes=0.5, centres=0.5)
    norms = [np.linalg.norm(rest_point(q, 4, gamma)) for gamma in (0.5, 0.05, 0.005)]
    assert norms[0] > norms[1] > norms[2] and norms[2] < 0.05


def test_a_matrix_W_that_is_not_positive_is_refused():
    """Many alike clients: W is near the symmetrised product of L and its diagonal, which is
    indefinite here.
    """
    L = np.tile(np.array([[1.0, 0.2], [0.2, 0.05]]), (20, 1, 1))
    assert (np.linalg.eigvalsh(L) > 0).all()
    with pytest.raises(InputError, match="does not apply"):
        theta(moments(L, 1))


# The weighted recursion lemma --------------------------------------------------------------------


@settings(max_examples=100)
@given(
    a=st.floats(1.0001, 1.5),
    c=st.floats(0, 2),
    X0=st.floats(0, 10),
    shares=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30),
)
def test_weighted_recursion_lemma(a, c, X0, shares):
    """Any sequences with X_{k+1} <= a X_k - Y_k + c, X and Y >= 0: `shares` choose Y_k and the
    slack.
    """
    X, Y = [X0], []
    for y, slack in shares:
        room = a * X[-1] + c
        Y.append(y * room)
        X.append(slack * (room - Y[-1]))
    K = len(Y)
    p = recursion_weights(a, K)
    assert p.sum() == pytest.approx(1) and (np.diff(p) <= 0).all()
    assert p @ np.array(Y) <= recursion_bound(a, c, X0, K) * (1 + 1e-9) + 1e-12


def test_weighted_recursion_is_an_equality_without_slack():
    assert all(row.holds for row in identities.recursion(0))


def test_uniform_weights_would_not_do():
    """The lemma needs p_k: with all of Y at the first step the plain mean is below it, at the last
    above.
    """
    a, K, X0 = 1.2, 10, 1.0
    late = np.zeros(K)
    late[-1] = a**K * X0  # X grows to a^{K-1}, then is given away
    assert recursion_weights(a, K) @ late <= recursion_bound(a, 0.0, X0, K) + 1e-12
    assert late.mean() > recursion_bound(a, 0.0, X0, K)


def test_bound_is_four_gaps_over_gamma_K():
    assert bound(0.5, 10, 3.0) == 4 * 3.0 / (0.5 * 10)
    for a in (1.0, 1.001):
        K = int(min(horizon(a), 500))
        assert 2 * recursion_bound(a, 0.0, 1.0, K) <= 4 / K * (1 + 1e-9)


def test_impossible_masks_are_refused():
    with pytest.raises(InputError):
        retained_together(4, 0)
    with pytest.raises(InputError, match="even"):
        pruning.diagonal_mean(0, 3, 4)


def test_mean_matrix_of_the_diagonal_family_is_diagonal():
    q: Quadratics = pruning.diagonal_mean(0, 6, 5)
    np.testing.assert_allclose(q.A_bar, np.diag(np.diag(q.A_bar)), atol=1e-15)
    assert (np.linalg.eigvalsh(q.A) > 0).all() and np.abs(q.A[0] - q.A_bar).max() > 0.01
