"""Fixed layer sets: not stationary for f, in closed form and in runs; and they may diverge."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3_paper.theory.fixed_layers import (
    PLANS,
    drift_point,
    field,
    fixed_point,
    follow,
    growth,
    residual,
    unstable_pair,
    windows,
)
from fedp3_paper.theory.framework import fedp3_step, iterate
from fedp3_paper.theory.problems import as_problem, random_quadratics
from fedp3_paper.theory.sketches import fixed, identity, normalised


def plan(name: str):
    return next(p for p in PLANS if p.name == name)


@pytest.mark.parametrize("name", [p.name for p in PLANS if p.width])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_runs_come_to_rest_where_the_closed_form_says(name, spread):
    r = follow(0, spread, plan(name), K=600, runs=1)
    assert r.measured == pytest.approx(r.closed_form, rel=1e-6, abs=1e-20)


def test_rest_is_not_stationary_for_f_unless_clients_agree():
    """T20."""
    assert follow(0, 0.0, plan("1 of 4 layers, fixed"), K=600, runs=1).measured < 1e-20
    ends = [
        follow(0, 3.0, plan(f"{k} of 4 layers, fixed"), K=600, runs=1).measured for k in (1, 2, 3)
    ]
    assert ends[0] > ends[1] > ends[2] > 0.01
    assert follow(0, 3.0, plan("all layers"), K=600, runs=1).measured < 1e-20


def test_redrawn_sketches_come_to_the_optimum_on_average():
    redrawn = follow(0, 1.0, plan("S redrawn every step"), K=800, runs=40)
    held = follow(0, 1.0, plan("1 of 4 layers, fixed"), K=800, runs=1)
    assert redrawn.measured < held.measured / 100
    assert redrawn.path[-100:].mean() < held.path[-100:].mean() / 20


def test_several_local_steps_drift_too():
    r = follow(0, 3.0, plan("all layers, 10 local steps"), K=300, runs=1)
    assert r.measured == pytest.approx(r.closed_form) and r.measured > 1e-3
    q = random_quadratics(0, 5, np.geomspace(0.2, 1, 6), shapes=1.0, centres=1.0)
    np.testing.assert_allclose(drift_point(q, 0.1, 1), q.optimum)


def test_field_is_the_mean_update_written_with_loops():
    q = random_quadratics(3, 4, np.geomspace(0.2, 1, 4), shapes=1.0, centres=1.0)
    train = np.array([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]])
    w = np.array([1.0, -2.0, 0.5, 3.0])
    M, r = field(q, train)
    expected = [
        np.mean([(q.A[i] @ (w - q.c[i]))[j] for i in range(4) if train[i, j]]) for j in range(4)
    ]
    np.testing.assert_allclose(M @ w - r, expected)
    np.testing.assert_allclose(M @ fixed_point(q, train), r)
    assert residual(q, fixed_point(q, train)) > 1e-4


@given(gamma=st.floats(1e-6, 10.0), coupling=st.floats(1.01, 5.0))
def test_two_convex_clients_diverge_at_every_step_size(gamma, coupling):
    """Every A_i and the mean are positive definite, yet det M = 1 - coupling^2 < 0: a saddle made
    by the plan.
    """
    q, train = unstable_pair(coupling)
    assert (np.linalg.eigvalsh(q.A) > 0).all() and (np.linalg.eigvalsh(q.A_bar) > 0).all()
    assert np.linalg.det(field(q, train)[0]) == pytest.approx(1 - coupling**2, rel=1e-6)
    assert growth(coupling, gamma) > 1


def test_weak_coupling_converges():
    assert growth(0.9, 0.1) < 1


def test_the_unstable_pair_diverges_in_a_run_and_not_with_all_layers():
    q, train = unstable_pair()
    p = as_problem(q, "pair", np.array([1.0, -0.5]))
    held = iterate(p, fedp3_step(p, 0.05, identity(2, 2), fixed(normalised(train)), seed=0), 200, 1)
    whole = iterate(p, fedp3_step(p, 0.05, identity(2, 2), identity(2, 2), seed=0), 200, 1)
    assert held.seen[-1, 0] > 1e6 * held.seen[0, 0] and whole.seen[-1, 0] < 1e-3 * whole.seen[0, 0]


@given(n=st.integers(1, 20), layers=st.integers(1, 6), data=st.data())
def test_windows_give_every_client_its_width_and_every_layer_somebody(n, layers, data):
    n = max(n, layers)
    width = data.draw(st.integers(1, layers))
    held = windows(n, layers, width)
    np.testing.assert_array_equal(held.sum(axis=1), width)
    assert (held.sum(axis=0) >= 1).all()


def test_windows_that_leave_a_layer_to_nobody_are_refused():
    with pytest.raises(InputError):
        windows(2, 4, 1)
