"""Proof that a network computes each record of a batch by itself, from the network's graph.

Ghost clipping shows a network whole batches.  A test on made-up batches cannot show that records
never meet: a network may mix them only in batches of 7, or remember them until a later batch.  So
ghost clipping is for networks whose graph (torch.fx) has only operations of the table `RULES`, each
of which keeps dimension 0 as the records and computes row j from row j.  What runs is then the
traced graph and not the Python code of `forward`, so that nothing but these operations can run.

Everything else is clipped by `torch.func`, which shows a network one record at a time.
"""

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedp3.models.buffers import restored_buffers

# Layers that draw for each record, and for each number or channel of a record.
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_Modes = tuple[tuple[bool, bool], ...]  # whether each module trains, and has its own `forward`
_graphs: "WeakKeyDictionary[nn.Module, dict[_Modes, fx.GraphModule | None]]" = WeakKeyDictionary()


def per_record_graph(net: nn.Module, x: Tensor) -> fx.GraphModule | None:
    """The traced network, with the same modules, if it provably computes record by record.

    Returns None if the network cannot be traced or has an operation that is not in `RULES`.

    Args:
        net: the network; its graph is traced once for each combination of training modes, and of
            modules with another `forward` than their class's.
        x: at least one record, for the number of dimensions.
    """
    modes = tuple((m.training, "forward" in vars(m)) for m in net.modules())
    known = _graphs.setdefault(net, {})
    if modes not in known:
        known[modes] = _proven_graph(net, x)
    return known[modes]


def _proven_graph(net: nn.Module, x: Tensor) -> fx.GraphModule | None:
    if next(net.children(), None) is None:
        return None  # a graph that held the network itself would keep it in the cache for ever
    # A hook is not part of the graph, and neither is a `forward` of one object.
    if any("forward" in vars(m) or any(getattr(m, h) for h in HOOKS) for m in net.modules()):
        return None
    root = nn.Sequential(net)  # a GraphModule has attributes that the network may have too: `code`
    # Tracing and running a network may draw random numbers or write to buffers.
    with restored_buffers(net), torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.random.get_rng_state()
        try:
            graph = fx.GraphModule(root, fx.Tracer().trace(root))
            if not torch.equal(before, torch.random.get_rng_state()):
                return None  # a draw that does not read a record would stay what it was in tracing
            run = _OneRecord(graph)
            run.run(x[:1].clone())
        except Exception:  # fx raises errors of many kinds
            return None
    own = {n for n, _ in (*root.named_parameters(), *root.named_buffers())}
    return graph if _is_proven(graph, run.values, own) else None


class _OneRecord(fx.Interpreter):
    """Runs a graph on one record and stores the value of every node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


# --------------------------------------------------------------------------- the proof


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known about the nodes before the present one."""

    rows: dict[fx.Node, Tensor] = field(default_factory=dict)  # dimension 0 is the records
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)  # the same for all records
    shapes: dict[fx.Node, int] = field(default_factory=dict)  # `x.shape`, with its dimensions
    records: set[fx.Node] = field(default_factory=set)  # the number of records
    numbers: set[fx.Node] = field(default_factory=set)  # other sizes, the same for all batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One operation whose first argument is rows."""

    module: Any  # None for functions and methods
    given: tuple[Any, ...]  # further positional arguments
    named: Mapping[str, Any]
    dims: int  # of the input, with dimension 0
    known: _Known

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """A further argument, by position or by name."""
        return self.given[place] if place < len(self.given) else self.named.get(name, default)

    def within(self, dim: Any, dims: int = 0) -> bool:
        """Whether this is a dimension other than that of the records."""
        dims = dims or self.dims
        return isinstance(dim, int) and -dims <= dim < dims and dim % dims != 0


