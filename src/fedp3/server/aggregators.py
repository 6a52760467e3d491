"""Algorithm 3: how accepted updates become the next model.

An aggregator is a pair of functions over partial uploads, `init` and `apply`.
The aggregators in this module are masked means: for each coordinate j,
    w_j <- sum_i a_i w_ij / sum_i a_i    over the clients i that uploaded j in this round.
A coordinate that nobody uploaded is unchanged, bit for bit.
The paper prints the weighted rule with a division by the sum over all n clients, under which
weights decay to zero; here it is the sum over the senders (erratum A9).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.errors import RunError
from fedp3.core.memo import once_per_plan
from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import STRICT
from fedp3.core.types import AcceptedUpdate, Layer, Mask, Params
from fedp3.server.averaging import RunningMean
from fedp3.server.grouping import group_updates

Apply = Callable[[Params, Iterable[AcceptedUpdate], Any], tuple[Params, Any]]


def _no_report(state: Any) -> Mapping[int, float]:
    return {}


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class NextRound:
    """What an aggregator wants of the next round's plans.

    Args:
        left_out: layers that no client uploads, because the aggregator does without them.
        stored: whether clients train these layers and store them, instead of doing what
            `plan.others` says.
        continued: layers that are not sent to clients which took part in round `since`; these
            clients continue from where they left off.
        since: the last round that was aggregated.
    """

    left_out: frozenset[Layer] = frozenset()
    stored: bool = False
    continued: frozenset[Layer] = frozenset()
    since: int = -1


def _as_planned(state: Any) -> NextRound:
    return NextRound()


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator:
    """How accepted updates become the next model.

    Args:
        apply: takes W_t, the accepted updates in client order, and the aggregator's state; returns
            W_{t+1} and the next state.  `updates` is an iterator that yields each update as it
            arrives: an aggregator that uses them one by one needs memory for one only.
        init: makes the state before the first round.  A state is made of dicts, lists, tuples,
            tensors, numbers, texts and None, so that a checkpoint can store it.
        report: from the state to one number per client, for the record of a round.
        next_round: from the state to what differs from the plans in the next round.
        interval: participants are drawn once in so many rounds, so that they can continue.
        average: the model is the mean of W over about so many rounds.
        of_changes: whether what an update counts for does not depend on where it is.  Then an
            update that started from an older model can be moved to the current one, which rounds
            that overlap need (`devices.round_end = "buffered"`).
    """

    apply: Apply
    init: Callable[[], Any] = dict
    report: Callable[[Any], Mapping[int, float]] = _no_report
    next_round: Callable[[Any], NextRound] = _as_planned
    interval: int = 1
    average: int = 1
    of_changes: bool = False


MakeAggregator = Callable[["AggregateSettings", RunSpec], Aggregator]
AGGREGATORS: Registry[MakeAggregator] = Registry("aggregation rule")
OPTIMIZERS: Registry[Any] = Registry("server optimizer")  # filled by `fedp3.server.optimizer`
RECYCLED_BY: Registry[Any] = Registry("choice of layers")  # filled by `fedp3.server.recycling`


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class AggregateSettings:
    """How uploads become the next model."""

    rule: Annotated[str, NameIn(AGGREGATORS)] = Field(
        default="simple",
        description="weights of the mean: simple, equal; examples, by number of samples; weighted, "
        "by number of layers in L_i; distance, softmax(-distance to the current model / tau); "
        "attention, learned per client; product_norm, by the norm of a client's product B A "
        "([adapter] rule = 'factors')",
    )
    tau: float = Field(
        default=1.0, gt=0, description="with rule = 'distance': temperature of the softmax"
    )
    step: float = Field(
        default=0.25, gt=0, description="with rule = 'attention': learning rate of a client's logit"
    )
    limit: float = Field(
        default=0.5,
        gt=0,
        description="with rule = 'attention': limit on how much a client's logit may change in one "
        "round",
    )
    start: Literal["simple", "weighted"] = Field(
        default="simple",
        description="with rule = 'attention': initial weights, equal (simple) or by number of "
        "layers in L_i (weighted)",
    )
    sketch: int = Field(
        default=1024,
        ge=0,
        description="with rule = 'attention': length of the random sketch of each upload that is "
        "stored until the next round; 0 means no sketching",
    )
    server: Annotated[str, NameIn(OPTIMIZERS)] = Field(
        default="none",
        description="server optimizer; its pseudo-gradient is the mean of the uploaded weights "
        "minus the current model (FedOpt)",
    )
    server_lr: float = Field(
        default=1.0,
        gt=0,
        description="its learning rate; with server = 'none', 1 is the mean itself",
    )
    beta1: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="with server = 'momentum' or 'adam': decay of the first moment",
    )
    beta2: float = Field(
        default=0.99, ge=0, lt=1, description="with server = 'adam': decay of the second moment"
    )
    server_epsilon: float = Field(
        default=1e-3, gt=0, description="with server = 'adam': Adam's epsilon"
    )
    damp: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="how much clients that did not upload a coordinate count as votes for its "
        "current value: 0, not at all; 1, as much as those that did (CoCoFL)",
    )
    recycle: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the layers, rounded down, that no client uploads in a round; the "
        "server repeats their last change instead (FedLUAR)",
    )
    recycle_by: Annotated[str, NameIn(RECYCLED_BY)] = Field(
        default="ratio",
        description="which layers are recycled: ratio, drawn with probabilities that are the "
        "higher the smaller a layer's last change is relative to its weights; random; or cyclic, "
        "one after the other",
    )
    interval: int = Field(
        default=1,
        ge=1,
        description="layers on which clients agree most are averaged only once in so many rounds, "
        "and clients continue to train them in between (FedLAMA); 1 means every round",
    )
    average: int = Field(
        default=1,
        ge=1,
        description="what is scored as G and exported is the mean of the server's weights over "
        "about the last so many rounds, while clients train from the last ones; 1 means the last "
        "ones themselves",
    )
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="settings of an aggregator that you registered, as in {trim = 0.1}",
    )


# --------------------------------------------------------------------------- uploads


def uploaded_mask(update: AcceptedUpdate, name: str, layer: Layer, spec: RunSpec) -> Mask:
    """The coordinates of a tensor that this client uploaded; None means all of them."""
    return M.uploaded(
        name, layer, update.plan, update.masks, spec.layers, spec.pruning.unfed_columns
    )


def uploads_of(
    updates: Sequence[AcceptedUpdate], layer: Layer, spec: RunSpec
) -> dict[str, list[tuple[AcceptedUpdate, Tensor, Mask]]]:
    """The uploads of one layer, for an aggregator that needs all of them at once.

    Args:
        updates: the accepted updates of a round, as a list: it is read once for every layer.
        layer: the layer.
        spec: the run.

    Returns:
        For each tensor of the layer a list of (update, full-shaped tensor, mask) over the clients
        that uploaded any of it.  Only coordinates in the mask count; None means all of them.
    """
    senders = [u for u in updates if u.plan.layers[layer].upload != "none"]
    return {
        n: [(u, u.update.tensors[n], uploaded_mask(u, n, layer, spec)) for u in senders]
        for n in spec.layers.layers[layer]
    }


# --------------------------------------------------------------------------- the masked mean


def masked_mean(
    W: Params,
    updates: Iterable[AcceptedUpdate],
    spec: RunSpec,
    weigh: Callable[[AcceptedUpdate, Layer], float],
) -> dict[str, Tensor]:
    """The mean of each coordinate over the clients that uploaded it; W where nobody did.

    Args:
        W: W_t.
        updates: the accepted updates in client order.
        spec: the run.
        weigh: from an update and a layer to the weight of the update in that layer's mean.
    """
    means: dict[str, RunningMean] = {}
    uploaded = once_per_plan(lambda plan: frozenset(plan.uploaded))
    for group in group_updates(updates, spec.layers):
        for l, names in spec.layers.layers.items():
            senders = [u for u in group if l in uploaded(u.plan)]
            weights = [weigh(u, l) for u in senders]
            _check_weights(weights, senders, l)
            if not senders:
                continue
            for n in names:
                if n not in means:
                    means[n] = RunningMean(torch.zeros(W[n].shape, dtype=torch.float64))
                _add(means[n], n, l, senders, weights, spec)
    return {n: means[n].mean(w) if n in means else w for n, w in W.items()}


def _check_weights(weights: Sequence[float], senders: Sequence[AcceptedUpdate], l: Layer) -> None:
    for weight, u in zip(weights, senders, strict=True):
        if not 0 < weight < math.inf:
            raise RunError(
                f"layer {l!r}, client {u.client}: want a finite weight > 0, got {weight}"
            )


def _add(
    mean: RunningMean,
    n: str,
    l: Layer,
    senders: Sequence[AcceptedUpdate],
    weights: Sequence[float],
    spec: RunSpec,
) -> None:
    """Add these clients' uploads of one tensor."""
    if not any(u.masks.units or u.masks.weights for u in senders):
        mean.add_dense([u.update.tensors[n] for u in senders], weights)
        return
    for u, weight in zip(senders, weights, strict=True):
        mean.add(u.update.tensors[n], uploaded_mask(u, n, l, spec), weight)


