"""Accuracy, three kinds, each over the clients' own test parts.

G: the server's model.  D: the model as dispatched, pruned and untrained: what a device that cannot hold W would run.
P: the dispatched model after one local update.  G and D are asked of all clients; P comes with a round's updates, and
from all clients once at the end, when the update is thrown away.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedp3.gate import METRIC_MOST
from fedp3.plan import per_layers
from fedp3.prune import dispatch
from fedp3.types import ClientPlan, ClientUpdate, Layer, LayerMap, LayerPlan, Params, Pruning, Reply, Task


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of right answers over clients, each client counting once."""

    mean: float
    std: float
    p10: float  # 10th percentile
    worst: float
    loss: float  # mean test loss
    clients: Mapping[int, float]


def accuracy(replies: Iterable[Reply]) -> Accuracy | None:
    """Summarise scored replies; None where nobody was scored.  A score that cannot be one is left out."""
    scored = {r.client: r.metrics for r in replies if isinstance(r, ClientUpdate) and _is_score(r.metrics)}
    if not scored:
        return None
    each = {i: m["correct"] / m["tested"] for i, m in sorted(scored.items())}
    # What no net computes would make the sum fail; it only makes it meaningless.
    losses = [x if abs(x := m["test_loss"] / m["tested"]) <= METRIC_MOST else math.nan for m in scored.values()]
    return Accuracy(
        mean=statistics.fmean(each.values()),
        std=statistics.pstdev(each.values()),
        p10=_percentile(sorted(each.values()), 0.1),
        worst=min(each.values()),
        loss=math.fsum(losses) / len(losses),
        clients=each,
    )


def _is_score(m: Mapping[str, float]) -> bool:
    if not all(isinstance(m.get(k), int | float) for k in ("correct", "tested", "test_loss")):
        return False
    return m["tested"] > 0 and 0 <= m["correct"] <= m["tested"]


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between neighbours."""
    at = share * (len(ordered) - 1)
    low, part = int(at), at - int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - part) + ordered[high] * part


def global_tasks(W: Params, plans: Sequence[ClientPlan], t: int, seen: Mapping[int, int]) -> list[Task]:
    """Tasks that score the server's model; a personal head, never sent, is the client's own."""
    whole = per_layers(_whole)
    asked = [ClientPlan(plan.client, whole(plan)) for plan in plans]
    return [Task(t, plan, W, kind="evaluate", evaluate=True, state_from=_last(seen, plan)) for plan in asked]


def _whole(plan: ClientPlan) -> dict[Layer, LayerPlan]:
    """Everything sent as the server has it, nothing sent back."""
    return {
        l: replace(p, upload="none") if p.send == "none" and p.upload == "none" else LayerPlan(upload="none")
        for l, p in plan.layers.items()
    }


def _last(seen: Mapping[int, int], plan: ClientPlan) -> int:
    return seen.get(plan.client, -1)


def dispatched_tasks(
    W: Params,
    plans: Sequence[ClientPlan],
    layers: LayerMap,
    pruning: Pruning,
    t: int,
    seed: int,
    seen: Mapping[int, int],
    *,
    probe: bool,
) -> list[Task]:
    """Tasks that score the dispatched model as it is (D), or after one local update that is thrown away (P)."""
    sent = dispatch(W, plans, layers, pruning, t, seed)
    return [
        Task(t, plan, weights, masks, "probe" if probe else "evaluate", evaluate=True, state_from=_last(seen, plan))
        for plan, (weights, masks) in zip(plans, sent, strict=True)
    ]
