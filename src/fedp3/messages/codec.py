"""Tasks and updates as bytes.

    magic, header length | header (JSON, with the sha256 of the payload) | payload

The payload holds the masks that the receiver cannot derive, then the values of the exchanged
coordinates.  Masks are bitmaps or index lists, whichever is shorter.  Values are little-endian,
float32 or the type to which the run compresses uploads.  `fedp3.costs.traffic` counts exactly
these bytes; everything else is framing.

Decoding checks sizes before it allocates memory, and it never runs code.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.errors import CodecError
from fedp3.core.masks import Mask
from fedp3.core.types import (
    ClientPlan,
    ClientUpdate,
    Kind,
    LayerMap,
    LayerPlan,
    Masks,
    Params,
    Send,
    Task,
    Upload,
)
from fedp3.messages.compression import (
    UNCOMPRESSED,
    UploadSettings,
    compressor_of,
    dtype_of,
    top,
    uploaded_tensors,
)
from fedp3.messages.framing import Reader, frame, open_frame
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import masks_for, pruned_tensors, retained_across_tensors
from fedp3.planning.selectors import retained_weights

EXTRA_LIMIT = 1 << 20  # bytes of a method's tensors that a reader always accepts
MAX_DIMENSIONS = 8  # of a method's tensor
MAX_INTEGER = 1 << 31  # rounds and clients are below it

# What evaluating a malformed header can raise.
HEADER_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)


# --------------------------------------------------------------------------- masks as bytes


def mask_bytes(n: int, k: int) -> int:
    """Bytes of a mask that retains k of n coordinates.

    It is a bitmap, or a list of the retained or of the pruned indices where that is shorter.
    """
    return min(math.ceil(n / 8), 4 * min(k, n - k))


def pack_mask(mask: Tensor) -> bytes:
    """A bool mask in `mask_bytes` bytes."""
    flat = mask.flatten().numpy()
    n, k = flat.size, int(flat.sum())
    if mask_bytes(n, k) == math.ceil(n / 8):
        return np.packbits(flat).tobytes()
    listed = flat if k <= n - k else ~flat
    return np.flatnonzero(listed).astype("<u4").tobytes()


def unpack_mask(data: bytes, n: int, k: int) -> Tensor:
    """The inverse of `pack_mask`.

    Args:
        data: the packed mask.
        n: the number of coordinates, from the plan and never from the data.
        k: the number of retained coordinates, from the plan too.
    """
    if len(data) != mask_bytes(n, k):
        raise CodecError(f"a mask of {k} in {n} takes {mask_bytes(n, k)} bytes, got {len(data)}")
    if len(data) == math.ceil(n / 8):
        flat = np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(bool)
    else:
        indices = np.frombuffer(data, "<u4")
        if indices.size and int(indices.max()) >= n:
            raise CodecError(f"a mask index is {int(indices.max())}, beyond {n}")
        listed = np.zeros(n, bool)
        listed[indices] = True
        flat = listed if k <= n - k else ~listed
    retained = int(flat.sum())
    if retained != k:
        raise CodecError(f"a mask retains {retained} of {n} coordinates, the plan says {k}")
    return torch.from_numpy(flat)


def wire_bytes(name: str, count: int, layers: LayerMap, compression: UploadSettings) -> int:
    """Payload bytes of an uploaded tensor, with its scale or its mask.

    Args:
        name: the tensor.
        count: how many of its coordinates the plan uploads.
        layers: the model's layers.
        compression: how the run compresses uploads.
    """
    compressor = compressor_of(name, layers, compression)
    if compressor is None:
        return 4 * count
    if compressor.sparse:
        k = retained_weights(compression.share, count)
        return 4 * k + mask_bytes(count, k)
    scale = 4 if compressor.scaled else 0
    return compressor.dtype.itemsize * count + scale


def room_for(extra: Params) -> int:
    """How many bytes of a method's tensors a reader accepts, where it expects these."""
    return max(EXTRA_LIMIT, 4 * sum(w.numel() for w in extra.values()))


