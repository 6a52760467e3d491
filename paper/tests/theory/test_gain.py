"""Bytes to reach eps: how they are counted, what equal clients save and unlike clients lose."""

import numpy as np
import pytest

from fedp3.core.errors import InputError
from fedp3_paper.theory.gain import BYTES, METHODS, compare, first_below

EPS = np.array([0.1, 0.01, 0.003])


def rows(n: int, spread: float, K: int = 400):
    return {(r.method, r.eps): r for r in compare(n, spread, EPS, K=K, runs=6, seed=0)}


def test_equal_clients_save_exactly_n():
    """Perm-K makes no error when all f_i agree: as many steps as gradient descent, a share 1/n of
    the bytes.
    """
    table = rows(8, 0.0)
    for eps in EPS:
        fedp3, dgd = table["FedP3", eps], table["DGD", eps]
        assert fedp3.steps == dgd.steps
        assert dgd.up == 8 * fedp3.up


def test_saving_turns_into_a_loss_as_eps_shrinks():
    table = rows(8, 1.0)
    ratio = [table["DGD", eps].up / table["FedP3", eps].up for eps in EPS]
    assert ratio[0] > 1 > ratio[2]
    assert ratio[0] > ratio[1] > ratio[2]


def test_counting_the_downlink_leaves_no_saving_for_unlike_clients():
    table = rows(8, 1.0)
    assert all(table["FedP3", eps].both > table["DGD", eps].both for eps in EPS[1:])


def test_bytes_are_steps_times_values_times_four():
    for (method, _), r in rows(8, 0.0).items():
        per_client = 32 if method == "DGD" else 4
        assert r.up == r.steps * 8 * per_client * BYTES
        assert r.both == r.up + r.steps * 8 * 32 * BYTES


def test_a_target_out_of_reach_is_said_to_be_so():
    r = compare(8, 1.0, np.array([1e-9]), K=20, runs=3, seed=0)
    assert {x.method: x.up for x in r if x.method != "DGD"} == {"FedP3": None, "DGD + Rand-t": None}


def test_first_below_reads_the_mean_over_runs():
    grad_sq = np.array([[4.0, 4.0], [0.0, 3.0], [0.0, 1.0]])
    assert [first_below(grad_sq, e) for e in (4.0, 1.5, 0.5, 0.1)] == [0, 1, 2, None]


def test_all_methods_are_compared():
    assert {r.method for r in rows(4, 0.0).values()} == set(METHODS)


def test_shares_that_are_not_whole_are_refused():
    with pytest.raises(InputError, match="n = 5"):
        compare(5, 0.0, EPS, K=3, runs=1, seed=0)
