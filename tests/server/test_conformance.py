"""Every registered aggregator passes the conformance table, alone and before a server optimizer.

The table also finds faults: aggregators that are wrong on purpose fail the claim that they break.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from conformance import CONFORMANCE, close_workers
from fedp3.client.context import RunSpec
from fedp3.core.errors import InputError
from fedp3.core.types import AcceptedUpdate, Params
from fedp3.server.aggregators import (
    AGGREGATORS,
    AggregateSettings,
    Aggregator,
    masked_mean,
    uploads_of,
)
from fedp3.server.optimizer import OPTIMIZERS

EQUAL = "equal uploads come back bit-equal"
every_claim = pytest.mark.parametrize("claim", CONFORMANCE)


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_workers()


@every_claim
@pytest.mark.parametrize("rule", AGGREGATORS)
def test_every_aggregator_conforms(rule: str, claim: str) -> None:
    CONFORMANCE[claim](AggregateSettings(rule=rule))


@pytest.mark.parametrize("claim", [claim for claim in CONFORMANCE if claim != EQUAL])
@pytest.mark.parametrize("server", OPTIMIZERS)
def test_every_server_optimizer_conforms(server: str, claim: str) -> None:
    """An optimizer follows the mean and does not return it, so that one claim is not made."""
    CONFORMANCE[claim](AggregateSettings(rule="attention", server=server, server_lr=0.5))


@pytest.mark.parametrize("claim", [claim for claim in CONFORMANCE if claim != EQUAL])
def test_damping_conforms(claim: str) -> None:
    """Damped means stay between the uploads and the model, so that one claim is not made."""
    CONFORMANCE[claim](AggregateSettings(rule="attention", damp=0.5, server="momentum"))


# --------------------------------------------------------------------------- faults that it finds

Apply = Callable[[Params, Iterable[AcceptedUpdate], Any, RunSpec], tuple[Params, Any]]


def dense_mean(
    W: Params, updates: Iterable[AcceptedUpdate], state: Any, spec: RunSpec
) -> tuple[Params, Any]:
    """Ignores masks."""
    received, new = list(updates), dict(W)
    for l in spec.layers.layers:
        for n, uploads in uploads_of(received, l, spec).items():
            if uploads:
                new[n] = torch.stack([w for _, w, _ in uploads]).mean(0)
    return new, state


def mean_with_old(
    W: Params, updates: Iterable[AcceptedUpdate], state: Any, spec: RunSpec
) -> tuple[Params, Any]:
    """Mixes in the old weights."""
    mean = masked_mean(W, updates, spec, lambda u, l: 1.0)
    return {n: 0.5 * (w + W[n]) for n, w in mean.items()}, state


def in_place(
    W: Params, updates: Iterable[AcceptedUpdate], state: Any, spec: RunSpec
) -> tuple[Params, Any]:
    """Writes to its state."""
    mean = masked_mean(W, updates, spec, lambda u, l: 1.0)
    state["rounds"] = state.get("rounds", 0) + 1
    return mean, state


class Counter:
    """Stores its state outside of the state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, W: Params, updates: Iterable[AcceptedUpdate], state: Any, spec: RunSpec
    ) -> tuple[Params, Any]:
        self.calls += 1
        return masked_mean(W, updates, spec, lambda u, l: self.calls + u.client), state


def unsaveable(
    W: Params, updates: Iterable[AcceptedUpdate], state: Any, spec: RunSpec
) -> tuple[Params, Any]:
    """Has a state that no checkpoint can store."""
    return masked_mean(W, updates, spec, lambda u, l: 1.0), {"clients": {1, 2}}


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        (dense_mean, "a coordinate that nobody uploaded keeps its bits"),
        (dense_mean, EQUAL),
        (mean_with_old, EQUAL),
        (in_place, "inputs are not written to"),
        (Counter(), "the order of replies does not change the result"),
        (Counter(), "a resumed run ends at the same bits"),
        (unsaveable, "its state can be saved and restored"),
        (unsaveable, "a resumed run ends at the same bits"),
    ],
)
def test_a_wrong_aggregator_fails(
    wrong: Apply, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(settings: AggregateSettings, spec: RunSpec) -> Aggregator:
        return Aggregator(apply=lambda W, updates, state: wrong(W, updates, state, spec))

    monkeypatch.setattr(AGGREGATORS, "_table", dict(AGGREGATORS))
    AGGREGATORS.add("wrong", make)
    with pytest.raises((AssertionError, InputError)):
        CONFORMANCE[claim](AggregateSettings(rule="wrong"))
