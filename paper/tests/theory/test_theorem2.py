"""Theorem 2 and the table: corrected noise, bound and schedule; what the printed forms do."""

from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3_paper.theory import identities, ldp_table, theorem2
from fedp3_paper.theory.digits import logistic
from fedp3_paper.theory.ldp_table import Setting
from fedp3_paper.theory.problems import scaled
from fedp3_paper.theory.theorem2 import (
    Privacy,
    Schedule,
    bound,
    bound_at,
    bound_without_gap,
    noise_level,
    schedule,
)

DIGITS = logistic(0, 8, 1.0, components=8)
M = DIGITS.samples.m
privacies = st.builds(
    Privacy, st.floats(0.01, 20), st.floats(1e-9, 0.1), st.integers(10, 10_000), st.floats(0.5, 20)
)
positive = st.floats(0.01, 100)


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_bound_holds_with_noise_on_the_gradient(epsilon):
    assert (
        theorem2.measure(DIGITS, Privacy(epsilon, 1e-5, M), b=8, runs=20, seed=1).verdict == "holds"
    )


def test_bound_is_violated_with_noise_on_the_weights():
    """T12: Algorithm 5 as printed.  For 10 f the step is shorter, the weights' noise is not."""
    p, steep = Privacy(4.0, 1e-5, M), scaled(DIGITS, 10.0)
    assert theorem2.measure(steep, p, b=8, runs=24, seed=1, on_weights=True).verdict == "violated"
    assert theorem2.measure(steep, p, b=8, runs=24, seed=1).verdict == "holds"


def test_bound_without_the_gap_is_violated_in_other_units():
    """T9: for 400 f the printed bound, without sqrt(Delta_0), is below what is measured.

    The correct one is not.
    """
    p = Privacy(2.0, 1e-5, M)
    big = scaled(DIGITS, 400.0)
    cell = theorem2.measure(big, p, b=8, runs=20, seed=1)
    printed = bound_without_gap(p, big.d, big.L_max, big.samples.bound)
    assert cell.verdict == "holds" and cell.low > printed


@given(privacies, st.integers(1, 10_000), positive, positive, positive)
def test_schedule_meets_the_closed_bound(p, d, L, gap, C):
    """K and gamma as printed give at most 2 C sqrt(Delta L A), up to K rounded up, and 2.5 for
    Poisson batches.
    """
    A = noise_level(p, d)
    exact_K = max(sqrt(L * gap / A) / C, 1 / A)
    gamma = min(1 / L, sqrt(gap * A / L) / C)
    assert exact_K * gamma == pytest.approx(sqrt(gap / (L * A)) / C)
    unrounded = Schedule(K=exact_K, gamma=gamma, sigma=0.0)
    closed = bound(p, d, L, gap, C)
    assert bound_at(unrounded, A, L, gap, C) <= closed * (1 + 1e-9)
    assert bound_at(unrounded, A, L, gap, C, second_moment=2.0) <= 1.25 * closed * (1 + 1e-9)
    s = schedule(p, d, L, gap, C)
    assert s.gamma == gamma and exact_K <= s.K < exact_K + 1
    assert s.sigma**2 == pytest.approx(p.c * s.K * C**2 * log(1 / p.delta) / (p.m * p.epsilon) ** 2)


@given(st.integers(1, 50), st.integers(1, 50))
def test_printed_second_moment_factor_is_above_one(b, extra):
    """T10: (b + 1 - q)/b is in (1, 2], not below 1; it is 1 only for whole batches."""
    m = b + extra
    assert 1 < theorem2.kappa(b, m, poisson=True) <= 2
    assert theorem2.kappa(b, b, poisson=True) == 1
    assert theorem2.kappa(b, m, poisson=False) == 1


def test_fixed_batches_of_clipped_gradients_are_never_longer_than_C():
    """Why kappa = 1: a mean of vectors of norm at most C.

    With Poisson batches the mean may be longer.
    """
    g = np.array([[1.0]] * 4)
    batch_mean_square = 1.0  # any two of them
    poisson = theorem2.kappa(2, 4, poisson=True)
    exact = identities.poisson_variance(g, 2) + 1.0
    assert batch_mean_square == 1.0 < exact <= poisson


