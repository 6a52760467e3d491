"""The units of a net, followed through its graph (torch.fx) from the weight that writes them to those that read them.

A module with a weight of two or more sides begins a layer; normalisation joins the layer whose output it normalises;
a module that reads the same tensor as an earlier layer joins that layer (a ResNet's 1x1 shortcut joins the first
convolution of its block).  Units pass through whatever maps zero to zero; where they cannot be followed (residual sums,
outputs, unknown operations) they are marked fixed, with the reason.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedp3.types import Axis, Group, Layer, UnitGroup
from fedp3.unsaved import untouched

ROOT = "net"  # the layer of tensors that belong to no module but the net itself
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
LAYER_NORMS = (nn.LayerNorm, nn.RMSNorm)  # they mix units, and their scales may have several sides
# What maps a zero unit to a zero unit and keeps units apart: modules, functions and names of methods.
POINTWISE = {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    F.relu, F.relu6, torch.relu, F.leaky_relu, F.gelu, F.silu, F.elu, torch.tanh, F.dropout, F.dropout2d,
    "relu", "relu_", "tanh", "contiguous",
}  # fmt: skip
POOLS = {  # these too, but along whatever sides come last: only channels are safe from them
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
    torch.max_pool2d, torch.avg_pool1d,
}  # fmt: skip
FLATTENS = {nn.Flatten, torch.flatten, "flatten"}
RESHAPES = {"view", "reshape"}
SUMS = {operator.add, operator.iadd, torch.add}
# What gives out as many sides as it takes in, besides POINTWISE, SUMS and Linear: modules of these files, functions.
KEEPS_SIDES_IN = {f"torch.nn.modules.{file}" for file in ("activation", "dropout", "batchnorm", "normalization")}
KEEPS_SIDES = {
    operator.mul, operator.sub, torch.mul, torch.sub, torch.cat, torch.sigmoid, F.sigmoid, "sigmoid",
    torch.softmax, F.softmax, "softmax", torch.log_softmax, F.log_softmax, "log_softmax", F.softplus, F.layer_norm,
}  # fmt: skip
ASKS = {"size", "dim", "shape", "ndim", "dtype", "device"}  # these give no units, only facts about the tensor


@dataclass(frozen=True, slots=True)
class _Units:
    """Units on their way through the net, and where in the tensor they lie.

    channel: side 1 of (N, units, ...); last: the last side, as Linear leaves them; flat: runs of side 1 of
    (N, units * repeat), as flattening leaves channels.
    """

    group: Group
    place: Literal["channel", "last", "flat"]


@dataclass(slots=True)
class Trace:
    """What one walk over the graph collects."""

    layer_of: dict[str, Layer] = field(default_factory=dict)  # module path -> layer
    axes: dict[str, tuple[Axis | None, ...]] = field(default_factory=dict)
    groups: dict[Group, UnitGroup] = field(default_factory=dict)
    carries: dict[fx.Node, _Units] = field(default_factory=dict)  # node -> units in its output
    reader: dict[fx.Node, Layer] = field(default_factory=dict)  # node -> first layer that reads it
    norms: set[str] = field(default_factory=set)  # normalisations met
    shared: set[str] = field(default_factory=set)  # modules whose weight is used more than once
    flat: frozenset[fx.Node] = frozenset()  # nodes known to give out two sides
    last: Layer = ""

    def fix(self, units: _Units | None, why: str) -> None:
        if units is not None:
            self.fix_group(units.group, why)

    def fix_group(self, group: Group, why: str) -> None:
        if not self.groups[group].fixed:
            self.groups[group] = replace(self.groups[group], fixed=why)

    def claim(self, path: str, m: nn.Module, layer: Layer) -> None:
        """Give a module, with what is inside it, to a layer."""
        for inside, _ in m.named_modules(prefix=path):
            self.layer_of[inside] = layer
        self.last = layer


def follow(net: nn.Module) -> tuple[Trace, str]:
    """Walk once over the net's graph; where it cannot be traced, nothing is found, and the note says why."""
    trace, modules = Trace(), dict(net.named_modules())
    try:
        # A net that draws in its forward pass, or writes to its buffers, does so while it is traced.
        with untouched(net), torch.random.fork_rng(devices=[]):
            graph = fx.symbolic_trace(net).graph
    except Exception as error:  # fx raises many kinds, all meaning: this net cannot be traced
        why = (str(error).splitlines() or [""])[0][:120]
        return trace, f"the net cannot be traced ({type(error).__name__}: {why})"
    trace.flat = _flat(graph, modules)
    for node in graph.nodes:
        _visit(node, modules, trace)
    _fix_shared(trace)
    return trace, ""


