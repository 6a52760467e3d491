"""Virtual time: phases add up, late and absent devices are found, and every end of a round."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.devices.clock import (
    Timing,
    Work,
    joules,
    make_timings,
    next_available,
    phases,
    recorded,
    visit,
    waiting,
)
from fedp3.devices.round_ends import (
    LATE,
    LEFT,
    ROUND_ENDS,
    SURPLUS,
    USED,
    EndRound,
    RoundEnd,
    Visit,
)
from fedp3.devices.table import DEVICES
from fedp3.devices.traces import DAY, MICRO, Trace, constant

PHONE, BOARD = DEVICES.pick("Pixel 3"), DEVICES.pick("raspberry-pi-4")


def timing(presence: Trace | None = None, **fields: object) -> Timing:
    here = presence or constant(1)
    absent = tuple(1 - v for v in here.values)
    usual = Timing(
        down=constant(8_000_000),
        up=constant(4_000_000),
        gflops=2.0,
        watts=3.0,
        presence=here,
        absence=Trace(here.starts, absent, here.period) if any(absent) else None,
        phase=0,
    )
    return replace(usual, **fields)  # type: ignore[arg-type]


def ends(name: str) -> EndRound:
    end = ROUND_ENDS.pick(name).end
    assert end is not None
    return end


def test_a_megabyte_over_8_megabits_takes_a_second_and_6_gflop_at_2_a_second_three() -> None:
    v = visit(7, timing(), Work(1_000_000, 1_000_000, 6.0), 5 * MICRO)
    assert (v.down, v.compute, v.up) == (1 * MICRO, 3 * MICRO, 2 * MICRO)
    assert v.ended == 11 * MICRO and v.left == -1


def test_a_device_that_leaves_in_between_is_noticed_when_it_leaves() -> None:
    half = Trace((0, 4 * MICRO), (1, 0), 10 * MICRO)
    v = visit(0, timing(half), Work(1_000_000, 1_000_000, 6.0), 1 * MICRO)
    assert v.left == v.ended == 4 * MICRO
    assert phases(v) == (1 * MICRO, 2 * MICRO, 0)
    stays = visit(0, timing(half), Work(1_000_000, 0, 4.0), 1 * MICRO)
    assert stays.left == -1


def test_the_first_moment_at_which_somebody_is_available() -> None:
    night = Trace((0, 2 * MICRO), (0, 1), 4 * MICRO)
    timings = [timing(night), timing(night, phase=1 * MICRO), timing(night, phase=2 * MICRO)]
    assert next_available(timings, [0, 1, 2], 0) == (0, [2])
    assert next_available(timings, [0, 1], 0) == (1 * MICRO, [1])
    assert next_available(timings, [], 7) == (7, [])
    assert waiting(timings[0], 3 * MICRO) == 0


def test_energy_is_watts_times_computing_and_unknown_if_one_device_is() -> None:
    v = visit(0, timing(), Work(0, 0, 6.0), 0)
    assert joules([v], [timing()]) == 9.0
    assert joules([v], [timing(watts=None)]) is None


def test_a_round_is_recorded_in_seconds() -> None:
    v = visit(0, timing(), Work(1_000_000, 1_000_000, 6.0), 2 * MICRO)
    clock = recorded([v], [USED], [timing()], 2 * MICRO, 8 * MICRO)
    assert (clock.began, clock.ended, clock.joules) == (2.0, 8.0, 9.0)
    one = clock.clients[0]
    assert (one.began, one.down, one.compute, one.up, one.outcome) == (2.0, 1.0, 3.0, 2.0, USED)


# --------------------------------------------------------------------------- ends of rounds


def visits(*ended: int, left: tuple[int, ...] = ()) -> list[Visit]:
    return [
        Visit(client=i, began=0, down=e, compute=0, up=0, left=e if i in left else -1)
        for i, e in enumerate(ended)
    ]


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("wait", visits(3, 9, 5), RoundEnd(9, (USED, USED, USED))),
        ("wait", visits(3, 9, left=(1,)), RoundEnd(9, (USED, LEFT))),
        ("deadline", visits(3, 9, 5), RoundEnd(6, (USED, LATE, USED))),
        ("deadline", visits(3, 5), RoundEnd(5, (USED, USED))),
        ("deadline", visits(3, 6), RoundEnd(6, (USED, USED))),
        ("first", visits(3, 9, 5), RoundEnd(5, (USED, SURPLUS, USED))),
        ("first", visits(5, 5, 5), RoundEnd(5, (USED, USED, SURPLUS))),
        ("first", visits(3, 9, 4, left=(2,)), RoundEnd(9, (USED, USED, LEFT))),
        ("wait", [], RoundEnd(0, ())),
        ("deadline", [], RoundEnd(0, ())),
        ("first", [], RoundEnd(0, ())),
    ],
)
def test_ends_of_rounds(name: str, parts: list[Visit], expected: RoundEnd) -> None:
    assert ends(name)(parts, 0, 6, 2) == expected


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 20))
def test_a_deadline_beyond_all_is_waiting_and_as_many_as_asked_is_waiting(
    times: list[int], extra: int
) -> None:
    parts = visits(*times)
    waited = ends("wait")(parts, 0, 0, 0)
    assert ends("deadline")(parts, 0, max(times) + extra, 0) == waited
    assert ends("first")(parts, 0, 0, len(times)) == waited


# --------------------------------------------------------------------------- devices over time


def test_timings_depend_on_seed_and_client_alone() -> None:
    many = make_timings([PHONE] * 5, 3, "daily")
    assert make_timings([PHONE] * 3, 3, "daily") == many[:3]
    assert len({t.phase for t in many}) == 5
    assert make_timings([PHONE], 4, "daily") != many[:1]
    share = sum(t.presence.values[0] * t.presence.starts[1] for t in many) / 5 / DAY / MICRO
    assert share == pytest.approx(PHONE.available)


def test_always_means_always() -> None:
    (one,) = make_timings([PHONE], 0)
    assert one.absence is None and waiting(one, 123 * DAY) == 0


def test_links_follow_a_trace_with_the_mean_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("0,1\n10,3\n")
    (one,) = make_timings([BOARD], 0, bandwidth=str(path))
    assert one.down.values == (25_000_000, 75_000_000)
    assert sum(one.up.values) / 2 == BOARD.mbps_up * MICRO
