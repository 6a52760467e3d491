"""Tasks and updates as bytes.

    magic, header length | header (JSON, with the sha256 of the payload) | payload

The payload holds the masks that the receiver cannot derive, then the values of the exchanged
coordinates.  Masks are bitmaps or index lists, whichever is shorter.  Values are float32, or coded
as `fedp3.messages.tensor_code` describes; a task may have coded changes of weights that the client
holds instead of weights (`fedp3.messages.versions`).  `fedp3.costs.traffic` counts exactly these
bytes; everything else is framing.

Decoding checks sizes before it allocates memory, and it never runs code.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.errors import CodecError, CopyError
from fedp3.core.hashing import model_sha256
from fedp3.core.types import (
    ClientPlan,
    ClientUpdate,
    Download,
    Kind,
    LayerMap,
    Mask,
    Params,
    Task,
)
from fedp3.messages import header_fields as fields
from fedp3.messages import tensor_code, versions
from fedp3.messages.compression import (
    PLAIN_DOWNLOAD,
    SCALE,
    UNCOMPRESSED,
    DownloadSettings,
    UploadSettings,
    coding_of,
    compressor_of,
    uploaded_tensors,
)
from fedp3.messages.compressors import COMPRESSORS
from fedp3.messages.framing import Reader, frame, open_frame, values_bytes
from fedp3.messages.task_masks import packed_masks, read_masks
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import masks_for

EXTRA_LIMIT = 1 << 20  # bytes of a method's tensors that a reader always accepts

# What a client holds of the published weights: tensor -> its values, and their coordinates.
Copy = Mapping[str, tuple[Tensor, Mask]]
# The round of a client's state, or -1 -> the copy that it holds since then; None if it has none.
FindCopy = Callable[[int], Copy | None]

# What evaluating a malformed header can raise.
HEADER_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)


def room_for(extra: Params) -> int:
    """How many bytes of a method's tensors a reader accepts, where it expects these."""
    return max(EXTRA_LIMIT, 4 * sum(w.numel() for w in extra.values()))


# --------------------------------------------------------------------------- tasks


def encode_task(
    task: Task,
    layers: LayerMap,
    pruning: PruneSettings,
    download: DownloadSettings = PLAIN_DOWNLOAD,
) -> bytes:
    """A task as a message."""
    payload = []
    if not SELECTORS.pick(pruning.selector).derivable:
        payload += packed_masks(task.masks, layers, pruning)
    needed = _needed(task, layers, pruning.unfed_columns)
    if task.download is None:
        payload += [values_bytes(M.take(task.weights[n], mask)) for n, mask in needed.items()]
    else:
        for n, mask in needed.items():
            payload += _coded_weights(task, task.download, n, mask, layers, download)
    payload += [values_bytes(w) for w in task.extra.values()]
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
        "code": task.plan.code,
        "extra": _shapes(task.extra),
    }
    if task.download is not None:
        header["missed"] = [_missed(task.download, n) for n in needed]
        header["weights"] = model_sha256(task.weights)
    return frame(header, b"".join(payload))


def _missed(download: Download, n: str) -> int:
    """How many changes of a tensor are in a message; -1 if its weights are."""
    part = download.tensors[n]
    return -1 if part.copied else len(part.changes)


def _coded_weights(
    task: Task,
    download: Download,
    n: str,
    mask: Mask,
    layers: LayerMap,
    settings: DownloadSettings,
) -> Iterator[bytes]:
    """One tensor for a client that may hold an earlier version of it."""
    part, dtype = download.tensors[n], versions.copy_type(n, layers, settings)
    if part.copied:
        yield values_bytes(M.take(task.weights[n], mask).to(dtype))
        return
    for change in part.changes:
        yield versions.restricted(change, part.common, n, layers, settings)
    if part.fresh is not None:
        yield values_bytes(M.take(task.weights[n], part.fresh).to(dtype))


