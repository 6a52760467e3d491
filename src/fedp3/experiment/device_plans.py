"""The devices that a config describes, with plans for them."""

from collections.abc import Sequence
from dataclasses import replace

from fedp3.client.context import ClientContext
from fedp3.config import Config
from fedp3.core.types import ClientPlan, Params
from fedp3.costs.compute import measure_on
from fedp3.costs.table import ClientCost
from fedp3.data import first_record
from fedp3.devices.options import KEEPS, transfer_and_work
from fedp3.devices.run_fleet import (
    FleetInputs,
    RunFleet,
    as_planned,
    plan_shares,
    plan_windows,
    run_devices,
)
from fedp3.devices.settings import NODES
from fedp3.devices.table import Device
from fedp3.methods import METHODS
from fedp3.planning.layer_sets import AUTO
from fedp3.privacy import trial
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Mechanism
from fedp3.server.context import ServerContext
from fedp3.server.round_plans import plans_for


def with_fleet(
    server: ServerContext,
    config: Config,
    client: ClientContext,
    extra: Params,
    reported: tuple[Device, ...] | None = None,
) -> ServerContext:
    """What the server knows, with the devices that a config describes and plans for them.

    Windows of layers are chosen where the method has layer sets, and shares where it trains
    sub-models.  Otherwise plans are as the config makes them, and devices without the memory for
    them do not take part.  Where nodes report their devices and samples, nothing is planned before
    they have done so.

    Args:
        server: what the server knows otherwise.
        config: the run.
        client: what all clients share.
        extra: the method's tensors.
        reported: the devices that nodes reported; None before they have.
    """
    settings, examples = config.devices, server.examples
    awaits = settings.fleet == NODES and reported is None
    if not settings.described or awaits or not any(examples.values()):
        return server
    devices = reported or run_devices(settings, server.clients, config.run.seed)
    if config.privacy.enabled:
        # How gradients are clipped decides about memory; the noise is found after the plans.
        mechanism = Mechanism(clip=config.privacy.clip, ghost=trial.uses_ghost(client))
        client = replace(client, steps=PrivateSteps(mechanism))
    inputs = FleetInputs(
        settings=settings,
        devices=devices,
        context=client,
        profile=measure_on(client.net, first_record(client.data), client.objective),
        examples=examples,
        extra=extra,
    )
    if config.plan.layers == AUTO:
        fleet = plan_windows(inputs, config.plan, all_steps=config.privacy.enabled)
        return replace(server, fleet=fleet)
    if config.prune.keep == AUTO:

        def plans_at(keep: float) -> tuple[ClientPlan, ...]:
            return plans_for(replace(server, keep=(keep,) * server.clients), 0)

        fleet, keep = plan_shares(inputs, _levels(config.method), plans_at)
        return replace(server, fleet=fleet, keep=keep)
    plans = [plan for t in range(server.turn) for plan in plans_for(server, t)]
    return replace(server, fleet=as_planned(inputs, plans))


def on_devices(costs: Sequence[ClientCost], fleet: RunFleet) -> list[ClientCost]:
    """The costs of all clients, with the seconds and the binding limits of their devices."""
    placed = []
    for cost in costs:
        device, binding = fleet.devices[cost.id], fleet.binding[cost.id]
        # A device that missed many changes is sent a copy: no download is longer.
        down, up = round(1e6 * cost.mb_copy), round(1e6 * cost.mb_up)
        seconds = sum(transfer_and_work(device, down, up, cost.gflop))
        placed.append(replace(cost, seconds=seconds, binding=binding))
    return placed


def _levels(method: str) -> Sequence[float]:
    """The shares that a method of sub-models knows."""
    keep = METHODS.pick(method).settings.get("prune", {}).get("keep")
    return keep if isinstance(keep, list) else KEEPS
