"""C: the score of the server's model on test samples that belong to no client.

These are a data set's published test part, or a test set that a user passes in.  The server scores
its model itself, in small batches and on one thread, so that C has the same bits on every engine.
C decides nothing: neither tuning nor `run.patience` looks at it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fedp3.client.context import ClientContext
from fedp3.client.update import local_update
from fedp3.core.errors import RunError
from fedp3.core.scores import ACCURACY, Score
from fedp3.core.threads import one_thread
from fedp3.core.types import ClientPlan, LayerPlan, Params, Task
from fedp3.data.shards import NO_SAMPLES, Shard
from fedp3.server.evaluation import scores


@dataclass(frozen=True, slots=True)
class CentralScore:
    """The score of the server's model on the central test set.

    Args:
        mean: the score over all samples.
        loss: the mean loss.
        samples: the number of samples.
        metrics: the objective's other metrics, by name.
        score: what the score is.
    """

    mean: float
    loss: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    score: Score = ACCURACY


def missing_layers(plans: Iterable[ClientPlan]) -> str:
    """Why the server has no complete model under these plans; empty if it has one."""
    personal = {
        l: None
        for plan in plans
        for l, p in plan.layers.items()
        if p.send == "none" and p.upload == "none"
    }
    if not personal:
        return ""
    stay = "stays" if len(personal) == 1 else "stay"
    return f"{', '.join(personal)} {stay} on the clients, so that the server has no complete model"


def central_score(
    context: ClientContext | None, W: Params, t: int, plans: Iterable[ClientPlan]
) -> CentralScore | None:
    """C of these weights; None without a central test set, or without a complete model.

    The model is scored as G is, as if all test samples were those of one client.

    Args:
        context: the network, and the test samples as its data.
        W: the server's weights.
        t: the number of finished rounds.
        plans: the plans of the clients.
    """
    if context is None or missing_layers(plans):
        return None
    plan = ClientPlan(0, dict.fromkeys(context.layers.layers, LayerPlan(upload="none")))
    task = Task(t=t, plan=plan, weights=W, kind="evaluate", evaluate=True)
    samples = len(context.data.y)
    everything = Shard(NO_SAMPLES.train, torch.arange(samples))
    try:
        with one_thread():
            update, _ = local_update(context, everything, task, None)
    except Exception as error:  # whatever a user's network, data set or objective raises
        reason = f"{type(error).__name__}: {error}"
        raise RunError(
            f"the server's model cannot be scored on the central test set: {reason:.300}; mend the "
            "test set, or run without it"
        ) from error
    found = scores([update], context.objective)
    if found is None:
        return None
    return CentralScore(found.mean, found.loss, samples, found.metrics, found.score)
