"""Ctrl-C and SIGTERM as one exception, so that a run can close its folder before it ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """Somebody asked this process to stop; no error, so nothing that catches errors may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises `Stopped`; a second one while closing is ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
