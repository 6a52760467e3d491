"""Problems: gradients against differences, the theorems' constants, samples and their means."""

import numpy as np
import pytest

from fedp3.core.errors import InputError
from fedp3_paper.theory.digits import LAYERS, curvature, logistic, network, split_digits
from fedp3_paper.theory.problems import (
    Problem,
    as_problem,
    gradient,
    objective,
    random_quadratics,
    scaled,
    with_samples,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def quadratic() -> Problem:
    q = random_quadratics(0, 5, np.geomspace(0.1, 2.0, 7), shapes=0.7, centres=1.0)
    return as_problem(q, "quadratics", np.ones(7))


@pytest.fixture(scope="module")
def small_network() -> Problem:
    return network(0, 4, 0.8)


@pytest.fixture(params=["quadratics", "logistic", "network"])
def problem(request, small_network):
    return {
        "quadratics": quadratic,
        "logistic": lambda: logistic(0, 6, 1.0),
        "network": lambda: small_network,
    }[request.param]()


def test_gradients_are_those_of_the_losses(problem):
    w = problem.start + 0.3 * rng(1).standard_normal((2, problem.n, problem.d))
    v = rng(2).standard_normal(w.shape)
    step = 1e-5
    numeric = (problem.losses(w + step * v) - problem.losses(w - step * v)) / (2 * step)
    np.testing.assert_allclose((problem.grads(w) * v).sum(axis=2), numeric, rtol=1e-5, atol=1e-8)


def test_no_loss_is_below_its_lower_bound(problem):
    w = problem.start + 2 * rng(3).standard_normal((20, problem.n, problem.d))
    assert (problem.losses(w) >= problem.lower).all()


def test_smoothness_bounds_differences_of_gradients(problem):
    a = problem.start + 0.2 * rng(4).standard_normal((10, problem.n, problem.d))
    b = a + 0.1 * rng(5).standard_normal(a.shape)
    slope = np.linalg.norm(problem.grads(a) - problem.grads(b), axis=2) / np.linalg.norm(
        a - b, axis=2
    )
    assert (slope <= problem.smooth * (1 + 1e-9)).all()


def test_curvature_finds_the_largest_eigenvalue():
    p = quadratic()
    np.testing.assert_allclose(
        curvature(p.grads, np.zeros((1, p.n, p.d)), 0, rounds=300)[0], p.smooth, rtol=1e-3
    )


def sampled_quadratic() -> Problem:
    q = random_quadratics(0, 5, np.geomspace(0.1, 2.0, 7), shapes=0.7, centres=1.0)
    return with_samples(as_problem(q, "quadratics", np.ones(7)), q, 0, m=9, spread=2.0)


@pytest.mark.parametrize("name", ["quadratics", "logistic", "network"])
def test_sample_gradients_average_to_the_client_gradient(name, small_network):
    p = {
        "quadratics": sampled_quadratic(),
        "logistic": logistic(0, 6, 1.0),
        "network": small_network,
    }[name]
    w = p.start + 0.2 * rng(6).standard_normal((2, p.d))
    everyone = np.broadcast_to(np.arange(p.samples.m), (2, p.n, p.samples.m))
    g = p.samples.grads(w, everyone)
    np.testing.assert_allclose(g.mean(axis=2).mean(axis=1), gradient(p, w), rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(g, axis=-1).max() <= p.samples.bound


def test_sample_gradients_are_of_the_samples_that_were_chosen():
    p = logistic(0, 6, 1.0)
    w = rng(7).standard_normal((2, p.d))
    chosen = rng(8).integers(0, p.samples.m, (2, p.n, 3))
    all_of_them = p.samples.grads(w, np.broadcast_to(np.arange(p.samples.m), (2, p.n, p.samples.m)))
    g = p.samples.grads(w, chosen)
    for r in range(2):
        for i in range(p.n):
            for k in range(3):
                np.testing.assert_allclose(g[r, i, k], all_of_them[r, i, chosen[r, i, k]])


def test_interpolation_means_one_point_minimises_every_client():
    q = random_quadratics(1, 4, np.geomspace(0.1, 1, 5), shapes=1.0, centres=0.0)
    p = as_problem(q, "", np.zeros(5))
    assert p.f_inf == pytest.approx(0, abs=1e-20)
    apart = random_quadratics(1, 4, np.geomspace(0.1, 1, 5), shapes=1.0, centres=1.0)
    assert as_problem(apart, "", np.zeros(5)).f_inf > 0.1


def test_equal_shapes_and_centres_give_equal_clients():
    q = random_quadratics(1, 4, np.geomspace(0.1, 1, 5), shapes=0.0, centres=0.0)
    assert (q.A[0] == q.A).all() and (q.c == q.c[0]).all()
    np.testing.assert_allclose(np.linalg.eigvalsh(q.A[0]), np.geomspace(0.1, 1, 5))


def test_optimum_is_stationary_and_inf_f_is_its_value():
    q = random_quadratics(2, 6, np.geomspace(0.1, 1, 8), shapes=0.5, centres=2.0)
    p = as_problem(q, "", np.zeros(8))
    assert np.abs(gradient(p, q.optimum[None])).max() < 1e-12
    assert objective(p, q.optimum[None])[0] == pytest.approx(p.f_inf)
    assert (objective(p, q.optimum + rng().standard_normal((50, 8))) > p.f_inf).all()


def test_scaling_scales_every_constant():
    p = logistic(0, 6, 1.0)
    s = scaled(p, 10.0)
    w = rng(9).standard_normal((2, p.d))
    np.testing.assert_allclose(objective(s, w), 10 * objective(p, w))
    np.testing.assert_allclose(gradient(s, w), 10 * gradient(p, w))
    assert (s.L_max, s.samples.bound) == (10 * p.L_max, 10 * p.samples.bound)
    one = np.zeros((2, p.n, 1), dtype=np.int64)
    np.testing.assert_allclose(s.samples.grads(w, one), 10 * p.samples.grads(w, one))


def test_every_digit_goes_to_one_client_and_heterogeneity_sorts_them():
    mixed, ordered = split_digits(0, 10, 0.0), split_digits(0, 10, 1.0)
    assert mixed.x.shape == (10, 179, 64)
    assert (
        np.unique(mixed.x.reshape(-1, 64), axis=0).shape[0] > 1780
    )  # a few digits are drawn twice in the data
    assert (np.diff(ordered.y.reshape(-1)) >= 0).all()
    assert np.mean([len(set(y)) for y in mixed.y]) == 10
    assert np.mean([len(set(y)) for y in ordered.y]) <= 3


def test_network_has_one_block_per_layer(small_network):
    assert small_network.blocks == LAYERS == (136, 72, 90)
    assert sum(small_network.blocks) == small_network.d


@pytest.mark.parametrize(
    "wrong", [{"shapes": 1.5, "centres": 0.0}, {"shapes": 0.5, "centres": -1.0}]
)
def test_impossible_quadratics_are_refused(wrong):
    with pytest.raises(InputError, match="shapes"):
        random_quadratics(0, 2, np.ones(2), **wrong)
