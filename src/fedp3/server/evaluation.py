"""Three kinds of accuracy, each measured on the clients' test samples.

    G   the server's model
    D   the model as dispatched, pruned and untrained: what a device that cannot hold W would run
    P   the dispatched model after one local update
All clients measure G and D.  The participants of a round measure P on their updates; at the end all
clients train once more to measure it, and that update is discarded.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedp3.core.types import ClientUpdate, Reply
from fedp3.server.gate import METRIC_MOST


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of correct answers over clients; each client counts once."""

    mean: float
    std: float
    p10: float  # 10th percentile
    worst: float
    loss: float  # mean test loss
    clients: Mapping[int, float]


def accuracy(replies: Iterable[Reply]) -> Accuracy | None:
    """Summarise scored replies; None if nobody was scored.

    Clients whose counts are impossible are left out; an impossible loss makes the mean loss NaN.
    Nodes that add noise to their scores return no loss, and the mean is over the other clients.
    """
    scored = {
        r.client: r.metrics for r in replies if isinstance(r, ClientUpdate) and _is_score(r.metrics)
    }
    if not scored:
        return None
    shares = {i: m["correct"] / m["tested"] for i, m in sorted(scored.items())}
    losses = [
        _possible_loss(m["test_loss"] / m["tested"]) for m in scored.values() if "test_loss" in m
    ]
    return Accuracy(
        mean=statistics.fmean(shares.values()),
        std=statistics.pstdev(shares.values()),
        p10=_percentile(sorted(shares.values()), 0.1),
        worst=min(shares.values()),
        loss=math.fsum(losses) / len(losses) if losses else math.nan,
        clients=shares,
    )


def _possible_loss(loss: float) -> float:
    """The loss, or NaN if no network computes it: `math.fsum` raises where a sum overflows."""
    return loss if abs(loss) <= METRIC_MOST else math.nan


def _is_score(m: Mapping[str, float]) -> bool:
    counts = (m.get("correct"), m.get("tested"), m.get("test_loss", 0.0))
    if not all(isinstance(value, int | float) for value in counts):
        return False
    return m["tested"] > 0 and 0 <= m["correct"] <= m["tested"]


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between adjacent values."""
    position = share * (len(ordered) - 1)
    low, part = int(position), position - int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - part) + ordered[high] * part