def test_lemma_9_holds_for_poisson_and_not_for_fixed_size():
    """T23: m/(m-1) is missing for b distinct samples, twice too small at m = 2."""
    assert all(row.holds for row in identities.lemma_9())
    g = np.array([[1.0], [-1.0]])
    assert identities.batch_variance(g, 1) == 1.0 > (1 - 1 / 2) * 1.0
    assert identities.poisson_variance(g, 1) == pytest.approx((1 - 1 / 2) * 1.0)


@given(st.integers(0, 2**32), st.integers(2, 6), st.data())
def test_minibatch_variances_follow_their_formulas(seed, m, data):
    b = data.draw(st.integers(1, m))
    g = np.random.Generator(np.random.PCG64(seed)).standard_normal((m, 3))
    spread = np.square(g - g.mean(axis=0)).sum(axis=1).mean()
    assert identities.batch_variance(g, b) == pytest.approx(
        (m - b) / (b * (m - 1)) * spread, abs=1e-12
    )
    square = np.square(g).sum(axis=1).mean()
    assert identities.poisson_variance(g, b) == pytest.approx((1 - b / m) / b * square, abs=1e-12)


def test_a_bounded_client_gradient_does_not_bound_a_sample():
    """T13: two samples with opposite gradients of any length leave the client's gradient at 0."""
    g = np.array([[1e6], [-1e6]])
    assert np.linalg.norm(g.mean(axis=0)) == 0
    assert identities.batch_variance(g, 1) == pytest.approx(1e12)


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 8.0])
def test_printed_sigma_is_not_positive_from_epsilon_one_on(epsilon):
    """T8: log(1/eps) in place of log(1/delta)."""
    p = Privacy(epsilon, 1e-5, 100)
    assert theorem2.sigma_sq_printed(p, 10, 1.0) <= 0 < theorem2.sigma_sq(p, 10, 1.0)


def test_printed_sigma_ignores_delta_and_gives_less_privacy_than_claimed():
    a, b = Privacy(0.5, 1e-3, 100, c=4.5), Privacy(0.5, 1e-9, 100, c=4.5)
    assert theorem2.sigma_sq_printed(a, 10, 1.0) == theorem2.sigma_sq_printed(b, 10, 1.0)
    p = Privacy(0.5, 1e-5, 100, c=4.5)
    K, C, sensitivity = 10, 1.0, 2 * 1.0 / 100
    mu = {
        name: sqrt(K) * sensitivity / sqrt(var(p, K, C))
        for name, var in (("correct", theorem2.sigma_sq), ("printed", theorem2.sigma_sq_printed))
    }
    assert theorem2.true_epsilon(mu["correct"], p.delta) <= p.epsilon
    assert theorem2.true_epsilon(mu["printed"], p.delta) > 3 * p.epsilon


def test_no_constant_makes_the_closed_form_exact():
    """T14: for full batches the c that is needed is 3.3 at epsilon 0.1 and 8.0 at 8."""
    c = [theorem2.c_needed(e, 1e-5) for e in (0.1, 1.0, 8.0)]
    assert c == pytest.approx([3.29, 4.84, 8.01], abs=0.01)


@given(st.floats(0.05, 10), st.floats(1e-9, 0.2))
def test_exact_gaussian_privacy_inverts_itself(epsilon, delta):
    mu = theorem2.largest_mu(epsilon, delta)
    assert theorem2.gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-4, abs=1e-12)
    assert theorem2.true_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-4)
    assert theorem2.gaussian_delta(epsilon, 0.9 * mu) < delta


def test_gaussian_mechanism_agrees_with_a_published_value():
    """(1, 1e-5) needs noise of 3.73 sensitivities (analytic Gaussian mechanism)."""
    assert 1 / theorem2.largest_mu(1.0, 1e-5) == pytest.approx(3.73, abs=0.005)


