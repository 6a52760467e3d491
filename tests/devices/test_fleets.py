"""Fleets: a device for every client, the same on every machine."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3.devices.fleet_file import write_fleet
from fedp3.devices.fleets import FLEETS, make_fleet
from fedp3.devices.table import BOARDS, DEVICES, PHONES

seeds = st.integers(0, 2**32)
PINNED_PHONES = ["Desire 310", "Galaxy A3", "Moto G4", "Pixel 3", "Galaxy Note", "Mi 9T"]
PINNED_BOARDS = [
    *("raspberry-pi-5", "raspberry-pi-5", "jetson-nano"),
    *("raspberry-pi-3", "raspberry-pi-zero-2w", "orange-pi-5"),
]
PINNED_SHARES = [
    *("Pixel 3", "Pixel 3", "raspberry-pi-4"),
    *("raspberry-pi-4", "raspberry-pi-4", "Pixel 3"),
]


def test_the_draw_is_pinned():
    """A change here changes the devices of every run with a named fleet."""
    assert [d.name for d in make_fleet("phones", 6, 0)] == PINNED_PHONES
    assert [d.name for d in make_fleet("boards", 6, 7)] == PINNED_BOARDS
    shared = make_fleet({"Pixel 3": 0.5, "raspberry-pi-4": 0.5}, 6, 0)
    assert [d.name for d in shared] == PINNED_SHARES


@given(st.sampled_from(list(FLEETS)), st.integers(1, 30), st.integers(0, 30), seeds)
def test_more_clients_leave_the_devices_of_the_others_as_they_are(name, clients, more, seed):
    assert make_fleet(name, clients + more, seed)[:clients] == make_fleet(name, clients, seed)


def test_a_named_fleet_has_its_devices_about_equally_often():
    for name, devices in FLEETS.items():
        counts = Counter(make_fleet(name, 200 * len(devices), 3))
        assert set(counts) == set(devices)
        assert all(130 < count < 270 for count in counts.values()), "five standard deviations"


def test_phones_are_phones_and_boards_are_boards():
    assert FLEETS == {"phones": PHONES, "boards": BOARDS}


def test_other_seeds_give_other_fleets():
    assert len({make_fleet("phones", 20, seed) for seed in range(10)}) == 10


@given(
    st.lists(st.sampled_from(list(DEVICES)), unique=True, min_size=1, max_size=4),
    st.integers(1, 10),
    seeds,
)
def test_equal_shares_are_equal_numbers_of_clients(names, each, seed):
    fleet = make_fleet({name: 1 / len(names) for name in names}, each * len(names), seed)
    assert Counter(d.name for d in fleet) == dict.fromkeys(names, each)


@given(st.floats(0.05, 0.95), st.integers(30, 200), seeds)
def test_shares_are_met_to_one_client(share, clients, seed):
    fleet = make_fleet({"pixel-3": share, "jetson-nano": 1 - share}, clients, seed)
    assert abs(fleet.count(DEVICES["Pixel 3"]) - share * clients) <= 1
    assert len(fleet) == clients


@pytest.mark.parametrize(
    ("fleet", "text"),
    [
        ("phone", "did you mean 'phones'"),
        ("Pixel 3", "unknown fleet 'Pixel 3'"),
        ({"Pixel 3": 0.5, "Jetson": 0.5}, "unknown device 'Jetson'"),
        ({"Pixel 3": 0.5}, "add up to 0.5"),
        ({"Pixel 3": 1.5, "jetson-nano": -0.5}, "share of 'jetson-nano' is -0.5"),
        ({"Pixel 3": float("nan")}, "is nan"),
        ({}, "add up to 0"),
        ({"Pixel 3": 0.99, "jetson-nano": 0.01}, "no client of 10 would be"),
        ("none.csv", "cannot be read"),
    ],
)
def test_wrong_fleets_are_refused(fleet, text):
    with pytest.raises(InputError, match=text):
        make_fleet(fleet, 10, 0)


def test_all_mistakes_of_a_table_of_shares_are_listed():
    with pytest.raises(InputError) as caught:
        make_fleet({"Pixle 3": 0.5, "jetson-nano": 0.0, "Nothing": 2.0}, 10, 0)
    assert str(caught.value).count("; ") == 3, "four mistakes"


def test_a_fleet_has_a_client():
    with pytest.raises(InputError, match="at least 1 client"):
        make_fleet("phones", 0, 0)


def test_a_file_is_a_fleet_whatever_the_seed(tmp_path):
    drawn = make_fleet("phones", 12, 5)
    write_fleet(tmp_path / "f.csv", drawn)
    assert make_fleet(str(tmp_path / "f.csv"), 12, 0) == drawn
    assert make_fleet(str(tmp_path / "f.csv"), 12, 1) == drawn
