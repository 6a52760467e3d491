"""What processes pass to each other: a pickle whose tensors lie in one shared block, each once."""

import io
import pickle  # between our own processes; nothing from outside comes this way
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors pass between processes
from torch import Tensor

Parcel = tuple[bytes, Tensor]  # a pickle, and the block its tensors lie in
LINE = 64  # bytes of a cache line, where every tensor begins


@dataclass(slots=True)
class _Shelf:
    """Where tensors will lie in a block: each once, however often it is named."""

    places: dict[int, tuple[int, tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    size: int = 0


class _Layer(pickle.Pickler):
    """Puts tensors on a shelf instead of into the pickle (pickle asks for a class here)."""

    def __init__(self, file: io.BytesIO, shelf: _Shelf) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shelf = shelf

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return None
        shelf = self.shelf
        if id(thing) not in shelf.places:
            shelf.places[id(thing)] = (shelf.size, tuple(thing.shape), thing.dtype)
            shelf.tensors.append(thing)
            shelf.size += -(-thing.numel() * thing.element_size() // LINE) * LINE
        return shelf.places[id(thing)]


class _Lifter(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: Tensor, copied: bool) -> None:
        super().__init__(file)
        self.block, self.copied = block, copied

    def persistent_load(self, place: Any) -> Tensor:
        w = _at(self.block, place)
        return w.clone() if self.copied else w


def _at(block: Tensor, place: tuple[int, tuple[int, ...], torch.dtype]) -> Tensor:
    begin, shape, dtype = place
    return block[begin : begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def lay(things: Sequence[Any], room: Callable[[int], Tensor]) -> list[Parcel]:
    """Each thing pickled, all their tensors in one shared block that `room` gives."""
    shelf, texts = _Shelf(), []
    for thing in things:
        file = io.BytesIO()
        _Layer(file, shelf).dump(thing)
        texts.append(file.getvalue())
    block = room(shelf.size)
    for w in shelf.tensors:
        _at(block, shelf.places[id(w)]).copy_(w)
    return [(text, block) for text in texts]


def lift(parcel: Parcel, *, copied: bool = False) -> Any:
    """What was laid; its tensors stay in the block, or are copied so that the block is free again."""
    text, block = parcel
    return _Lifter(io.BytesIO(text), block, copied).load()


def new_block(size: int) -> Tensor:
    """That many bytes in shared memory."""
    return in_shared_memory(torch.empty(size, dtype=torch.uint8))


def in_shared_memory(w: Tensor) -> Tensor:
    """The same tensor, where other processes can map it."""
    shared: Tensor = w.share_memory_()  # type: ignore[no-untyped-call]
    return shared