def _visit(node: fx.Node, modules: Mapping[str, nn.Module], trace: Trace) -> None:
    """Record what one operation does: its layer, its wiring, and the units in its output."""
    m = modules[str(node.target)] if node.op == "call_module" else None
    source = trace.carries.get(node.all_input_nodes[0]) if node.all_input_nodes else None
    if isinstance(m, WEIGHTED):
        trace.carries[node] = _visit_weighted(node, m, source, trace)
        return
    after = _visit_norm(node, m, source, trace) if isinstance(m, NORMS) else _passed(node, m, source)
    if after is not None:
        trace.carries[node] = after
    elif not isinstance(m, NORMS) and not _asks(node):
        _visit_other(node, m, modules, trace)


def _flat(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> frozenset[fx.Node]:
    """Nodes that give out (N, numbers): what a flatten leaves, the logits, and what must have as many sides as these.

    Nothing else tells neurons (N, units) from tokens (N, tokens, units): no sample runs through the graph.
    """
    flat, links = set(), []
    for node in graph.nodes:
        m = modules[str(node.target)] if node.op == "call_module" else None
        op: Any = node.target if m is None else type(m)
        if op in FLATTENS | RESHAPES and _keeps_batch(node, m):
            flat.add(node)
        elif node.op == "output":
            flat.update(a for a in node.args if isinstance(a, fx.Node))
        elif op in POINTWISE | SUMS | KEEPS_SIDES or type(m).__module__ in KEEPS_SIDES_IN or isinstance(m, nn.Linear):
            links.append(node)
    while True:  # until nothing more follows, backwards or forwards
        read = {a for node in links if node in flat for a in node.all_input_nodes}
        more = read | {node for node in links if node.all_input_nodes and flat.issuperset(node.all_input_nodes)}
        if more <= flat:
            return frozenset(flat)
        flat |= more


def _asks(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ASKS
    return node.target is getattr and node.args[1] in ASKS


def _passed(node: fx.Node, m: nn.Module | None, units: _Units | None) -> _Units | None:
    """The units behind an operation that keeps them apart and maps zero to zero; None if it may not."""
    op: Any = node.target if m is None else type(m)
    if units is None or op in POINTWISE or (op in POOLS and units.place == "channel"):
        return units
    reshapes = op in RESHAPES and units.place != "flat"
    if (reshapes or op in FLATTENS) and _keeps_batch(node, m):
        return replace(units, place="flat") if units.place == "channel" else units
    return None


def _keeps_batch(node: fx.Node, m: nn.Module | None) -> bool:
    """Whether a flatten, view or reshape makes (N, everything else) of its input."""
    if isinstance(m, nn.Flatten):
        return (m.start_dim, m.end_dim) == (1, -1)
    given: Any = node.args[1:]
    if node.target in RESHAPES:
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
        # A literal number of features, as in view(-1, 400), would not fit once a unit is gone.
        return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and sizes[1] == -1
    dims = dict(zip(("start_dim", "end_dim"), given, strict=False)) | node.kwargs
    return (dims.get("start_dim", 0), dims.get("end_dim", -1)) == (1, -1)


def _repeat(units: _Units, size: int, trace: Trace) -> int:
    """How many of these `size` entries each unit owns; 0: units and entries do not line up."""
    repeat, rest = divmod(size, trace.groups[units.group].units)
    return 0 if rest or (repeat > 1 and units.place != "flat") else repeat


def _visit_weighted(node: fx.Node, m: nn.Module, source: _Units | None, trace: Trace) -> _Units:
    """A weight writes units of its own, and reads those of `source` where they line up with its inputs."""
    path = str(node.target)
    linear = isinstance(m, nn.Linear)
    writes = _Units(path, "last" if linear else "channel")
    if path in trace.groups:
        trace.fix(source, f"{path} is used more than once")
        trace.shared.add(path)
        return writes
    trace.claim(path, m, trace.reader.setdefault(node.all_input_nodes[0], path))
    weight: Any = m.weight
    trace.groups[path] = UnitGroup(weight.shape[0], trace.last)
    reads: Axis | None = None
    if getattr(m, "groups", 1) != 1 or not isinstance(weight, nn.Parameter):
        kind = "grouped convolution" if isinstance(weight, nn.Parameter) else "reparametrised weight of"
        trace.fix(source, f"the {kind} {path} reads them")
        trace.fix(writes, f"the {kind} {path} writes them")
    elif source is not None:
        repeat = _repeat(source, weight.shape[1], trace)
        if repeat and linear == (source.place != "channel"):
            reads = Axis(source.group, repeat)  # after a flatten each channel owns `repeat` inputs
        else:
            trace.fix(source, f"{path} reads them after a change of shape")
    trace.axes[f"{path}.weight"] = (Axis(path), reads)
    trace.axes[f"{path}.bias"] = (Axis(path),)
    return writes


def _visit_norm(node: fx.Node, m: nn.Module, source: _Units | None, trace: Trace) -> _Units | None:
    """Normalisation belongs to the units it normalises: one scale, shift and statistic for each of their entries."""
    path = str(node.target)
    if path in trace.norms:
        trace.fix(source, f"{path} is used more than once")
        trace.shared.add(path)
        return source
    trace.norms.add(path)
    layer = trace.layer_of[source.group] if source is not None else trace.last
    if layer:  # else nothing came before: it joins the first layer
        trace.layer_of[path] = layer
    if source is None:
        return None
    norm: Any = m
    size: int = norm.num_channels if isinstance(m, nn.GroupNorm) else norm.num_features
    repeat = _repeat(source, size, trace)
    if not repeat:
        trace.fix(source, f"{path} reads them after a change of shape")
        return None
    if source.place == "last" and node.all_input_nodes[0] not in trace.flat:
        trace.fix(source, f"{path} normalises side 1, where tokens may be in their place")
        return None
    for name in ("weight", "bias", "running_mean", "running_var"):
        trace.axes[f"{path}.{name}"] = (Axis(source.group, repeat),)
    if isinstance(m, nn.GroupNorm):
        if m.weight is None:  # a smaller net finds the number of its groups by its tensors
            trace.fix(source, f"the GroupNorm {path} has no tensors that could be cut with them")
        u = trace.groups[source.group]
        block = math.lcm(size // m.num_groups, repeat) // repeat
        trace.groups[source.group] = replace(u, granule=math.lcm(u.granule, block))
    return source


def _visit_other(node: fx.Node, m: nn.Module | None, modules: Mapping[str, nn.Module], trace: Trace) -> None:
    """An operation nothing is known about: what it reads is fixed, and its weights begin layers of their own."""
    name = type(m).__name__ if m is not None else getattr(node.target, "__name__", str(node.target))
    why = "a residual sum reads them" if node.target in SUMS else f"{name} reads them"
    for read in node.all_input_nodes:
        trace.fix(trace.carries.get(read), "they are the net's output" if node.op == "output" else why)
    if m is not None:
        source = trace.carries.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if isinstance(m, LAYER_NORMS) and source is not None:
            trace.layer_of.setdefault(str(node.target), trace.layer_of[source.group])
        for path, inside in m.named_modules(prefix=str(node.target)):
            _begin(path, inside, [*inside.parameters(recurse=False)], trace)
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        trace.shared.add(path)  # matters where the module is run as well
        weight = getattr(modules.get(path), name, None)  # None: a constant that fx made up
        _begin(path, modules.get(path), [] if weight is None else [weight], trace)


def _begin(path: str, m: nn.Module | None, weights: Sequence[Any], trace: Trace) -> None:
    """Let a module that is not followed begin a layer, or join the last one."""
    if path not in trace.layer_of and weights:
        if any(w.dim() >= 2 for w in weights) and not isinstance(m, LAYER_NORMS):
            trace.last = path or ROOT
        if trace.last:
            trace.layer_of[path] = trace.last


def _fix_shared(trace: Trace) -> None:
    """One tensor used at two places would need two masks."""
    for path in trace.shared:
        own = trace.axes.get(f"{path}.weight", ())
        for axis in own:
            if axis is not None:
                trace.fix_group(axis.group, f"{path} is used more than once")
        if path in trace.groups:
            trace.axes[f"{path}.weight"] = (Axis(path), None)
