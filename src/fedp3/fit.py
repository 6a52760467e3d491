"""Whether a net answers these samples with logits, in training as in scoring, before all clients fail at it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedp3.data import Dataset, batch
from fedp3.errors import InputError
from fedp3.recipe import Shard, dealt
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.unsaved import untouched


def smallest_batch(shards: Mapping[int, Shard], size: int) -> int:
    """The fewest samples a step takes at any client; one that has a single sample is its own matter."""
    return min((min(dealt(m, size)) for s in shards.values() if (m := len(s.train)) > 1), default=size)


def check(net: nn.Module, data: Dataset, least: int, seed: int) -> None:
    """Refuse a net that cannot take these samples, or answers with anything but a number for every class."""
    with untouched(net):  # training mode writes to buffers
        _check_answer(*_answer(net, data, 2, seed, training=False), data.classes)
        _check_answer(*_answer(net, data, min(2, least), seed, training=True), data.classes)


def _answer(net: nn.Module, data: Dataset, samples: int, seed: int, *, training: bool) -> tuple[Tensor, object]:
    x = batch(data, torch.arange(samples) % len(data.x))  # a server of nodes has one example only
    was = net.training
    try:
        with torch.no_grad(), layers_draw_from(stream(seed, Use.LAYER)):
            return x, net.train(training)(x)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        what = f"train on a batch of {len(x)}" if training else f"take samples of shape {tuple(x.shape[1:])}"
        hint = "; normalisation over a batch needs more: take a larger local.batch" if training and len(x) == 1 else ""
        raise InputError(f"the model cannot {what}: {type(error).__name__}: {text}{hint}") from None
    finally:
        net.train(was)


def _check_answer(x: Tensor, logits: object, classes: int) -> None:
    if not isinstance(logits, Tensor):
        raise InputError(f"the model answers with a {type(logits).__name__}, want one tensor of logits")
    if logits.dim() != 2 or len(logits) != len(x) or logits.shape[1] < classes:
        raise InputError(
            f"the model answers {len(x)} samples of shape {tuple(x.shape[1:])} with shape {tuple(logits.shape)}, want "
            f"({len(x)}, k) with k >= {classes} classes (labels run from 0 to {classes - 1})"
        )
