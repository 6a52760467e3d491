"""Tasks and updates as bytes: raw values of the coordinates that travel, and masks the other side cannot derive.

    magic, length of header | header (JSON, with the sha256 of the payload) | payload
The payload is what `cost` counts: masks as bitmaps or index lists, whichever is shorter, then little-endian values,
float32 or what the run compresses uploads to.  Everything else is framing.  Decoding checks sizes before it allocates,
and never runs code.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.compress import dtype_of, top, travelling, way
from fedp3.errors import CodecError
from fedp3.frames import Reader, frame, open_frame
from fedp3.gate import EXTRA_LIMIT
from fedp3.masks import Kept
from fedp3.prune import SELECTORS, cut_weights, kept_together, kept_weights, masks_for
from fedp3.types import (
    AS_IS,
    ClientPlan,
    ClientUpdate,
    Compression,
    Kind,
    LayerMap,
    LayerPlan,
    Masks,
    Params,
    Pruning,
    Send,
    Task,
    Upload,
)

SIDES = 8  # of a tensor
WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)  # what a false header leads to


# --------------------------------------------------------------------------- masks as bytes


def mask_bytes(n: int, k: int) -> int:
    """Length of a mask of k out of n: one bit each, or indices of the fewer kind where that is shorter."""
    return min(math.ceil(n / 8), 4 * min(k, n - k))


def pack_mask(mask: Tensor) -> bytes:
    """A bool mask in `mask_bytes` bytes."""
    flat = mask.flatten().numpy()
    n, k = flat.size, int(flat.sum())
    if mask_bytes(n, k) == math.ceil(n / 8):
        return np.packbits(flat).tobytes()
    return np.flatnonzero(flat if k <= n - k else ~flat).astype("<u4").tobytes()


def unpack_mask(data: bytes, n: int, k: int) -> Tensor:
    """The inverse of `pack_mask`; n and k come from the plan, never from the data."""
    if len(data) != mask_bytes(n, k):
        raise CodecError(f"a mask of {k} in {n} takes {mask_bytes(n, k)} bytes, got {len(data)}")
    if len(data) == math.ceil(n / 8):
        flat = np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(bool)
    else:
        at = np.frombuffer(data, "<u4")
        if at.size and int(at.max()) >= n:
            raise CodecError(f"a mask index is {int(at.max())}, beyond {n}")
        flat = np.zeros(n, bool)
        flat[at] = True
        flat = flat if k <= n - k else ~flat
    if int(flat.sum()) != k:
        raise CodecError(f"a mask keeps {int(flat.sum())} of {n}, the plan says {k}")
    return torch.from_numpy(flat)


def wire_bytes(name: str, count: int, layers: LayerMap, compression: Compression) -> int:
    """Payload of this many coordinates of a tensor on their way up, with its scale or its indices."""
    how = way(name, layers, compression)
    if how is None:
        return 4 * count
    if how.remembers:
        k = kept_weights(compression.share, count)
        return 4 * k + mask_bytes(count, k)
    return how.dtype.itemsize * count + 4 * how.scaled


def room_for(extra: Params) -> int:
    """How many bytes of a method's own tensors a reader makes room for."""
    return max(EXTRA_LIMIT, 4 * sum(w.numel() for w in extra.values()))


def _bytes_of(w: Tensor) -> bytes:
    here = w.contiguous().numpy()
    return here.astype(here.dtype.newbyteorder("<"), copy=False).tobytes()


# --------------------------------------------------------------------------- tasks


def _sent(task: Task, layers: LayerMap, stale: str) -> Iterator[tuple[str, Kept]]:
    for l, p in task.plan.layers.items():
        if p.send in ("dense", "pruned"):
            for n in layers.layers[l]:
                yield n, M.sent(n, l, task.plan, task.masks, layers, stale)


def _expected(plan: ClientPlan, layers: LayerMap, pruning: Pruning) -> Masks:
    """Masks of the planned sizes, for a client to know how many bytes to read."""
    zeros = {n: torch.zeros(shape) for n, shape in layers.shapes.items()}
    return masks_for(plan, zeros, layers, pruning, 0, 0)