def _is_proven(graph: fx.GraphModule, values: Mapping[fx.Node, Any], own: set[str]) -> bool:
    """Whether each node follows from nodes before it by a rule.

    Args:
        graph: the traced network.
        values: the value of each node, for one record.
        own: the names of the network's parameters and buffers.
    """
    modules, known = dict(graph.named_modules()), _Known()
    for node in graph.graph.nodes:
        value: Any = values.get(node)
        if node.op == "placeholder":
            if not known.rows:  # further arguments have defaults; an operation may not use them
                known.rows[node] = value
        elif node.op == "get_attr":
            if node.target not in own:
                return False  # `forward` made it in tracing, perhaps from an earlier batch
            known.constants[node] = value
        elif node.op == "output":
            return _in(node.args[0], known.rows) and known.rows[node.args[0]].dim() == 2
        elif not _learns_size(node, known):
            if not (_follows(node, modules, known) and isinstance(value, Tensor)):
                return False
            if value.dim() == 0 or len(value) != 1:
                return False
            known.rows[node] = value
    return False


def _in(a: Any, nodes: Container[fx.Node]) -> TypeGuard[fx.Node]:
    """Whether an argument is one of these nodes; some arguments cannot be hashed."""
    return isinstance(a, fx.Node) and a in nodes


def _learns_size(node: fx.Node, known: _Known) -> bool:
    """Take note of a node that is a size of rows; False if it is anything else."""
    source, *rest = node.args or (None,)
    if _in(source, known.rows) and not node.kwargs:
        dims = known.rows[source].dim()
        if (node.target, rest) in ((getattr, ["shape"]), ("size", [])):
            known.shapes[node] = dims
            return True
        if node.target == "size" and len(rest) == 1 and isinstance(rest[0], int):
            (known.records if rest[0] % dims == 0 else known.numbers).add(node)
            return True
    getitem = node.target is operator.getitem
    if _in(source, known.shapes) and getitem and isinstance(rest[0], int):
        (known.records if rest[0] % known.shapes[source] == 0 else known.numbers).add(node)
        return True
    return False


def _follows(node: fx.Node, modules: Mapping[str, nn.Module], known: _Known) -> bool:
    """Whether the output of an operation is rows, each computed from one row of its inputs."""
    module = modules[str(node.target)] if node.op == "call_module" else None
    op: Any = node.target if module is None else type(module)
    if op in COMBINING:
        return COMBINING[op](node, known)
    source = node.args[0] if node.args else None
    if op not in RULES or not _in(source, known.rows):
        return False
    if op not in RESHAPES and node.all_input_nodes != [source]:
        return False
    call = _Call(
        module=module,
        given=tuple(node.args[1:]),
        named=node.kwargs,
        dims=known.rows[source].dim(),
        known=known,
    )
    return RULES[op](call)


# --------------------------------------------------------------------------- operations on rows


def _at_least(dims: int) -> Callable[[_Call], bool]:
    return lambda call: call.dims >= dims


def _exactly(dims: int) -> Callable[[_Call], bool]:
    return lambda call: call.dims == dims


def _layer_norm(call: _Call) -> bool:
    return len(call.module.normalized_shape) < call.dims


def _over_dims(call: _Call) -> bool:
    """A reduction over, or a softmax along, dimensions that are named."""
    dim = call.argument(0, "dim")
    return _all_within(call, dim if isinstance(dim, tuple | list) else (dim,))


def _all_within(call: _Call, dims: Iterable[Any]) -> bool:
    listed = list(dims)
    return bool(listed) and all(call.within(dim) for dim in listed)


def _flatten(call: _Call) -> bool:
    return call.within(call.argument(0, "start_dim", 0))


def _transpose(call: _Call) -> bool:
    return _all_within(call, (call.argument(0, "dim0"), call.argument(1, "dim1")))


def _permute(call: _Call) -> bool:
    dims = call.argument(0, "dims")
    return (dims[0] if isinstance(dims, tuple | list) else dims) in (0, -call.dims)


def _getitem(call: _Call) -> bool:
    """`x[:, ...]` with numbers and slices only."""
    places = call.given[0]
    return (
        isinstance(places, tuple)
        and places[0] == slice(None)
        and all(p is None or p is ... or isinstance(p, int | slice) for p in places)
    )


def _reshape(call: _Call) -> bool:
    """A view as (records, ...): with the number of records, or -1 and then known sizes.

    The caller checks on one record that the result has one row; since all other sizes are the same
    for every batch, a batch then has one row for each record.
    """
    given = call.argument(0, "shape")
    sizes = given if isinstance(given, tuple | list) else call.given
    if not sizes or not all(isinstance(s, int) or _in(s, call.known.numbers) for s in sizes[1:]):
        return False
    return _in(sizes[0], call.known.records) or (sizes[0] == -1 and -1 not in sizes[1:])


