"""Client plans: what each client is sent, trains and uploads of each layer (Alg. 1, l. 2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedp3.core.errors import PlanError
from fedp3.core.randomness import Stream, stream
from fedp3.core.registry import NameIn
from fedp3.core.settings import STRICT, Share
from fedp3.core.types import ClientPlan, Layer, LayerMap, LayerPlan
from fedp3.planning.layer_sets import AUTO, LAYER_SETS, LayerSets, with_head
from fedp3.planning.schedules import SCHEDULES


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Which layers a client trains in full and uploads (L_i), and what becomes of the others."""

    layers: Annotated[str, NameIn(LAYER_SETS, also=(AUTO,))] = Field(
        default="opu2",
        description="how L_i is chosen; opuK gives K adjacent hidden layers and the head, for any "
        "K (opu1-2: 1 or 2 of them; lowerb is opu1); prune-all: only the head is in L_i; "
        "resnet-*: for resnet18; auto: chosen for each device of [devices]",
    )
    redraw: bool = Field(
        default=False, description="draw the layer sets anew each round instead of once for the run"
    )
    schedule: Annotated[str, NameIn(SCHEDULES)] = Field(
        default="always",
        description="which layers of L_i are due in a round, while the rest counts as outside L_i: "
        "always, all of them; cycle, one layer after the other, the head too (FedPart); paced, the "
        "head and small layers in every round, large layers in turn; random, each by chance, drawn "
        "for every client and round (FedLP)",
    )
    warm: int = Field(
        default=5,
        ge=0,
        description="with schedule = 'cycle': rounds of all layers at the start of each cycle",
    )
    stretch: int = Field(
        default=2, ge=1, description="with schedule = 'cycle': rounds in a row for each layer"
    )
    share: Share = Field(
        default=0.1,
        description="with schedule = 'paced': the smallest hidden layers that together hold at "
        "most this share of the network's values are due in every round",
    )
    period: int = Field(
        default=4,
        ge=1,
        description="with schedule = 'paced': every other hidden layer is due once in so many "
        "rounds",
    )
    dealt: bool = Field(
        default=False,
        description="with schedule = 'cycle' or 'paced': clients are at different places of the "
        "cycle or period, instead of all training the same layers",
    )
    probability: Share = Field(
        default=0.5, description="with schedule = 'random': the chance that a layer is due"
    )
    others: Literal["auto", "train", "freeze", "hold", "noise", "personal", "skip"] = Field(
        default="auto",
        description="layers outside L_i: train or freeze them, hold (freeze them and prune "
        "nothing, whatever a device's share is), personal (they never leave the "
        "client), or skip their residual blocks; under LDP freeze, or noise (train them with the "
        "same clip and noise); auto means train, and freeze under LDP, where layers is auto, and "
        "with the schedules cycle and paced",
    )
    head: Literal["shared", "personal", "personal_uploaded"] = Field(
        default="shared",
        description="the last layer: shared, personal (never sent, never uploaded), or "
        "personal_uploaded (never sent but uploaded, as in the authors' code)",
    )
    upload: Literal["none", "retained", "zeros"] = Field(
        default="none",
        description="what is uploaded of pruned layers: nothing, the retained coordinates, or "
        "all coordinates with zeros for the pruned ones",
    )
    weak_below: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="a client is weak if its share prune.keep is below this; 0: no client is",
    )
    weak_steps: int = Field(
        default=0, ge=0, description="local steps of weak clients; 0: as many as all others"
    )
    weak_depth: Share = Field(
        default=1.0,
        description="share of the layers, counted from the head, that weak clients train; below "
        "them a backward pass has nothing to do",
    )

    @property
    def changes(self) -> bool:
        """Whether plans change from round to round."""
        return self.redraw or SCHEDULES.pick(self.schedule).changes

    def turn(self, layers: LayerMap) -> int:
        """The rounds after which the schedule begins again; 1 where there is none."""
        return SCHEDULES.pick(self.schedule).turn(self, layers)


def unscheduled(settings: PlanSettings) -> PlanSettings:
    """The same settings without a schedule: every layer of L_i is due."""
    return replace(settings, schedule="always")


