"""Intervals and verdicts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3_paper.reproduce.stats import T975, Interval, interval, judge, pooled

values = st.lists(st.floats(-100, 100), min_size=2, max_size=14)


def test_quantiles_are_students():
    t = pytest.importorskip("scipy.stats").t
    assert pytest.approx([t.ppf(0.975, k + 1) for k in range(len(T975))], abs=1e-4) == T975


@given(values)
def test_an_interval_is_scipys(xs):
    t = pytest.importorskip("scipy.stats").t
    mean = sum(xs) / len(xs)
    std = math.sqrt(sum((x - mean) ** 2 for x in xs) / (len(xs) - 1))
    reach = t.ppf(0.975, len(xs) - 1) * std / math.sqrt(len(xs))
    ours = interval(xs)
    assert (ours.mean, ours.low, ours.high) == pytest.approx(
        (mean, mean - reach, mean + reach), rel=1e-3, abs=1e-9
    )


def test_seeds_whose_means_agree_by_luck_do_not_make_a_narrow_interval():
    """Two places that move against each other: all means are 1, and each place is uncertain."""
    lucky = pooled([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    assert lucky.mean == 1 and lucky.high - lucky.low > 2 and lucky.seeds == 3
    t = pytest.importorskip("scipy.stats").t
    assert lucky.high - 1 == pytest.approx(t.ppf(0.975, 4) * math.sqrt(1 / 6), rel=1e-4)


def test_seeds_that_move_all_places_alike_keep_the_wide_interval():
    together = pooled([[0.0, 1.0, 2.0], [0.5, 1.5, 2.5]])
    alone = interval([0.25, 1.25, 2.25])
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high))


def test_one_seed_has_no_limits_and_decides_nothing():
    one = interval([5.0])
    assert (one.mean, one.low, one.high, one.seeds) == (5.0, None, None, 1)
    assert judge(one, 0, math.inf) == "not decided"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1, 2, "holds"), (-1, 2, "not decided"), (-2, -1, "does not hold"), (0, 0, "does not hold")],
)
def test_a_claim_of_a_positive_difference(low, high, verdict):
    assert judge(Interval((low + high) / 2, low, high, 3), 0, math.inf) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-6, -3, "holds"),
        (-12, -3, "not decided"),
        (-1, 0, "does not hold"),
        (-30, -20, "does not hold"),
    ],
)
def test_a_claim_of_a_range(low, high, verdict):
    assert judge(Interval((low + high) / 2, low, high, 3), -10, -2) == verdict
