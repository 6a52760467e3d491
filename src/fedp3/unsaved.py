"""Buffers that no state dict names (`persistent=False`): they come with a net and never travel.

A forward pass may write to them.  So that every task begins with what was given, each has a twin beside it that holds
it: a buffer too, because those go along wherever the net is copied, cut, moved or sent to a worker process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

TWIN = "_as_given"


def remember(net: nn.Module) -> None:
    """Take what the net's unsaved buffers hold now for what was given."""
    saved, buffers = net.state_dict().keys(), dict(net.named_buffers())
    for n, w in buffers.items():
        if n in saved or n.endswith(TWIN):
            continue
        path, _, own = n.rpartition(".")
        twin = buffers.get(n + TWIN)
        if twin is not None and (twin.shape, twin.dtype) == (w.shape, w.dtype):
            twin.copy_(w)  # in place: nets cut from this one have the same twin
        else:
            net.get_submodule(path).register_buffer(own + TWIN, w.detach().clone(), persistent=False)


def twins(net: nn.Module) -> list[Tensor]:
    return [w for n, w in net.named_buffers() if n.endswith(TWIN)]


def given(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """What an unsaved buffer of these tensors held at first."""
    twin = tensors.get(name + TWIN)
    return None if twin is None else twin.clone()


@contextmanager
def untouched(net: nn.Module) -> Iterator[None]:
    """Afterwards all buffers hold what they held before: a net that is traced really writes to them."""
    places = [(m._buffers, dict(m._buffers)) for m in net.modules()]
    values = [(w, w.detach().clone()) for w in net.buffers()]
    try:
        yield
    finally:
        for now, before in places:  # what is assigned while tracing stands for a tensor and is none
            now.clear()
            now.update(before)
        for w, held in values:
            w.data = held
