"""Theorem 1: the corrected bound, the misprints, and the order of counts and costs."""

import numpy as np
import pytest

from fedp3.core.errors import InputError
from fedp3_paper.theory import identities, theorem1
from fedp3_paper.theory.digits import logistic, network
from fedp3_paper.theory.problems import as_problem, gradient, scaled
from fedp3_paper.theory.theorem1 import (
    bound,
    bound_heterogeneous,
    bound_inf_f,
    bound_tight,
    costs,
    step_size,
)


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("K", [10, 200])
def test_bound_holds_on_quadratics(n, spread, K):
    problem = as_problem(theorem1.quadratics(n, spread, 0), "q", np.zeros(32))
    assert theorem1.measure(problem, K, runs=24, seed=1, case="q").verdict == "holds"


@pytest.mark.parametrize("K", [10, 200])
def test_half_of_the_printed_bound_holds_too(K):
    """B = 0 in the ABC assumption: the factor 2 is not needed.

    Checked where the bound is sharpest.
    """
    cells = theorem1.sharpness(runs=24, seed=1, horizons=(K,))
    assert all(c.high <= c.bound / 2 for c in cells)


def test_bound_is_sharp_to_a_factor_of_six():
    """A bound a sixth as large would be violated, so the test above can fail."""
    cells = theorem1.sharpness(runs=24, seed=1, horizons=(100,))
    assert all(c.low > c.bound / 16 and c.measured > c.bound / 6 for c in cells)


def test_bound_holds_on_sorted_digits_and_on_a_network_by_layers():
    assert theorem1.measure(logistic(0, 10, 1.0), 100, runs=24, seed=1, case="l").verdict == "holds"
    assert theorem1.measure(network(0, 10, 0.8), 20, runs=20, seed=1, case="n").verdict == "holds"


def test_f_inf_below_every_client_is_needed():
    """T5: with f^inf = inf f, as printed, the bound is violated near the optimum.

    Both corrections hold.
    """
    verdicts = {
        c.case: c.verdict for c in theorem1.literal_reading(runs=24, seed=0, horizons=(400,))
    }
    assert verdicts == {
        "f^inf = inf f, as printed": "violated",
        "f^inf = inf f, plus L gamma Z": "holds",
        "f^inf below every f_i": "holds",
    }


def test_heterogeneity_term_is_zero_only_under_interpolation():
    alike = as_problem(theorem1.quadratics(4, 0.0, 0), "q", np.zeros(32))
    apart = as_problem(theorem1.quadratics(4, 2.0, 0), "q", np.zeros(32))
    assert theorem1.heterogeneity(alike) == pytest.approx(0, abs=1e-12)
    assert theorem1.heterogeneity(apart) > 1
    assert bound_heterogeneous(alike, 0.1, 10) == pytest.approx(bound_inf_f(alike, 0.1, 10))


def test_lemma_1_needs_each_clients_own_infimum():
    assert all(row.holds for row in identities.lemma_1(0))


def test_printed_step_count_is_too_small_for_a_steep_loss():
    """T2: for 10 f the printed K is one step, and eps is not reached.

    The correct K does not change.
    """
    cells = {c.case: c for c in theorem1.printed_count(runs=20, seed=0, steps=300)}
    assert cells["f, correct K"].K == cells["10 f, correct K"].K == 300
    assert cells["10 f, correct K"].verdict == "holds"
    assert cells["10 f, printed K"].K == 1
    assert cells["10 f, printed K"].verdict == "violated"


