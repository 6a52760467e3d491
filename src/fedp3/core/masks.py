"""Masks: which coordinates of a tensor are retained, and how to extract and restore their values.

The mask on one tensor is a `Mask`: None (dense), a bool tensor (unstructured), or a `Block` of
rows and columns (structured).  `active` gives the coordinates that a client's training may change;
`sent` and `uploaded` give those that are exchanged.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedp3.core.types import Axis, Block, ClientPlan, LayerMap, Mask, Masks


def _indices(axis: Axis | None, units: Mapping[str, Tensor], size: int) -> Tensor | None:
    """The indices along one dimension that belong to retained units; None means all of them.

    Args:
        axis: how units lie along the dimension.
        units: the retained units of each pruned group.
        size: of the dimension, with all units.
    """
    if axis is None or axis.group not in units:
        return None
    retained = units[axis.group]
    if axis.repeat == axis.parts == 1:
        return retained
    first = retained[:, None] * axis.repeat
    offsets = torch.arange(axis.repeat, device=retained.device)
    indices = (first + offsets).flatten()  # (retained units * repeat,)
    if axis.parts == 1:
        return indices
    begins = torch.arange(axis.parts, device=retained.device) * (size // axis.parts)
    return (begins[:, None] + indices).flatten()


def block(name: str, units: Mapping[str, Tensor], layers: LayerMap) -> Block | None:
    """Return the rows and columns of one tensor that belong to retained units.

    Args:
        name: the name of the tensor.
        units: the retained units of each pruned group.
        layers: the layer map of the network.
    """
    axes = (*layers.axes.get(name, ()), None, None)
    shape: tuple[int, ...] = (0, 0)
    if any(axes):
        whole = layers.frozen[name].shape if name in layers.frozen else layers.shapes[name]
        shape = (*whole, 0, 0)
    rows, cols = _indices(axes[0], units, shape[0]), _indices(axes[1], units, shape[1])
    return None if rows is None and cols is None else Block(rows, cols)


def active(name: str, masks: Masks, layers: LayerMap) -> Mask:
    """Return the coordinates of a tensor that exist at this client."""
    if name in masks.weights:
        return masks.weights[name]
    return block(name, masks.units, layers) if masks.units else None


def exchanged(name: str, dense: bool, masks: Masks, layers: LayerMap, unfed_columns: str) -> Mask:
    """Return the coordinates of a tensor that are exchanged, in either direction.

    In a dense layer, the columns that no retained unit feeds get no gradient.  They abstain from
    the average, or vote with their old value where `unfed_columns` is "vote" (the paper's literal
    reading).

    Args:
        name: the name of the tensor.
        dense: whether its layer is exchanged in full.
        masks: the client's masks.
        layers: the layer map of the network.
        unfed_columns: the setting of this name, "abstain" or "vote".
    """
    if dense and unfed_columns == "vote":
        return None
    return active(name, masks, layers)


def sent(
    name: str, l: str, plan: ClientPlan, masks: Masks, layers: LayerMap, unfed_columns: str
) -> Mask:
    """Return the coordinates of one tensor of layer l that the server sends."""
    dense = plan.layers[l].send == "dense"
    return exchanged(name, dense, masks, layers, unfed_columns)


def uploaded(
    name: str, l: str, plan: ClientPlan, masks: Masks, layers: LayerMap, unfed_columns: str
) -> Mask:
    """Return the coordinates of one tensor of layer l that the client uploads."""
    upload = plan.layers[l].upload
    if upload == "zeros":
        return None
    return exchanged(name, upload == "all", masks, layers, unfed_columns)


def count(mask: Mask, shape: tuple[int, ...]) -> int:
    """Return the number of retained coordinates of a tensor of this shape."""
    n = torch.Size(shape).numel()
    if mask is None:
        return n
    if isinstance(mask, Tensor):
        return int(mask.count_nonzero())
    for side, indices in enumerate((mask.rows, mask.cols)):
        if indices is not None:
            n = n // shape[side] * len(indices)
    return n


def as_bool(mask: Mask, shape: tuple[int, ...]) -> Tensor:
    """Return the mask as a bool tensor of this shape."""
    if isinstance(mask, Tensor):
        return mask
    out = torch.ones(shape, dtype=torch.bool)
    if mask is None:
        return out
    for side, indices in enumerate((mask.rows, mask.cols)):
        if indices is not None:
            line = torch.zeros(shape[side], dtype=torch.bool)
            line[indices] = True
            out &= line.view(*(-1 if d == side else 1 for d in range(len(shape))))
    return out


def same(a: Mask, b: Mask, shape: tuple[int, ...]) -> bool:
    """Return whether two masks retain the same coordinates of a tensor of this shape."""
    if a is b:
        return True
    return torch.equal(as_bool(a, shape), as_bool(b, shape))


def take(w: Tensor, mask: Mask) -> Tensor:
    """Extract the retained values: flat for a bool mask, a smaller dense tensor for a block."""
    if mask is None:
        return w
    if isinstance(mask, Tensor):
        return w.masked_select(mask)
    for side, indices in enumerate((mask.rows, mask.cols)):
        if indices is None:
            continue
        if _is_prefix(indices):
            w = w.narrow(side, 0, len(indices)).clone()
        else:
            w = w.index_select(side, indices)
    return w


def _is_prefix(indices: Tensor) -> bool:
    """Whether the indices are 0, 1, 2, ...: a slice is faster to read and write than indices."""
    return torch.equal(indices, torch.arange(len(indices), device=indices.device))


def put(values: Tensor, mask: Mask, shape: tuple[int, ...]) -> Tensor:
    """Invert `take`: return a full-shaped tensor that is zero at pruned coordinates."""
    if mask is None:
        return values.reshape(shape)
    out = torch.zeros(shape, dtype=values.dtype)
    add_at(out, values, mask)
    return out


def add_at(out: Tensor, values: Tensor, mask: Mask) -> None:
    """Add retained values, as `take` extracts them, to a full-shaped tensor in place."""
    if mask is None:
        out += values
    elif isinstance(mask, Tensor):
        # This is far faster than out[mask] += values.
        out += torch.zeros_like(out).masked_scatter_(mask, values.to(out.dtype))
    elif mask.cols is None:
        assert mask.rows is not None
        out.index_add_(0, mask.rows, values)
    elif mask.rows is None:
        out.index_add_(1, mask.cols, values)
    else:
        indices = (mask.rows[:, None], mask.cols[None, :])
        out[indices] += values.reshape(len(mask.rows), len(mask.cols), *out.shape[2:])


def set_at(out: Tensor, values: Tensor, mask: Block) -> None:
    """Write values into the retained block of a full-shaped tensor, in place."""
    rows, cols = _selection(mask.rows), _selection(mask.cols)
    if isinstance(rows, Tensor) and isinstance(cols, Tensor):
        rows = rows[:, None]
    out[(rows, cols)[: out.dim()]] = values


def _selection(indices: Tensor | None) -> slice | Tensor:
    """The indices of one dimension as a slice where possible."""
    if indices is None:
        return slice(None)
    return slice(len(indices)) if _is_prefix(indices) else indices


def zero_pruned(w: Tensor, mask: Mask) -> Tensor:
    """Return a copy of w with zeros at pruned coordinates, or w itself if none are pruned."""
    if mask is None:
        return w
    # w * mask would leave -0.0 and NaN, which a message of retained values alone cannot carry.
    if isinstance(mask, Tensor):
        return w.masked_fill(~mask, 0)
    return put(take(w, mask), mask, tuple(w.shape))