HEADS: Mapping[str, LayerPlan] = {
    "shared": LayerPlan(),
    "personal": LayerPlan(send="none", upload="none"),
    "personal_uploaded": LayerPlan(send="none", upload="all"),
}
# Layers outside L_i; `keep` and `upload` of pruned layers are set per client.
OTHERS: Mapping[str, LayerPlan] = {
    "auto": LayerPlan(send="pruned"),
    "train": LayerPlan(send="pruned"),
    "noise": LayerPlan(send="pruned"),
    "freeze": LayerPlan(send="pruned", train=False),
    "hold": LayerPlan(train=False, upload="none"),
    "personal": LayerPlan(send="none", upload="none"),
    "skip": LayerPlan(send="skip", train=False, upload="none"),
}


def outside(settings: PlanSettings, share: float) -> LayerPlan:
    """The plan of a layer outside L_i at a device that can hold this share of it."""
    other = OTHERS[settings.others]
    if other.send != "pruned":
        return other
    train = other.train or settings.upload != "none"
    return LayerPlan(send="pruned", keep=share, train=train, upload=settings.upload)


def layer_sets(
    settings: PlanSettings, layers: LayerMap, clients: int, seed: int, t: int
) -> LayerSets:
    """L_i of every client in round t: of its layer set, what is due."""
    if settings.layers == AUTO:
        raise PlanError(
            "plan.layers = 'auto' chooses layers for devices, and no device is known here; with "
            "[devices] fleet = 'nodes', the nodes of a Flower server report what they are"
        )
    rng = stream(seed, Stream.PLAN, t if settings.redraw else 0)
    sets = LAYER_SETS.pick(settings.layers)(layers, clients, rng)
    schedule = SCHEDULES.pick(settings.schedule)
    if not schedule.changes:
        return sets

    @cache
    def both(L_i: tuple[Layer, ...], due: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(l for l in with_head(layers, L_i) if l in due)

    due = schedule.due(settings, layers, clients, seed, t)
    return tuple(both(*pair) for pair in zip(sets, due, strict=True))


def client_plans(
    settings: PlanSettings,
    layers: LayerMap,
    keep: Sequence[float],
    seed: int,
    t: int,
    clients: Sequence[int] | None = None,
) -> tuple[ClientPlan, ...]:
    """The plans of these clients, or of all, in round t.

    Args:
        settings: the run's `[plan]`.
        layers: the model's layers.
        keep: for every client of the run, the share of a pruned layer that its device can hold.
        seed: the run's seed.
        t: the round, from 0.
        clients: the clients whose plans to return; None means all.
    """
    everything, layers = layers, _trained_part(layers)
    upper = _upper_layers(layers, settings.weak_depth)
    scheduled = SCHEDULES.pick(settings.schedule).changes  # else the head is in every L_i

    @cache  # clients with equal plans share one object
    def layer_plans(L_i: tuple[Layer, ...], share: float) -> Mapping[Layer, LayerPlan]:
        rest = outside(settings, share)
        trained = upper & {*L_i} if share < settings.weak_below else L_i
        plans = {l: LayerPlan() if l in trained else rest for l in layers.layers}
        if layers.head in L_i or not scheduled or settings.head != "shared":
            plans[layers.head] = HEADS[settings.head]
        return {l: plans.get(l, OTHERS["hold"]) for l in everything.layers}

    def steps(share: float) -> int:
        return settings.weak_steps if share < settings.weak_below else 0

    sets = layer_sets(settings, layers, len(keep), seed, t)
    chosen = range(len(keep)) if clients is None else clients
    return tuple(ClientPlan(i, layer_plans(sets[i], keep[i]), steps=steps(keep[i])) for i in chosen)


def _trained_part(layers: LayerMap) -> LayerMap:
    """The layers without those that no client trains."""
    if not layers.constant:
        return layers
    trained = {l: names for l, names in layers.layers.items() if l not in layers.constant}
    return replace(layers, layers=trained)


def _upper_layers(layers: LayerMap, share: float) -> set[Layer]:
    """This share of the layers, rounded up, counted from the head."""
    names = list(layers.layers)
    return set(names[len(names) - math.ceil(share * len(names) - 1e-9) :])
