"""Recognise a plain MLP in a traced network: linear layers with ReLU between them, nothing else.

Clients of such a network can train stacked, with an explicit backward pass
(`fedp3.client.stacked`).
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedp3.core.types import Chain

OPERATIONS = {
    nn.Linear: "linear",
    nn.ReLU: "relu",
    F.relu: "relu",
    torch.relu: "relu",
    "relu": "relu",
    nn.Flatten: "flatten",
    torch.flatten: "flatten",
    "flatten": "flatten",
    nn.Identity: "identity",
}


def find_chain(graph: fx.Graph, net: nn.Module) -> Chain | None:
    """Return the layers of a plain MLP in order; None if the network is anything else."""
    modules = dict(net.named_modules())
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules.values()):
        return None
    nodes = list(graph.nodes)
    if not all(b.all_input_nodes == [a] for a, b in pairwise(nodes)):
        return None
    steps = [(_operation(node, modules), node) for node in nodes]
    operations = [operation for operation, _ in steps if operation != "identity"]
    if operations[0] != "placeholder" or operations[-1] != "output":
        return None
    body = operations[1:-1]
    flattens = body[:1] == ["flatten"]
    if flattens:
        body = body[1:]
    if not _alternates(body):
        return None
    paths = [str(node.target) for operation, node in steps if operation == "linear"]
    layers = tuple((f"{path}.weight", _bias_name(path, modules)) for path in paths)
    used_twice = len(set(paths)) < len(paths)
    named = {name for pair in layers for name in pair if name}
    if used_twice or named != {name for name, _ in net.named_parameters()}:
        return None
    return Chain(layers, flattens)


def _alternates(operations: list[str]) -> bool:
    """Whether these are linear layers with one ReLU between each two."""
    linear, relu = operations[::2], operations[1::2]
    return (
        len(linear) == len(relu) + 1
        and all(operation == "linear" for operation in linear)
        and all(operation == "relu" for operation in relu)
    )


def _bias_name(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    return None if modules[path].bias is None else f"{path}.bias"


def _operation(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Name an operation; a flatten that does not leave (N, numbers) is none of a plain MLP."""
    module = modules[str(node.target)] if node.op == "call_module" else None
    operation = OPERATIONS.get(node.target if module is None else type(module), node.op)
    if operation != "flatten":
        return operation
    if isinstance(module, nn.Flatten):
        sides: tuple[object, ...] = (module.start_dim, module.end_dim)
    else:
        sides = (*node.args[1:], node.kwargs.get("end_dim", -1))
    return operation if sides == (1, -1) else "other"
