"""Warnings that a run gives once, after the round in which something shows."""

import math
from collections.abc import Callable

from fedp3.core.types import RejectionCode
from fedp3.server.context import RoundRecord

DIVERGED = 1e3  # a training loss of this many times that of guessing

OnRound = Callable[[RoundRecord], None]
Tell = Callable[[str], None]


def divergence_warning(classes: int, warn: Tell) -> OnRound:
    """A function that is called with every round, and warns once that training diverges."""
    guessing = math.log(max(classes, 2))
    told = False

    def on_round(record: RoundRecord) -> None:
        nonlocal told
        if not told and record.loss is not None and not record.loss <= DIVERGED * guessing:
            told = True
            warn(
                f"training diverges: the loss of round {record.t + 1} is {record.loss:.3g}, that "
                f"of guessing {guessing:.3g}. Lower local.lr, or scale the inputs"
            )

    return on_round


def failure_warning(warn: Tell) -> OnRound:
    """A function that is called with every round, and warns once that a client's code fails."""
    told = False

    def on_round(record: RoundRecord) -> None:
        nonlocal told
        failed = [(i, r) for i, r in record.rejected.items() if r.code == RejectionCode.FAILED]
        if failed and not told:
            told = True
            client, rejection = failed[0]
            others = f", like {len(failed) - 1} more" if len(failed) > 1 else ""
            warn(
                f"client {client}{others} failed in round {record.t + 1}, and is left out of it: "
                f"{rejection.text}"
            )

    return on_round