def _bytes_of(w: Tensor) -> bytes:
    values = w.contiguous().numpy()
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


# --------------------------------------------------------------------------- tasks


def encode_task(task: Task, layers: LayerMap, pruning: PruneSettings) -> bytes:
    """A task as a message."""
    payload = []
    if not SELECTORS.pick(pruning.selector).derivable:
        payload += _packed_masks(task.masks, layers, pruning)
    for n, mask in _sent_tensors(task, layers, pruning.unfed_columns):
        payload.append(_bytes_of(M.take(task.weights[n], mask)))
    payload += [_bytes_of(w) for w in task.extra.values()]
    plan = {l: [p.send, p.keep, p.train, p.upload] for l, p in task.plan.layers.items()}
    header = {
        "kind": "task",
        "t": task.t,
        "client": task.plan.client,
        "plan": plan,
        "task": task.kind,
        "evaluate": task.evaluate,
        "state_from": task.state_from,
        "deal": task.plan.deal,
        "steps": task.plan.steps,
        "split": task.plan.split,
        "extra": _shapes(task.extra),
    }
    return frame(header, b"".join(payload))


def decode_task(
    data: bytes, layers: LayerMap, pruning: PruneSettings, seed: int, room: int = 0
) -> Task:
    """The inverse of `encode_task`; masks that were not sent are derived.

    Args:
        data: the message.
        layers: the model's layers.
        pruning: the run's pruning.
        seed: the run's seed, from which masks are derived.
        room: how many bytes a method's tensors may take.
    """
    header, payload = open_frame(data, "task", _largest_task(layers) + room)
    try:
        plan = ClientPlan(
            client=_integer(header["client"]),
            layers={l: _layer_plan(*p) for l, p in header["plan"].items()},
            deal=_deal(*header["deal"]),
            steps=_integer(header["steps"]),
            split=_integer(header["split"], least=1),
        )
        t = _integer(header["t"])
        state_from = _integer(header["state_from"], least=-1)
        kind, evaluate = header["task"], header["evaluate"]
        shapes = {n: _shape(shape, room) for n, shape in header["extra"].items()}
    except HEADER_ERRORS as error:
        raise CodecError(f"the header of a task is wrong: {_reason(error)}") from None
    if kind not in get_args(Kind) or not isinstance(evaluate, bool):
        raise CodecError("the header of a task is wrong: its kind or its evaluate flag is invalid")
    if set(plan.layers) != set(layers.layers):
        raise CodecError("the task's plan does not fit this model")
    reader = Reader(payload)
    zeros = {n: torch.zeros(shape) for n, shape in layers.shapes.items()}
    if SELECTORS.pick(pruning.selector).derivable:
        masks = masks_for(plan, zeros, layers, pruning, t, seed)
    else:
        planned = masks_for(plan, zeros, layers, pruning, 0, 0)  # only their sizes are right
        masks = _read_masks(reader, planned, plan, layers, pruning)
    task = Task(
        t=t, plan=plan, weights={}, masks=masks, kind=kind, evaluate=evaluate, state_from=state_from
    )
    weights = {}
    for n, mask in _sent_tensors(task, layers, pruning.unfed_columns):
        shape = layers.shapes[n]
        weights[n] = _full_shaped(reader.values(M.count(mask, shape)), mask, shape)
    extra = _read_extra(reader, shapes)
    reader.finish()
    return replace(task, weights=weights, extra=extra)


def _sent_tensors(task: Task, layers: LayerMap, unfed_columns: str) -> Iterator[tuple[str, Mask]]:
    """The tensors that the server sends, each with the mask of the coordinates that are sent."""
    for l, p in task.plan.layers.items():
        if p.send in ("dense", "pruned"):
            for n in layers.layers[l]:
                yield n, M.sent(n, l, task.plan, task.masks, layers, unfed_columns)


