"""Confidence limits and verdicts: right size, right side, and able to say no."""

import numpy as np
import pytest

from fedp3.core.errors import InputError
from fedp3_paper.theory.stats import Estimate, check, estimate, smallest_mean, t_quantile, verdict


@pytest.mark.parametrize("freedom", [9, 19, 39, 200])
@pytest.mark.parametrize("p", [0.975, 0.999])
def test_t_quantile_agrees_with_the_tables(p, freedom):
    stats = pytest.importorskip("scipy.stats")
    assert t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=0.01)


def test_limits_cover_the_mean_as_often_as_stated():
    rng = np.random.Generator(np.random.PCG64(0))
    missed = sum(estimate(x, 0.95).low > 1 for x in rng.exponential(1.0, (4000, 40)))
    assert missed / 4000 < 0.05  # a lower limit of right-skewed data errs on the safe side
    missed = sum(
        not estimate(x, 0.95).low <= 0 <= estimate(x, 0.95).high
        for x in rng.standard_normal((4000, 40))
    )
    assert missed / 4000 == pytest.approx(0.10, abs=0.015)


def test_smallest_mean_is_measured_on_runs_that_did_not_choose_it():
    """K = 200 rows of the same law: choosing and measuring on the same runs is far too small."""
    rng = np.random.Generator(np.random.PCG64(1))
    honest, naive = [], []
    for _ in range(200):
        x = rng.exponential(1.0, (200, 20))
        honest.append(smallest_mean(x).mean)
        naive.append(x.mean(axis=1).min())
    assert np.mean(honest) == pytest.approx(1.0, abs=0.08)
    assert np.mean(naive) < 0.6


def test_verdicts_know_three_cases():
    e = Estimate(1.0, 0.9, 1.1)
    assert [verdict(e, b) for b in (1.2, 1.0, 0.8)] == ["holds", "undecided", "violated"]
    assert check("x", 3, e, 0.8).verdict == "violated"


def test_too_few_runs_are_refused():
    with pytest.raises(InputError, match="at least 10"):
        estimate(np.ones(9))
