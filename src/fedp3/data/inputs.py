"""Inputs of a network: one tensor, several in a tuple, or named ones in a dict.

A network is called with a tensor as its only argument, with a tuple as its arguments, and with a
dict as its arguments by name, as Hugging Face's models are.  Records are along dimension 0 of every
tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedp3.core.errors import InputError

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some records: their inputs and their targets."""

    x: Inputs
    y: Tensor


def call(net: nn.Module, x: Inputs) -> Any:
    """The outputs of a network for these inputs."""
    if isinstance(x, Tensor):
        return net(x)
    args, named = as_arguments(x)
    return net(*args, **named)


def as_arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs as positional and named arguments."""
    if isinstance(x, Tensor):
        return (x,), {}
    return ((), dict(x)) if isinstance(x, Mapping) else (x, {})


def map_tensors(f: Callable[[Tensor], Tensor], x: Inputs) -> Any:
    """Inputs of the same structure, with f of every tensor."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping):
        return {name: f(w) for name, w in x.items()}
    return tuple(f(w) for w in x)


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors, in order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values() if isinstance(x, Mapping) else x)


def combine(f: Callable[..., Tensor], first: Inputs, *others: Inputs) -> Any:
    """Inputs of the structure of `first`, with f of the tensors at each place."""
    places = zip(*(tensors_of(x) for x in (first, *others)), strict=True)
    values = iter([f(*at_place) for at_place in places])
    return map_tensors(lambda w: next(values), first)


def to_device(x: Inputs, device: str) -> Any:
    """The inputs on this device."""
    return x.to(device) if isinstance(x, Tensor) else map_tensors(lambda w: w.to(device), x)


def chunks(x: Inputs, parts: int) -> Sequence[Any]:
    """The records in this many parts, or fewer, as `Tensor.chunk` cuts them."""
    if isinstance(x, Tensor):
        return x.chunk(parts)
    pieces = [w.chunk(parts) for w in tensors_of(x)]
    return [combine(lambda w, piece: piece, x, piece) for piece in zip(*pieces, strict=True)]


def only_tensor(x: Inputs, who: str) -> Tensor:
    """The only tensor of inputs; refused if there are several.

    Args:
        x: the inputs.
        who: what needs one tensor, as the beginning of the error message.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"{who} takes one tensor per record, but the data have several")
    return x
