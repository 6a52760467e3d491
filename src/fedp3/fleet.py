"""What a round asks of a device, and how long it would take there: a model, not a measurement.

A device of capacity c (its `keep`) computes and transfers at c times the pace of a whole one, which trains at
10 GFLOP/s, receives 6.25 MB/s and sends 1.25 MB/s (50 and 10 Mbit/s): a phone on a mobile network.
    seconds = MB down / (6.25 c) + GFLOP / (10 c) + MB up / (1.25 c);    a round takes as long as its slowest client
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedp3.cost import unit_counts
from fedp3.local_prune import BY_UNITS, LOCAL_PRUNERS, q_grid
from fedp3.passes import only
from fedp3.recipe import Recipe, steps_of
from fedp3.types import ClientPlan, Group, Masks
from fedp3.work import Work, flops

DRAWS = 8  # widths that stand for all of U[q_min, 1]


@dataclass(frozen=True, slots=True)
class Device:
    """What a device does in a second."""

    gflop: float = 10.0
    mb_down: float = 6.25
    mb_up: float = 1.25


WHOLE = Device()


def seconds(capacity: float, gflop: float, mb_down: float, mb_up: float, whole: Device = WHOLE) -> float:
    """How long one client's part of a round takes on a device of this capacity."""
    return (mb_down / whole.mb_down + gflop / whole.gflop + mb_up / whole.mb_up) / capacity


def round_gflop(work: Work, plan: ClientPlan, recipe: Recipe, samples: int) -> float:
    """GFLOP of one client's local training in one round: every pass, every step, forward and backward."""
    layers, local, total = recipe.layers, recipe.local, 0.0
    each = samples / math.ceil(samples / local.batch) if samples else 0.0  # mean size of a batch
    for p in recipe.hooks.passes:
        asked = only(plan, p, layers)
        whole = flops(work, asked, layers, recipe.pruning)
        drawn = [flops(work, asked, layers, recipe.pruning, left) for left in _left(asked, recipe)]
        per_example = math.fsum(drawn) / len(drawn) + (whole if recipe.hooks.distil else 0)
        total += per_example * each * steps_of(local, samples, p.share)
    return total / 1e9


def _left(plan: ClientPlan, recipe: Recipe) -> Sequence[Mapping[Group, int]]:
    """The units that local pruning leaves in a step, each of these as likely as the others."""
    layers, pruning = recipe.layers, recipe.pruning
    if pruning.local not in BY_UNITS:
        return [{}]
    q_min = pruning.q_min
    spread = tuple(q_min + (1 - q_min) * (k + 0.5) / DRAWS for k in range(DRAWS))
    kept = Masks(units={g: torch.arange(m) for g, m in unit_counts(plan, layers, pruning).items()})
    prune, nothing = LOCAL_PRUNERS[pruning.local], torch.Generator()  # which cuts leading units, and draws none
    steps = [prune(q, plan, kept, layers, nothing) for q in q_grid(pruning, plan) or spread]
    return [{g: len(at) for g, at in step.units.items()} for step in steps]
