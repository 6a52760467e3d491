"""Accounting: Rényi divergences against plain sums, dp-accounting and Opacus; PLD; calibration."""

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3.privacy import accountant
from fedp3.privacy.audit.bounds import gaussian_epsilon

CASES = [
    (1.0, 0.1, 150, 1e-5),
    (2.0, 0.12, 500, 1e-5),
    (0.7, 0.02, 300, 1e-6),
    (8.0, 0.1, 1000, 1e-3),
]


def binomial_renyi(z: float, q: float, order: int) -> float:
    """The divergence of an integer order, term by term."""
    terms = [
        math.log(math.comb(order, k))
        + (order - k) * math.log1p(-q)
        + k * math.log(q)
        + k * (k - 1) / (2 * z * z)
        for k in range(order + 1)
    ]
    most = max(terms)
    return (most + math.log(sum(math.exp(t - most) for t in terms))) / (order - 1)


@given(z=st.floats(0.4, 20), q=st.floats(0.001, 0.95), order=st.integers(2, 30))
def test_divergences_of_whole_orders_are_binomial_sums(z: float, q: float, order: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountant, "ORDERS", accountant.np.array([float(order)]))
        got = float(accountant._renyi.__wrapped__(z, q)[0])
    assert got == pytest.approx(binomial_renyi(z, q, order), rel=1e-6, abs=1e-12) or math.isinf(got)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), CASES)
def test_our_epsilon_is_that_of_dp_accounting_and_opacus(
    z: float, q: float, steps: int, delta: float
) -> None:
    from dp_accounting import dp_event, rdp
    from opacus.accountants import RDPAccountant

    ours = accountant.epsilon({(z, q): steps}, delta, "RDP")
    theirs = rdp.RdpAccountant()
    theirs.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), steps)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=5e-3)
    third = RDPAccountant()
    third.history = [(z, q, steps)]
    with warnings.catch_warnings(action="ignore"):
        assert ours == pytest.approx(third.get_epsilon(delta), rel=5e-3)


@pytest.mark.parametrize(("z", "q", "steps", "delta"), CASES)
def test_the_loss_distribution_is_tighter_and_agrees_with_opacus(
    z: float, q: float, steps: int, delta: float
) -> None:
    from opacus.accountants import PRVAccountant

    tight = accountant.epsilon({(z, q): steps}, delta, "PLD")
    assert tight <= accountant.epsilon({(z, q): steps}, delta, "RDP") <= 1.25 * tight
    third = PRVAccountant()
    third.history = [(z, q, steps)]
    with warnings.catch_warnings(action="ignore"):
        assert tight == pytest.approx(third.get_epsilon(delta), abs=0.02)


@pytest.mark.parametrize("method", accountant.ACCOUNTANTS)
def test_one_whole_step_is_the_gaussian_mechanism(method: str) -> None:
    exact = gaussian_epsilon(1.0, 1e-5)
    got = accountant.epsilon({(1.0, 1.0): 1}, 1e-5, method)
    assert exact * (1 - 1e-6) <= got <= 1.1 * exact


@pytest.mark.parametrize("method", accountant.ACCOUNTANTS)
def test_costs_add_up_over_different_noise(method: str) -> None:
    def cost(spent: accountant.Spent) -> float:
        return accountant.epsilon(spent, 1e-5, method)

    both = cost({(1.0, 0.1): 50, (2.0, 0.2): 50})
    assert max(cost({(1.0, 0.1): 50}), cost({(2.0, 0.2): 50})) < both < cost({(1.0, 0.2): 100})
    assert cost({(1.0, 0.1): 50, (2.0, 0.2): 0}) == cost({(1.0, 0.1): 50})
    assert cost({}) == 0.0 and cost({(0.0, 0.1): 1}) == math.inf


@settings(max_examples=8)
@given(
    target=st.sampled_from([0.1, 1.0, 8.0, 60.0]),
    q=st.floats(0.005, 1.0),
    steps=st.integers(1, 3000),
    delta=st.sampled_from([1e-3, 1e-6]),
)
def test_calibrated_noise_fits_and_hardly_less_would(
    target: float, q: float, steps: int, delta: float
) -> None:
    z = accountant.noise_multiplier(target, delta, q, steps, "RDP")
    assert accountant.epsilon({(z, q): steps}, delta, "RDP") <= target
    assert accountant.epsilon({(0.99 * z, q): steps}, delta, "RDP") > target
    allowed = accountant.allowed_steps(z, q, target, delta, "RDP")
    assert allowed >= steps
    assert accountant.epsilon({(z, q): allowed + 1}, delta, "RDP") > target


