"""A run that is ready to start, and what can be derived from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fedp3.client.context import ClientContext
from fedp3.config import Config
from fedp3.core.types import ClientPlan
from fedp3.costs.compute import ComputeProfile, measure_on
from fedp3.costs.table import ClientCost, client_costs
from fedp3.data import first_record
from fedp3.data.partition import histogram
from fedp3.data.shards import Shard
from fedp3.experiment.device_plans import on_devices
from fedp3.privacy.budget import Schedule
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.round_plans import plans_for


@dataclass(frozen=True)
class Experiment:
    """A run that is ready to start.

    Attributes:
        config: its config.
        server: what the server knows.
        client: what all clients share.
        shards: the samples of each client.
        start: the state before the first round.
        client_names: the names of the clients, if they have any.
    """

    config: Config
    server: ServerContext
    client: ClientContext
    shards: Mapping[int, Shard]
    start: ServerState
    client_names: tuple[str, ...] = ()

    @cached_property
    def first_plans(self) -> tuple[ClientPlan, ...]:
        """The plans of all clients in round 0."""
        return plans_for(self.server, 0)

    @cached_property
    def turn_plans(self) -> tuple[ClientPlan, ...]:
        """The plans of all clients in every round of one turn of the schedule of layers.

        Without a schedule these are the plans of round 0.
        """
        later = (plans_for(self.server, t) for t in range(1, self.server.turn))
        return sum(later, self.first_plans)

    @cached_property
    def profile(self) -> ComputeProfile:
        """FLOPs and memory of the network."""
        if self.server.fleet is not None:
            return self.server.fleet.profile
        return measure_on(self.client.net, first_record(self.client.data), self.client.objective)

    @cached_property
    def costs(self) -> list[ClientCost]:
        """What every client's plan costs in round 0."""
        return self.costs_of(self.first_plans)

    def costs_of(self, plans: Sequence[ClientPlan]) -> list[ClientCost]:
        """What these plans, one for each client, cost in their round."""
        server = self.server
        costs = client_costs(
            self.client,
            self.profile,
            plans,
            server.keep,
            server.examples,
            self.start.extra,
        )
        return costs if server.fleet is None else on_devices(costs, server.fleet)

    @property
    def schedule(self) -> Schedule:
        """Which clients may take part in which round."""
        server, fleet = self.server, self.server.fleet
        if fleet is None:
            return Schedule(server.run, server.examples)
        run = replace(server.run, clients_per_round=fleet.asked(server.participants))
        return Schedule(run, {i: n * (i in fleet.able) for i, n in server.examples.items()})

    @property
    def labels(self) -> np.ndarray:
        """Samples of each class at each client: (clients, classes); one class without labels."""
        data = self.client.data
        parts = [torch.cat([s.train, s.test]).numpy() for _, s in sorted(self.shards.items())]
        if not data.labelled:
            return np.array([[len(part)] for part in parts])
        return histogram(data.y.numpy(), parts, data.classes)
