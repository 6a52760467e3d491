"""Uploads in fewer bytes: the change of what was sent, rounded or thinned out.

    fp16   d = W_i - W_sent in half precision
    int8   s q, with s = max |d| / 127 and q whole, rounded up or down by chance so that s q is right in the mean
    topk   the k largest of d + e, where e is what earlier rounds left out; the rest is the next e and stays here
The server adds the change to what it sent.  Running statistics travel as they are: a variance must stay positive.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.lookup import pick
from fedp3.masks import Kept
from fedp3.prune import kept_weights, magnitude
from fedp3.rng import Use, stream
from fedp3.types import ClientPlan, Compression, LayerMap, Params, Task

SCALE, RESIDUAL = "scale/", "residual/"  # names: in an update's extra, and in what a client keeps
LEVELS = 127


@dataclass(frozen=True, slots=True)
class Packed:
    """An upload as it travels: tensors of the wire's type, and a scale for those that need one."""

    tensors: Params
    scales: Params
    residual: Params  # stays with the client


# --------------------------------------------------------------------------- one tensor


def _half(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    return d.half(), None


def _whole_numbers(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    scale = d.abs().amax() / LEVELS if d.numel() else d.new_zeros(())
    if not bool(scale > 0) or not bool(torch.isfinite(scale)):
        return torch.zeros_like(d, dtype=torch.int8), scale
    low = (d / scale + torch.rand(d.shape, generator=rng)).floor()
    return low.clamp(-LEVELS, LEVELS).to(torch.int8), scale


def _largest(d: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
    # NaN is no size: it would be left out, and stay in the residual; sent, it is refused.
    return d if bool(d.isnan().any()) else d.masked_fill(~top(d, share), 0), None


def top(d: Tensor, share: float) -> Tensor:
    """The coordinates of a flat tensor that top-k sends."""
    return magnitude(d, kept_weights(share, d.numel()), None)


Pack = Callable[[Tensor, float, torch.Generator], tuple[Tensor, Tensor | None]]  # flat change -> wire tensor, scale


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compress."""

    pack: Pack
    dtype: torch.dtype
    scaled: bool = False
    remembers: bool = False  # with error feedback


WAYS: Mapping[str, Way | None] = {
    "none": None,
    "fp16": Way(_half, torch.float16),
    "int8": Way(_whole_numbers, torch.int8, scaled=True),
    "topk": Way(_largest, torch.float32, remembers=True),
}


def way(name: str, layers: LayerMap, compression: Compression) -> Way | None:
    """How one tensor is compressed; None: it travels as it is."""
    how = pick(WAYS, compression.kind, "compression")
    return None if name in layers.buffers else how


def dtype_of(name: str, layers: LayerMap, compression: Compression) -> torch.dtype:
    """The type of a tensor on the wire."""
    how = way(name, layers, compression)
    return torch.float32 if how is None else how.dtype


def scales_of(plan: ClientPlan, layers: LayerMap, compression: Compression) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the scales that an update brings."""
    names = (n for l in plan.uploaded for n in layers.layers[l])
    return {f"{SCALE}{n}": () for n in names if (how := way(n, layers, compression)) is not None and how.scaled}


# --------------------------------------------------------------------------- one upload


def pack(
    tensors: Params, task: Task, layers: LayerMap, stale: str, compression: Compression, seed: int, kept: Params
) -> Packed:
    """An upload compressed; `kept` is what the client kept, with residuals of earlier rounds in it."""
    if pick(WAYS, compression.kind, "compression") is None:
        return Packed(tensors, {}, {})
    residual = {n: w.clone() for n, w in kept.items() if n.startswith(RESIDUAL)}  # a round's state is its own
    out: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    rng = stream(seed, Use.COMPRESS, task.t, task.plan.client)
    for n, at in travelling(task, layers, stale):
        how, shape = way(n, layers, compression), layers.shapes[n]
        if how is None:
            out[n] = tensors[n]
            continue
        e = residual.get(f"{RESIDUAL}{n}", torch.zeros(shape)) if how.remembers else torch.zeros(shape)
        change = M.take(tensors[n] - _base(n, task, shape) + e, at)
        wire, scale = how.pack(change.flatten(), compression.share, rng)
        out[n] = M.put(wire.view(change.shape), at, shape)
        if scale is not None:
            scales[f"{SCALE}{n}"] = scale
        if how.remembers:
            left = M.put(change - wire.view(change.shape), at, shape)
            residual[f"{RESIDUAL}{n}"] = left if at is None else torch.where(M.as_bool(at, shape), left, e)
    return Packed(out, scales, residual)


def unpack(
    tensors: Params, extra: Params, task: Task, layers: LayerMap, stale: str, compression: Compression
) -> Params:
    """What the server makes of a compressed upload: full-shaped, zero at coordinates that did not travel."""
    if pick(WAYS, compression.kind, "compression") is None:
        return tensors
    out = {}
    for n, at in travelling(task, layers, stale):
        how = way(n, layers, compression)
        if how is None:
            out[n] = tensors[n]
            continue
        change = tensors[n].float()
        if how.scaled:
            change = change * extra[f"{SCALE}{n}"]
        out[n] = M.zero_pruned(_base(n, task, layers.shapes[n]) + change, at)
    return out


def travelling(task: Task, layers: LayerMap, stale: str) -> Iterable[tuple[str, Kept]]:
    """The tensors that a client sends back, and which of their coordinates."""
    for l in task.plan.uploaded:
        for n in layers.layers[l]:
            yield n, M.uploaded(n, l, task.plan, task.masks, layers, stale)


def _base(name: str, task: Task, shape: tuple[int, ...]) -> Tensor:
    """What the server sent of this tensor; nothing where the client has its own."""
    return task.weights[name] if name in task.weights else torch.zeros(shape)