def encode_task(task: Task, layers: LayerMap, pruning: Pruning) -> bytes:
    """A task as a message."""
    payload = [] if SELECTORS[pruning.selector].derivable else _mask_pieces(task.masks, layers, pruning)
    payload += [_bytes_of(M.take(task.weights[n], kept)) for n, kept in _sent(task, layers, pruning.stale)]
    payload += [_bytes_of(w) for w in task.extra.values()]
    plan = {l: [p.send, p.keep, p.train, p.upload] for l, p in task.plan.layers.items()}
    header = {"kind": "task", "t": task.t, "client": task.plan.client, "plan": plan, "task": task.kind}
    more = {"evaluate": task.evaluate, "state_from": task.state_from, "deal": task.plan.deal}
    return frame({**header, **more, "extra": _shapes(task.extra)}, b"".join(payload))


def _mask_pieces(masks: Masks, layers: LayerMap, pruning: Pruning) -> list[bytes]:
    """Masks as bytes; one for all weights where they were chosen together."""
    weights = [m.flatten() for m in masks.weights.values()]
    if SELECTORS[pruning.selector].together and weights:
        weights = [torch.cat(weights)]
    units = [_line(at, layers.groups[g].units) for g, at in masks.units.items()]
    return [pack_mask(m) for m in (*weights, *units)]


def _shapes(extra: Params) -> dict[str, list[int]]:
    return {n: list(w.shape) for n, w in extra.items()}


def _line(at: Tensor, n: int) -> Tensor:
    line = torch.zeros(n, dtype=torch.bool)
    line[at] = True
    return line


def decode_task(data: bytes, layers: LayerMap, pruning: Pruning, seed: int, room: int = 0) -> Task:
    """The inverse of `encode_task`; derivable masks are derived.  A method's tensors may take `room` bytes."""
    header, payload = open_frame(data, "task", _most(layers) + room)
    try:
        whole = {l: _layer_plan(*p) for l, p in header["plan"].items()}
        plan = ClientPlan(_whole(header["client"]), whole, _deal(*header["deal"]))
        t, kind, evaluate = _whole(header["t"]), header["task"], header["evaluate"]
        state_from = _whole(header["state_from"], -1)
        extras = {n: _shape(shape, room) for n, shape in header["extra"].items()}
    except WRONG as error:
        raise CodecError(f"the header of a task is wrong: {_told(error)}") from None
    if set(plan.layers) != set(layers.layers) or kind not in get_args(Kind) or not isinstance(evaluate, bool):
        raise CodecError("the task's plan does not fit this model")
    derivable = SELECTORS[pruning.selector].derivable
    zeros = {n: torch.zeros(shape) for n, shape in layers.shapes.items()}
    masks = masks_for(plan, zeros, layers, pruning, t, seed) if derivable else _expected(plan, layers, pruning)
    reader = Reader(payload)
    if not derivable:
        masks = _read_masks(reader, masks, plan, layers, pruning)
    task = Task(t, plan, {}, masks, kind, evaluate, state_from)
    weights = {}
    for n, kept in _sent(task, layers, pruning.stale):
        weights[n] = _shaped(reader.values(M.count(kept, layers.shapes[n])), kept, layers.shapes[n])
    extra = {n: reader.values(math.prod(shape)).view(shape) for n, shape in extras.items()}
    reader.done()
    return replace(task, weights=weights, extra=extra)


def _most(layers: LayerMap) -> int:
    """Bytes of the largest task: everything dense, and a bit of mask for each weight and unit."""
    bits = [u.units for u in layers.groups.values()] + [math.prod(s) for s in layers.shapes.values()]
    return 4 * sum(math.prod(s) for s in layers.shapes.values()) + sum(math.ceil(n / 8) for n in bits)


def _whole(value: object, least: int = 0) -> int:
    """A whole number that can address a stream."""
    if type(value) is not int or not least <= value < 1 << 31:
        raise ValueError(f"want a whole number from {least} on")
    return value


def _layer_plan(send: Send, keep: float, train: bool, upload: Upload) -> LayerPlan:
    known = send in get_args(Send) and upload in get_args(Upload) and isinstance(train, bool)
    if not (known and isinstance(keep, int | float) and 0 < keep <= 1):
        raise ValueError("a layer's plan is none this code knows")
    return LayerPlan(send, keep, train, upload)


def _deal(j: object, m: object) -> tuple[int, int]:
    if _whole(j) >= _whole(m, 1):
        raise ValueError("a client's part is none of those that were dealt")
    return _whole(j), _whole(m, 1)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


