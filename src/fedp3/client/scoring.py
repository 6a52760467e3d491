"""Scoring a model on a client's test samples."""

import torch
from torch import Tensor

from fedp3.client.batching import EVAL_BATCH
from fedp3.client.context import ClientContext
from fedp3.client.objectives import TESTED
from fedp3.data import Batch, records
from fedp3.data.inputs import call, to_device
from fedp3.data.shards import Shard


@torch.inference_mode()
def score(context: ClientContext, shard: Shard, *, trained: bool) -> dict[str, float]:
    """The sums from which the objective's metrics are computed, of the current network.

    Args:
        context: the network and what clients share.
        shard: the client's samples.
        trained: the client has trained this model, so that its method may transform the outputs.
    """
    context.net.eval()
    sums: dict[str, float] = {}
    transform = context.hooks.transform_outputs if trained else None
    labels = present_labels(context, shard) if transform is not None else None
    batches = torch.split(shard.test, EVAL_BATCH) if len(shard.test) else ()
    for indices in batches:
        tested = records(context.data, indices)
        x, y = to_device(tested.x, context.device), tested.y.to(context.device)
        outputs = call(context.net, x)
        if transform is not None and labels is not None:
            outputs = transform(outputs, labels)
        for name, value in context.objective.evaluate(outputs, Batch(x, y)).items():
            sums[name] = sums.get(name, 0) + value
    return sums or {TESTED: 0}


def present_labels(context: ClientContext, shard: Shard) -> Tensor:
    """(classes,) bool: the labels among a client's training samples."""
    labels = torch.zeros(context.data.classes, dtype=torch.bool)
    labels[context.data.y[shard.train]] = True
    return labels.to(context.device)
