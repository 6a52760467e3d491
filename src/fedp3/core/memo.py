"""Compute a value once for all clients whose plans share their layers."""

from collections.abc import Callable
from typing import TypeVar

from fedp3.core.types import ClientPlan

T = TypeVar("T")


def once_per_plan(make: Callable[[ClientPlan], T]) -> Callable[[ClientPlan], T]:
    """Cache the results of `make`, one per `plan.layers` (by identity) and `plan.deal`.

    Many plans of a fleet share one `layers` object.  `make` must not depend on `plan.client`.
    """
    known: dict[tuple[int, tuple[int, int]], tuple[ClientPlan, T]] = {}

    def lookup(plan: ClientPlan) -> T:
        key = id(plan.layers), plan.deal
        if key not in known:
            # Storing the plan keeps its layers alive, so that no other object gets their id.
            known[key] = plan, make(plan)
        return known[key][1]

    return lookup
