"""Plans as an aggregator revises them before a round, from what the server remembers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fedp3.core.memo import once_per_plan
from fedp3.core.types import ClientPlan, Layer, LayerPlan
from fedp3.planning.client_plans import PlanSettings, outside

STORED = LayerPlan(upload="none")  # a layer that a client trains, stores and uploads later


def without_layers(
    plans: Sequence[ClientPlan],
    left_out: Collection[Layer],
    settings: PlanSettings,
    keep: Sequence[float],
    *,
    stored: bool = False,
) -> Sequence[ClientPlan]:
    """The same plans, in which these layers are outside every L_i.

    Args:
        plans: the plans of a round.
        left_out: the layers that no client shall upload.
        settings: the run's `[plan]`.
        keep: for every client of the run, the share of a pruned layer that its device can hold.
        stored: whether clients train these layers in full and store them for a later round, instead
            of doing what `plan.others` says.
    """
    if not left_out:
        return plans

    def layer_plans(plan: ClientPlan) -> Mapping[Layer, LayerPlan]:
        rest = STORED if stored else outside(settings, keep[plan.client])
        return {
            l: rest if l in left_out and p == LayerPlan() else p for l, p in plan.layers.items()
        }

    rests = once_per_plan(layer_plans, lambda plan: keep[plan.client])
    return [replace(plan, layers=rests(plan)) for plan in plans]


def only_layers(
    plans: Sequence[ClientPlan],
    trained: Mapping[int, Collection[Layer]],
    settings: PlanSettings,
    keep: Sequence[float],
) -> Sequence[ClientPlan]:
    """The same plans, in which all but these layers are outside each client's L_i.

    Args:
        plans: the plans of a round.
        trained: the layers that each client may train and upload.
        settings: the run's `[plan]`.
        keep: for every client of the run, the share of a pruned layer that its device can hold.
    """
    alike: dict[frozenset[Layer], list[ClientPlan]] = {}
    for plan in plans:
        left_out = frozenset(plan.layers) - set(trained[plan.client])
        alike.setdefault(left_out, []).append(plan)
    revised = {
        plan.client: plan
        for left_out, group in alike.items()
        for plan in without_layers(group, left_out, settings, keep)
    }
    return [revised[plan.client] for plan in plans]


def continuing_layers(
    plans: Sequence[ClientPlan], continued: Collection[Layer], seen: Mapping[int, int], since: int
) -> Sequence[ClientPlan]:
    """The same plans, in which these layers are not sent to clients that have them.

    Args:
        plans: the plans of a round.
        continued: the layers that a client continues to train from where it left off.
        seen: for each client the last round in which its update was accepted.
        since: the round after which a client has these layers; others are sent a copy.
    """
    if not continued:
        return plans
    without = once_per_plan(
        lambda plan: {
            l: replace(p, send="none") if l in continued else p for l, p in plan.layers.items()
        }
    )
    return [
        replace(plan, layers=without(plan)) if seen.get(plan.client, -1) == since else plan
        for plan in plans
    ]
