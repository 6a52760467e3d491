"""What the server knows about a run, its state after t rounds, and the record of one round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedp3.client.context import ClientContext, RunSpec
from fedp3.core.settings import RunSettings
from fedp3.core.types import LayerMap, Params, Rejection
from fedp3.devices.buffer import Flight
from fedp3.devices.clock import RoundClock
from fedp3.devices.run_fleet import RunFleet
from fedp3.messages.versions import Published
from fedp3.planning.client_plans import PlanSettings
from fedp3.privacy.settings import Budget
from fedp3.server.aggregators import Aggregator
from fedp3.server.central import CentralScore
from fedp3.server.client_level import ClientLevel
from fedp3.server.evaluation import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """One run, as the server knows it.

    Args:
        spec: what clients know too.
        plan: the rules for plans.
        run: rounds, participants, quorum and evaluation.
        aggregator: how updates become the next model.
        keep: for each client the share of a pruned layer that its device can hold.
        examples: the number of training samples that each client registered.
        budget: the privacy limit of LDP; None without LDP.
        client_level: client-level DP, whose release then takes the place of the aggregator; None
            without it.
        fleet: the clients' devices; None if they are not described.
        central: the network with test samples of no client, on which C is scored; None without
            them.
    """

    spec: RunSpec
    plan: PlanSettings
    run: RunSettings
    aggregator: Aggregator
    keep: tuple[float, ...]
    examples: Mapping[int, int]
    budget: Budget | None = None
    client_level: ClientLevel | None = None
    fleet: RunFleet | None = None
    central: ClientContext | None = None

    @property
    def layers(self) -> LayerMap:
        """The model's layers."""
        return self.spec.layers

    @property
    def clients(self) -> int:
        """The number of clients of the run."""
        return len(self.keep)

    @property
    def participants(self) -> int:
        """How many clients take part in a round, if all are eligible."""
        return self.run.clients_per_round or self.clients

    @property
    def redraws(self) -> bool:
        """Whether plans change from round to round."""
        return self.plan.changes or (self.fleet is not None and self.fleet.redraws)

    @property
    def turn(self) -> int:
        """The rounds, from the first, after which a schedule of layers begins again."""
        return min(self.plan.turn(self.layers), self.run.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The complete state of a run after t rounds.

    Args:
        t: the number of finished rounds.
        W: W_t.
        aggregator: the state of the aggregator, opaque to everything else.
        seen: the last round in which each client was accepted.
        void: the number of void rounds in a row.
        extra: the tensors of the method's exchange.
        clock: the virtual time, in microseconds; 0 where devices are not described.
        flying: where rounds overlap, the clients that compute.
        versions: the models of earlier rounds that these clients started from.
        published: the weights that clients hold copies of; None where W is sent in every round.
        average: the mean of W over rounds; None where the model is W itself.
    """

    t: int
    W: Params
    aggregator: Any = field(default_factory=dict)
    seen: Mapping[int, int] = field(default_factory=dict)
    void: int = 0
    extra: Params = field(default_factory=dict)
    clock: int = 0
    flying: tuple[Flight, ...] = ()
    versions: Mapping[int, Params] = field(default_factory=dict)
    published: Published | None = None
    average: Params | None = None

    @property
    def model(self) -> Params:
        """The weights that are scored as G and exported."""
        return self.W if self.average is None else self.average


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What happened in one round."""

    t: int  # from 0
    sampled: tuple[int, ...]
    accepted: tuple[int, ...]
    late: tuple[int, ...]
    rejected: Mapping[int, Rejection]
    bytes_down: int
    bytes_up: int
    loss: float | None  # mean training loss of the accepted clients
    density: float | None  # realised density of local pruning
    void: bool
    seconds: float
    G: Scores | None = None  # the server's model
    D: Scores | None = None  # as dispatched, before training
    P: Scores | None = None  # after local training, of this round's participants
    C: CentralScore | None = None  # the server's model on the central test set
    aggregator: Mapping[int, float] = field(default_factory=dict)  # its report for each client
    epsilon: float | None = None  # under LDP, the largest that any client has spent
    client_epsilon: float | None = None  # under client-level DP, of all releases so far
    clock: RoundClock | None = None  # the round in virtual time, where devices are described


@dataclass(frozen=True, slots=True)
class FinalEvaluation:
    """The scores of the finished model: over all clients, and on the central test set."""

    G: Scores | None
    D: Scores | None
    P: Scores | None
    C: CentralScore | None = None
