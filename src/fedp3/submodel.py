"""Structured masks made physical: a really smaller dense net, and the way back.

Where whole units are cut, the rows that write them and the columns that read them are zero and stay zero, so the net
without them computes the same function and the same gradients, with less work: half of every width is a third of the
time, where multiplying by a mask saves nothing.  Units can only be cut where they could be followed (`LayerMap.groups`)
and where everything they pass through maps zero to zero, which the tracing has made sure of.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedp3 import masks as M
from fedp3.types import Group, LayerMap, Params, Pruning
from fedp3.unsaved import twins

Units = Mapping[Group, Tensor]  # kept unit indices
KEPT_NETS = 16  # smaller nets remembered per net: a fleet has few shapes, ordered dropout draws many


def physical(pruning: Pruning) -> bool:
    """A smaller net stands for a masked one only where pruned coordinates are held at zero."""
    return pruning.physical and pruning.hold


def shrink_map(layers: LayerMap, counts: Mapping[Group, int]) -> LayerMap:
    """The layer map of the net that is left when each named group keeps only so many units."""
    shapes = {}
    for n, shape in layers.shapes.items():
        sides = list(shape)
        for side, axis in enumerate(layers.axes.get(n, ())):
            if axis is not None and axis.group in counts:
                sides[side] = counts[axis.group] * axis.repeat
        shapes[n] = tuple(sides)
    groups = {g: replace(u, units=counts.get(g, u.units)) for g, u in layers.groups.items()}
    return replace(layers, shapes=shapes, groups=groups)


def _linear(m: Any) -> None:
    m.out_features, m.in_features = m.weight.shape


def _convolution(m: Any) -> None:
    m.out_channels, m.in_channels = m.weight.shape[:2]


def _batch_norm(m: Any) -> None:
    m.num_features = len(m.running_mean if m.running_mean is not None else m.weight)


def _group_norm(m: Any) -> None:
    size = m.num_channels // m.num_groups  # whole groups are cut, so their size stays
    m.num_channels, m.num_groups = len(m.weight), len(m.weight) // size


# What a module says of its own size, besides its tensors.
SIZES: Mapping[type[nn.Module], Callable[[Any], None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.GroupNorm: _group_norm,
}


def shrink_net(net: nn.Module, layers: LayerMap, counts: Mapping[Group, int]) -> nn.Module:
    """The same modules with smaller tensors; values are left to the caller."""
    shapes = shrink_map(layers, counts).shapes
    small = copy.deepcopy(net, {id(w): w for w in twins(net)})  # theirs too where the net is given again
    for path, module in small.named_modules():
        changed = False
        for own, tensors in ((module._parameters, nn.Parameter), (module._buffers, lambda w: w)):
            for name, w in own.items():
                shape = shapes.get(f"{path}.{name}" if path else name)
                if w is not None and shape is not None and tuple(w.shape) != shape:
                    own[name] = tensors(torch.empty(shape, device=w.device, memory_format=_format(w)).zero_())
                    changed = True
        if changed:
            SIZES[type(module)](module)
    return small


def _format(w: Tensor) -> torch.memory_format:
    """By the strides: a kernel of one channel or of 1x1 counts as contiguous in either format."""
    if w.dim() != 4:
        return torch.contiguous_format
    last = torch.empty(w.shape, device="meta", memory_format=torch.channels_last)
    return torch.channels_last if w.stride() == last.stride() else torch.contiguous_format


_nets: "WeakKeyDictionary[nn.Module, OrderedDict[tuple[tuple[Group, int], ...], nn.Module]]" = WeakKeyDictionary()


def small_net(net: nn.Module, layers: LayerMap, counts: Mapping[Group, int]) -> nn.Module:
    """`shrink_net`, remembered: making a net costs more than a step of a small one."""
    known = _nets.setdefault(net, OrderedDict())
    key = tuple(sorted(counts.items()))
    if key not in known:
        known[key] = shrink_net(net, layers, counts)
        while len(known) > KEPT_NETS:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def counts_of(units: Units) -> dict[Group, int]:
    """How many units are kept of each cut group."""
    return {g: len(at) for g, at in units.items()}


def cut(W: Params, units: Units, layers: LayerMap) -> dict[str, Tensor]:
    """The tensors of the smaller net."""
    return {n: M.take(w, M.block(n, units, layers)) for n, w in W.items()}


def write_back(W: Params, small: Params, units: Units, layers: LayerMap) -> dict[str, Tensor]:
    """The smaller net's tensors in their places in W; W itself is not touched."""
    kept = {n: M.block(n, units, layers) for n in small}
    out = {n: w if kept[n] is None else W[n].clone() for n, w in small.items()}
    put_back(out, {n: w for n, w in small.items() if kept[n] is not None}, units, layers)
    return out


@torch.no_grad()
def put_back(W: Params, small: Params, units: Units, layers: LayerMap) -> None:
    """The same in place."""
    for n, w in small.items():
        kept = M.block(n, units, layers)
        if kept is None:
            W[n].copy_(w)
        else:
            M.set_at(W[n], w, kept)