def _read_masks(reader: Reader, expected: Masks, plan: ClientPlan, layers: LayerMap, pruning: Pruning) -> Masks:
    sizes = {n: m.numel() for n, m in expected.weights.items()}
    counts = {n: int(m.sum()) for n, m in expected.weights.items()}
    read: Mapping[str, Tensor] = {}
    if SELECTORS[pruning.selector].together and sizes:
        n, k = sum(sizes.values()), kept_together(cut_weights(plan, layers), sizes)
        pieces = torch.split(unpack_mask(reader.take(mask_bytes(n, k)), n, k), list(sizes.values()))
        read = dict(zip(sizes, pieces, strict=True))
    else:
        read = {n: unpack_mask(reader.take(mask_bytes(m, counts[n])), m, counts[n]) for n, m in sizes.items()}
    weights, units = {n: m.view(layers.shapes[n]) for n, m in read.items()}, {}
    for g, at in expected.units.items():
        size, k = layers.groups[g].units, len(at)
        units[g] = unpack_mask(reader.take(mask_bytes(size, k)), size, k).nonzero().flatten()
    return Masks(units, weights)


def _shaped(values: Tensor, kept: Kept, shape: tuple[int, ...]) -> Tensor:
    if isinstance(kept, M.Block):
        sizes = list(shape)
        for side, at in enumerate((kept.rows, kept.cols)):
            if at is not None:
                sizes[side] = len(at)
        values = values.view(sizes)
    return M.put(values, kept, shape)


# --------------------------------------------------------------------------- updates


def encode_update(
    update: ClientUpdate, task: Task, layers: LayerMap, stale: str, compression: Compression = AS_IS
) -> bytes:
    """An update as a message; which coordinates travel follows from its task."""
    back = travelling(task, layers, stale) if task.kind == "train" else ()
    payload = []
    for n, kept in back:
        values, how = M.take(update.tensors[n], kept), way(n, layers, compression)
        if how is not None and how.remembers:
            mask = top(values.flatten(), compression.share)
            payload.append(pack_mask(mask))
            values = values.flatten()[mask]
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
    data: bytes, task: Task, layers: LayerMap, stale: str, compression: Compression = AS_IS, room: int = EXTRA_LIMIT
) -> ClientUpdate:
    """The inverse of `encode_update`, for the task that was sent; values are checked by the gate."""
    back = dict(travelling(task, layers, stale)) if task.kind == "train" else {}
    counts = {n: M.count(kept, layers.shapes[n]) for n, kept in back.items()}
    header, payload = open_frame(data, "update", 4 * sum(counts.values()) + room)
    reader = Reader(payload)
    tensors = {}
    for n, kept in back.items():
        tensors[n] = _shaped(_read_values(reader, n, counts[n], layers, compression), kept, layers.shapes[n])
    try:
        shapes = {n: _shape(shape, room) for n, shape in header["extra"].items()}
        extra: Params = {n: reader.values(math.prod(shape)).view(shape) for n, shape in shapes.items()}
        metrics = {k: _number(v) for k, v in header["metrics"].items()}
        client, t, examples = _whole(header["client"]), _whole(header["t"]), header["examples"]
    except WRONG as error:
        raise CodecError(f"the header of an update is wrong: {_told(error)}") from None
    reader.done()
    return ClientUpdate(client, t, tensors, examples, metrics, extra)


def _read_values(reader: Reader, name: str, count: int, layers: LayerMap, compression: Compression) -> Tensor:
    how = way(name, layers, compression)
    if how is None or not how.remembers:
        return reader.values(count, dtype_of(name, layers, compression))
    k = kept_weights(compression.share, count)
    mask = unpack_mask(reader.take(mask_bytes(count, k)), count, k)
    return M.put(reader.values(k), mask, (count,))


def _shape(claimed: Sequence[object], room: int) -> list[int]:
    if len(claimed) > SIDES:
        raise ValueError(f"an extra has {len(claimed)} sides, at most {SIDES} are taken")
    shape = [_whole(d) for d in claimed]
    if math.prod(max(1, d) for d in shape) > room:
        raise ValueError("an extra is larger than any that is taken")
    return shape


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a metric is a {type(value).__name__}, want a number")
    return float(value)
