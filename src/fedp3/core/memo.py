"""Compute a value once for all clients whose plans share their layers."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from fedp3.core.types import ClientPlan

T = TypeVar("T")


def once_per_plan(
    make: Callable[[ClientPlan], T], also: Callable[[ClientPlan], Hashable] | None = None
) -> Callable[[ClientPlan], T]:
    """Cache the results of `make`, one for all plans that differ only in their client.

    Many plans of a fleet share one `layers` object, which is compared by identity.

    Args:
        make: computes the value.
        also: what else the value depends on, such as the client's number of samples.
    """
    known: dict[Hashable, tuple[ClientPlan, T]] = {}

    def lookup(plan: ClientPlan) -> T:
        rest = plan.deal, plan.steps, plan.split, plan.code
        key = id(plan.layers), rest, also(plan) if also else None
        if key not in known:
            # Storing the plan keeps its layers alive, so that no other object gets their id.
            known[key] = plan, make(plan)
        return known[key][1]

    return lookup
