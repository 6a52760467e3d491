"""Links and availability over time, against plain loops."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3.devices.traces import (
    DAY,
    MICRO,
    Trace,
    constant,
    duration,
    mean,
    read_availability,
    read_bandwidth,
    share_of_day,
    transfer_seconds,
    waiting_seconds,
)

from .reference import duration_by_interval, duration_by_microsecond, value_at


@st.composite
def traces(draw: st.DrawFn, longest: int = 6, most: int = 5) -> Trace:
    """Traces with outages, of few values so that amounts often end exactly where one begins."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=8))
    values = draw(
        st.lists(st.integers(0, most), min_size=len(lengths), max_size=len(lengths)).filter(any)
    )
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return Trace(tuple(starts), tuple(values), sum(lengths))


def parts(trace: Trace) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return trace.starts, trace.values, trace.period


# --------------------------------------------------------------------------- arithmetic


@given(traces(), st.integers(0, 60), st.integers(0, 60))
def test_a_duration_is_that_of_adding_up_microsecond_by_microsecond(trace, amount, start):
    wanted = duration_by_microsecond(*parts(trace), amount, start)
    assert duration(trace, amount, start) == wanted
    assert duration_by_interval(*parts(trace), amount, start) == wanted


@given(traces(longest=10**8, most=10**8), st.integers(0, 10**17), st.integers(0, 10**12))
def test_a_long_duration_is_that_of_adding_up_interval_by_interval(trace, amount, start):
    amount %= 50 * trace.sums[-1]  # at most 50 laps of the loop
    assert duration(trace, amount, start) == duration_by_interval(*parts(trace), amount, start)


@given(traces(), st.integers(1, 50), st.integers(1, 50), st.integers(0, 40))
def test_two_transfers_one_after_the_other_take_as_long_as_both_together(trace, a, b, start):
    """Exactly if the first ends with a whole microsecond's worth, and never less otherwise."""
    first = duration(trace, a, start)
    together = duration(trace, a + b, start)
    apart = first + duration(trace, b, start + first)
    assert together <= apart
    begin = [value_at(*parts(trace), start + k) for k in range(first)]
    assert sum(begin) > a or apart == together


@given(traces(), st.integers(0, 60), st.integers(0, 60))
def test_a_trace_repeats(trace, amount, start):
    assert duration(trace, amount, start) == duration(trace, amount, start + 7 * trace.period)


@given(traces(), st.integers(0, 60))
def test_what_a_lap_carries_takes_at_most_a_lap(trace, start):
    lap = trace.sums[-1]
    assert duration(trace, lap, start) <= trace.period < duration(trace, lap + 1, start)


def test_a_transfer_that_ends_where_an_outage_begins_does_not_wait_for_its_end():
    trace = Trace((0, 10), (3, 0), 1000)
    assert duration(trace, 30, 0) == 10
    assert duration(trace, 31, 0) == 1001


def test_nothing_takes_no_time_even_during_an_outage():
    assert duration(Trace((0, 10), (0, 1), 20), 0, 5) == 0


def test_a_constant_link_takes_bits_over_rate():
    assert transfer_seconds(constant(8_000_000), 5_000_000, 123.456) == 5.0


@given(traces(), st.integers(0, 60))
def test_the_wait_ends_with_the_first_microsecond_that_is_on(trace, start):
    presence = Trace(trace.starts, tuple(min(v, 1) for v in trace.values), trace.period)
    wait = round(waiting_seconds(presence, start / MICRO) * MICRO)
    on = [value_at(*parts(presence), start + k) for k in range(wait + 1)]
    assert on == [0] * wait + [1]


def test_a_share_of_the_day_is_its_beginning():
    night = share_of_day(1 / 3)
    assert mean(night) == pytest.approx(1 / 3)
    assert waiting_seconds(night, 60.0) == 0
    assert waiting_seconds(night, DAY / 3) == pytest.approx(2 * DAY / 3)
    assert waiting_seconds(share_of_day(1.0), DAY / 2) == 0


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), float("inf"), 1e-15])
def test_what_is_no_share_of_time_is_refused(share):
    with pytest.raises(InputError, match="share of time"):
        share_of_day(share)


@pytest.mark.parametrize(
    ("starts", "values", "period"),
    [
        ((), (), 5),
        ((1,), (1,), 5),
        ((0, 0), (1, 1), 5),
        ((0, 5), (1, 1), 5),
        ((0,), (0,), 5),
        ((0,), (-1,), 5),
        ((0,), (1, 1), 5),
    ],
)
def test_what_is_no_trace_is_refused(starts, values, period):
    with pytest.raises(InputError):
        Trace(starts, values, period)


# --------------------------------------------------------------------------- files


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("separator", [",", "\t", " ", " , "])
@pytest.mark.parametrize("header", ["", "seconds,Mbit/s\n"])
def test_links_are_read_with_any_separator(separator, header, tmp_path):
    lines = "".join(f"{t}{separator}{rate}\n" for t, rate in ((2, 1.5), (3.5, 0), (4, 2)))
    link = read_bandwidth(written(tmp_path / "t", header + lines))
    assert link == Trace((0, 1_500_000, 2_000_000), (1_500_000, 0, 2_000_000), 2_500_000)


def test_a_link_of_one_line_is_constant(tmp_path):
    link = read_bandwidth(written(tmp_path / "t", "0,4\n"))
    assert transfer_seconds(link, 1_000_000, 0.3) == 2.0


@given(traces(longest=50, most=9))
def test_a_link_that_is_written_is_read(trace):
    text = "".join(f"{s},{v}\n" for s, v in zip(trace.starts, trace.values, strict=True))
    with TemporaryDirectory() as folder:
        link = read_bandwidth(written(Path(folder) / "t", text))
    assert link.starts == tuple(MICRO * s for s in trace.starts)
    assert link.values == tuple(MICRO * v for v in trace.values)


def test_availability_is_read_as_on_and_off(tmp_path):
    presence = read_availability(written(tmp_path / "t", "0,on\n60,off\n100,on\n"))
    assert presence.values == (1, 0, 1) and presence.period == 140 * MICRO
    assert waiting_seconds(presence, 70.0) == 30.0


def test_all_mistakes_of_a_link_are_listed_with_their_lines(tmp_path):
    text = "0,1\nx,2\n1,-3\n2,nan\n3\n\n4,1,1\n5,1_0\n2,inf\n6,1\n6,1\n"
    with pytest.raises(InputError) as caught:
        read_bandwidth(written(tmp_path / "t", text))
    listed = [line.strip() for line in str(caught.value).splitlines()]
    assert listed[0].endswith("has 8 mistakes:")
    numbers = [int(line.partition(":")[0].removeprefix("line ")) for line in listed[1:]]
    assert numbers == [2, 3, 4, 5, 7, 8, 9, 11]
    assert "do not come after" in listed[-1]


@pytest.mark.parametrize("text", ["", "\n\n", "0,0\n1,0\n", "seconds,Mbit/s\n", "0,1e-9\n"])
def test_a_link_that_never_carries_anything_is_refused(text, tmp_path):
    with pytest.raises(InputError, match="no line has a value above 0"):
        read_bandwidth(written(tmp_path / "t", text))


def test_a_file_that_is_absent_or_no_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_bandwidth(tmp_path / "none")
    (tmp_path / "t").write_bytes(b"\xff\xfe0,1")
    with pytest.raises(InputError, match="not UTF-8"):
        read_bandwidth(tmp_path / "t")
