"""Compression of uploads, and the settings of codes in both directions.

The codes themselves are in `fedp3.messages.compressors`.
"""

from collections.abc import Iterable
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.randomness import Stream, stream
from fedp3.core.registry import NameIn
from fedp3.core.settings import STRICT, Share
from fedp3.core.types import ClientPlan, LayerMap, Mask, Params, Task
from fedp3.messages.compressors import (
    COMPRESSORS,
    Compressor,
    pack_tensor,
    scale_shape,
    value_of,
)

SCALE = "scale/"  # prefix of the scales' names in an update's extra
RESIDUAL = "residual/"  # prefix of the residuals' names in a client's state


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """How uploads are compressed."""

    compress: Annotated[str, NameIn(COMPRESSORS)] = Field(
        default="none",
        description="code of the difference between the trained and the received weights: none; "
        "fp16; int8, with random rounding; int4 and ternary, with error feedback; int4-random and "
        "ternary-random, without; topk, sparse with error feedback",
    )
    share: Share = Field(
        default=0.01,
        description="with compress = 'topk': share of each tensor's coordinates that is sent",
    )
    entropy: bool = Field(
        default=False,
        description="with integers (int8, int4, ternary): make them shorter by a lossless entropy "
        "code; costs are then upper bounds, and a run records the bytes that were written",
    )


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """How the server sends weights to clients."""

    compress: Annotated[str, NameIn(COMPRESSORS)] = Field(
        default="none",
        description="none sends weights in every round; any code of [upload] compress sends coded "
        "changes of published weights, of which every client stores a copy, and of layers that did "
        "not change nothing",
    )
    share: Share = Field(
        default=0.01,
        description="with compress = 'topk': share of each tensor's coordinates that is sent",
    )
    entropy: bool = Field(default=False, description="as in [upload], for what is sent down")
    copy: Literal["fp32", "fp16"] = Field(
        default="fp16",
        description="type of the published weights, and so of a copy for a client that missed too "
        "many changes; what rounding loses is sent with the next change",
    )


Coding = UploadSettings | DownloadSettings
UNCOMPRESSED = UploadSettings()
PLAIN_DOWNLOAD = DownloadSettings()


@plain_dataclass(frozen=True, slots=True)
class PackedUpload:
    """A compressed upload.

    Args:
        tensors: what is sent, full-shaped.
        scales: the scales to send with them, by prefixed name.
        residual: what was left out, by prefixed name; it stays on the client.
    """

    tensors: Params
    scales: Params
    residual: Params


def coding_of(plan: ClientPlan, settings: UploadSettings) -> UploadSettings:
    """How the uploads of this plan are compressed: by its own code, or by the run's."""
    return replace(settings, compress=plan.code) if plan.code else settings


def compressor_of(name: str, layers: LayerMap, settings: Coding) -> Compressor | None:
    """The compressor of one tensor; None where it is sent uncompressed."""
    compressor = COMPRESSORS.pick(settings.compress)
    return None if name in layers.buffers else compressor


def dtype_of(name: str, layers: LayerMap, settings: Coding) -> torch.dtype:
    """The type of a tensor in an upload."""
    compressor = compressor_of(name, layers, settings)
    return torch.float32 if compressor is None else compressor.dtype


