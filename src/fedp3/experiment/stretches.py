"""A schedule of layers as rounds in a row with the same plans, and what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from fedp3.core.types import Layer
from fedp3.experiment.experiment import Experiment
from fedp3.messages.versions import is_coded
from fedp3.planning.coverage import coverage
from fedp3.server.round_plans import plans_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Rounds in a row with the same plans; costs are those of one round, as a mean over clients."""

    first: int  # from 1
    last: int
    clients: Mapping[Layer, int]  # how many train and upload each layer
    mb_down: float
    mb_up: float
    gflop: float


def stretches(experiment: Experiment) -> list[Stretch]:
    """The rounds of one turn of the schedule, or of the run if that is shorter.

    Where coded changes are sent down, a round downloads the layers that the one before it changed.
    """
    server = experiment.server
    plans = [plans_for(server, t) for t in range(server.turn)]
    coded = is_coded(server.spec.download)

    def alike(t: int) -> object:
        of_round = [plan.layers for plan in plans[t]]
        return of_round, [plan.layers for plan in plans[t - 1]] if coded else None

    found = []
    for _, group in groupby(range(len(plans)), key=alike):
        rounds = list(group)
        costs = experiment.costs_of(plans[rounds[0]])
        covered = coverage(plans[rounds[0]])
        mb_down = fmean(cost.mb_down for cost in costs)
        if coded:
            changed = [l for l, who in coverage(plans[rounds[0] - 1]).items() if who]
            mb_down = fmean(sum(cost.layer_bytes[l][0] for l in changed) / 1e6 for cost in costs)
        found.append(
            Stretch(
                first=rounds[0] + 1,
                last=rounds[-1] + 1,
                clients={l: len(who) for l, who in covered.items() if who},
                mb_down=mb_down,
                mb_up=fmean(cost.mb_up for cost in costs),
                gflop=fmean(cost.gflop for cost in costs),
            )
        )
    return found


def mean_of(stretches: Sequence[Stretch], cost: str) -> float:
    """The mean of a cost over all rounds of these stretches."""
    lengths = [s.last - s.first + 1 for s in stretches]
    total = sum(n * getattr(s, cost) for n, s in zip(lengths, stretches, strict=True))
    return float(total / sum(lengths))