def weighted_mean(
    weigh: Callable[[AcceptedUpdate], float], *, of_changes: bool = False
) -> MakeAggregator:
    """A masked mean whose weights follow from each update alone.

    Args:
        weigh: from an update to its weight, a finite number above 0.
        of_changes: see `Aggregator`; true of weights that do not read the update's tensors.

    Updates are added as they arrive.
    """

    def make(settings: AggregateSettings, spec: RunSpec) -> Aggregator:
        def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
            return masked_mean(W, updates, spec, lambda u, l: weigh(u)), state

        return Aggregator(apply=apply, of_changes=of_changes)

    return make


def simple(update: AcceptedUpdate) -> float:
    """Every client counts the same (Alg. 3, l. 3)."""
    return 1.0


def examples(update: AcceptedUpdate) -> float:
    """m_i: FedAvg's weights."""
    return float(update.update.examples)


def weighted(update: AcceptedUpdate) -> float:
    """|L_i| with the head (Alg. 3, l. 5; A10); layers that are uploaded pruned are not in L_i."""
    return float(len(update.plan.full_layers) or 1)


def distance(settings: AggregateSettings, spec: RunSpec) -> Aggregator:
    """Weights softmax(-||W_i^l - W_t^l|| / tau), over the coordinates that client i uploaded."""

    def apply(W: Params, updates: Iterable[AcceptedUpdate], state: Any) -> tuple[Params, Any]:
        received = list(updates)
        weights = {l: _by_distance(W, l, received, spec, settings.tau) for l in spec.layers.layers}
        return masked_mean(W, received, spec, lambda u, l: weights[l][u.client]), state

    return Aggregator(apply=apply)