def decode_task(
    data: bytes,
    layers: LayerMap,
    pruning: PruneSettings,
    seed: int,
    room: int = 0,
    download: DownloadSettings = PLAIN_DOWNLOAD,
    find_copy: FindCopy = lambda t: None,
) -> Task:
    """The inverse of `encode_task`; masks that were not sent are derived.

    Args:
        data: the message.
        layers: the model's layers.
        pruning: the run's pruning.
        seed: the run's seed, from which masks are derived.
        room: how many bytes a method's tensors may take.
        download: how the run sends weights.
        find_copy: returns what the client holds of the published weights.

    Raises:
        CopyError: the client does not hold what the message changes, or holds something else.
    """
    header, payload = open_frame(data, "task", _largest_task(layers) + room)
    task, shapes = _task_of(header, layers, room)
    reader = Reader(payload)
    zeros = {n: torch.zeros(shape) for n, shape in layers.shapes.items()}
    if SELECTORS.pick(pruning.selector).derivable:
        masks = masks_for(task.plan, zeros, layers, pruning, task.t, seed)
    else:
        planned = masks_for(task.plan, zeros, layers, pruning, 0, 0)  # only their sizes are right
        masks = read_masks(reader, planned, task.plan, layers, pruning)
    task = replace(task, masks=masks)
    needed = _needed(task, layers, pruning.unfed_columns)
    if "missed" in header:
        weights = _read_coded_weights(reader, header, task, needed, layers, download, find_copy)
    else:
        weights = {n: _read_weights(reader, mask, layers.shapes[n]) for n, mask in needed.items()}
    extra = _read_extra(reader, shapes)
    reader.finish()
    if "missed" in header and model_sha256(weights) != header.get("weights"):
        raise CopyError("what this client holds and was sent is not what the server published")
    return replace(task, weights=weights, extra=extra)


def _task_of(
    header: Mapping[str, Any], layers: LayerMap, room: int
) -> tuple[Task, dict[str, list[int]]]:
    """The task that a header describes, without tensors, and the shapes of the method's."""
    try:
        plan = ClientPlan(
            client=fields.integer(header["client"]),
            layers={l: fields.layer_plan(*p) for l, p in header["plan"].items()},
            deal=fields.deal(*header["deal"]),
            steps=fields.integer(header["steps"]),
            split=fields.integer(header["split"], least=1),
            code=fields.name(header["code"], COMPRESSORS),
        )
        t = fields.integer(header["t"])
        state_from = fields.integer(header["state_from"], least=-1)
        kind, evaluate = header["task"], header["evaluate"]
        shapes = {n: fields.shape(claimed, room) for n, claimed in header["extra"].items()}
    except HEADER_ERRORS as error:
        raise CodecError(f"the header of a task is wrong: {fields.reason(error)}") from None
    if kind not in get_args(Kind) or not isinstance(evaluate, bool):
        raise CodecError("the header of a task is wrong: its kind or its evaluate flag is invalid")
    if set(plan.layers) != set(layers.layers):
        raise CodecError("the task's plan does not fit this model")
    task = Task(t=t, plan=plan, weights={}, kind=kind, evaluate=evaluate, state_from=state_from)
    return task, shapes


def _read_weights(reader: Reader, mask: Mask, shape: tuple[int, ...]) -> Tensor:
    return tensor_code.full_shaped(reader.values(M.count(mask, shape)), mask, shape)


def _read_coded_weights(
    reader: Reader,
    header: Mapping[str, Any],
    task: Task,
    needed: Mapping[str, Mask],
    layers: LayerMap,
    settings: DownloadSettings,
    find_copy: FindCopy,
) -> dict[str, Tensor]:
    """The weights of a task that has changes of what the client holds."""
    counts = header["missed"]
    if not versions.is_coded(settings):
        raise CodecError("the task has coded changes, and this run sends weights")
    if not isinstance(counts, list) or len(counts) != len(needed):
        raise CodecError("the task does not say how many changes it has of each tensor")
    # A layer changes at most once in a round, which bounds the work that a message can cause.
    if not all(type(count) is int and -1 <= count <= task.t for count in counts):
        raise CodecError("the task has an impossible number of changes of a tensor")
    state_from = task.state_from
    copy = find_copy(state_from) if max(counts, default=-1) >= 0 else {}
    weights = {}
    for (n, mask), missed in zip(needed.items(), counts, strict=True):
        held = (copy or {}).get(n)
        if missed >= 0 and held is None:
            raise CopyError(f"this client holds no copy of {n!r} of round {state_from + 1}")
        weights[n] = versions.read_tensor(reader, missed, mask, held, n, layers, settings)
    return weights


