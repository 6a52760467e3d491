"""Bandwidth and availability over time, as traces that repeat for ever.

A trace is piecewise constant.  Its times are whole microseconds and its values whole numbers
(bits per second, or 0 and 1 for off and on).  All arithmetic is exact, so that a transfer takes
equally long on every machine.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from fedp3.core.errors import InputError
from fedp3.devices.text_files import read_text, refuse

MICRO = 1_000_000  # microseconds in a second, and bits in a megabit
DAY = 86_400  # seconds


@dataclass(frozen=True, slots=True)
class Trace:
    """A value for every moment: `values[k]` from `starts[k]` on, and all over again at `period`.

    Args:
        starts: where each interval begins, in microseconds; the first is 0, and they increase.
        values: a whole number, at least 0, for each interval; not all are 0.
        period: where the last interval ends.
    """

    starts: tuple[int, ...]
    values: tuple[int, ...]
    period: int
    # The integral over all intervals up to and including each, in microseconds times the value.
    sums: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times = (*self.starts, self.period)
        ends = times[1:]
        if times[0] != 0 or not ends or not all(a < b for a, b in pairwise(times)):
            raise InputError("the times of a trace begin at 0 and increase")
        if len(self.values) != len(self.starts) or min(self.values) < 0 or max(self.values) == 0:
            raise InputError("a trace has a value for each interval, at least 0 and not always 0")
        parts = [
            value * (end - start)
            for start, end, value in zip(self.starts, ends, self.values, strict=True)
        ]
        object.__setattr__(self, "sums", tuple(accumulate(parts)))


def constant(value: int) -> Trace:
    """The trace that always has this value."""
    return Trace((0,), (value,), MICRO)


def duration(trace: Trace, amount: int, start: int) -> int:
    """Microseconds from `start` until the integral of the trace has grown by `amount`, rounded up.

    Args:
        trace: the trace.
        amount: in microseconds times its value: a byte over a link takes 8 million.
        start: in microseconds from the beginning of the trace, which repeats.
    """
    if amount <= 0:
        return 0
    phase = start % trace.period
    k = bisect_right(trace.starts, phase) - 1
    before = trace.sums[k - 1] if k else 0
    wanted = before + trace.values[k] * (phase - trace.starts[k]) + amount
    # The end lies in the lap whose sum first reaches what is wanted, which may be at its very end.
    laps, rest = divmod(wanted - 1, trace.sums[-1])
    rest += 1
    k = bisect_left(trace.sums, rest)
    before = trace.sums[k - 1] if k else 0
    inside = -((before - rest) // trace.values[k])  # rounded up
    return laps * trace.period + trace.starts[k] + inside - phase


def transfer_seconds(link: Trace, size: int, start: float) -> float:
    """Seconds that a transfer takes over a link.

    Args:
        link: its bits per second over time.
        size: bytes to transfer.
        start: when it starts, in seconds from the beginning of the trace.
    """
    return duration(link, 8 * MICRO * size, round(start * MICRO)) / MICRO


def waiting_seconds(presence: Trace, start: float) -> float:
    """Seconds from `start` until the device is available; 0 if it is.

    Args:
        presence: 1 where the device is available, and 0 where it is not.
        start: in seconds from the beginning of the trace.
    """
    # It is available in the last microsecond of the time that it takes to be so for one.
    return (duration(presence, 1, round(start * MICRO)) - 1) / MICRO


def mean(trace: Trace) -> float:
    """The mean over time: bits per second of a link, or the share of time of an availability."""
    return trace.sums[-1] / trace.period


def share_of_day(share: float) -> Trace:
    """Availability during the first part of every day, which has this share of it."""
    on = round(share * DAY * MICRO) if math.isfinite(share) else 0
    if not 0 < on <= DAY * MICRO:
        raise InputError(f"available is {share:g}, want a share of time in (0, 1]")
    return constant(1) if on == DAY * MICRO else Trace((0, on), (1, 0), DAY * MICRO)


# --------------------------------------------------------------------------- files


def read_bandwidth(path: Path) -> Trace:
    """Read a link from lines `seconds,Mbit/s`, separated by commas, tabs or spaces.

    A line holds from its time to that of the next.  The last one holds as long as the one before
    it, and then the trace repeats; a single line holds always.
    """
    return _read(path, "seconds,Mbit/s", _megabits)


def read_availability(path: Path) -> Trace:
    """Read an availability from lines `seconds,on` and `seconds,off`, as `read_bandwidth` does."""
    return _read(path, "seconds,on or seconds,off", {"on": 1, "off": 0}.get)


def _megabits(text: str) -> int | None:
    rate = _number(text)
    return None if rate is None else round(rate * MICRO)


def _number(text: str) -> float | None:
    """The text as a number from 0 on; None if it is anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e9 and "_" not in text else None


def _read(path: Path, form: str, parse: Callable[[str], int | None]) -> Trace:
    text = read_text(path, "trace")
    times: list[int] = []
    values: list[int] = []
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.replace(",", " ").split()
        is_header = number == 1 and cells[:1] == ["seconds"]
        if not cells or is_header:
            continue
        seconds = _number(cells[0])
        value = parse(cells[1]) if len(cells) == 2 else None
        if seconds is None or value is None:
            wrong.append(f"line {number}: got {line.strip()!r:.60}, want {form}, from 0 on")
            continue
        time = round(seconds * MICRO)
        if times and time <= times[-1]:
            wrong.append(f"line {number}: {seconds:g} seconds do not come after the line before")
            continue
        times.append(time)
        values.append(value)
    if not wrong and not any(values):
        wrong.append(f"no line has a value above 0; want lines {form}")
    refuse(path, wrong)
    starts = tuple(time - times[0] for time in times)
    last = starts[-1] - starts[-2] if len(starts) > 1 else MICRO
    return Trace(starts, tuple(values), starts[-1] + last)
