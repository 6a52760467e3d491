"""Sketches P and S: exact identities over all permutations, and properties over random shapes."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3_paper.theory import identities
from fedp3_paper.theory.sketches import (
    bernoulli_prune,
    deal,
    fixed,
    identity,
    normalised,
    perm_k,
    rand_t,
    random_prune,
)

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=9)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@given(seed=st.integers(0, 2**32), n=st.integers(1, 7), blocks=sizes)
def test_mean_of_aggregation_sketches_is_the_identity_for_every_draw(seed, n, blocks):
    S = perm_k(n, blocks)(rng(seed), 3)
    assert S.shape == (3, n, sum(blocks))
    np.testing.assert_array_equal(S.sum(axis=1), n)


@given(seed=st.integers(0, 2**32), n=st.integers(1, 7), blocks=sizes)
def test_a_layer_is_never_cut_and_shares_differ_by_at_most_the_padding(seed, n, blocks):
    owner = deal(rng(seed), 4, n, blocks)
    start = 0
    for size in blocks:
        assert (owner[:, start : start + size] == owner[:, start : start + 1]).all()
        start += size
    first = np.cumsum([0, *blocks[:-1]])
    held = np.stack([(owner[:, first] == i).sum(axis=1) for i in range(n)])
    assert held.max() <= -(-len(blocks) // n)


@pytest.mark.parametrize(
    ("n", "blocks"),
    [(3, (1,) * 6), (3, (1,) * 5), (2, (4, 1, 3)), (5, (4, 1, 3)), (4, (2, 2, 2, 2, 2))],
)
def test_enumeration_gives_the_three_identities(n, blocks):
    """Naive twin of `identities.by_enumeration`: dense matrices, plain loops, every permutation."""
    d = sum(blocks)
    y = rng(1).standard_normal((n, d))
    x = rng(2).standard_normal(d)
    slots = [i for i in range(n) for _ in range(-(-len(blocks) // n))]
    mean_Sx, second, count = np.zeros((n, d)), 0.0, 0
    for order in set(permutations(slots)):
        owner = [i for i, size in zip(order, blocks, strict=False) for _ in range(size)]
        S = [n * np.diag([1.0 if owner[j] == i else 0.0 for j in range(d)]) for i in range(n)]
        np.testing.assert_allclose(sum(S) / n, np.eye(d))
        mean_Sx += np.array([M @ x for M in S])
        second += float(np.square(sum(S[i] @ y[i] for i in range(n)) / n).sum())
        count += 1
    np.testing.assert_allclose(mean_Sx / count, np.tile(x, (n, 1)), atol=1e-12)
    assert second / count == pytest.approx(np.square(y).sum() / n)
    assert all(row.holds for row in identities.by_enumeration(0, n, blocks))


@pytest.mark.parametrize(
    ("n", "blocks"), [(16, (1,) * 100), (4, (50, 10, 30, 7, 3)), (7, (1,) * 30)]
)
def test_sampling_agrees_with_the_second_moments(n, blocks):
    assert all(row.holds for row in identities.by_sampling(3, n, blocks))


def test_sampling_would_notice_a_wrong_second_moment():
    """Two per cent off must be seen, else the sampling test proves nothing."""
    row = identities.by_sampling(3, 16, (1,) * 100)[0]
    S = perm_k(16, (1,) * 100)(rng(), 4000)
    y = rng(5).standard_normal((16, 100))
    seen = identities.estimate(np.square((S * y).mean(axis=1)).sum(axis=1))
    expected = np.square(y).sum(axis=1).mean()
    assert seen.low <= expected <= seen.high
    assert not seen.low <= 1.02 * expected <= seen.high
    assert row.holds


def test_perm_k_beats_rand_t_only_while_clients_agree():
    """Perm-K: mean||g_i||^2 - ||g||^2; Rand-t: (n-1)/n mean||g_i||^2.

    For equal clients Perm-K's error is zero, for a mean of zero it is larger than Rand-t's.
    """
    n, d, draws = 4, 8, 20_000
    for name, g in (
        ("equal", np.tile(rng(0).standard_normal(d), (n, 1))),
        ("opposed", signs(n, d)),
    ):
        mean = g.mean(axis=0)
        errors = [
            np.square((sketch(rng(9), draws) * g).mean(axis=1) - mean).sum(axis=1).mean()
            for sketch in (perm_k(n, (1,) * d), rand_t(n, d, d // n))
        ]
        square = np.square(g).sum(axis=1).mean()
        assert errors[0] == pytest.approx(square - np.square(mean).sum(), abs=1e-9, rel=0.03)
        assert errors[1] == pytest.approx((n - 1) / n * square, rel=0.03)
        assert (errors[0] < errors[1]) == (name == "equal")


def signs(n: int, d: int) -> np.ndarray:
    return np.where(np.arange(n)[:, None] % 2 == 0, 1.0, -1.0) * np.ones(d)


@given(seed=st.integers(0, 2**32), n=st.integers(1, 5), d=st.integers(1, 12), data=st.data())
def test_random_pruning_keeps_exactly_so_many(seed, n, d, data):
    keep = data.draw(st.integers(1, d))
    P = random_prune(n, d, keep)(rng(seed), 5)
    np.testing.assert_array_equal(P.sum(axis=2), keep)
    np.testing.assert_array_equal(P * P, P)
    np.testing.assert_allclose(rand_t(n, d, keep)(rng(seed), 5), P * d / keep)


def test_global_pruning_is_biased_and_its_rescaling_is_not():
    d, keep, draws = 6, 2, 40_000
    x = rng(1).standard_normal(d)
    biased = (random_prune(1, d, keep)(rng(2), draws)[:, 0] * x).mean(axis=0)
    unbiased = (rand_t(1, d, keep)(rng(2), draws)[:, 0] * x).mean(axis=0)
    np.testing.assert_allclose(biased, keep / d * x, atol=0.03)
    np.testing.assert_allclose(unbiased, x, atol=0.06)


def test_bernoulli_pruning_follows_its_probabilities():
    c = np.array([0.1, 0.5, 1.0])
    P = bernoulli_prune(2, c)(rng(), 20_000)
    np.testing.assert_allclose(P.mean(axis=(0, 1)), c, atol=0.01)
    np.testing.assert_allclose(bernoulli_prune(2, c, scaled=True)(rng(), 20_000), P / c)


@settings(max_examples=30)
@given(n=st.integers(1, 6), d=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_overlapping_layer_sets_are_normalised_by_who_trains_what(n, d, seed):
    train = (rng(seed).random((n, d)) < 0.5).astype(float)
    train[0] = 1
    S = fixed(normalised(train))(rng(), 2)
    np.testing.assert_allclose(S.mean(axis=1), 1.0)
    assert ((S > 0) == (train > 0)).all()


def test_identity_cuts_nothing():
    np.testing.assert_array_equal(identity(2, 3)(rng(), 4), np.ones((4, 2, 3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_prune(2, 4, 0),
        lambda: random_prune(2, 4, 5),
        lambda: bernoulli_prune(2, np.array([0.0, 1.0])),
        lambda: normalised(np.array([[1.0, 0.0], [1.0, 0.0]])),
    ],
)
def test_improper_sketches_are_refused(make):
    with pytest.raises(InputError):
        make()
