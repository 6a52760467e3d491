"""LoRA: a linear module stays as it is, and two thin matrices are trained beside it.

    y = W x + b + scale B (A x)        A: rank x inputs,  B: outputs x rank

A rank is a width: the pair of row k of A and column k of B is a unit, as a neuron is.  All adapters
of one layer share their units, so that a device of rank r has r of them in each of its adapters.
B starts at zero, so that the network starts as it was.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedp3.core.types import Axis, Group, Layer, LayerMap, UnitGroup

A, B = "a.weight", "b.weight"  # names of the two matrices within an adapter
FOLD = "fold.weight"  # what was learned in earlier rounds and is no product of this rank any more
FOLDED = "folded"  # the layer of these
TRANSPOSED = "Conv1D"  # the class that GPT-2 of Hugging Face uses: its weight is inputs x outputs


class LoRALinear(nn.Module):
    """A linear module with an adapter.

    Args:
        base: the module, whose tensors are frozen.
        rank: the number of pairs.
        scale: the factor of the product, often written as alpha / rank.
        folds: whether there is a matrix of the size of the weight beside it, for products of
            earlier rounds.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float, *, folds: bool = False) -> None:
        super().__init__()
        inputs, outputs = linear_sizes(base)
        self.base = base
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)
        self.fold = nn.Linear(inputs, outputs, bias=False) if folds else None
        self.scale = scale
        if self.fold is not None:
            nn.init.zeros_(self.fold.weight)
        nn.init.uniform_(self.a.weight, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the module and of its adapter, added up."""
        outputs: Tensor = self.base(x) + self.scale * self.b(self.a(x))
        return outputs if self.fold is None else outputs + self.fold(x)


def is_linear(m: nn.Module) -> bool:
    """Whether a module can have an adapter: a plain linear one, or Hugging Face's `Conv1D`."""
    return type(m) is nn.Linear or (type(m).__name__ == TRANSPOSED and hasattr(m, "nf"))


def linear_sizes(m: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear module."""
    weight: Any = m.weight
    rows, columns = weight.shape
    return (rows, columns) if type(m).__name__ == TRANSPOSED else (columns, rows)


def lora_modules(net: nn.Module) -> dict[str, LoRALinear]:
    """The adapters of a network by path."""
    return {path: m for path, m in net.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def merge(net: nn.Module) -> None:
    """Add every adapter to the weight beside it, in place, and remove it.

    The weights must be copies of their own (`fedp3.models.frozen.thaw`).
    """
    for path, adapter in lora_modules(net).items():
        change = adapter.scale * (adapter.b.weight.double() @ adapter.a.weight.double())
        if adapter.fold is not None:
            change += adapter.fold.weight.double()
        weight: Any = adapter.base.weight
        if type(adapter.base).__name__ == TRANSPOSED:
            change = change.T
        weight.copy_((weight.double() + change).to(weight.dtype))
        put_module(net, path, adapter.base)


def put_module(net: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of another one."""
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, module)


# --------------------------------------------------------------------------- ranks as units


def rank_group(layer: Layer) -> Group:
    """The name of the group of a layer's rank-1 pairs."""
    return f"{layer}.rank"


def rank_units(
    net: nn.Module, layer_of: Mapping[str, Layer]
) -> tuple[dict[Group, UnitGroup], dict[str, tuple[Axis | None, ...]]]:
    """The groups of rank-1 pairs of a network, and where its adapters have them.

    Args:
        net: the network.
        layer_of: the layer of each tensor that is trained; A may be frozen.
    """
    groups: dict[Group, UnitGroup] = {}
    axes: dict[str, tuple[Axis | None, ...]] = {}
    for path, adapter in lora_modules(net).items():
        layer = layer_of[f"{path}.{B}"]
        groups[rank_group(layer)] = UnitGroup(adapter.a.out_features, layer)
        axes[f"{path}.{A}"] = (Axis(rank_group(layer)), None)
        axes[f"{path}.{B}"] = (None, Axis(rank_group(layer)))
    return groups, axes


@dataclass(frozen=True, slots=True)
class Pair:
    """The names of an adapter's matrices."""

    layer: Layer
    a: str
    b: str
    fold: str


def pairs_of(layers: LayerMap) -> Iterator[Pair]:
    """The adapters of which both matrices are trained."""
    for l, names in layers.layers.items():
        for b in names:
            path = b.removesuffix(B)
            a, fold = path + A, path + FOLD
            if b.endswith(f".{B}") and a in names and rank_group(l) in layers.groups:
                yield Pair(l, a, b, fold)


def folded_apart(
    layers: Mapping[Layer, tuple[str, ...]], net: nn.Module
) -> dict[Layer, tuple[str, ...]]:
    """The layers, preceded by a separate layer of what was learned in earlier rounds."""
    folds = tuple(f"{p}.{FOLD}" for p, m in lora_modules(net).items() if m.fold is not None)
    if not folds:
        return dict(layers)
    apart = {l: tuple(n for n in names if n not in folds) for l, names in layers.items()}
    return {FOLDED: folds, **{l: names for l, names in apart.items() if names}}
