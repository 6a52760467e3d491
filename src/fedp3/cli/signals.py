"""Ctrl-C and SIGTERM as one exception, so that a run can close its folder before it ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal stopped this process.  This is no `Exception`, so that no handler swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises `Stopped`; later ones are ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_IGN)
        raise Stopped(number)

    before = {handled: signal.signal(handled, stop) for handled in SIGNALS}
    try:
        yield
    finally:
        for handled, handler in before.items():
            signal.signal(handled, handler)