@pytest.mark.parametrize("s", [0.01, 100.0])
def test_step_count_does_not_depend_on_the_unit_of_f(s):
    """T2: f -> s f takes L, Delta -> s L, s Delta and eps -> s^2 eps.

    K must not change, the printed one goes s^-4.
    """
    args = (2.0, 3.0, 5.0, 0.01)
    in_other_units = (s * 2.0, s * 3.0, s * 5.0, s**2 * 0.01)
    assert theorem1.iterations(*in_other_units) == pytest.approx(theorem1.iterations(*args), abs=1)
    ratio = theorem1.iterations_printed(*in_other_units) / theorem1.iterations_printed(*args)
    assert (
        ratio == pytest.approx(s**-4, rel=0.01) or theorem1.iterations_printed(*in_other_units) == 1
    )


def test_step_count_makes_the_bound_meet_eps():
    problem = as_problem(theorem1.quadratics(4, 1.0, 0), "q", np.zeros(32))
    gap = theorem1.start_loss(problem, None)
    for eps in (1.0, 0.1):
        K = theorem1.iterations(gap, problem.L_bar, problem.L_max, eps)
        assert bound(problem, step_size(problem, K), K) <= eps
        tenth = K // 10
        assert bound(problem, step_size(problem, tenth), tenth) > eps


def test_step_limit_one_over_L_max_is_not_needed():
    """T1: for L_bar < L_max and K = 1 the second limit alone is the larger step, and the bound
    still holds.
    """
    q = theorem1.quadratics(4, 1.0, 0)
    A = q.A.copy()
    A[0] *= 20
    problem = as_problem(type(q)(A=A, c=q.c), "steep client", np.zeros(32))
    assert step_size(problem, 1) > 1 / problem.L_max
    for K in (1, 2, 3):
        assert theorem1.measure(problem, K, runs=24, seed=0, case="steep").verdict == "holds"


@pytest.mark.parametrize("eps", [1.0, 0.01])
@pytest.mark.parametrize("n", [10, 1000])
def test_gain_over_gradient_descent_is_of_order_n_eps(n, eps):
    """T3, T4: with both constants kept the ratio to n eps is one number, and n with the same lemma
    for both.
    """
    c = costs(n, 100, 0.7, 2.0, eps)
    assert c.gain / (n * eps) == pytest.approx(costs(1, 7, 0.7, 2.0, 1.0).gain)
    assert c.gain_same_lemma == pytest.approx(n)
    assert c.gain < n / eps  # as printed


def test_small_eps_turns_the_gain_into_a_loss():
    assert costs(100, 10, 1.0, 1.0, 1.0).gain > 1 > costs(100, 10, 1.0, 1.0, 0.01).gain


def test_tight_bound_is_half():
    problem = as_problem(theorem1.quadratics(4, 1.0, 0), "q", np.zeros(32))
    assert bound_tight(problem, 0.1, 10) == bound(problem, 0.1, 10) / 2
    twice = scaled(problem, 2.0)
    assert bound(twice, 0.05, 10) == pytest.approx(4 * bound(problem, 0.1, 10))


def test_inf_f_must_be_known_to_be_used():
    with pytest.raises(InputError, match="inf f is not known"):
        theorem1.inf_f(logistic(0, 10, 1.0))


def test_random_points_satisfy_the_descent_inequality():
    """One step in expectation: E f(w+) - m <= (1 + L L_max g^2)(f - m) - g ||grad||^2, over all
    permutations.
    """
    q = theorem1.quadratics(3, 2.0, 0, d=6)
    p = as_problem(q, "q", np.zeros(6))
    S = identities.diagonals(identities.all_deals(3, (1,) * 6), 3)
    rng = np.random.Generator(np.random.PCG64(0))
    for w in rng.standard_normal((5, 6)) * 3:
        for gamma in (0.1, 0.7):
            g = p.grads(np.broadcast_to(w, (1, 3, 6)))[0]
            after = w - gamma * (S * g).mean(axis=1)
            f = theorem1.objective(p, after).mean()
            here = theorem1.start_loss(p, w)
            limit = (1 + p.L_bar * p.L_max * gamma**2) * here - gamma * np.square(
                gradient(p, w[None])
            ).sum()
            assert f <= limit + 1e-12
