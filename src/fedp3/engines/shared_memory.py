"""Messages between processes: a pickle whose tensors are in one block of shared memory."""

import io
import pickle  # between processes of this program; nothing from outside is unpickled
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are sent to other processes
from torch import Tensor, nn

Packed = tuple[bytes, Tensor]  # a pickle, and the block that holds its tensors
GetBlock = Callable[[int], Tensor]  # size in bytes -> a block of at least this size
Place = tuple[int, tuple[int, ...], torch.dtype]  # of a tensor in a block: offset, shape, dtype
CACHE_LINE = 64  # bytes; every tensor begins at a multiple of it


@dataclass(slots=True)
class _Layout:
    """The places of tensors in a block.  A tensor that occurs several times has one place."""

    places: dict[int, Place] = field(default_factory=dict)  # by the tensor's id
    tensors: list[Tensor] = field(default_factory=list)
    size: int = 0  # bytes

    def place(self, tensor: Tensor) -> Place:
        """The place of a tensor, which is assigned when it occurs for the first time."""
        if id(tensor) not in self.places:
            self.places[id(tensor)] = (self.size, tuple(tensor.shape), tensor.dtype)
            self.tensors.append(tensor)
            lines = -(-tensor.numel() * tensor.element_size() // CACHE_LINE)
            self.size += lines * CACHE_LINE
        return self.places[id(tensor)]


class _Pickler(pickle.Pickler):
    """Writes the places of tensors into the pickle instead of their values.

    Parameters of a network stay in the pickle: in a block they would be plain tensors.
    """

    def __init__(self, file: io.BytesIO, layout: _Layout) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.layout = layout

    def persistent_id(self, obj: Any) -> Place | None:
        placed = isinstance(obj, Tensor) and not isinstance(obj, nn.Parameter)
        return self.layout.place(obj) if placed else None


class _Unpickler(pickle.Unpickler):
    """Reads tensors from a block."""

    def __init__(self, file: io.BytesIO, block: Tensor, copied: bool) -> None:
        super().__init__(file)
        self.block, self.copied = block, copied

    def persistent_load(self, place: Any) -> Tensor:
        tensor = _view(self.block, place)
        return tensor.clone() if self.copied else tensor


def _view(block: Tensor, place: Place) -> Tensor:
    """The tensor at this place, as a view of the block."""
    offset, shape, dtype = place
    size = torch.Size(shape).numel() * dtype.itemsize
    return block[offset : offset + size].view(dtype).view(shape)


def pack(messages: Sequence[Any], get_block: GetBlock) -> list[Packed]:
    """Pickle each message, with the tensors of all of them in one shared block."""
    layout, pickles = _Layout(), []
    for message in messages:
        file = io.BytesIO()
        _Pickler(file, layout).dump(message)
        pickles.append(file.getvalue())
    block = get_block(layout.size)
    for tensor in layout.tensors:
        _view(block, layout.places[id(tensor)]).copy_(tensor)
    return [(data, block) for data in pickles]


def unpack(packed: Packed, *, copied: bool = False) -> Any:
    """The message that was packed.

    Args:
        packed: a pickle and the block with its tensors.
        copied: copy the tensors, so that the block can be used again; else they are views of it.
    """
    data, block = packed
    return _Unpickler(io.BytesIO(data), block, copied).load()


def new_block(size: int) -> Tensor:
    """A block of this many bytes in shared memory."""
    return in_shared_memory(torch.empty(size, dtype=torch.uint8))


def growing_block() -> GetBlock:
    """A block that is used again and again, and replaced by a larger one when it is too small."""
    block = new_block(0)

    def get_block(size: int) -> Tensor:
        nonlocal block
        if size > len(block):
            block = new_block(size)
        return block

    return get_block


def in_shared_memory(tensor: Tensor) -> Tensor:
    """The same tensor, moved to where other processes can map it."""
    shared: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared
