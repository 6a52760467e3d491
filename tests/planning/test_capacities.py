"""Each client's device gets its share `keep`."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import PlanError
from fedp3.planning.capacities import capacities

from .layer_maps import chosen, deep, seeds


def test_one_number_is_for_every_client_and_a_list_for_each() -> None:
    assert capacities(0.7, 3, 0) == (0.7, 0.7, 0.7)
    assert capacities(1, 2, 0) == (1.0, 1.0)
    assert capacities([0.9, 0.5, 0.7], 3, 0) == (0.9, 0.5, 0.7)


@given(
    classes=st.lists(st.floats(0.01, 1), min_size=1, max_size=6, unique=True),
    n=st.integers(1, 60),
    seed=seeds,
)
def test_device_classes_are_dealt_out_in_equal_shares(
    classes: list[float], n: int, seed: int
) -> None:
    if len(classes) > n:
        with pytest.raises(PlanError, match=f"{len(classes)} device classes for {n} clients"):
            capacities(classes, n, seed)
        return
    dealt = capacities(classes, n, seed)
    assert dealt == capacities(classes, n, seed)
    count = Counter(dealt)
    assert set(count) == set(classes) and max(count.values()) - min(count.values()) <= 1


def test_which_client_is_which_device_depends_on_the_seed_and_not_on_its_layers() -> None:
    assert capacities([0.5, 1], 40, 0) != capacities([0.5, 1], 40, 1)
    groups = [L_i[0] for L_i in chosen("lowerb", deep(2), 40, 0)]
    pairs = Counter(zip(groups, capacities([0.5, 1], 40, 0), strict=True))
    assert len(pairs) == 4, (
        "one permutation for both would give every group a single class of device"
    )


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, math.nan, math.inf, [0.5, 0], [0.5, -1, 2], []])
def test_a_share_outside_0_to_1_is_refused(keep: float | list[float]) -> None:
    with pytest.raises(PlanError, match=r"keep is a share in \(0, 1\], got"):
        capacities(keep, 5, 0)
