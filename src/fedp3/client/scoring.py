"""Scoring a model on a client's test samples."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedp3.client.batching import EVAL_BATCH
from fedp3.client.context import ClientContext
from fedp3.data import batch
from fedp3.data.shards import Shard


@torch.inference_mode()
def score(context: ClientContext, shard: Shard, *, trained: bool) -> dict[str, float]:
    """Number of correct predictions, summed loss and number of samples, of the current network.

    Args:
        context: the network and what clients share.
        shard: the client's samples.
        trained: the client has trained this model, so that its method may transform the outputs.
    """
    context.net.eval()
    correct, loss = 0, 0.0
    transform = context.hooks.transform_outputs if trained else None
    labels = present_labels(context, shard)
    batches = torch.split(shard.test, EVAL_BATCH) if len(shard.test) else ()
    for indices in batches:
        y = context.data.y[indices].to(context.device)
        outputs = context.net(batch(context.data, indices).to(context.device))
        if transform is not None:
            outputs = transform(outputs, labels)
        correct += int((outputs.argmax(1) == y).sum())
        loss += float(F.cross_entropy(outputs, y, reduction="sum"))
    return {"correct": correct, "tested": len(shard.test), "test_loss": loss}


def present_labels(context: ClientContext, shard: Shard) -> Tensor:
    """(classes,) bool: the labels among a client's training samples."""
    labels = torch.zeros(context.data.classes, dtype=torch.bool)
    labels[context.data.y[shard.train]] = True
    return labels.to(context.device)
