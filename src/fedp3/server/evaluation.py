"""Three kinds of scores, each measured on the clients' test samples (C: `central.py`).

    G   the server's model
    D   the model as dispatched, pruned and untrained: what a device that cannot hold W would run
    P   the dispatched model after one local update
All clients measure G and D.  The participants of a round measure P on their updates; at the end all
clients train once more to measure it, and that update is discarded.

What is measured is the score of the run's objective: the accuracy, unless it says otherwise.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedp3.client.objectives import TEST_LOSS, TESTED, Objective, Sums
from fedp3.core.scores import ACCURACY, Score
from fedp3.core.types import ClientUpdate, Reply
from fedp3.server.gate import METRIC_MOST


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the clients; each client counts once.

    Args:
        mean: their mean.
        std: their standard deviation.
        p10: the score that a tenth of the clients do not reach.
        worst: that of the worst client.
        loss: the mean test loss.
        clients: the score of each client.
        metrics: the means of the objective's other metrics, by name.
        score: what the scores are.
    """

    mean: float
    std: float
    p10: float
    worst: float
    loss: float
    clients: Mapping[int, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    score: Score = ACCURACY


def scores(replies: Iterable[Reply], objective: Objective) -> Scores | None:
    """Summarise scored replies; None if nobody was scored.

    Clients whose sums are impossible are left out; an impossible loss makes the mean loss NaN.
    Nodes that add noise to their scores return no loss, and the mean is over the other clients.

    Args:
        replies: of clients that tested a model.
        objective: what they were scored by.
    """
    kind = objective.score
    scored = {
        r.client: r.metrics
        for r in replies
        if isinstance(r, ClientUpdate) and _is_score(r.metrics, objective)
    }
    if not scored:
        return None
    values = {i: _score(m, objective) for i, m in sorted(scored.items())}
    losses = [_possible(m[TEST_LOSS] / m[TESTED]) for m in scored.values() if TEST_LOSS in m]
    others = {name: metric for name, metric in objective.metrics.items() if name != kind.name}
    means = {name: _mean_of(metric, scored.values()) for name, metric in others.items()}
    return Scores(
        mean=statistics.fmean(values.values()),
        std=statistics.pstdev(values.values()),
        p10=_percentile(kind.from_worst(values.values()), 0.1),
        worst=kind.worst(values.values()),
        loss=math.fsum(losses) / len(losses) if losses else math.nan,
        clients=values,
        metrics={name: mean for name, mean in means.items() if mean is not None},
        score=kind,
    )


def _score(sums: Mapping[str, float], objective: Objective) -> float:
    """A client's score; that of a model whose outputs are not finite is as bad as can be."""
    value = objective.metrics[objective.score.name](sums)
    if not math.isfinite(value):
        return METRIC_MOST if objective.score.lower_is_better else -METRIC_MOST
    return min(max(value, -METRIC_MOST), METRIC_MOST)


def _mean_of(metric: Callable[[Sums], float], sums: Iterable[Mapping[str, float]]) -> float | None:
    """The mean of a metric over clients; None where nodes did not release its sums."""
    try:
        values = [_possible(metric(m)) for m in sums]
    except (KeyError, ArithmeticError, ValueError):
        return None
    return math.fsum(values) / len(values)


def _possible(value: float) -> float:
    """The value, or NaN if no network computes it: `math.fsum` raises where a sum overflows."""
    return value if abs(value) <= METRIC_MOST else math.nan


def _is_score(m: Mapping[str, float], objective: Objective) -> bool:
    """Whether a client tested records, and its sums are possible."""
    if not all(isinstance(value, int | float) for value in m.values()):
        return False
    tested = m.get(TESTED, 0)
    if not tested > 0 or not all(0 <= m[name] <= tested for name in objective.shares & m.keys()):
        return False
    try:
        return isinstance(objective.metrics[objective.score.name](m), int | float)
    except (KeyError, ArithmeticError, ValueError):
        return False


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between adjacent values."""
    position = share * (len(ordered) - 1)
    low, part = int(position), position - int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - part) + ordered[high] * part