def scales_of(
    plan: ClientPlan, layers: LayerMap, settings: UploadSettings
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the scales in an update under this plan."""
    settings = coding_of(plan, settings)
    scales: dict[str, tuple[int, ...]] = {}
    for l in plan.uploaded:
        for n in layers.layers[l]:
            shape = scale_shape(layers.shapes[n], compressor_of(n, layers, settings))
            if shape is not None:
                scales[f"{SCALE}{n}"] = shape
    return scales


# --------------------------------------------------------------------------- one upload


def pack(
    tensors: Params,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    settings: UploadSettings,
    seed: int,
    state: Params,
) -> PackedUpload:
    """Compress an upload.

    What a code with error feedback left out is added to the client's next change of the tensor,
    whichever code that one has.

    Args:
        tensors: what the client uploads, full-shaped.
        task: the task that it answers.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
        settings: the run's compression.
        seed: the run's seed.
        state: the client's state, with the residuals of earlier rounds.
    """
    settings = coding_of(task.plan, settings)
    if COMPRESSORS.pick(settings.compress) is None:
        return PackedUpload(tensors=tensors, scales={}, residual=_left_from_before(state, {}))
    residual: dict[str, Tensor] = {}
    packed: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    rng = stream(seed, Stream.COMPRESS, task.t, task.plan.client)
    for n, mask in uploaded_tensors(task, layers, unfed_columns):
        compressor = compressor_of(n, layers, settings)
        if compressor is None:
            packed[n] = tensors[n]
            continue
        change = tensors[n] - _sent_by_server(n, task, layers.shapes[n])
        error = state.get(f"{RESIDUAL}{n}")
        if error is not None:
            change += error
        packed[n], scale = pack_tensor(change, mask, compressor, settings.share, rng)
        if scale is not None:
            scales[f"{SCALE}{n}"] = scale
        if compressor.feedback:
            left_out = change.sub_(value_of(packed[n], scale))
            residual[f"{RESIDUAL}{n}"] = _where_exchanged(left_out, mask, error)
        elif error is not None:  # it was sent now
            residual[f"{RESIDUAL}{n}"] = _where_exchanged(torch.zeros_like(error), mask, error)
    residual |= _left_from_before(state, residual)
    return PackedUpload(tensors=packed, scales=scales, residual=residual)


def _left_from_before(state: Params, sent: Params) -> dict[str, Tensor]:
    """The residuals of tensors that are not sent coded now.

    They are copied, because two states of a client are stored without sharing tensors.
    """
    return {n: w.clone() for n, w in state.items() if n.startswith(RESIDUAL) and n not in sent}


def _where_exchanged(left_out: Tensor, mask: Mask, error: Tensor | None) -> Tensor:
    """What was left out where coordinates were exchanged; elsewhere the error of earlier rounds."""
    if mask is None:
        return left_out
    before = torch.zeros_like(left_out) if error is None else error
    return torch.where(M.as_bool(mask, tuple(left_out.shape)), left_out, before)


def unpack(
    tensors: Params,
    extra: Params,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    settings: UploadSettings,
    started_from: Params | None = None,
) -> Params:
    """Decompress an upload: full-shaped tensors, zero at coordinates that were not uploaded.

    Args:
        tensors: the compressed tensors.
        extra: the update's extra tensors, with the scales.
        task: the task that the upload answers.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
        settings: the run's compression.
        started_from: weights to which a change is added instead of those that were sent.
    """
    settings = coding_of(task.plan, settings)
    if COMPRESSORS.pick(settings.compress) is None:
        return tensors
    unpacked = {}
    for n, mask in uploaded_tensors(task, layers, unfed_columns):
        if compressor_of(n, layers, settings) is None:
            unpacked[n] = tensors[n]
            continue
        sent = _sent_by_server(n, task, layers.shapes[n])
        if started_from is not None and n in task.weights:
            sent = started_from[n]
        change = value_of(tensors[n], extra.get(f"{SCALE}{n}"))
        unpacked[n] = M.zero_pruned(change.add_(sent), mask)
    return unpacked


def uploaded_tensors(
    task: Task, layers: LayerMap, unfed_columns: str
) -> Iterable[tuple[str, Mask]]:
    """The tensors that a client uploads, each with the mask of the coordinates that are sent."""
    for l in task.plan.uploaded:
        for n in layers.layers[l]:
            yield n, M.uploaded(n, l, task.plan, task.masks, layers, unfed_columns)


def _sent_by_server(name: str, task: Task, shape: tuple[int, ...]) -> Tensor:
    """The values that a change is relative to; zero for a personal layer, which is never sent."""
    return task.weights[name] if name in task.weights else torch.zeros(shape)
