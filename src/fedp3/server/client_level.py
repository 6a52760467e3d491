"""The server's step under client-level DP: the noised release, then the server optimizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedp3.client.context import RunSpec
from fedp3.core.types import AcceptedUpdate, ClientPlan, Params
from fedp3.privacy.client_level.mechanism import release, uploaders
from fedp3.privacy.settings import Budget
from fedp3.server.aggregators import AggregateSettings
from fedp3.server.optimizer import Moments, is_identity, optimize


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLevel:
    """Client-level DP on the server.

    Args:
        budget: the mechanism of a round, and what the run may cost.
        optimizer: the server optimizer and its settings; the rule is always `simple`.
    """

    budget: Budget
    optimizer: AggregateSettings


def private_step(
    mode: ClientLevel,
    spec: RunSpec,
    plans: Sequence[ClientPlan],
    W: Params,
    updates: Iterable[AcceptedUpdate],
    moments: Moments,
    t: int,
) -> tuple[Params, Moments]:
    """W_{t+1} and the optimizer's next moments.

    The optimizer only processes the noised release: it sees neither uploads nor who sent them, and
    steps on every coordinate of every released tensor.

    Args:
        mode: the mechanism and the server optimizer.
        spec: the run.
        plans: the plans of all clients in round t.
        W: W_t.
        updates: the accepted updates of the participants.
        moments: the optimizer's moments after the last round.
        t: the round, from 0.
    """
    released = release(W, updates, uploaders(plans), spec, mode.budget.mechanism, t)
    new = {**W, **released}
    if is_identity(mode.optimizer):
        return new, moments
    everywhere = dict.fromkeys(released)
    return optimize(W, new, everywhere, spec.layers, mode.optimizer, moments)
