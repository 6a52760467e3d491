"""When a synchronous round ends in virtual time, and whose updates are in time.

All times are whole microseconds, so that sums are exact on every machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedp3.core.registry import Registry

USED, LATE, SURPLUS, LEFT = "used", "late", "surplus", "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One client's part of a round, in virtual time."""

    client: int
    began: int
    down: int
    compute: int
    up: int
    left: int = -1  # when its device became unavailable before it had finished; -1 if it did not

    @property
    def ended(self) -> int:
        """When its update arrived, or when the server noticed that none will come."""
        return self.left if self.left >= 0 else self.began + self.down + self.compute + self.up


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """When a round ended, and what became of each client: used, late, surplus or left."""

    ended: int
    outcomes: tuple[str, ...]


# (visits, when the round began, microseconds of the deadline or 0, number of updates wanted)
EndRound = Callable[[Sequence[Visit], int, int, int], RoundEnd]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMode:
    """A way to end rounds.

    Args:
        end: when a round ends, and whose updates it uses; None where rounds overlap.
        over_selects: more clients are asked than are used.
    """

    end: EndRound | None = None
    over_selects: bool = False


ROUND_ENDS: Registry[RoundMode] = Registry("end of rounds")


def wait(visits: Sequence[Visit], began: int, deadline: int, wanted: int) -> RoundEnd:
    """The round ends when everybody has answered or left."""
    outcomes = tuple(LEFT if v.left >= 0 else USED for v in visits)
    return RoundEnd(max((v.ended for v in visits), default=began), outcomes)


def until_deadline(visits: Sequence[Visit], began: int, deadline: int, wanted: int) -> RoundEnd:
    """The round ends when everybody has answered, or at the deadline."""
    end = began + deadline
    outcomes = tuple(LEFT if v.left >= 0 else USED if v.ended <= end else LATE for v in visits)
    last = max((v.ended for v in visits), default=began)
    return RoundEnd(min(last, end), outcomes)


def first(visits: Sequence[Visit], began: int, deadline: int, wanted: int) -> RoundEnd:
    """The round ends with the last update that is wanted; later ones are surplus."""
    arrived = sorted((v.ended, v.client) for v in visits if v.left < 0)
    used = {client for _, client in arrived[:wanted]}
    last = max((v.ended for v in visits if v.client in used), default=began)
    if len(used) < wanted:  # the server waits until nobody is left who could answer
        last = max((v.ended for v in visits), default=began)
    outcomes = tuple(
        USED if v.client in used else LEFT if 0 <= v.left <= last else SURPLUS for v in visits
    )
    return RoundEnd(last, outcomes)


ROUND_ENDS.add("wait", RoundMode(end=wait))
ROUND_ENDS.add("deadline", RoundMode(end=until_deadline))
ROUND_ENDS.add("first", RoundMode(end=first, over_selects=True))
ROUND_ENDS.add("buffered", RoundMode())
