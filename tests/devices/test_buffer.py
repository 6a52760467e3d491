"""Asynchronous rounds are those of a slow simulation that looks at every client at every moment."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.devices.buffer import Buffer, Flight, fill_buffer
from fedp3.devices.clock import Timing
from fedp3.devices.round_ends import LEFT, USED, Visit
from fedp3.devices.traces import Trace, constant


def timing(presence: Trace) -> Timing:
    absent = tuple(1 - v for v in presence.values)
    return Timing(
        down=constant(1),
        up=constant(1),
        gflops=1.0,
        watts=None,
        presence=presence,
        absence=Trace(presence.starts, absent, presence.period) if any(absent) else None,
        phase=0,
    )


def visits(lengths: list[int], leaves: list[int]) -> dict[int, tuple[int, int]]:
    return dict(enumerate(zip(lengths, leaves, strict=True)))


def naive(
    flying: list[Flight],
    order: list[int],
    present: list[Trace],
    table: dict[int, tuple[int, int]],
    now: int,
    concurrency: int,
    size: int,
) -> tuple[int, list[int], list[int]]:
    """Time goes on microsecond by microsecond; returns the end, who arrived and who still flies."""
    in_air = {f.visit.client: f.visit.ended for f in flying}
    gone = {f.visit.client for f in flying if f.visit.left >= 0}
    arrived: list[int] = []
    used = 0
    looks = True  # for clients that may start: at the beginning and after every arrival
    for moment in range(now, now + 100_000):
        while True:
            idle = [i for i in order if i not in in_air and i not in arrived]
            if looks or not in_air:
                ready = [i for i in idle if at(present[i], moment)]
                for i in ready[: concurrency - len(in_air)]:
                    length, leaves = table[i]
                    in_air[i] = moment + (leaves if leaves >= 0 else length)
                    if leaves >= 0:
                        gone.add(i)
            looks = False
            if not in_air and not idle:
                return moment, arrived, []
            due = sorted((e, i) for i, e in in_air.items() if e <= moment)
            if not due:
                break
            _, i = due[0]
            del in_air[i]
            arrived.append(i)
            used += i not in gone
            if used == size:
                return moment, arrived, sorted(in_air)
            looks = True
    raise AssertionError("the simulation does not end")


def at(trace: Trace, moment: int) -> bool:
    phase = moment % trace.period
    return [v for s, v in zip(trace.starts, trace.values, strict=True) if s <= phase][-1] == 1


def start_of(table: dict[int, tuple[int, int]]) -> object:
    def start(client: int, now: int) -> Visit:
        length, leaves = table[client]
        left = now + leaves if leaves >= 0 else -1
        return Visit(client=client, began=now, down=length, compute=0, up=0, left=left)

    return start


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Trace], dict[int, tuple[int, int]], int, int]:
    n = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    leaves = [draw(st.sampled_from([-1, -1, -1, max(1, l // 2)])) for l in lengths]
    presence = [
        draw(st.sampled_from([constant(1), Trace((0, 7), (0, 1), 20), Trace((0, 5), (1, 0), 11)]))
        for _ in range(n)
    ]
    order = draw(st.permutations(range(n)))
    concurrency = draw(st.integers(1, n))
    return list(order), presence, visits(lengths, leaves), concurrency, draw(st.integers(1, n))


@given(cases())
@settings(max_examples=200, deadline=None)
def test_rounds_are_those_of_a_slow_simulation(
    case: tuple[list[int], list[Trace], dict[int, tuple[int, int]], int, int],
) -> None:
    order, presence, table, concurrency, size = case
    timings = [timing(p) for p in presence]
    flying: tuple[Flight, ...] = ()
    now = 0
    for version in range(3):
        slow = naive(list(flying), order, presence, table, now, concurrency, size)
        fast = fill_buffer(
            flying,
            order,
            timings,
            start_of(table),  # type: ignore[arg-type]
            version=version,
            now=now,
            concurrency=concurrency,
            size=size,
        )
        assert slow == (fast.ended, arrivals(fast), sorted(f.visit.client for f in fast.flying))
        assert len(fast.flying) <= concurrency
        assert all(f.version <= version for f in fast.arrived)
        now, flying = fast.ended, fast.flying


def arrivals(buffer: Buffer) -> list[int]:
    return [f.visit.client for f in buffer.arrived]


def test_a_slow_client_arrives_in_a_later_round_with_the_version_it_started_from() -> None:
    timings = [timing(constant(1))] * 3
    table = visits([2, 2, 9], [-1, -1, -1])
    flying: tuple[Flight, ...] = ()
    now, versions = 0, []
    for version in range(6):
        buffer = fill_buffer(
            flying,
            [0, 1, 2],
            timings,
            start_of(table),  # type: ignore[arg-type]
            version=version,
            now=now,
            concurrency=3,
            size=2,
        )
        now, flying = buffer.ended, buffer.flying
        versions += [(f.visit.client, f.version, version) for f in buffer.arrived]
    assert (2, 0, 4) in versions
    assert all(started == arrived for client, started, arrived in versions if client < 2) is False


def test_who_leaves_does_not_count_for_the_size_of_the_round() -> None:
    buffer = fill_buffer(
        (),
        [0, 1],
        [timing(constant(1))] * 2,
        start_of(visits([5, 9], [2, -1])),  # type: ignore[arg-type]
        version=0,
        now=0,
        concurrency=2,
        size=1,
    )
    assert buffer.outcomes == (LEFT, USED) and buffer.ended == 9
