"""From any `nn.Module` to named layers and the units that connect them.

The net is traced once (torch.fx).  A module with a weight of two or more sides begins a layer; normalisation
joins the layer whose output it normalises; a module that reads the same tensor as an earlier layer joins that
layer (a ResNet's 1x1 shortcut joins the first convolution of its block).  Units are followed from the weight
that writes them to the weights that read them, through whatever maps zero to zero; where they cannot be
followed (residual sums, outputs, unknown operations) they are marked fixed, with the reason.
A net that cannot be traced still gets layers, in order of registration, and a note.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedp3.errors import InputError
from fedp3.types import Axis, Group, Layer, LayerMap, UnitGroup

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
# What maps a zero unit to a zero unit, and keeps units apart.
PASSES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity, nn.Flatten,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
PASS_FUNCTIONS = {
    F.relu, torch.relu, F.leaky_relu, F.gelu, F.silu, F.elu, torch.tanh, F.dropout, F.dropout2d, torch.flatten,
    F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
    torch.max_pool2d, torch.avg_pool1d,
}  # fmt: skip
PASS_METHODS = {"relu", "relu_", "flatten", "view", "reshape", "contiguous", "tanh"}
SUMS = {operator.add, operator.iadd, torch.add}
SHAPES = {"size", "dim"}  # methods that give numbers, not units


@dataclass(slots=True)
class _Trace:
    """What one walk over the graph collects."""

    layer_of: dict[str, Layer] = field(default_factory=dict)  # module path -> layer
    axes: dict[str, tuple[Axis | None, ...]] = field(default_factory=dict)
    groups: dict[Group, UnitGroup] = field(default_factory=dict)
    carries: dict[fx.Node, Group | None] = field(default_factory=dict)  # node -> units it carries
    reader: dict[fx.Node, Layer] = field(default_factory=dict)  # node -> first layer that reads it
    last: Layer = ""

    def fix(self, group: Group | None, why: str) -> None:
        if group is not None and not self.groups[group].fixed:
            self.groups[group] = replace(self.groups[group], fixed=why)


def layer_map(net: nn.Module, layers: Mapping[Layer, Sequence[str]] | None = None) -> LayerMap:
    """Group the tensors of any net into ordered layers; `layers` (name -> tensors) overrides the grouping."""
    tensors, buffers = _tensors(net)
    trace, note = _Trace(), ""
    try:
        graph = fx.symbolic_trace(net).graph
    except Exception as error:  # fx raises many kinds, all meaning: this net cannot be traced
        note = f"the net cannot be traced ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
    else:
        modules = dict(net.named_modules())
        for node in graph.nodes:
            _visit(node, modules, trace)
    named = _group(net, tensors, trace) if layers is None else _checked(layers, tensors)
    owner = {n: l for l, names in named.items() for n in names}
    groups = {g: replace(u, layer=owner[f"{g}.weight"]) for g, u in trace.groups.items() if f"{g}.weight" in owner}
    return LayerMap(
        layers=named,
        shapes={n: tuple(w.shape) for n, w in tensors.items()},
        axes={n: a for n, a in trace.axes.items() if n in tensors},
        groups=groups,
        prunable=frozenset(n for n, w in tensors.items() if n not in buffers and w.dim() >= 2),
        buffers=buffers,
        note=note,
    )


def _tensors(net: nn.Module) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Every tensor of the net that travels, and which of them are buffers."""
    parameters = dict(net.named_parameters())
    tensors = {n: w for n, w in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    tied = sorted(set(tensors) - set(parameters) - {n for n, _ in net.named_buffers()})
    if tied:
        raise InputError(f"tensors {tied} share storage with others of the net; untie them, or wrap the net")
    strange = sorted(n for n, w in tensors.items() if w.dtype != torch.float32)
    if strange:
        raise InputError(f"tensors {strange} are not float32, the only type that can be averaged here")
    if not parameters:
        raise InputError("the net has no parameters to train")
    return tensors, frozenset(n for n in tensors if n not in parameters)


def _checked(layers: Mapping[Layer, Sequence[str]], tensors: Mapping[str, Tensor]) -> dict[Layer, tuple[str, ...]]:
    given = [n for names in layers.values() for n in names]
    missing, unknown = sorted(set(tensors) - set(given)), sorted(set(given) - set(tensors))
    twice = sorted({n for n in given if given.count(n) > 1})
    for what, names in (("missing", missing), ("not in the net", unknown), ("in two layers", twice)):
        if names:
            raise InputError(f"layers must name every tensor once; {what}: {', '.join(names)}")
    return {l: tuple(names) for l, names in layers.items()}


def _group(net: nn.Module, tensors: Mapping[str, Tensor], trace: _Trace) -> dict[Layer, tuple[str, ...]]:
    """Layer -> tensors: traced layers in order of execution, then what the trace did not see."""
    begins = {path for path, m in net.named_modules() if any(w.dim() >= 2 for w in m.parameters(recurse=False))}
    layers: dict[Layer, list[str]] = {l: [] for l in trace.layer_of.values()}
    last = next(iter(layers), "")
    for name in tensors:
        path = name.rpartition(".")[0]
        layer = trace.layer_of.get(path) or (path or "net" if path in begins or not last else last)
        layers.setdefault(layer, []).append(name)
        last = layer
    return {l: tuple(names) for l, names in layers.items() if names}


def _inputs(node: fx.Node, trace: _Trace) -> list[Group | None]:
    return [trace.carries.get(a) for a in node.all_input_nodes]


def _visit(node: fx.Node, modules: Mapping[str, nn.Module], trace: _Trace) -> None:
    carried = _inputs(node, trace)
    source = carried[0] if carried else None
    if node.op == "call_module":
        path = str(node.target)
        trace.carries[node] = _visit_module(node, path, modules[path], source, trace)
        return
    if node.op == "output":
        for g in carried:
            trace.fix(g, "they are the net's output")
    passes = (node.op == "call_function" and node.target in PASS_FUNCTIONS) or (
        node.op == "call_method" and node.target in PASS_METHODS
    )
    if passes:
        trace.carries[node] = source
    elif not (node.op == "call_method" and node.target in SHAPES) and node.target is not getattr:
        summed = node.op == "call_function" and node.target in SUMS
        for g in carried:
            trace.fix(g, "a residual sum reads them" if summed else f"{_name(node)} reads them")
        trace.carries[node] = None


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _visit_module(node: fx.Node, path: str, m: nn.Module, source: Group | None, trace: _Trace) -> Group | None:
    """Record one module's layer and wiring; return the units its output carries."""
    if isinstance(m, WEIGHTED):
        return _visit_weighted(node, path, m, source, trace)
    if isinstance(m, NORMS):
        trace.layer_of[path] = trace.layer_of.get(source or "", trace.last)
        if source is None:
            return None
        for name in ("weight", "bias", "running_mean", "running_var"):
            trace.axes[f"{path}.{name}"] = (Axis(source),)
        if isinstance(m, nn.GroupNorm):
            size = m.num_channels // m.num_groups
            trace.groups[source] = replace(trace.groups[source], granule=size)
        return source
    if isinstance(m, PASSES):
        return source
    trace.fix(source, f"{type(m).__name__} reads them")
    if any(True for _ in m.parameters()):
        starts = any(w.dim() >= 2 for w in m.parameters())
        trace.layer_of[path] = path if starts else trace.last
        trace.last = trace.layer_of[path]
    return None


def _visit_weighted(node: fx.Node, path: str, m: nn.Module, source: Group | None, trace: _Trace) -> Group:
    if path in trace.groups:  # one weight used twice: its two readers would need two masks
        trace.fix(path, f"{path} is used more than once")
        trace.fix(source, f"{path} is used more than once")
        trace.axes[f"{path}.weight"] = (Axis(path), None)
        return path
    read = node.all_input_nodes[0]
    layer = trace.reader.setdefault(read, path)
    trace.layer_of[path] = trace.last = layer
    weight: Any = m.weight
    out_units, in_units = weight.shape[0], weight.shape[1]
    trace.groups[path] = UnitGroup(out_units, layer)
    reads: Axis | None = None
    if getattr(m, "groups", 1) != 1:
        trace.fix(source, f"the grouped convolution {path} reads them")
        trace.fix(path, "a grouped convolution writes them")
    elif source is not None:
        repeat, rest = divmod(in_units, trace.groups[source].units)
        if rest:
            trace.fix(source, f"{path} reads them after a change of shape")
        else:
            reads = Axis(source, repeat)  # after a flatten each channel owns `repeat` inputs
    trace.axes[f"{path}.weight"] = (Axis(path), reads)
    trace.axes[f"{path}.bias"] = (Axis(path),)
    return path
