"""An estimate of how long a round takes where a run describes no devices; nothing is measured.

A full device is a phone on a mobile network: it trains at 10 GFLOP/s, receives 6.25 MB/s and
sends 1.25 MB/s (50 and 10 Mbit/s).  A device of capacity c (its `keep`) has c times this speed:

    seconds = MB down / (6.25 c) + GFLOP / (10 c) + MB up / (1.25 c)

A round takes as long as its slowest client.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from fedp3.client.batching import step_count
from fedp3.client.context import ClientContext
from fedp3.client.passes import planned_steps, restrict_plan
from fedp3.core.types import ClientPlan, Group, Masks
from fedp3.costs.compute import ComputeProfile, flops
from fedp3.costs.traffic import unit_counts
from fedp3.planning.local_pruning import q_grid
from fedp3.planning.prune_settings import LOCAL_PRUNERS

DRAWS = 8  # evenly spread values of q that stand for U[q_min, 1]


# What the full device does in one second.
GFLOP = 10.0
MB_DOWN = 6.25
MB_UP = 1.25


def seconds(capacity: float, gflop: float, mb_down: float, mb_up: float) -> float:
    """How long one client's part of a round takes on its device.

    Args:
        capacity: the device's speed, as a share of the full device's.
        gflop: the work of local training.
        mb_down: megabytes that the client receives.
        mb_up: megabytes that it sends.
    """
    return (mb_down / MB_DOWN + gflop / GFLOP + mb_up / MB_UP) / capacity


def round_gflop(
    profile: ComputeProfile, plan: ClientPlan, context: ClientContext, samples: int
) -> float:
    """GFLOP of one client's local training in one round, over all passes and steps.

    Args:
        profile: the FLOPs of the network.
        plan: the client's plan.
        context: what all clients share.
        samples: the client's number of training samples.
    """
    layers, hooks = context.layers, context.hooks
    local = planned_steps(context.local, plan)
    batch = samples / math.ceil(samples / local.batch) if samples else 0.0  # mean size of a batch
    full_passes = hooks.step.full_passes if hooks.step is not None else 0
    total = 0.0
    for p in hooks.passes:
        restricted = restrict_plan(plan, p, layers)
        full = flops(profile, restricted, layers, context.pruning)
        drawn = [
            flops(profile, restricted, layers, context.pruning, units)
            for units in _step_units(restricted, context)
        ]
        per_example = math.fsum(drawn) / len(drawn) + full_passes * full
        total += per_example * batch * step_count(local, samples, p.share)
    return total / 1e9


def _step_units(plan: ClientPlan, context: ClientContext) -> Sequence[Mapping[Group, int]]:
    """The numbers of units that local pruning may leave in a step, all equally likely."""
    layers, pruning = context.layers, context.pruning
    local_pruner = LOCAL_PRUNERS.pick(pruning.local_pruner)
    if not local_pruner.by_units:
        return [{}]
    q_min = pruning.q_min
    evenly_spread = tuple(q_min + (1 - q_min) * (k + 0.5) / DRAWS for k in range(DRAWS))
    retained = Masks(
        units={g: torch.arange(m) for g, m in unit_counts(plan, layers, pruning).items()}
    )
    unused = torch.Generator()  # these pruners retain leading units and draw nothing
    steps = [
        local_pruner.draw(q, plan, retained, layers, unused)
        for q in q_grid(pruning, plan) or evenly_spread
    ]
    return [{g: len(indices) for g, indices in step.units.items()} for step in steps]
