"""Trace the units of a network through its graph, from the weight that writes them to its readers.

The graph is that of torch.fx.  These rules group modules into layers:

- A module with a weight of two or more dimensions begins a layer.
- Normalisation joins the layer whose output it normalises.
- A module that reads the same tensor as an earlier layer joins that layer.  A ResNet's 1x1 shortcut
  joins the first convolution of its block this way.

Units pass through every operation that maps zero to zero.  Where they cannot be traced further
(residual sums, outputs, unknown operations) they are marked as fixed, with the reason.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedp3.core.types import Axis, Chain, Group, Layer, UnitGroup
from fedp3.models.buffers import restored_buffers
from fedp3.models.frozen import frozen_in, own_weights
from fedp3.models.mlp_chain import find_chain

ROOT = "net"  # the layer of tensors that belong to the network itself and to none of its modules
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
# These mix units, and their scales may have several dimensions.
LAYER_NORMS = (nn.LayerNorm, nn.RMSNorm)

# The sets below contain modules, functions, and names of methods.
# Operations that map a zero unit to a zero unit and do not mix units.
POINTWISE = {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    F.relu, F.relu6, torch.relu, F.leaky_relu, F.gelu, F.silu, F.elu, torch.tanh,
    F.dropout, F.dropout2d,
    "relu", "relu_", "tanh", "contiguous",
}  # fmt: skip
# The same, but they pool the last dimensions, so that only channels pass through unmixed.
POOLS = {
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d,
    F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
    torch.max_pool2d, torch.avg_pool1d,
}  # fmt: skip
FLATTENS = {nn.Flatten, torch.flatten, "flatten"}
RESHAPES = {"view", "reshape"}
SUMS = {operator.add, operator.iadd, torch.add}
# Operations whose output has as many dimensions as their input, besides POINTWISE, SUMS and Linear:
# the modules of these files, and these functions and methods.
SAME_DIMENSIONS_FILES = {
    f"torch.nn.modules.{file}" for file in ("activation", "dropout", "batchnorm", "normalization")
}
SAME_DIMENSIONS = {
    operator.mul, operator.sub, torch.mul, torch.sub, torch.cat,
    torch.sigmoid, F.sigmoid, "sigmoid",
    torch.softmax, F.softmax, "softmax", torch.log_softmax, F.log_softmax, "log_softmax",
    F.softplus, F.layer_norm,
}  # fmt: skip
# Methods and attributes that return facts about a tensor, and no units.
QUERIES = {"size", "dim", "shape", "ndim", "dtype", "device"}


@dataclass(frozen=True, slots=True)
class _Units:
    """Units at one point of the network.

    Args:
        group: the group that they belong to.
        place: where they are in the tensor.
            channel: dimension 1 of (N, units, ...);
            last: the last dimension, as Linear leaves them;
            flat: consecutive entries of dimension 1 of (N, units * repeat), as flattening leaves
            channels.
    """

    group: Group
    place: Literal["channel", "last", "flat"]


@dataclass(slots=True)
class Trace:
    """The results of one walk over the graph.

    Args:
        layer_of: the layer of each module, by path.
        axes: the dimensions of each tensor that are connected to units.
        groups: the groups of units.
        carries: the units in the output of each node.
        reader: the first layer that reads each node.
        norms: the normalisations that were visited.
        shared: the modules whose weight is used more than once.
        flat: the nodes whose output is known to have two dimensions.
        last: the layer of the last weight that was visited.
        chain: the layers of a plain MLP; None if the network is anything else.
    """

    layer_of: dict[str, Layer] = field(default_factory=dict)
    axes: dict[str, tuple[Axis | None, ...]] = field(default_factory=dict)
    groups: dict[Group, UnitGroup] = field(default_factory=dict)
    carries: dict[fx.Node, _Units] = field(default_factory=dict)
    reader: dict[fx.Node, Layer] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    flat: frozenset[fx.Node] = frozenset()
    last: Layer = ""
    chain: Chain | None = None

    def fix(self, units: _Units | None, why: str) -> None:
        """Mark the group of these units as fixed."""
        if units is not None:
            self.fix_group(units.group, why)

    def fix_group(self, group: Group, why: str) -> None:
        """Mark a group as fixed; the first reason stands."""
        if not self.groups[group].fixed:
            self.groups[group] = replace(self.groups[group], fixed=why)

    def claim(self, path: str, m: nn.Module, layer: Layer) -> None:
        """Assign a module and its submodules to a layer."""
        for inner_path, _ in m.named_modules(prefix=path):
            self.layer_of[inner_path] = layer
        self.last = layer


def trace_units(net: nn.Module) -> tuple[Trace, str]:
    """Walk once over the network's graph.

    Returns the trace and a note.  Where the network cannot be traced, the trace is empty and the
    note states the reason; otherwise the note is empty.
    """
    trace, modules = Trace(), dict(net.named_modules())
    try:
        # Tracing executes `forward`, which may draw random numbers or write to buffers.
        with restored_buffers(net), torch.random.fork_rng(devices=[]):
            graph = fx.symbolic_trace(net).graph
    except Exception as error:  # fx raises errors of many kinds
        why = (str(error).splitlines() or [""])[0][:120]
        return trace, f"the network cannot be traced ({type(error).__name__}: {why})"
    trace.flat = _flat_nodes(graph, modules)
    for node in graph.nodes:
        _visit(node, modules, trace)
    _fix_shared(trace)
    trace.chain = find_chain(graph, net)
    return trace, ""


def _module(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules[str(node.target)] if node.op == "call_module" else None


def _visit(node: fx.Node, modules: Mapping[str, nn.Module], trace: Trace) -> None:
    """Record one operation: its layer, how it connects units, and the units in its output."""
    m = _module(node, modules)
    source = trace.carries.get(node.all_input_nodes[0]) if node.all_input_nodes else None
    if isinstance(m, WEIGHTED):
        trace.carries[node] = _visit_weighted(node, m, source, trace)
        return
    if isinstance(m, NORMS):
        after = _visit_norm(node, m, source, trace)
    else:
        after = _pass_through(node, m, source)
        if after is None and not _is_query(node):
            _visit_other(node, m, modules, trace)
    if after is not None:
        trace.carries[node] = after


def _flat_nodes(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> frozenset[fx.Node]:
    """The nodes whose output is known to be (N, numbers).

    These are the outputs of a flatten, the logits, and all nodes that must have as many dimensions
    as these.  Nothing else distinguishes neurons (N, units) from tokens (N, tokens, units), because
    no sample runs through the graph.
    """
    flat, links = set(), []
    for node in graph.nodes:
        m = _module(node, modules)
        op: Any = node.target if m is None else type(m)
        if op in FLATTENS | RESHAPES and _keeps_batch(node, m):
            flat.add(node)
        elif node.op == "output":
            flat.update(a for a in node.args if isinstance(a, fx.Node))
        elif _keeps_dimensions(op, m):
            links.append(node)
    while True:  # propagate backwards and forwards until nothing changes
        read = {a for node in links if node in flat for a in node.all_input_nodes}
        more = read | {
            node for node in links if node.all_input_nodes and flat.issuperset(node.all_input_nodes)
        }
        if more <= flat:
            return frozenset(flat)
        flat |= more


def _keeps_dimensions(op: Any, m: nn.Module | None) -> bool:
    """Whether the output of an operation has as many dimensions as its input."""
    if op in POINTWISE | SUMS | SAME_DIMENSIONS:
        return True
    return isinstance(m, nn.Linear) or type(m).__module__ in SAME_DIMENSIONS_FILES


def _is_query(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in QUERIES
    return node.target is getattr and node.args[1] in QUERIES


def _pass_through(node: fx.Node, m: nn.Module | None, units: _Units | None) -> _Units | None:
    """The units behind an operation that does not mix them and maps zero to zero.

    None means that there are no units, or that the operation may be of another kind.
    """
    op: Any = node.target if m is None else type(m)
    if units is None or op in POINTWISE or (op in POOLS and units.place == "channel"):
        return units
    reshapes = op in RESHAPES and units.place != "flat"
    if (reshapes or op in FLATTENS) and _keeps_batch(node, m):
        return replace(units, place="flat") if units.place == "channel" else units
    return None


def _keeps_batch(node: fx.Node, m: nn.Module | None) -> bool:
    """Whether a flatten, view or reshape turns its input into (N, everything else)."""
    if isinstance(m, nn.Flatten):
        return (m.start_dim, m.end_dim) == (1, -1)
    given: Any = node.args[1:]
    if node.target in RESHAPES:
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
        # A literal number of features, as in view(-1, 400), would be wrong without some units.
        return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and sizes[1] == -1
    dims = dict(zip(("start_dim", "end_dim"), given, strict=False)) | node.kwargs
    return (dims.get("start_dim", 0), dims.get("end_dim", -1)) == (1, -1)


def _repeat(units: _Units, size: int, trace: Trace) -> int:
    """How many of `size` entries belong to each unit; 0 if entries do not correspond to units."""
    repeat, remainder = divmod(size, trace.groups[units.group].units)
    if remainder or (repeat > 1 and units.place != "flat"):
        return 0
    return repeat


def _visit_weighted(node: fx.Node, m: nn.Module, source: _Units | None, trace: Trace) -> _Units:
    """Record a weight: it writes new units, and may read those of `source`."""
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
    if not isinstance(weight, nn.Parameter):
        kind = "frozen" if "weight" in frozen_in(m) else "reparametrised"
        _fix_both(f"{kind} weight of {path}", source, writes, trace)
    elif getattr(m, "groups", 1) != 1:
        _fix_both(f"grouped convolution {path}", source, writes, trace)
    elif source is not None:
        repeat = _repeat(source, weight.shape[1], trace)
        if repeat and linear == (source.place != "channel"):
            reads = Axis(source.group, repeat)  # after a flatten each channel has `repeat` inputs
        else:
            trace.fix(source, f"{path} reads them after a change of shape")
    trace.axes[f"{path}.weight"] = (Axis(path), reads)
    trace.axes[f"{path}.bias"] = (Axis(path),)
    return writes


def _fix_both(what: str, source: _Units | None, writes: _Units, trace: Trace) -> None:
    """Fix the units that a module reads and those that it writes."""
    trace.fix(source, f"the {what} reads them")
    trace.fix(writes, f"the {what} writes them")


def _visit_norm(node: fx.Node, m: nn.Module, source: _Units | None, trace: Trace) -> _Units | None:
    """Record a normalisation: its scales, shifts and statistics belong to the units it reads."""
    path = str(node.target)
    if path in trace.norms:
        trace.fix(source, f"{path} is used more than once")
        trace.shared.add(path)
        return source
    trace.norms.add(path)
    layer = trace.layer_of[source.group] if source is not None else trace.last
    if layer:  # otherwise no layer came before, and the norm joins the first layer
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
        trace.fix(source, f"{path} normalises dimension 1, where tokens may be in their place")
        return None
    for name in ("weight", "bias", "running_mean", "running_var"):
        trace.axes[f"{path}.{name}"] = (Axis(source.group, repeat),)
    if isinstance(m, nn.GroupNorm):
        if m.weight is None:  # a smaller network computes its number of groups from the tensors
            trace.fix(source, f"the GroupNorm {path} has no tensors that could be pruned with them")
        group = trace.groups[source.group]
        block = math.lcm(size // m.num_groups, repeat) // repeat
        trace.groups[source.group] = replace(group, granule=math.lcm(group.granule, block))
    return source


def _visit_other(
    node: fx.Node, m: nn.Module | None, modules: Mapping[str, nn.Module], trace: Trace
) -> None:
    """Record an unknown operation: the units it reads are fixed, and its weights begin layers."""
    why = _why_fixed(node, m)
    for read in node.all_input_nodes:
        trace.fix(trace.carries.get(read), why)
    if m is not None:
        source = trace.carries.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if isinstance(m, LAYER_NORMS) and source is not None:
            trace.layer_of.setdefault(str(node.target), trace.layer_of[source.group])
        for path, inner in m.named_modules(prefix=str(node.target)):
            _begin_layer(path, inner, list(own_weights(inner).values()), trace)
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        trace.shared.add(path)  # matters only if the module is executed as well
        weight = getattr(modules.get(path), name, None)  # None: a constant that fx created
        _begin_layer(path, modules.get(path), [] if weight is None else [weight], trace)


def _why_fixed(node: fx.Node, m: nn.Module | None) -> str:
    if node.op == "output":
        return "they are the network's output"
    if node.target in SUMS:
        return "a residual sum reads them"
    if m is not None:
        return f"{type(m).__name__} reads them"
    return f"{getattr(node.target, '__name__', node.target)} reads them"


def _begin_layer(path: str, m: nn.Module | None, weights: Sequence[Any], trace: Trace) -> None:
    """Let a module that is not traced begin a layer, or join the last one."""
    if path in trace.layer_of or not weights:
        return
    if any(w.dim() >= 2 for w in weights) and not isinstance(m, LAYER_NORMS):
        trace.last = path or ROOT
    if trace.last:
        trace.layer_of[path] = trace.last


def _fix_shared(trace: Trace) -> None:
    """Fix the units around a tensor that is used twice, which would need two masks."""
    for path in trace.shared:
        for axis in trace.axes.get(f"{path}.weight", ()):
            if axis is not None:
                trace.fix_group(axis.group, f"{path} is used more than once")
        if path in trace.groups:
            trace.axes[f"{path}.weight"] = (Axis(path), None)
