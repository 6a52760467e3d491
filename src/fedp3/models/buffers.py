"""Buffers that are not in the state dict (`persistent=False`): they are never exchanged.

A forward pass may write to such a buffer, but every task must start from its initial value.  That
value is therefore recorded in a second buffer beside it.  It is a buffer because buffers are copied
with the network, shrunk with it, moved to a device with it and sent to a worker process with it.
Frozen tensors (`fedp3.models.frozen`) are never written to, and need no second copy.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from fedp3.models.frozen import frozen_in, frozen_tensors

SUFFIX = "_initial_value"


def record_initial_values(net: nn.Module) -> None:
    """Record the present values of non-persistent buffers as their initial values."""
    exempt, buffers = net.state_dict().keys() | frozen_tensors(net), dict(net.named_buffers())
    for name, w in buffers.items():
        if name in exempt or name.endswith(SUFFIX):
            continue
        initial = buffers.get(name + SUFFIX)
        if initial is not None and (initial.shape, initial.dtype) == (w.shape, w.dtype):
            initial.copy_(w)  # in place: networks shrunk from this one share the tensor
        else:
            path, _, short_name = name.rpartition(".")
            module = net.get_submodule(path)
            module.register_buffer(short_name + SUFFIX, w.detach().clone(), persistent=False)


def initial_values(net: nn.Module) -> list[Tensor]:
    """Return the recorded values of all non-persistent buffers."""
    return [w for name, w in net.named_buffers() if name.endswith(SUFFIX)]


def initial_value(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return a copy of the initial value of a non-persistent buffer; None for other tensors."""
    initial = tensors.get(name + SUFFIX)
    return None if initial is None else initial.clone()


@contextmanager
def restored_buffers(net: nn.Module) -> Iterator[None]:
    """Restore all buffers on exit, because tracing or running a network may write to them.

    Frozen parameters are not written to: they are not copied.
    """
    tables = [(m._buffers, dict(m._buffers)) for m in net.modules()]
    constant = {id(m._buffers[n]) for m in net.modules() for n, was in frozen_in(m).items() if was}
    values = [(w, w.detach().clone()) for w in net.buffers() if id(w) not in constant]
    try:
        yield
    finally:
        for table, before in tables:  # tracing may have replaced buffers by placeholders
            table.clear()
            table.update(before)
        for w, value in values:
            w.data = value