def test_calibration_by_the_loss_distribution_gives_known_values() -> None:
    q = 48 / 392  # batches of 48 of the paper's 392 records
    for steps, delta, target, want in (
        (100, 1e-5, 8, 1.05),
        (500, 1e-5, 1, 10.31),
        (500, 1e-3, 4, 2.39),
    ):
        z = accountant.noise_multiplier(target, delta, q, steps, "PLD")
        assert z == pytest.approx(want, abs=0.012)
        allowed = accountant.allowed_steps(z, q, target, delta, "PLD")
        assert allowed >= steps
        assert accountant.epsilon({(z, q): allowed + 1}, delta, "PLD") > target


@pytest.mark.parametrize(
    ("z", "q", "steps", "tight"),
    [
        (3.491, 0.001, 10_000, 0.0895),
        (20.0, 0.01, 10_000, 0.1603),
        (50.0, 0.1, 1000, 0.207),
        (5.0, 0.01, 10_000, 0.7362),
    ],
)
def test_the_grid_is_fine_enough_for_a_small_epsilon(
    z: float, q: float, steps: int, tight: float
) -> None:
    """`tight` is dp-accounting's on a grid of 3e-5."""
    got = accountant.epsilon({(z, q): steps}, 1e-5, "PLD")
    assert got == pytest.approx(tight, rel=0.01)
    assert got <= accountant.epsilon({(z, q): steps}, 1e-5, "RDP")


@pytest.mark.parametrize(
    ("target", "q", "steps"),
    [(0.1, 0.001, 10_000), (0.01, 0.001, 10_000), (0.02, 1.0, 10_000), (1.0, 0.01, 3_000_000)],
)
def test_what_the_divergences_certify_is_never_refused(target: float, q: float, steps: int) -> None:
    z, enough = (accountant.noise_multiplier(target, 1e-5, q, steps, by) for by in ("PLD", "RDP"))
    assert z <= enough and accountant.epsilon({(z, q): steps}, 1e-5, "PLD") <= target
    assert accountant.allowed_steps(z, q, target, 1e-5, "PLD") >= steps


@pytest.mark.parametrize("method", accountant.ACCOUNTANTS)
def test_huge_noise_allows_steps_without_end(method: str) -> None:
    allowed = [
        accountant.allowed_steps(z, 1e-3, 8.0, 1e-5, method) for z in (1e3, 1e5, 1e7, 1e9, 1e12)
    ]
    assert (
        allowed == sorted(allowed)
        and allowed[0] > 10**6
        and allowed[-1] == accountant.UNLIMITED_STEPS
    )


def test_the_papers_closed_form_is_not_safe() -> None:
    q = 48 / 392
    z = accountant.paper_noise(8, 1e-5, q, 100, c=2)
    assert z == pytest.approx(0.735, abs=1e-3)
    assert accountant.epsilon({(z, q): 100}, 1e-5, "PLD") == pytest.approx(15.93, abs=0.05)


def test_so_little_noise_costs_a_bound_at_once() -> None:
    """The grid of the divergence grows as 1 / z², so sampling is ignored for tiny noise."""
    costs = [accountant.epsilon({(z, 0.001): 10}, 1e-5) for z in (1e-6, 0.01, 0.0499, 0.0501, 0.06)]
    assert (
        costs == sorted(costs, reverse=True)
        and costs[-1] > accountant.LARGE_EPSILON
        and math.isfinite(costs[0])
    )
    assert accountant.noise_multiplier(20, 1e-5, 0.001, 10) == pytest.approx(0.204, abs=0.005)


def test_an_infinite_budget_needs_no_noise() -> None:
    assert accountant.noise_multiplier(math.inf, 1e-5, 0.1, 100) == 0.0
    assert accountant.allowed_steps(0.0, 0.1, math.inf, 1e-5) > 10**9
    assert accountant.allowed_steps(0.0, 0.1, 8.0, 1e-5) == 0


@pytest.mark.parametrize(
    ("z", "q", "delta"),
    [(-1.0, 0.1, 1e-5), (math.nan, 0.1, 1e-5), (1.0, 1.2, 1e-5), (1.0, 0.1, 0.0), (1.0, 0.1, 1.0)],
)
def test_what_is_no_mechanism_has_no_epsilon(z: float, q: float, delta: float) -> None:
    with pytest.raises(InputError):
        accountant.epsilon({(z, q): 10}, delta, "RDP")


@pytest.mark.filterwarnings("ignore")  # as on a node
@pytest.mark.parametrize("name", ["PLD", "RDP"])
@pytest.mark.parametrize("noise", [1e7, 1e100, 1e160, 1e200, 1e308])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_steps_with_absurdly_much_noise_do_not_hide_what_others_cost(
    name: str, noise: float, rate: float
) -> None:
    others = {(2.0, 0.1): 3}
    alone = accountant.epsilon(others, 1e-5, name)
    together = accountant.epsilon({**others, (noise, rate): 2}, 1e-5, name)
    assert alone * 0.999 <= together <= alone * 1.01
