"""Naive reference implementations for devices, by plain loops."""

from collections.abc import Sequence


def value_at(starts: Sequence[int], values: Sequence[int], period: int, time: int) -> int:
    """The value of a repeated, piecewise constant trace during the microsecond from `time` on."""
    phase = time % period
    found = values[0]
    for start, value in zip(starts, values, strict=True):
        if start <= phase:
            found = value
    return found


def duration_by_microsecond(
    starts: Sequence[int], values: Sequence[int], period: int, amount: int, start: int
) -> int:
    """Whole microseconds until the trace has added up to `amount`."""
    time, total = start, 0
    while total < amount:
        total += value_at(starts, values, period, time)
        time += 1
    return time - start


def duration_by_interval(
    starts: Sequence[int], values: Sequence[int], period: int, amount: int, start: int
) -> int:
    """The same for long traces: interval by interval, lap after lap."""
    ends = [*starts[1:], period]
    lap, left = start // period * period, amount
    while left > 0:
        for begin, end, value in zip(starts, ends, values, strict=True):
            now = max(start, lap + begin)
            room = value * (lap + end - now)
            if lap + end <= now:
                continue
            if room >= left:
                return now + -(-left // value) - start
            left -= room
        lap += period
    return 0
