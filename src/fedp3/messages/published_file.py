"""Published weights as plain data with tensors, for a checkpoint, and back."""

from typing import Any

from fedp3.core.types import Block, Mask
from fedp3.messages.versions import Holding, Published


def saved(published: Published | None) -> Any:
    """Published weights as nested plain data; masks that clients share are stored once."""
    if published is None:
        return None
    masks: list[Mask] = []
    numbers: dict[int, int] = {}  # id of a mask -> its number; `published` keeps the masks alive

    def number(mask: Mask) -> int:
        if id(mask) not in numbers:
            numbers[id(mask)] = len(masks)
            masks.append(mask)
        return numbers[id(mask)]

    def holding(held: Holding | None) -> Any:
        if held is None:
            return None
        return [dict(held.versions), {n: number(mask) for n, mask in held.masks.items()}]

    held = {i: holding(each) for i, each in published.held.items()}
    return {
        # A tensor that was not rounded may be the server's own, which cannot be stored twice.
        "R": {n: w.clone() for n, w in published.R.items()},
        "versions": dict(published.versions),
        "changes": {l: [dict(c) for c in each] for l, each in published.changes.items()},
        "held": held,
        "initial": holding(published.initial),
        "masks": [_saved_mask(mask) for mask in masks],
    }


def _saved_mask(mask: Mask) -> Any:
    """A mask with copies of its tensors, which may share memory with others."""
    if isinstance(mask, Block):
        return [None if side is None else side.clone() for side in (mask.rows, mask.cols)]
    return None if mask is None else mask.clone()


def restored(tree: Any) -> Published | None:
    """The inverse of `saved`."""
    if tree is None:
        return None
    masks = [Block(*mask) if isinstance(mask, list) else mask for mask in tree["masks"]]

    def holding(plain: Any) -> Holding | None:
        if plain is None:
            return None
        versions, numbers = plain
        return Holding(versions, {n: masks[k] for n, k in numbers.items()})

    return Published(
        R=tree["R"],
        versions=tree["versions"],
        changes={l: tuple(each) for l, each in tree["changes"].items()},
        held={int(i): holding(each) for i, each in tree["held"].items()},
        initial=holding(tree["initial"]),
    )
