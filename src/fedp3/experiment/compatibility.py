"""Whether a network fits its data and this machine, and whether a run's parts fit each other.

The network is tried on two samples, in training and in evaluation mode, before any client trains.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedp3.client.batching import batch_sizes
from fedp3.client.context import RunSpec
from fedp3.client.objectives import CLASSIFICATION, Objective
from fedp3.core.errors import InputError, first_line
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data import Batch, Dataset, records
from fedp3.data.inputs import call, tensors_of
from fedp3.data.shards import Shard
from fedp3.devices.round_ends import ROUND_ENDS
from fedp3.devices.settings import DevicesSettings
from fedp3.models.buffers import restored_buffers
from fedp3.server.aggregators import Aggregator


def smallest_batch(shards: Mapping[int, Shard], size: int) -> int:
    """The fewest samples in a step of any client.

    Args:
        shards: the samples of each client; clients with a single sample do not count.
        size: the batch size.
    """
    smallest = (min(batch_sizes(len(s.train), size)) for s in shards.values() if len(s.train) > 1)
    return min(smallest, default=size)


def check_model(
    net: nn.Module,
    data: Dataset,
    smallest: int,
    seed: int,
    objective: Objective = CLASSIFICATION,
) -> None:
    """Refuse a network that cannot compute these samples, or outputs that do not fit the objective.

    Args:
        net: the network.
        data: the samples.
        smallest: the fewest samples in a training step.
        seed: what random layers draw from.
        objective: what the outputs are for.
    """
    with restored_buffers(net):  # training mode writes to buffers
        for samples, training in ((2, False), (min(2, smallest), True)):
            # On a Flower server, data is one example.
            indices = torch.arange(samples) % len(data.y)
            tried = records(data, indices)
            outputs = _outputs(net, tried, seed, training=training)
            _check_outputs(outputs, tried, data, objective)
        _check_extremes(net, data)


def _check_extremes(net: nn.Module, data: Dataset) -> None:
    """Refuse tokens that the network's tables do not have, wherever in the data they are."""
    if data.rows is not None:
        return
    for values in tensors_of(data.x):
        if values.dtype != torch.int64 or not values.numel():
            continue
        each = values.flatten(1) if values.dim() > 1 else values[:, None]
        samples = {"largest": int(each.amax(1).argmax()), "least": int(each.amin(1).argmin())}
        for extreme, sample in samples.items():
            error = _failure(net, data, sample)
            if error is None:
                continue
            number = int(each[sample].max() if extreme == "largest" else each[sample].min())
            raise InputError(
                f"the model cannot compute sample {sample}, which has the {extreme} of all "
                f"integers, {number}: {type(error).__name__}: {first_line(error)}"
            )


def _failure(net: nn.Module, data: Dataset, sample: int) -> Exception | None:
    """What the network raises for a sample; None if it computes it."""
    tried, before = records(data, torch.tensor([sample])), net.training
    try:
        with restored_buffers(net), torch.no_grad(), layers_draw_from(stream(0, Stream.LAYER)):
            call(net.eval(), tried.x)
    except Exception as error:  # networks raise many kinds
        return error
    finally:
        net.train(before)
    return None


def with_fitting_numbers(net: nn.Module, data: Dataset) -> Dataset:
    """The data set with integer samples as float32, if the network can only compute with those.

    Integers may be tokens, which a table of embeddings looks up, or plain numbers.

    Args:
        net: the network.
        data: the samples.
    """
    if not isinstance(data.x, Tensor) or data.x.dtype != torch.int64:
        return data
    if _failure(net, data, 0) is None:
        return data
    numbers = replace(data, x=data.x.to(torch.float32))
    return numbers if _failure(net, numbers, 0) is None else data


def _outputs(net: nn.Module, tried: Batch, seed: int, *, training: bool) -> object:
    before, count = net.training, len(tried.y)
    try:
        with torch.no_grad(), layers_draw_from(stream(seed, Stream.LAYER)):
            outputs: object = call(net.train(training), tried.x)
            return outputs
    except Exception as error:
        text = first_line(error)
        shapes = ", ".join(str(tuple(w.shape[1:])) for w in tensors_of(tried.x))
        what, hint = f"take samples of shape {shapes}", ""
        if training:
            what = f"train on a batch of {count}"
        if training and count == 1:
            hint = "; normalisation over a batch needs more: use a larger local.batch"
        if isinstance(tried.x, Mapping) and "unexpected keyword argument" in text:
            hint = "; columns of rows are passed by name: rename them, or pass pairs (x, y)"
        raise InputError(f"the model cannot {what}: {type(error).__name__}: {text}{hint}") from None
    finally:
        net.train(before)


def _check_outputs(outputs: object, tried: Batch, data: Dataset, objective: Objective) -> None:
    """Refuse outputs from which the objective has no loss for each record, or no score."""
    try:
        problem = objective.problem(outputs, tried, data) if objective.problem else ""
        if not problem:
            with torch.no_grad():
                problem = _wrong_losses(objective, outputs, tried)
    except Exception as error:  # whatever a user's objective raises
        problem = (
            "the objective cannot judge the model's outputs: "
            f"{type(error).__name__}: {first_line(error)}"
        )
    if problem:
        raise InputError(problem)


def _wrong_losses(objective: Objective, outputs: object, tried: Batch) -> str:
    """Why an objective's losses or sums are not what they should be; empty if they are."""
    losses, count = objective.loss(outputs, tried), len(tried.y)
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        return (
            f"the objective's loss of {count} records is {got}, want shape ({count},): one number "
            "for each record, not their mean"
        )
    sums = objective.evaluate(outputs, tried)
    for name, metric in objective.metrics.items():
        if not isinstance(metric(sums), int | float):
            return f"the objective's metric {name!r} is a {type(metric(sums)).__name__}, no number"
    return ""


def check_hooks(spec: RunSpec) -> None:
    """Refuse parts of a method that assume classification, where the objective is another one."""
    parts = spec.hooks.needs_labels
    if parts and not spec.objective.labelled:
        raise InputError(
            f"the method's {' and '.join(parts)} {'is' if len(parts) == 1 else 'are'} made for "
            "classification, and this run has another objective; use a method without it, such as "
            "fedavg or fedp3"
        )


def check_overlap(devices: DevicesSettings, rule: str, aggregator: Aggregator) -> None:
    """Refuse a rule that has no meaning for updates which started from an older model."""
    overlaps = devices.described and ROUND_ENDS.pick(devices.round_end).end is None
    if overlaps and not aggregator.of_changes:
        raise InputError(
            f"[aggregate] rule: {rule!r} weighs an update by where it is, which says nothing about "
            "one that started from an older model ([devices] round_end = 'buffered'); set "
            "'simple', 'examples' or 'weighted'; a rule of your own whose weights do not depend on "
            "where an update is says so with Aggregator(of_changes=True)"
        )


def refuse_frozen(net: nn.Module) -> None:
    """Refuse a network with frozen parameters: plans are about full layers, so they would train."""
    frozen = [n for n, p in net.named_parameters() if not p.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        raise InputError(
            f"parameter {frozen[0]!r}{more} of the model does not require a gradient, but every "
            "parameter would train: name the modules that stay as they are in [model] frozen, or "
            "call model.requires_grad_()"
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
