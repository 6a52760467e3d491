"""The probabilities and lower bounds of an audit, against the textbook and other programs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedp3.privacy import accountant
from fedp3.privacy.audit import bounds, findings, noise, sampling
from fedp3.privacy.audit.neighbours import Bench
from fedp3.privacy.settings import Mechanism


def test_bounds_are_those_of_the_textbook() -> None:
    for k, n, p in ((3, 10, 0.2), (0, 50, 0.1), (50, 50, 0.9), (17, 40, 0.5)):
        assert bounds.binomial_tail(k, n, p) == pytest.approx(stats.binom.sf(k - 1, n, p), rel=1e-9)
    for errors, n in ((0, 75), (4, 100), (60, 100)):
        assert bounds.rate_above(errors, n) == pytest.approx(
            stats.beta.isf(bounds.ERROR_PROBABILITY, errors + 1, n - errors), rel=1e-6
        )
    for mu, epsilon in (
        (1.0, 4.3766),
        (4.0, 24.382),
        (5.0, 33.10),
        (8.0, 65.32),
    ):  # with logarithms of the tail
        assert bounds.gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, rel=3e-4)


def test_the_proven_epsilon_is_below_the_true_one_and_grows_with_the_runs() -> None:
    rng = torch.Generator().manual_seed(0)

    def proven(runs: int, mu: float) -> float:
        without, with_canary = torch.randn(2, runs, generator=rng, dtype=torch.float64)
        alarms = int((without > mu / 2).sum())
        misses = int((with_canary + mu <= mu / 2).sum())
        return bounds.gaussian_lower(alarms, misses, runs, 1e-5)

    assert proven(4000, 0.0) == 0.0
    few, many = proven(150, 3.0), proven(6000, 3.0)
    assert 0 < few < many < bounds.gaussian_epsilon(3.0, 1e-5)


def test_a_test_without_errors_proves_what_it_could_refute_and_no_test_proves_more() -> None:
    most = bounds.refutable(100, 1e-5)
    assert bounds.gaussian_lower(0, 0, 100, 1e-5) == most
    assert bounds.gaussian_lower(1, 0, 100, 1e-5) < most < bounds.refutable(1000, 1e-5)
    assert bounds.gaussian_lower(100, 0, 100, 1e-5) == 0.0


@given(n=st.integers(1, 5000), factor=st.floats(0.2, 4))
def test_the_probability_of_an_energy_is_never_below_the_true_one(n: int, factor: float) -> None:
    squares = factor * n
    below, above = stats.chi2.cdf(squares, n), stats.chi2.sf(squares, n)
    assert findings.energy_tail(squares, n) >= min(below, above) * (1 - 1e-9)


@given(n=st.integers(1, 5000), k=st.integers(0, 5000), p=st.floats(0.001, 0.999))
def test_the_probability_of_a_count_is_never_below_the_true_one(n: int, k: int, p: float) -> None:
    k = min(k, n)
    tail = min(stats.binom.cdf(k, n, p), stats.binom.sf(k - 1, n, p))
    assert findings.binomial_two_sided(k, n, p) >= tail * (1 - 1e-9)


@given(n=st.integers(2, 300), cosine=st.floats(0.01, 0.999))
def test_the_probability_of_an_angle_is_never_below_the_true_one(n: int, cosine: float) -> None:
    # The squared cosine of two random directions is Beta(1/2, (n - 1) / 2).
    exact = stats.beta.sf(cosine**2, 0.5, (n - 1) / 2)
    assert findings.cosine_tail(cosine, n, 1) >= exact * (1 - 1e-9)
    assert findings.cosine_tail(cosine, n, 10) == pytest.approx(
        10 * findings.cosine_tail(cosine, n, 1)
    )


@pytest.mark.parametrize("n", [1, 4, 50])
def test_the_probability_of_a_sum_of_products_is_never_below_its_frequency(n: int) -> None:
    rng = torch.Generator().manual_seed(n)
    x, y = torch.randn(2, 200_000, n, generator=rng)
    sums = (x * y).sum(1).abs()
    for limit in (0.5, 1, 2, 3, 4):
        total = limit * math.sqrt(n)
        assert findings.product_tail(total, n) >= float((sums >= total).double().mean())


@pytest.mark.parametrize("n", [10, 200])
def test_the_probability_of_a_distance_between_distributions_bounds_its_frequency(n: int) -> None:
    for scaled in (0.5, 1.0, 1.5, 2.0):
        distance = scaled / math.sqrt(n)
        assert findings.kolmogorov_tail(distance, n) >= stats.kstwo.sf(distance, n)


@settings(max_examples=30, deadline=None)
@given(
    z=st.floats(0.6, 10),
    q=st.floats(0.005, 0.95),
    steps=st.integers(1, 400),
    delta=st.sampled_from([1e-3, 1e-5, 1e-7]),
)
def test_the_independent_bound_is_below_both_accountants(
    z: float, q: float, steps: int, delta: float
) -> None:
    least = bounds.composed_lower(z, q, steps, delta)
    assert least <= accountant.epsilon({(z, q): steps}, delta, "RDP")
    assert least <= accountant.epsilon({(z, q): steps}, delta, "PLD") * (1 + 1e-6)


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta"),
    [(1.0, 0.1, 100, 1e-5), (1.2, 0.1, 250, 1e-5), (0.7, 0.02, 400, 1e-6), (4, 0.5, 50, 1e-5)],
)
def test_the_independent_bound_is_within_a_hundredth_of_the_certified_one(
    z: float, q: float, steps: int, delta: float
) -> None:
    """So an accountant that counts half of the steps, or any other twelfth less, is refuted."""
    certified = accountant.epsilon({(z, q): steps}, delta, "PLD")
    assert bounds.composed_lower(z, q, steps, delta) > 0.99 * certified


def test_the_independent_bound_of_full_batches_is_the_gaussian_formula() -> None:
    assert bounds.composed_lower(2.0, 1.0, 4, 1e-5) == bounds.gaussian_epsilon(1.0, 1e-5)
    assert bounds.composed_lower(2.0, 1.0, 0, 1e-5) == 0.0


# --------------------------------------------------------------------------- under correct code


def too_often(p_values: dict[str, list[float]], level: float) -> dict[str, float]:
    """The checks whose p-value is below a level more often than five standard errors allow."""
    shares = {
        what: sum(p <= level for p in values) / len(values) for what, values in p_values.items()
    }
    runs = min(map(len, p_values.values()))
    limit = level + 5 * math.sqrt(level / runs)
    return {what: share for what, share in shares.items() if share > limit}


def test_p_values_of_white_noise_are_never_too_small() -> None:
    p_values: dict[str, list[float]] = {}
    for seed in range(150):
        rng = torch.Generator().manual_seed(seed)
        draws = noise.Draws(
            values=torch.randn(20, 66, generator=rng, dtype=torch.float64),
            tensors=[("fc.weight", 0, 8), ("fc.bias", 48, 1), ("out.weight", 54, 6)],
            kinds=["a step"] * 12 + ["a probe"] * 8,
        )
        for f in [*noise.size_and_shape(draws), *noise.independence(draws, seed)]:
            assert f.passed
            if f.p_value is not None:
                p_values.setdefault(f.what, []).append(f.p_value)
    assert len(p_values) >= 10
    assert not too_often(p_values, 0.01) and not too_often(p_values, 0.1)


@pytest.mark.parametrize("q", [0.02, 0.1, 0.5])
def test_p_values_of_independent_coins_are_never_too_small(
    q: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(0)

    def counts(bench: Bench, mechanism: Mechanism, steps: int, client: int, t: int) -> Tensor:
        coins = torch.rand(steps, len(bench.without), generator=rng)
        return (coins < mechanism.sample_rate).sum(0).double()

    monkeypatch.setattr(sampling, "_counts", counts)
    p_values: dict[str, list[float]] = {}
    for _ in range(60):
        for f in sampling.sampling(Mechanism(sample_rate=q), range(5)):
            assert f.passed
            if f.p_value is not None:
                p_values.setdefault(f.what, []).append(f.p_value)
    assert len(p_values) >= 7
    assert not too_often(p_values, 0.01) and not too_often(p_values, 0.1)
