"""Compression of uploads: clients send the change d = W_i - W_sent, rounded or made sparse.

    fp16   d in half precision
    int8   s q, with s = max |d| / 127 and integers q, rounded up or down at random so that
           s q is unbiased
    topk   the k largest coordinates of d + e, where e is what earlier rounds left out; the
           other coordinates become the next e and stay on the client (error feedback)

The server adds the change to what it sent.
Running statistics are never compressed, because a variance must stay positive.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass as plain_dataclass
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.masks import Mask
from fedp3.core.randomness import Stream, stream
from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import STRICT, Share
from fedp3.core.types import ClientPlan, LayerMap, Params, Task
from fedp3.planning.selectors import magnitude, retained_weights

SCALE = "scale/"  # prefix of the scales' names in an update's extra
RESIDUAL = "residual/"  # prefix of the residuals' names in a client's state
LEVELS = 127  # positive int8 levels

# (flat change, share that topk sends, generator) -> tensor to send, and its scale or None
Pack = Callable[[Tensor, float, torch.Generator], tuple[Tensor, Tensor | None]]


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """A way to compress one tensor of an upload.

    Args:
        pack: takes the flat change, the share that `topk` sends and a generator; returns the
            tensor to send, and its scale or None.
        dtype: the type of the tensor that is sent.
        scaled: one float32 scale is sent with each tensor; the receiver multiplies by it.
        sparse: only the share `upload.share` of the coordinates is sent, with a mask; what is
            left out is added to the next round's change (error feedback).
    """

    pack: Pack
    dtype: torch.dtype
    scaled: bool = False
    sparse: bool = False


# None stands for no compression.
COMPRESSORS: Registry[Compressor | None] = Registry("compression")


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """How uploads are compressed."""

    compress: Annotated[str, NameIn(COMPRESSORS)] = Field(
        default="none",
        description="compression of the difference between the trained and the received weights: "
        "none; fp16; int8, with random rounding; topk, sparse with error feedback",
    )
    share: Share = Field(
        default=0.01,
        description="with compress = 'topk': share of each tensor's coordinates that is sent",
    )


UNCOMPRESSED = UploadSettings()


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


# --------------------------------------------------------------------------- one tensor


def _to_half(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    return d.half(), None


def _to_int8(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    scale = d.abs().amax() / LEVELS if d.numel() else d.new_zeros(())
    if not bool(scale > 0) or not bool(torch.isfinite(scale)):
        return torch.zeros_like(d, dtype=torch.int8), scale
    rounded = (d / scale + torch.rand(d.shape, generator=rng)).floor()
    return rounded.clamp(-LEVELS, LEVELS).to(torch.int8), scale


def _to_sparse(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    # NaN has no magnitude: it would be left out and stay in the residual.
    # If it is sent, the server rejects the update.
    if bool(d.isnan().any()):
        return d, None
    return d.masked_fill(~top(d, share), 0), None


def top(d: Tensor, share: float) -> Tensor:
    """The mask of the coordinates of a flat tensor that `topk` sends."""
    return magnitude(d, retained_weights(share, d.numel()), None)


COMPRESSORS.add("none", None)
COMPRESSORS.add("fp16", Compressor(pack=_to_half, dtype=torch.float16))
COMPRESSORS.add("int8", Compressor(pack=_to_int8, dtype=torch.int8, scaled=True))
COMPRESSORS.add("topk", Compressor(pack=_to_sparse, dtype=torch.float32, sparse=True))


def compressor_of(name: str, layers: LayerMap, settings: UploadSettings) -> Compressor | None:
    """The compressor of one tensor; None where it is sent uncompressed."""
    compressor = COMPRESSORS.pick(settings.compress)
    return None if name in layers.buffers else compressor


def dtype_of(name: str, layers: LayerMap, settings: UploadSettings) -> torch.dtype:
    """The type in which a tensor is uploaded."""
    compressor = compressor_of(name, layers, settings)
    return torch.float32 if compressor is None else compressor.dtype


def scales_of(
    plan: ClientPlan, layers: LayerMap, settings: UploadSettings
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the scales in an update under this plan."""
    scales: dict[str, tuple[int, ...]] = {}
    for l in plan.uploaded:
        for n in layers.layers[l]:
            compressor = compressor_of(n, layers, settings)
            if compressor is not None and compressor.scaled:
                scales[f"{SCALE}{n}"] = ()
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

    Args:
        tensors: what the client uploads, full-shaped.
        task: the task that it answers.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
        settings: the run's compression.
        seed: the run's seed.
        state: the client's state, with the residuals of earlier rounds.
    """
    if COMPRESSORS.pick(settings.compress) is None:
        return PackedUpload(tensors=tensors, scales={}, residual={})
    # Copies, so that the states of earlier rounds stay as they are.
    residual = {n: w.clone() for n, w in state.items() if n.startswith(RESIDUAL)}
    packed: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    rng = stream(seed, Stream.COMPRESS, task.t, task.plan.client)
    for n, mask in uploaded_tensors(task, layers, unfed_columns):
        compressor = compressor_of(n, layers, settings)
        shape = layers.shapes[n]
        if compressor is None:
            packed[n] = tensors[n]
            continue
        error = torch.zeros(shape)
        if compressor.sparse:
            error = residual.get(f"{RESIDUAL}{n}", error)
        change = M.take(tensors[n] - _sent_by_server(n, task, shape) + error, mask)
        flat, scale = compressor.pack(change.flatten(), settings.share, rng)
        sent = flat.view(change.shape)
        packed[n] = M.put(sent, mask, shape)
        if scale is not None:
            scales[f"{SCALE}{n}"] = scale
        if compressor.sparse:
            left_out = M.put(change - sent, mask, shape)
            if mask is not None:  # elsewhere the error of earlier rounds stays
                left_out = torch.where(M.as_bool(mask, shape), left_out, error)
            residual[f"{RESIDUAL}{n}"] = left_out
    return PackedUpload(tensors=packed, scales=scales, residual=residual)


def unpack(
    tensors: Params,
    extra: Params,
    task: Task,
    layers: LayerMap,
    unfed_columns: str,
    settings: UploadSettings,
) -> Params:
    """Decompress an upload: full-shaped tensors, zero at coordinates that were not uploaded.

    Args:
        tensors: the compressed tensors.
        extra: the update's extra tensors, with the scales.
        task: the task that the upload answers.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
        settings: the run's compression.
    """
    if COMPRESSORS.pick(settings.compress) is None:
        return tensors
    unpacked = {}
    for n, mask in uploaded_tensors(task, layers, unfed_columns):
        compressor = compressor_of(n, layers, settings)
        if compressor is None:
            unpacked[n] = tensors[n]
            continue
        change = tensors[n].float()
        if compressor.scaled:
            change = change * extra[f"{SCALE}{n}"]
        unpacked[n] = M.zero_pruned(_sent_by_server(n, task, layers.shapes[n]) + change, mask)
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