def _by_distance(
    W: Params, l: Layer, updates: Sequence[AcceptedUpdate], spec: RunSpec, tau: float
) -> dict[int, float]:
    uploads = uploads_of(updates, l, spec)
    clients = [u.client for u, _, _ in next(iter(uploads.values()))]
    if not clients:
        return {}
    norms: list[list[float]] = [[] for _ in clients]  # of each tensor, client by client
    for n, rows in uploads.items():
        for of_client, (_, w, mask) in zip(norms, rows, strict=True):
            change = M.take(w.double() - W[n], mask)
            of_client.append(float(torch.linalg.vector_norm(change)))
    distances = torch.tensor([math.hypot(*of_client) for of_client in norms], dtype=torch.float64)
    return dict(zip(clients, softmax(-distances / tau), strict=True))


def softmax(logits: Tensor) -> list[float]:
    """Shares that add up to 1.

    None underflows to 0, so that a coordinate which only a distant client sent is taken from it.
    """
    shares: list[float] = torch.softmax((logits - logits.max()).clamp(min=-600), 0).tolist()
    return shares


AGGREGATORS.add("simple", weighted_mean(simple, of_changes=True))
AGGREGATORS.add("examples", weighted_mean(examples, of_changes=True))
AGGREGATORS.add("weighted", weighted_mean(weighted, of_changes=True))
AGGREGATORS.add("distance", distance)