def _largest_task(layers: LayerMap) -> int:
    """Bytes of the largest possible task: all weights, and a bit of mask per weight and unit."""
    tensors = [math.prod(shape) for shape in layers.shapes.values()]
    units = [group.units for group in layers.groups.values()]
    return 4 * sum(tensors) + sum(math.ceil(n / 8) for n in (*units, *tensors))


# --------------------------------------------------------------------------- masks of a task


def _packed_masks(masks: Masks, layers: LayerMap, pruning: PruneSettings) -> list[bytes]:
    """The masks as bytes; a selector that chooses across tensors has one mask for all weights."""
    weights = [mask.flatten() for mask in masks.weights.values()]
    if SELECTORS.pick(pruning.selector).across_tensors and weights:
        weights = [torch.cat(weights)]
    units = []
    for g, indices in masks.units.items():
        line = torch.zeros(layers.groups[g].units, dtype=torch.bool)
        line[indices] = True
        units.append(line)
    return [pack_mask(mask) for mask in (*weights, *units)]


def _read_masks(
    reader: Reader, planned: Masks, plan: ClientPlan, layers: LayerMap, pruning: PruneSettings
) -> Masks:
    """The masks of a task; each retains as many coordinates as the planned one."""
    sizes = {n: mask.numel() for n, mask in planned.weights.items()}
    if SELECTORS.pick(pruning.selector).across_tensors and sizes:
        retained = retained_across_tensors(pruned_tensors(plan, layers), sizes)
        mask_of_all = _read_mask(reader, sum(sizes.values()), retained)
        flat = dict(zip(sizes, torch.split(mask_of_all, list(sizes.values())), strict=True))
    else:
        counts = {n: int(mask.sum()) for n, mask in planned.weights.items()}
        flat = {n: _read_mask(reader, sizes[n], counts[n]) for n in sizes}
    weights = {n: mask.view(layers.shapes[n]) for n, mask in flat.items()}
    units = {}
    for g, indices in planned.units.items():
        mask = _read_mask(reader, layers.groups[g].units, len(indices))
        units[g] = mask.nonzero().flatten()
    return Masks(units=units, weights=weights)


def _read_mask(reader: Reader, n: int, k: int) -> Tensor:
    return unpack_mask(reader.take(mask_bytes(n, k)), n, k)


# --------------------------------------------------------------------------- updates


def encode_update(
    update: ClientUpdate,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    compression: UploadSettings = UNCOMPRESSED,
) -> bytes:
    """An update as a message; the task determines which coordinates are sent."""
    payload = []
    for n, mask in _expected_tensors(task, layers, unfed_columns).items():
        values = M.take(update.tensors[n], mask)
        compressor = compressor_of(n, layers, compression)
        if compressor is not None and compressor.sparse:
            values = values.flatten()
            largest = top(values, compression.share)
            payload.append(pack_mask(largest))
            values = values[largest]
        payload.append(_bytes_of(values))
    payload += [_bytes_of(w) for w in update.extra.values()]
    header = {
        "kind": "update",
        "t": update.t,
        "client": update.client,
        "examples": update.examples,
        "metrics": dict(update.metrics),
        "extra": _shapes(update.extra),
    }
    return frame(header, b"".join(payload))