RESHAPES = ("view", "reshape", torch.reshape)
# (modules, functions and names of methods) -> whether row j is computed from row j
RULES: Mapping[Any, Callable[[_Call], bool]] = {
    **dict.fromkeys(
        (
            nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
            nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish,
            nn.Hardsigmoid, nn.Identity, *DROPOUTS,
            F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.tanh,
            F.sigmoid, F.softplus, F.softsign, F.hardtanh, F.hardswish, F.hardsigmoid,
            torch.relu, torch.tanh, torch.sigmoid,
            "relu", "relu_", "tanh", "sigmoid", "contiguous", "float",
        ),
        _at_least(1),
    ),
    nn.Linear: _at_least(2),
    nn.GroupNorm: _at_least(2),
    # With one dimension less, torch would take the records for channels.
    nn.Conv1d: _exactly(3),
    nn.Conv2d: _exactly(4),
    nn.Conv3d: _exactly(5),
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    # Pooling and padding change the last dimensions only.
    **dict.fromkeys(
        (
            nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d,
            F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d,
        ),
        _at_least(2),
    ),
    **dict.fromkeys(
        (
            nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d,
            F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
        ),
        _at_least(3),
    ),
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d), _at_least(4)),
    nn.Softmax: lambda call: call.within(call.module.dim),
    nn.LogSoftmax: lambda call: call.within(call.module.dim),
    **dict.fromkeys(
        (
            F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, "softmax", "log_softmax",
            torch.mean, torch.sum, torch.amax, "mean", "sum", "amax",
        ),
        _over_dims,
    ),
    nn.Flatten: lambda call: call.within(call.module.start_dim),
    nn.Unflatten: lambda call: call.within(call.module.dim),
    torch.flatten: _flatten,
    "flatten": _flatten,
    **dict.fromkeys(RESHAPES, _reshape),
    torch.transpose: _transpose,
    "transpose": _transpose,
    torch.permute: _permute,
    "permute": _permute,
    **dict.fromkeys(
        (torch.unsqueeze, "unsqueeze"),
        lambda call: call.within(call.argument(0, "dim"), call.dims + 1),
    ),
    **dict.fromkeys((torch.squeeze, "squeeze"), _over_dims),
    operator.getitem: _getitem,
}  # fmt: skip


# --------------------------------------------------------------------------- several inputs


def _arithmetic(node: fx.Node, known: _Known) -> bool:
    """Rows with rows of as many dimensions, or with constants that are no rows."""
    if len(node.args) != 2 or node.kwargs:
        return False
    dims = [known.rows[a].dim() for a in node.args if _in(a, known.rows)]
    if not dims or len(set(dims)) > 1:
        return False  # with fewer dimensions, records would be broadcast over features
    return all(_fits(a, dims[0], known) for a in node.args)


def _fits(a: Any, dims: int, known: _Known) -> bool:
    if not isinstance(a, fx.Node):
        return isinstance(a, int | float)
    if a in known.constants:
        constant = known.constants[a]
        return constant.dim() < dims or (constant.dim() == dims and len(constant) == 1)
    return a in known.rows or a in known.numbers


def _concatenation(node: fx.Node, known: _Known) -> bool:
    parts: Any = node.args[0] if node.args else ()
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(parts, tuple | list) or not all(_in(p, known.rows) for p in parts):
        return False
    dims = {known.rows[p].dim() for p in parts}
    if len(dims) != 1 or not {"dim"}.issuperset(node.kwargs):
        return False
    (dims_of_all,) = dims
    return isinstance(dim, int) and dim % dims_of_all != 0


COMBINING: Mapping[Any, Callable[[fx.Node, _Known], bool]] = {
    **dict.fromkeys(
        (
            operator.add, operator.sub, operator.mul, operator.truediv,
            torch.add, torch.sub, torch.mul, torch.div, "add", "sub", "mul", "div",
        ),
        _arithmetic,
    ),
    torch.cat: _concatenation,
}  # fmt: skip
