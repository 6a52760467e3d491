"""The ratio of two durations, measured in turn, pair by pair."""

import math
import statistics
import time
from collections.abc import Callable

Work = Callable[[], None]
Clock = Callable[[], float]


def compare(
    a: Work, b: Work, pairs: int, clock: Clock = time.process_time
) -> tuple[float, float, float]:
    """Median ratio a / b over interleaved pairs, and its 95 % interval."""

    def seconds(work: Work) -> float:
        began = clock()
        work()
        return clock() - began

    a()  # warm up
    b()
    ratios = sorted(seconds(a) / seconds(b) for _ in range(pairs))
    half = math.ceil(0.98 * math.sqrt(pairs))
    return (
        statistics.median(ratios),
        ratios[max(0, pairs // 2 - half)],
        ratios[min(pairs - 1, pairs // 2 + half)],
    )


def shown(ratio: tuple[float, float, float]) -> str:
    """The ratio and its interval as text."""
    return f"{ratio[0]:.3f} [{ratio[1]:.3f}-{ratio[2]:.3f}]"
