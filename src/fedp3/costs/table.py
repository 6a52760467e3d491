"""The cost of each client's plan in one round, one row per client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedp3.client.context import ClientContext
from fedp3.core.memo import once_per_plan
from fedp3.core.types import ClientPlan, Layer, LayerMap, Params
from fedp3.costs import device_time
from fedp3.costs.compute import ComputeProfile, flops
from fedp3.costs.memory import client_bytes
from fedp3.costs.traffic import exchange_bytes, retained_parameters, share_down, traffic_by_layer
from fedp3.messages.compression import coding_of
from fedp3.planning.prune_settings import SELECTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCost:
    """What one round costs one client."""

    id: int
    layers: tuple[Layer, ...]  # L_i
    keep: Mapping[Layer, float]  # the share of each layer that the client is sent
    examples: int
    parameters: int
    mflops_per_example: float
    peak_mb: float
    mb_down: float
    mb_up: float
    layer_bytes: Mapping[Layer, tuple[int, int]]  # (down, up)
    capacity: float = 1.0  # the share of the network that its device can hold
    gflop: float = 0.0  # of its local training
    seconds: float = 0.0  # on its device, or estimated by `device_time` if that is not described
    binding: str = ""  # the limit that keeps its device from training everything
    steps: int = 0  # local steps, where the plan names them
    split: int = 1  # parts in which a batch is computed
    code: str = "none"  # of its uploads
    mb_copy: float = 0.0  # of weights for a client that holds none; as `mb_down` without a code


def client_costs(
    context: ClientContext,
    profile: ComputeProfile,
    plans: Sequence[ClientPlan],
    keep: Sequence[float],
    examples: Mapping[int, int],
    extra: Params,
) -> list[ClientCost]:
    """The cost of every client's plan.

    Args:
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        plans: the plans of all clients.
        keep: the capacity of each client's device.
        examples: the number of training samples of each client.
        extra: the method's tensors, which are sent in both directions.
    """
    cost_of = once_per_plan(
        lambda plan: _client_cost(plan, context, profile, examples[plan.client], extra),
        lambda plan: examples[plan.client],
    )
    costs = []
    for plan in plans:
        i, samples, cost = plan.client, examples[plan.client], cost_of(plan)
        seconds = device_time.seconds(keep[i], cost.gflop, cost.mb_down, cost.mb_up)
        costs.append(replace(cost, id=i, examples=samples, capacity=keep[i], seconds=seconds))
    return costs


def _client_cost(
    plan: ClientPlan,
    context: ClientContext,
    profile: ComputeProfile,
    samples: int,
    extra: Params,
) -> ClientCost:
    layers, pruning = context.layers, context.pruning
    spec = context.spec
    traffic = traffic_by_layer(plan, layers, pruning, spec.compression, spec.download)
    exchanged, rows = exchange_bytes(extra), max(1, min(context.local.batch, samples))
    return ClientCost(
        id=plan.client,
        layers=plan.full_layers,
        keep={l: share_down(p) for l, p in plan.layers.items()},
        examples=0,
        parameters=retained_parameters(plan, layers, pruning),
        mflops_per_example=flops(profile, plan, layers, pruning) / 1e6,
        peak_mb=client_bytes(context, profile, plan, rows) / 1e6,
        mb_down=(sum(t.down for t in traffic.values()) + exchanged) / 1e6,
        mb_up=(sum(t.up for t in traffic.values()) + exchanged) / 1e6,
        layer_bytes={l: (t.down, t.up) for l, t in traffic.items()},
        mb_copy=(sum(t.copy for t in traffic.values()) + exchanged) / 1e6,
        gflop=device_time.round_gflop(profile, plan, context, samples),
        steps=plan.steps,
        split=plan.split,
        code=coding_of(plan, spec.compression).compress,
    )


def unprunable_units(
    layers: LayerMap, selector: str, plans: Sequence[ClientPlan]
) -> dict[str, str]:
    """Unit groups that a structured selector should prune but cannot, each with the reason."""
    if SELECTORS.pick(selector).units is None:
        return {}
    pruned = {
        l for plan in plans for l, p in plan.layers.items() if p.send == "pruned" and p.keep < 1
    }
    return {
        g: group.fixed
        for g, group in layers.groups.items()
        if group.layer in pruned and group.fixed
    }