def _needed(task: Task, layers: LayerMap, unfed_columns: str) -> dict[str, Mask]:
    """The tensors that the server sends, each with the mask of the coordinates that are sent."""
    sent = versions.sent_masks(task.plan, task.masks, layers, unfed_columns)
    return {n: mask for n, (_, mask) in sent.items()}


def _largest_task(layers: LayerMap) -> int:
    """Bytes of the largest possible task: all weights, and a bit of mask per weight and unit."""
    tensors = [math.prod(shape) for shape in layers.shapes.values()]
    units = [group.units for group in layers.groups.values()]
    return 4 * sum(tensors) + sum(math.ceil(n / 8) for n in (*units, *tensors))


# --------------------------------------------------------------------------- updates


def encode_update(
    update: ClientUpdate,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    compression: UploadSettings = UNCOMPRESSED,
) -> bytes:
    """An update as a message; the task determines which coordinates are sent."""
    payload = [
        encode_tensors(update, task, layers, unfed_columns, compression),
        *(values_bytes(w) for w in own_tensors(update.extra).values()),
    ]
    header = {
        "kind": "update",
        "t": update.t,
        "client": update.client,
        "examples": update.examples,
        "metrics": dict(update.metrics),
        "extra": _shapes(own_tensors(update.extra)),
    }
    return frame(header, b"".join(payload))


def encode_tensors(
    update: ClientUpdate,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    compression: UploadSettings,
) -> bytes:
    """The uploaded tensors, with their scales, as they are in a message."""
    compression = coding_of(task.plan, compression)
    return b"".join(
        tensor_code.encode(
            update.tensors[n],
            update.extra.get(f"{SCALE}{n}"),
            mask,
            compressor_of(n, layers, compression),
            compression,
        )
        for n, mask in _expected_tensors(task, layers, unfed_columns).items()
    )


def own_tensors(extra: Params) -> Params:
    """The tensors of a method's exchange, without the scales of coded tensors."""
    return {n: w for n, w in extra.items() if not n.startswith(SCALE)}


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
    compression = coding_of(task.plan, compression)
    masks = _expected_tensors(task, layers, unfed_columns)
    counts = {n: M.count(mask, layers.shapes[n]) for n, mask in masks.items()}
    header, payload = open_frame(data, "update", 4 * sum(counts.values()) + room)
    reader = Reader(payload)
    tensors: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for n, mask in masks.items():
        compressor = compressor_of(n, layers, compression)
        tensors[n], scale = tensor_code.decode(
            reader, mask, layers.shapes[n], compressor, compression
        )
        if scale is not None:
            scales[f"{SCALE}{n}"] = scale
    written = len(payload) - reader.left if compression.entropy else 0
    try:
        shapes = {n: fields.shape(claimed, room) for n, claimed in header["extra"].items()}
        update = ClientUpdate(
            client=fields.integer(header["client"]),
            t=fields.integer(header["t"]),
            tensors=tensors,
            examples=header["examples"],
            metrics={k: fields.number(v) for k, v in header["metrics"].items()},
            extra={**_read_extra(reader, shapes), **scales},
            bytes=written,
        )
    except HEADER_ERRORS as error:
        raise CodecError(f"the header of an update is wrong: {fields.reason(error)}") from None
    reader.finish()
    return update


def _expected_tensors(task: Task, layers: LayerMap, unfed_columns: str) -> dict[str, Mask]:
    """The tensors that answer a task, each with the mask of the coordinates that are sent."""
    return dict(uploaded_tensors(task, layers, unfed_columns)) if task.kind == "train" else {}


# --------------------------------------------------------------------------- a method's tensors


def _shapes(extra: Params) -> dict[str, list[int]]:
    return {n: list(w.shape) for n, w in extra.items()}


def _read_extra(reader: Reader, shapes: dict[str, list[int]]) -> Params:
    return {n: reader.values(math.prod(shape)).view(shape) for n, shape in shapes.items()}
