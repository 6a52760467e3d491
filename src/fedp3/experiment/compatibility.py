"""Whether a network fits its data and this machine.

The network is tried on two samples, in training and in evaluation mode, before any client trains.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedp3.client.batching import batch_sizes
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data import Dataset, batch
from fedp3.data.shards import Shard
from fedp3.models.buffers import restored_buffers


def smallest_batch(shards: Mapping[int, Shard], size: int) -> int:
    """The fewest samples in a step of any client.

    Args:
        shards: the samples of each client; clients with a single sample do not count.
        size: the batch size.
    """
    smallest = (min(batch_sizes(len(s.train), size)) for s in shards.values() if len(s.train) > 1)
    return min(smallest, default=size)


def check_model(net: nn.Module, data: Dataset, smallest: int, seed: int) -> None:
    """Refuse a network that cannot compute these samples, or has no output for some class.

    Args:
        net: the network.
        data: the samples.
        smallest: the fewest samples in a training step.
        seed: what random layers draw from.
    """
    with restored_buffers(net):  # training mode writes to buffers
        from_one = int(data.y.min()) == 1 if len(data.y) > 1 else False
        for samples, training in ((2, False), (min(2, smallest), True)):
            x, outputs = _outputs(net, data, samples, seed, training=training)
            _check_outputs(x, outputs, data.classes, from_one=from_one)


def _outputs(
    net: nn.Module, data: Dataset, samples: int, seed: int, *, training: bool
) -> tuple[Tensor, object]:
    x = batch(data, torch.arange(samples) % len(data.x))  # on a Flower server, data is one example
    before = net.training
    try:
        with torch.no_grad(), layers_draw_from(stream(seed, Stream.LAYER)):
            return x, net.train(training)(x)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        what, hint = f"take samples of shape {tuple(x.shape[1:])}", ""
        if training:
            what = f"train on a batch of {len(x)}"
        if training and len(x) == 1:
            hint = "; normalisation over a batch needs more: use a larger local.batch"
        raise InputError(f"the model cannot {what}: {type(error).__name__}: {text}{hint}") from None
    finally:
        net.train(before)


def _check_outputs(x: Tensor, outputs: object, classes: int, *, from_one: bool) -> None:
    if not isinstance(outputs, Tensor):
        raise InputError(f"the model returns a {type(outputs).__name__}, want one tensor of logits")
    if outputs.dim() != 2 or len(outputs) != len(x) or outputs.shape[1] < classes:
        raise InputError(
            f"for {len(x)} samples of shape {tuple(x.shape[1:])} the model returns shape "
            f"{tuple(outputs.shape)}, want ({len(x)}, k) with k >= {classes} classes "
            f"(labels run from 0 to {classes - 1})"
            + ("; the smallest label is 1: if labels count from 1, pass y - 1" if from_one else "")
        )


def refuse_frozen(net: nn.Module) -> None:
    """Refuse a network with frozen parameters: plans are about full layers, so they would train."""
    frozen = [n for n, p in net.named_parameters() if not p.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        raise InputError(
            f"parameter {frozen[0]!r}{more} of the model does not require a gradient, but every "
            "parameter would train: run the frozen part over the data once and train the other "
            "part on its outputs, or call model.requires_grad_()"
        )


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"[run] device: {device!r} cannot be used here ({reason}); 'cpu' always works"
        ) from None
