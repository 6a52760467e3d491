"""The table of known devices: what it claims about itself."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3.devices.table import (
    BOARDS,
    DEVICES,
    NUMBERS,
    PHONES,
    SCORE_FACTOR,
    assumed_link,
    find,
    gflops_of_score,
)


def test_there_are_twenty_phones_and_some_boards():
    assert len(PHONES) == 20 and {d.kind for d in PHONES} == {"phone"}
    assert {"raspberry-pi-4", "raspberry-pi-zero-2w", "jetson-nano"} <= {d.name for d in BOARDS}
    assert {d.kind for d in BOARDS} == {"board"}
    assert tuple(DEVICES.values()) == PHONES + BOARDS


def test_phones_spread_as_the_list_that_they_were_chosen_from():
    """Its scores are 213, 1548 and 3695 at 5, 50 and 95 %, and its RAM is 4 GB at 50 %."""
    speeds = sorted(d.gflops for d in PHONES)
    assert speeds[0] <= gflops_of_score(213) and speeds[-1] >= gflops_of_score(3695)
    assert statistics.median(speeds) == pytest.approx(gflops_of_score(1548), rel=0.05)
    assert statistics.median(d.memory_mb for d in PHONES) == 4000
    assert [d.gflops for d in PHONES] == speeds


def test_every_source_says_what_is_assumed():
    for device in DEVICES.values():
        assert "assumed" in device.source and "GFLOP/s: " in device.source
        assert "Link: " in device.source and "Available: assumed" in device.source
    assert all("ai-benchmark.com" in d.source and "FLASH" in d.source for d in PHONES)


def test_the_rule_for_scores_hits_the_number_that_it_is_anchored_at():
    """15 to 30 GFLOP/s for Snapdragon 8 CPUs, whose median score is 2213."""
    gflops = gflops_of_score(2213)
    assert gflops == pytest.approx((15 * 30) ** 0.5, rel=0.05)
    assert gflops / SCORE_FACTOR < 15 and gflops * SCORE_FACTOR > 30


@pytest.mark.parametrize("score", [0, -5, float("nan"), float("inf")])
def test_what_is_no_score_is_refused(score):
    with pytest.raises(InputError, match="want a number above 0"):
        gflops_of_score(score)


@given(st.integers(2005, 2030), st.floats(0.25, 24))
def test_links_are_faster_down_than_up_and_never_slower_in_newer_phones(year, gb):
    down, up = assumed_link(year, gb)
    assert down == 5 * up
    assert assumed_link(year + 1, gb)[0] >= down and assumed_link(year, gb + 4)[0] >= down


@pytest.mark.parametrize("name", ["Pixel 3", "pixel 3", "pixel-3", "PIXEL3"])
def test_names_are_found_whatever_their_capitals_and_signs(name):
    assert find(name) is DEVICES["Pixel 3"] is DEVICES.pick(name)


def test_every_device_is_found_by_its_own_name_alone():
    assert [find(name) for name in DEVICES] == list(DEVICES.values())


def test_an_unknown_device_is_refused_with_the_nearest_name():
    assert find("Pixel 33") is None
    with pytest.raises(InputError, match="did you mean 'Pixel 3'"):
        DEVICES.pick("Pixel 33")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_device_with_an_impossible_number_is_refused(number, value):
    with pytest.raises(InputError, match=f"'Pixel 3': {number} is"):
        replace(DEVICES["Pixel 3"], **{number: value})


def test_no_device_is_available_more_than_always():
    with pytest.raises(InputError, match="share of time"):
        replace(DEVICES["Pixel 3"], available=1.5)
