"""Client plans: what each client is sent, trains and uploads of each layer (Alg. 1, l. 2)."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedp3.core.errors import PlanError
from fedp3.core.randomness import Stream, stream
from fedp3.core.registry import NameIn
from fedp3.core.settings import STRICT
from fedp3.core.types import ClientPlan, Layer, LayerMap, LayerPlan
from fedp3.planning.layer_sets import AUTO, LAYER_SETS, LayerSets


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
    others: Literal["auto", "train", "freeze", "noise", "personal", "skip"] = Field(
        default="auto",
        description="layers outside L_i: train or freeze them, personal (they never leave the "
        "client), or skip their residual blocks; under LDP freeze, or noise (train them with the "
        "same clip and noise); auto means train, and freeze under LDP and where layers is auto",
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
    """L_i of every client in round t."""
    if settings.layers == AUTO:
        raise PlanError(
            "plan.layers = 'auto' chooses layers for devices, and no device is known here; with "
            "[devices] fleet = 'nodes', the nodes of a Flower server report what they are"
        )
    rng = stream(seed, Stream.PLAN, t if settings.redraw else 0)
    return LAYER_SETS.pick(settings.layers)(layers, clients, rng)


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

    @cache  # clients with equal plans share one object
    def layer_plans(L_i: tuple[Layer, ...], share: float) -> Mapping[Layer, LayerPlan]:
        rest = outside(settings, share)
        plans = {l: LayerPlan() if l in L_i else rest for l in layers.layers}
        plans[layers.head] = HEADS[settings.head]
        return plans

    sets = layer_sets(settings, layers, len(keep), seed, t)
    chosen = range(len(keep)) if clients is None else clients
    return tuple(ClientPlan(i, layer_plans(sets[i], keep[i])) for i in chosen)
