"""One round is masks: which coordinates of a tensor are kept, and how kept values are taken out and put back.

A mask on one tensor is a `Kept`: None (whole), a bool tensor (unstructured), or a `Block` of rows and columns
(structured).  `active` is what a client's training may touch; `sent` and `uploaded` are what travels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedp3.types import Axis, ClientPlan, LayerMap, Masks


@dataclass(frozen=True, slots=True)
class Block:
    """Kept indices of sides 0 and 1; None: that side is whole."""

    rows: Tensor | None
    cols: Tensor | None


Kept = Tensor | Block | None


def _side(axis: Axis | None, units: Mapping[str, Tensor]) -> Tensor | None:
    if axis is None or axis.group not in units:
        return None
    at = units[axis.group]
    if axis.repeat == 1:
        return at
    return (at[:, None] * axis.repeat + torch.arange(axis.repeat, device=at.device)).flatten()  # (kept units * repeat,)


def block(name: str, units: Mapping[str, Tensor], layers: LayerMap) -> Block | None:
    """The rows and columns of one tensor that these kept units leave."""
    axes = (*layers.axes.get(name, ()), None, None)
    rows, cols = _side(axes[0], units), _side(axes[1], units)
    return None if rows is None and cols is None else Block(rows, cols)


def active(name: str, masks: Masks, layers: LayerMap) -> Kept:
    """The coordinates of a tensor that exist at this client."""
    if name in masks.weights:
        return masks.weights[name]
    return block(name, masks.units, layers) if masks.units else None


def travels(name: str, whole: bool, masks: Masks, layers: LayerMap, stale: str) -> Kept:
    """The coordinates of a tensor that travel, either way.

    In a layer sent whole, columns that no kept unit feeds get no gradient: they abstain, or vote with their
    old value where `stale` is "vote" (the paper's literal reading).
    """
    return None if whole and stale == "vote" else active(name, masks, layers)


def sent(name: str, l: str, plan: ClientPlan, masks: Masks, layers: LayerMap, stale: str) -> Kept:
    """The coordinates of one tensor of layer l that the server sends."""
    return travels(name, plan.layers[l].send == "dense", masks, layers, stale)


def uploaded(name: str, l: str, plan: ClientPlan, masks: Masks, layers: LayerMap, stale: str) -> Kept:
    """The coordinates of one tensor of layer l that the client sends back."""
    p = plan.layers[l]
    return None if p.upload == "zeros" else travels(name, p.upload == "all", masks, layers, stale)


def count(kept: Kept, shape: tuple[int, ...]) -> int:
    """How many coordinates are kept."""
    whole = torch.Size(shape).numel()
    if kept is None:
        return whole
    if isinstance(kept, Tensor):
        return int(kept.count_nonzero())
    n = whole
    for side, at in enumerate((kept.rows, kept.cols)):
        if at is not None:
            n = n // shape[side] * len(at)
    return n


def as_bool(kept: Kept, shape: tuple[int, ...]) -> Tensor:
    """The mask as a bool tensor of the tensor's shape."""
    if isinstance(kept, Tensor):
        return kept
    out = torch.ones(shape, dtype=torch.bool)
    if kept is None:
        return out
    for side, at in enumerate((kept.rows, kept.cols)):
        if at is not None:
            line = torch.zeros(shape[side], dtype=torch.bool)
            line[at] = True
            out &= line.view(*(-1 if d == side else 1 for d in range(len(shape))))
    return out


def take(w: Tensor, kept: Kept) -> Tensor:
    """The kept values of w: a bool mask gives them flat, a block gives the smaller dense tensor."""
    if kept is None:
        return w
    if isinstance(kept, Tensor):
        return w.masked_select(kept)
    for side, at in enumerate((kept.rows, kept.cols)):
        if at is not None:
            w = w.narrow(side, 0, len(at)).clone() if _leads(at) else w.index_select(side, at)
    return w


def _leads(at: Tensor) -> bool:
    """Whether these are 0, 1, 2, ...: a slice, which is faster to read and to write than places one by one."""
    return torch.equal(at, torch.arange(len(at), device=at.device))


def put(values: Tensor, kept: Kept, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `take`: a full-shaped tensor, zero where nothing was kept."""
    if kept is None:
        return values.reshape(shape)
    out = torch.zeros(shape, dtype=values.dtype)
    add_at(out, values, kept)
    return out


def add_at(out: Tensor, values: Tensor, kept: Kept) -> None:
    """Add kept values (as `take` gives them) to a full-shaped tensor, in place."""
    if kept is None:
        out += values
    elif isinstance(kept, Tensor):
        out += torch.zeros_like(out).masked_scatter_(kept, values.to(out.dtype))  # far faster than out[kept] += values
    elif kept.cols is None:
        assert kept.rows is not None
        out.index_add_(0, kept.rows, values)
    elif kept.rows is None:
        out.index_add_(1, kept.cols, values)
    else:
        at = (kept.rows[:, None], kept.cols[None, :])
        out[at] += values.reshape(len(kept.rows), len(kept.cols), *out.shape[2:])


def set_at(out: Tensor, values: Tensor, kept: Block) -> None:
    """Write these values into the kept block of a full-shaped tensor, in place."""
    sides = (kept.rows, kept.cols)
    rows, cols = (slice(None) if at is None else slice(len(at)) if _leads(at) else at for at in sides)
    if isinstance(rows, Tensor) and isinstance(cols, Tensor):
        rows = rows[:, None]
    out[(rows, cols)[: out.dim()]] = values


def zero_pruned(w: Tensor, kept: Kept) -> Tensor:
    """A copy of w with zeros at the coordinates that are not kept; w itself if all are."""
    if kept is None:
        return w
    # Not w * mask: that leaves -0.0 and NaN behind, which bytes that carry kept values alone would not.
    return w.masked_fill(~kept, 0) if isinstance(kept, Tensor) else put(take(w, kept), kept, tuple(w.shape))