def decode_update(
    data: bytes,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    compression: UploadSettings = UNCOMPRESSED,
    room: int = EXTRA_LIMIT,
) -> ClientUpdate:
    """The inverse of `encode_update`; the server's gate checks the values.

    Args:
        data: the message.
        task: the task that the update answers.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
        compression: how the run compresses uploads.
        room: how many bytes a method's tensors may take.
    """
    masks = _expected_tensors(task, layers, unfed_columns)
    counts = {n: M.count(mask, layers.shapes[n]) for n, mask in masks.items()}
    header, payload = open_frame(data, "update", 4 * sum(counts.values()) + room)
    reader = Reader(payload)
    tensors = {}
    for n, mask in masks.items():
        values = _read_values(reader, n, counts[n], layers, compression)
        tensors[n] = _full_shaped(values, mask, layers.shapes[n])
    try:
        shapes = {n: _shape(shape, room) for n, shape in header["extra"].items()}
        update = ClientUpdate(
            client=_integer(header["client"]),
            t=_integer(header["t"]),
            tensors=tensors,
            examples=header["examples"],
            metrics={k: _number(v) for k, v in header["metrics"].items()},
            extra=_read_extra(reader, shapes),
        )
    except HEADER_ERRORS as error:
        raise CodecError(f"the header of an update is wrong: {_reason(error)}") from None
    reader.finish()
    return update


def _expected_tensors(task: Task, layers: LayerMap, unfed_columns: str) -> dict[str, Mask]:
    """The tensors that answer a task, each with the mask of the coordinates that are sent."""
    return dict(uploaded_tensors(task, layers, unfed_columns)) if task.kind == "train" else {}


def _read_values(
    reader: Reader, name: str, count: int, layers: LayerMap, compression: UploadSettings
) -> Tensor:
    """The uploaded values of one tensor; a sparse compressor left zeros out."""
    compressor = compressor_of(name, layers, compression)
    if compressor is None or not compressor.sparse:
        return reader.values(count, dtype_of(name, layers, compression))
    k = retained_weights(compression.share, count)
    mask = _read_mask(reader, count, k)
    return M.put(reader.values(k), mask, (count,))


# --------------------------------------------------------------------------- tensors


def _full_shaped(values: Tensor, mask: Mask, shape: tuple[int, ...]) -> Tensor:
    """These values at the coordinates of the mask, zero elsewhere."""
    if isinstance(mask, M.Block):
        sizes = list(shape)
        for side, indices in enumerate((mask.rows, mask.cols)):
            if indices is not None:
                sizes[side] = len(indices)
        values = values.view(sizes)
    return M.put(values, mask, shape)


def _shapes(extra: Params) -> dict[str, list[int]]:
    return {n: list(w.shape) for n, w in extra.items()}


def _read_extra(reader: Reader, shapes: dict[str, list[int]]) -> Params:
    return {n: reader.values(math.prod(shape)).view(shape) for n, shape in shapes.items()}


# --------------------------------------------------------------------------- fields of a header


def _integer(value: object, least: int = 0) -> int:
    """An integer in the range of rounds and clients."""
    if type(value) is not int or not least <= value < MAX_INTEGER:
        raise ValueError(f"want an integer of at least {least}")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a metric is a {type(value).__name__}, want a number")
    return float(value)


def _shape(claimed: Sequence[object], room: int) -> list[int]:
    """The shape of a method's tensor, whose elements must fit `room`."""
    if len(claimed) > MAX_DIMENSIONS:
        raise ValueError(f"an extra has {len(claimed)} dimensions, at most {MAX_DIMENSIONS}")
    shape = [_integer(d) for d in claimed]
    if math.prod(max(1, d) for d in shape) > room:
        raise ValueError("an extra is larger than what is accepted")
    return shape


def _layer_plan(send: Send, keep: float, train: bool, upload: Upload) -> LayerPlan:
    known = send in get_args(Send) and upload in get_args(Upload) and isinstance(train, bool)
    if not (known and isinstance(keep, int | float) and 0 < keep <= 1):
        raise ValueError("the plan of a layer has unknown values")
    return LayerPlan(send=send, keep=keep, train=train, upload=upload)


def _deal(part: object, parts: object) -> tuple[int, int]:
    """Which of how many disjoint parts of the units a client gets."""
    if _integer(part) >= _integer(parts, least=1):
        raise ValueError("the client's part of the units is beyond the number of parts")
    return _integer(part), _integer(parts, least=1)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"
