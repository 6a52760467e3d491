"""Structured pruning made physical: build the smaller dense network, and write its weights back.

Where units are pruned, the rows that write them and the columns that read them are zero and stay
zero.  The network without these units therefore computes the same function and the same gradients
with less work: half of every width takes a third of the time, whereas multiplying by a mask saves
nothing.  Units can be removed where tracing could follow them (`LayerMap.groups`) and where
everything they pass through maps zero to zero, which the tracing has ensured.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedp3.core import masks as M
from fedp3.core.types import Group, LayerMap, Params
from fedp3.models.block_kinds import RESIZE_BY_NAME, full_name
from fedp3.models.buffers import initial_values
from fedp3.models.frozen import copy_network, frozen_tensors
from fedp3.models.skipping import skipped_blocks

Units = Mapping[Group, Tensor]  # the indices of retained units
# Smaller networks that are cached per network: a fleet has few shapes, but ordered dropout draws
# many.
CACHE_SIZE = 16


def shrink_map(layers: LayerMap, counts: Mapping[Group, int]) -> LayerMap:
    """Return the layer map of the network in which each group retains `counts[group]` units."""

    def shrink(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        sides = list(shape)
        for side, axis in enumerate(layers.axes.get(name, ())):
            if axis is not None and axis.group in counts:
                sides[side] = counts[axis.group] * axis.repeat * axis.parts
        return tuple(sides)

    shapes = {name: shrink(name, shape) for name, shape in layers.shapes.items()}
    frozen = {name: replace(w, shape=shrink(name, w.shape)) for name, w in layers.frozen.items()}
    groups = {
        g: replace(group, units=counts.get(g, group.units)) for g, group in layers.groups.items()
    }
    return replace(layers, shapes=shapes, groups=groups, frozen=frozen)


def _resize_linear(m: Any) -> None:
    m.out_features, m.in_features = m.weight.shape


def _resize_convolution(m: Any) -> None:
    m.out_channels, m.in_channels = m.weight.shape[:2]


def _resize_batch_norm(m: Any) -> None:
    m.num_features = len(m.running_mean if m.running_mean is not None else m.weight)


def _resize_group_norm(m: Any) -> None:
    group_size = m.num_channels // m.num_groups  # groups are pruned entirely: their size stays
    m.num_channels, m.num_groups = len(m.weight), len(m.weight) // group_size


# How to set the attributes of a module that repeat the shapes of its tensors.
RESIZE: Mapping[type[nn.Module], Callable[[Any], None]] = {
    nn.Linear: _resize_linear,
    nn.Conv1d: _resize_convolution,
    nn.Conv2d: _resize_convolution,
    nn.Conv3d: _resize_convolution,
    nn.BatchNorm1d: _resize_batch_norm,
    nn.BatchNorm2d: _resize_batch_norm,
    nn.BatchNorm3d: _resize_batch_norm,
    nn.GroupNorm: _resize_group_norm,
}


def shrink_net(net: nn.Module, layers: LayerMap, counts: Mapping[Group, int]) -> nn.Module:
    """Return a copy of the network with smaller tensors; the caller loads their values.

    It shares frozen tensors with the full network, but for those that are smaller themselves.

    Args:
        net: the full network.
        layers: its layer map.
        counts: the number of retained units of each pruned group.
    """
    smaller = shrink_map(layers, counts)
    shapes = {**smaller.shapes, **{name: w.shape for name, w in smaller.frozen.items()}}
    small = copy_network(net, initial_values(net))
    for path, module in small.named_modules():
        parameters = _resize_tensors(module._parameters, nn.Parameter, path, shapes)
        buffers = _resize_tensors(module._buffers, lambda w: w, path, shapes)
        if parameters or buffers:
            resize = RESIZE.get(type(module)) or RESIZE_BY_NAME[full_name(module)]
            resize(module)
    for module in small.modules():  # some repeat the shapes of their children
        if full_name(module) in RESIZE_BY_NAME:
            RESIZE_BY_NAME[full_name(module)](module)
    return small


def _resize_tensors(
    table: dict[str, Any],
    wrap: Callable[[Tensor], Tensor],
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Replace the tensors of one module that have another shape; return whether there were any."""
    changed = False
    for name, w in table.items():
        shape = shapes.get(f"{path}.{name}" if path else name)
        if w is None or shape is None or tuple(w.shape) == shape:
            continue
        new = torch.empty(shape, device=w.device, memory_format=_memory_format(w))
        table[name] = wrap(new.zero_())
        changed = True
    return changed


def _memory_format(w: Tensor) -> torch.memory_format:
    """The layout by strides: a kernel with one channel or of 1x1 is contiguous in both layouts."""
    if w.dim() != 4:
        return torch.contiguous_format
    last = torch.empty(w.shape, device="meta", memory_format=torch.channels_last)
    return torch.channels_last if w.stride() == last.stride() else torch.contiguous_format


_Nets = OrderedDict[tuple[object, ...], nn.Module]
_nets: "WeakKeyDictionary[nn.Module, _Nets]" = WeakKeyDictionary()


def small_net(net: nn.Module, layers: LayerMap, counts: Mapping[Group, int]) -> nn.Module:
    """Return `shrink_net` from a cache: building a network takes longer than a small step."""
    cached = _nets.setdefault(net, OrderedDict())
    key = (*sorted(counts.items()), *skipped_blocks(net))
    if key not in cached:
        cached[key] = shrink_net(net, layers, counts)
        while len(cached) > CACHE_SIZE:
            cached.popitem(last=False)
    cached.move_to_end(key)
    return cached[key]


@torch.no_grad()
def load_frozen(small: nn.Module, net: nn.Module, units: Units, layers: LayerMap) -> None:
    """Load the retained units of frozen tensors into a smaller network.

    Args:
        small: the smaller network.
        net: the full network.
        units: the retained units.
        layers: the layer map of the full network.
    """
    blocks = {name: M.block(name, units, layers) for name in layers.frozen}
    pruned = {name: block for name, block in blocks.items() if block is not None}
    if pruned:
        full, part = frozen_tensors(net), frozen_tensors(small)
        for name, block in pruned.items():
            part[name].copy_(M.take(full[name], block))


def counts_of(units: Units) -> dict[Group, int]:
    """Return the number of retained units of each pruned group."""
    return {g: len(indices) for g, indices in units.items()}


def take_units(W: Params, units: Units, layers: LayerMap) -> dict[str, Tensor]:
    """Return each tensor restricted to the retained units."""
    return {name: M.take(w, M.block(name, units, layers)) for name, w in W.items()}


def write_back(W: Params, small: Params, units: Units, layers: LayerMap) -> dict[str, Tensor]:
    """Return full tensors: those of the smaller network at retained units, those of W elsewhere.

    W is not changed.
    """
    pruned = {name for name in small if M.block(name, units, layers) is not None}
    full = {name: W[name].clone() if name in pruned else w for name, w in small.items()}
    put_back(full, {name: small[name] for name in small if name in pruned}, units, layers)
    return full


@torch.no_grad()
def put_back(W: Params, small: Params, units: Units, layers: LayerMap) -> None:
    """Write the tensors of the smaller network to their places in W."""
    for name, w in small.items():
        block = M.block(name, units, layers)
        if block is None:
            W[name].copy_(w)
        else:
            M.set_at(W[name], w, block)