def test_communication_is_d_times_K():
    p = Privacy(2.0, 1e-5, 500)
    l = log(1 / p.delta)
    for d in (5, 5000):
        expected = max(
            p.m * p.epsilon * sqrt(d * 0.3 * 0.7 / (p.c * l)) / 1.1,
            (p.m * p.epsilon) ** 2 / (p.c * l),
        )
        assert theorem2.communication(p, d, 0.3, 0.7, 1.1) == pytest.approx(expected)
        assert d * schedule(p, d, 0.3, 0.7, 1.1).K == pytest.approx(expected, abs=d)


@pytest.mark.parametrize(
    "wrong", [(0.0, 1e-5, 10, 1.0), (1.0, 1.0, 10, 1.0), (1.0, 1e-5, 0, 1.0), (1.0, 0.1, 9, 0.0)]
)
def test_impossible_privacy_is_refused(wrong):
    with pytest.raises(InputError, match="privacy"):
        Privacy(*wrong)


# The table ---------------------------------------------------------------------------------------

settings_ = st.builds(
    Setting,
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.integers(1, 10**7),
    st.floats(0.01, 20),
    st.floats(1e-12, 0.5),
    st.floats(0, 1000),
    st.floats(0.01, 100),
)


@given(settings_)
def test_table_is_the_printed_formulas(s):
    """Naive twin, each row written out."""
    l = log(1 / s.delta)
    rows = {
        "Q-DPSGD-1": (1 + s.n / (s.m * s.sigma2)) * s.m**2 * s.epsilon**2 / (s.d * l),
        "LDP SVRG/SPIDER": s.n**1.5 * s.m * s.epsilon * s.d**0.5 / l**0.5,
        "SDM-DSGD": s.n**3.5 * s.m * s.epsilon * s.d**0.5 / ((1 + s.omega) ** 1.5 * l**0.5)
        + s.n * s.m**2 * s.epsilon**2 / ((1 + s.omega) * l),
        "CDP-SGD": s.n**1.5 * s.m * s.epsilon * s.d**0.5 / ((1 + s.omega) ** 1.5 * l**0.5)
        + s.n * s.m**2 * s.epsilon**2 / ((1 + s.omega) * l),
        "LDP-FedP3": s.m * s.epsilon * s.d**0.5 / l**0.5 + s.m**2 * s.epsilon**2 / l,
    }
    assert ldp_table.table(s) == pytest.approx(rows)


@given(settings_)
def test_cdp_sgd_with_rand_t_is_ldp_fedp3(s):
    """T19: omega = n - 1 makes the two rows one."""
    rand_t = Setting(s.n, s.m, s.d, s.epsilon, s.delta, s.n - 1)
    rows = ldp_table.table(rand_t)
    assert rows["CDP-SGD"] == pytest.approx(rows["LDP-FedP3"])


def test_q_dpsgd_1_is_a_number_of_rounds():
    """Its leading term is Theorem 2's K without constants.

    In values it is CDP-SGD's second term uncompressed.
    """
    s = Setting(10, 1000, 50, 1.0, 1e-5, omega=0.0, sigma2=1e12)
    p = Privacy(1.0, 1e-5, 1000, c=1.0)
    assert ldp_table.table(s)["Q-DPSGD-1"] == pytest.approx(1 / noise_level(p, 50))
    assert ldp_table.in_values(s)["Q-DPSGD-1"] == pytest.approx(s.n * ldp_table.second_order(s))


@pytest.mark.parametrize(
    "field", [{"n": 0}, {"epsilon": 0.0}, {"delta": 1.0}, {"omega": -0.1}, {"sigma2": 0.0}]
)
def test_impossible_settings_are_refused(field):
    good = {"n": 1, "m": 1, "d": 1, "epsilon": 1.0, "delta": 0.1, "omega": 0.0}
    with pytest.raises(InputError, match="ldp-table"):
        Setting(**{**good, **field})
