"""Algorithms 4 and 5 against twins in plain loops, and their limit cases."""

from collections import Counter
from dataclasses import replace
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3_paper.theory.digits import logistic, network
from fedp3_paper.theory.draws import For, draw
from fedp3_paper.theory.framework import (
    Perturbation,
    batches,
    clipped,
    fedp3_step,
    gradient_step,
    iterate,
    ldp_step,
)
from fedp3_paper.theory.problems import as_problem, gradient, random_quadratics, with_samples
from fedp3_paper.theory.sketches import fixed, identity, perm_k, rand_t, random_prune


def problem(n: int = 4, d: int = 6, spread: float = 1.0):
    q = random_quadratics(0, n, np.geomspace(0.2, 1, d), shapes=0.5, centres=spread)
    return q, as_problem(q, "quadratics", np.arange(float(d)))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 5), d=st.integers(1, 7), local=st.integers(1, 4), seed=st.integers(0, 999))
def test_step_is_algorithm_4_written_with_loops(n, d, local, seed):
    q, p = problem(n, d)
    keep = max(1, d // 2)
    gamma = 0.3
    w = p.start
    step = fedp3_step(
        p, gamma, random_prune(n, d, keep), perm_k(n, (1,) * d), seed=seed, local_steps=local
    )
    P = random_prune(n, d, keep)(draw(seed, For.PRUNE, 7), 1)[0]
    S = perm_k(n, (1,) * d)(draw(seed, For.AGGREGATE, 7), 1)[0]
    total = np.zeros(d)
    for i in range(n):
        u = np.diag(P[i]) @ w
        for _ in range(local):
            u = u - gamma * np.diag(P[i]) @ (q.A[i] @ (u - q.c[i]))
        total += np.diag(S[i]) @ u
    np.testing.assert_allclose(step(7, w[None])[0], total / n, rtol=1e-12, atol=1e-12)


def test_no_pruning_and_equal_clients_is_gradient_descent_exactly():
    """Perm-K reassembles one step of gradient descent: no error if all clients are alike."""
    q = random_quadratics(0, 3, np.geomspace(0.2, 1, 6), shapes=0.0, centres=0.0)
    p = as_problem(q, "", np.ones(6))
    a = iterate(p, fedp3_step(p, 0.5, identity(3, 6), perm_k(3, (1,) * 6), seed=1), 20, 2)
    b = iterate(p, gradient_step(p, 0.5, identity(3, 6), seed=1), 20, 2)
    np.testing.assert_allclose(a.last, b.last, rtol=1e-12)
    np.testing.assert_allclose(a.seen, b.seen, rtol=1e-9, atol=1e-25)


def test_sending_weights_or_gradients_through_perm_k_is_the_same():
    _, p = problem()
    S = perm_k(p.n, p.blocks)
    a = iterate(p, fedp3_step(p, 0.2, identity(p.n, p.d), S, seed=3), 15, 3)
    b = iterate(p, gradient_step(p, 0.2, S, seed=3), 15, 3)
    np.testing.assert_allclose(a.last, b.last, rtol=1e-10)


def test_sending_weights_through_rand_t_loses_them():
    """Why S must average to the identity: Rand-t on weights adds noise of the size of the weights
    at any gamma.
    """
    _, p = problem(spread=0.0)
    start = np.full(p.d, 5.0)
    step = fedp3_step(p, 0.0, identity(p.n, p.d), rand_t(p.n, p.d, 2), seed=0)
    moved = np.square(step(0, np.tile(start, (500, 1))) - start).sum(axis=1).mean()
    assert moved == pytest.approx((p.d / 2 - 1) / p.n * 25 * p.d, rel=0.1)


def test_one_step_moves_along_the_gradient_on_average():
    _, p = problem()
    step = fedp3_step(p, 0.1, identity(p.n, p.d), perm_k(p.n, p.blocks), seed=0)
    w = np.tile(p.start, (20_000, 1))
    np.testing.assert_allclose(
        (w - step(0, w)).mean(axis=0) / 0.1, gradient(p, p.start[None])[0], atol=0.05
    )


def test_runs_do_not_depend_on_step_sizes_of_other_runs():
    _, p = problem()
    together = iterate(
        p,
        fedp3_step(p, np.array([0.1, 0.3]), identity(p.n, p.d), perm_k(p.n, p.blocks), seed=0),
        9,
        2,
    )
    alone = iterate(p, fedp3_step(p, 0.3, identity(p.n, p.d), perm_k(p.n, p.blocks), seed=0), 9, 2)
    np.testing.assert_allclose(together.last[1], alone.last[1], rtol=1e-12)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    _, p = problem()
    runs = [
        iterate(
            p, fedp3_step(p, 0.1, random_prune(p.n, p.d, 3), perm_k(p.n, p.blocks), seed=s), 5, 4
        ).last
        for s in (0, 0, 1)
    ]
    assert (runs[0] == runs[1]).all() and not (runs[0] == runs[2]).all()


def test_held_layers_follow_only_the_clients_that_hold_them():
    q, p = problem(n=2, d=2)
    step = fedp3_step(p, 0.1, identity(2, 2), fixed(2 * np.eye(2)), seed=0)
    w = p.start
    expected = [w[j] - 0.1 * (q.A[j] @ (w - q.c[j]))[j] for j in range(2)]
    np.testing.assert_allclose(step(0, w[None])[0], expected)


def test_ldp_step_is_algorithm_5_written_with_loops():
    p = logistic(0, 3, 1.0, components=5)
    noise = Perturbation(b=4, C=0.3, sigma=0.7)
    w = np.linspace(-1, 1, p.d)
    step = ldp_step(p, 0.2, perm_k(3, p.blocks), noise, seed=5)
    R, m = 2, p.samples.m
    chosen = batches(draw(5, For.BATCH, 3), (R, 3), m, 4)
    zeta = 0.7 * draw(5, For.NOISE, 3).standard_normal((R, 3, p.d))
    S = perm_k(3, p.blocks)(draw(5, For.AGGREGATE, 3), R)
    everyone = p.samples.grads(np.tile(w, (R, 1)), np.broadcast_to(np.arange(m), (R, 3, m)))
    expected = np.zeros((R, p.d))
    for r in range(R):
        for i in range(3):
            g = np.zeros(p.d)
            for j in chosen[r, i]:
                x = everyone[r, i, j]
                g += x * min(1.0, 0.3 / float(np.sqrt((x * x).sum())))
            u = w - 0.2 * (g / 4 + zeta[r, i])
            expected[r] += S[r, i] * u / 3
    np.testing.assert_allclose(step(3, np.tile(w, (R, 1))), expected, rtol=1e-10)


@given(m=st.integers(1, 40), data=st.data(), seed=st.integers(0, 2**32))
def test_batches_hold_distinct_samples(m, data, seed):
    b = data.draw(st.integers(1, m))
    chosen = batches(np.random.Generator(np.random.PCG64(seed)), (3, 4), m, b)
    assert chosen.shape == (3, 4, b) and chosen.min() >= 0 and chosen.max() < m
    assert all(len(set(row)) == b for row in chosen.reshape(-1, b).tolist())


@pytest.mark.parametrize(("m", "b"), [(6, 2), (4, 3)])  # drawn with redraws, and by sorting
def test_every_batch_is_as_likely_as_any_other(m, b):
    chosen = batches(np.random.Generator(np.random.PCG64(0)), (300, 200), m, b)
    seen = Counter(tuple(sorted(row)) for row in chosen.reshape(-1, b).tolist())
    assert len(seen) == comb(m, b)
    expected = 60_000 / comb(m, b)
    assert all(abs(v - expected) < 4.5 * sqrt(expected) for v in seen.values())


def test_without_noise_clipping_and_sampling_ldp_is_plain_fedp3():
    p = logistic(0, 4, 1.0, components=6)
    noise = Perturbation(b=p.samples.m, C=float("inf"), sigma=0.0)
    a = iterate(p, ldp_step(p, 0.5, perm_k(4, p.blocks), noise, seed=2), 5, 2)
    b = iterate(p, fedp3_step(p, 0.5, identity(4, p.d), perm_k(4, p.blocks), seed=2), 5, 2)
    np.testing.assert_allclose(a.last, b.last, rtol=1e-9)


@pytest.mark.parametrize("on_weights", [False, True])
def test_noise_has_the_stated_size_on_gradient_or_weights(on_weights):
    p = logistic(0, 4, 1.0, components=6)
    m = p.samples.m
    quiet = ldp_step(p, 0.25, identity(4, p.d), Perturbation(m, 1.1, 0.0), seed=2)
    loud = ldp_step(p, 0.25, identity(4, p.d), Perturbation(m, 1.1, 0.8, on_weights), seed=2)
    w = np.zeros((600, p.d))
    moved = loud(0, w) - quiet(0, w)
    size = 0.8 * (1.0 if on_weights else 0.25) / np.sqrt(4)  # the mean of four clients
    assert moved.std() == pytest.approx(size, rel=0.03)
    assert abs(moved.mean()) < 4 * size / np.sqrt(moved.size)


def test_ldp_on_quadratics_goes_to_the_optimum_on_average():
    q, p = problem(spread=0.5)
    sampled = with_samples(p, q, 0, m=12, spread=1.0)
    noise = Perturbation(b=3, C=float("inf"), sigma=0.1)
    w = np.tile(q.optimum, (40_000, 1))
    moved = ldp_step(sampled, 0.2, perm_k(p.n, p.blocks), noise, seed=0)(0, w) - w
    assert np.abs(moved.mean(axis=0)).max() < 4.5 * moved.std() / np.sqrt(40_000)
    assert moved.std() > 0.05


def test_ldp_runs_on_the_network_too():
    p = network(0, 4, 0.5)
    noise = Perturbation(b=4, C=1.0, sigma=0.01)
    before = np.square(gradient(p, p.start[None])).sum()
    trace = iterate(p, ldp_step(p, 0.1, perm_k(4, p.blocks), noise, seed=0), 30, 4)
    assert np.isfinite(trace.last).all() and trace.seen[-1].mean() < before


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_clipping_shortens_what_is_long_and_leaves_the_rest(values, C):
    g = np.array(values)
    out = clipped(g[None], C)[0]
    assert np.linalg.norm(out) <= C * (1 + 1e-9)
    if np.linalg.norm(g) <= C:
        np.testing.assert_allclose(out, g, rtol=1e-12)


def test_ldp_refuses_problems_without_samples_and_batches_too_large():
    _, p = problem()
    with pytest.raises(InputError, match="no samples"):
        ldp_step(p, 0.1, perm_k(p.n, p.blocks), Perturbation(1, 1.0, 1.0), seed=0)
    digits = logistic(0, 10, 1.0)
    with pytest.raises(InputError, match="m = 179"):
        ldp_step(digits, 0.1, perm_k(10, digits.blocks), Perturbation(180, 1.0, 1.0), seed=0)
    assert replace(digits, samples=None).samples is None
