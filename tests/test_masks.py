"""Masks against twins that look at one coordinate at a time."""

from collections.abc import Mapping
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedp3 import masks as M
from fedp3.masks import Block, Kept
from fedp3.types import Axis, ClientPlan, LayerMap, LayerPlan, Masks, UnitGroup


def is_kept(kept: Kept, at: tuple[int, ...]) -> bool:
    """The twin of every function here: whether one coordinate is kept."""
    if kept is None:
        return True
    if isinstance(kept, Tensor):
        return bool(kept[at])
    return all(i is None or at[side] in i.tolist() for side, i in enumerate((kept.rows, kept.cols)))


def coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(n) for n in shape)))


@st.composite
def sides(draw: st.DrawFn, n: int) -> Tensor:
    return torch.tensor(sorted(draw(st.sets(st.integers(0, n - 1)))), dtype=torch.int64)


@st.composite
def kept_in(draw: st.DrawFn) -> tuple[Kept, tuple[int, ...]]:
    """Any mask on a tensor of any shape, scalars and single numbers included."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    kinds = ["whole", "bool", *(["rows"] if shape else []), *(["cols", "block"] if len(shape) > 1 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "whole":
        return None, shape
    if kind == "bool":
        n = torch.Size(shape).numel()
        return torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))).view(shape), shape
    rows = draw(sides(shape[0])) if kind != "cols" else None
    return Block(rows, draw(sides(shape[1])) if kind != "rows" else None), shape


def numbered(shape: tuple[int, ...]) -> Tensor:
    """No two numbers alike, none zero."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).view(shape)


@given(kept_in())
def test_as_bool_and_count_agree_with_looking(drawn: tuple[Kept, tuple[int, ...]]) -> None:
    kept, shape = drawn
    mask = M.as_bool(kept, shape)
    assert mask.shape == shape and mask.dtype == torch.bool
    assert all(bool(mask[at]) == is_kept(kept, at) for at in coordinates(shape))
    assert M.count(kept, shape) == sum(is_kept(kept, at) for at in coordinates(shape))


@given(kept_in())
def test_take_gives_the_kept_values_in_order(drawn: tuple[Kept, tuple[int, ...]]) -> None:
    kept, shape = drawn
    w = numbered(shape)
    before = w.clone()
    assert M.take(w, kept).flatten().tolist() == [float(w[at]) for at in coordinates(shape) if is_kept(kept, at)]
    assert torch.equal(w, before)


@given(kept_in())
def test_put_is_the_inverse_of_take_and_zero_elsewhere(drawn: tuple[Kept, tuple[int, ...]]) -> None:
    kept, shape = drawn
    w = numbered(shape)
    back = M.put(M.take(w, kept), kept, shape)
    assert back.shape == shape
    assert all(float(back[at]) == (float(w[at]) if is_kept(kept, at) else 0) for at in coordinates(shape))
    assert torch.equal(M.zero_pruned(w, kept), back)
    assert torch.equal(w, numbered(shape))


@given(kept_in())
def test_add_at_touches_kept_coordinates_alone(drawn: tuple[Kept, tuple[int, ...]]) -> None:
    kept, shape = drawn
    w, out = numbered(shape), torch.full(shape, 0.5)
    M.add_at(out, M.take(w, kept), kept)
    assert all(float(out[at]) == 0.5 + (float(w[at]) if is_kept(kept, at) else 0) for at in coordinates(shape))


@given(kept_in())
def test_what_is_pruned_is_plain_zero_whatever_was_there(drawn: tuple[Kept, tuple[int, ...]]) -> None:
    """Neither -0.0 nor NaN may remain: the bytes that travel could not say so."""
    kept, shape = drawn
    for value in (-1.0, float("nan"), float("-inf")):
        zeroed = M.zero_pruned(torch.full(shape, value), kept)
        bits = zeroed.view(torch.int32) if shape else zeroed.reshape(1).view(torch.int32)
        gone = ~M.as_bool(kept, shape).view(bits.shape)
        assert not bits[gone].any()


def test_a_whole_tensor_is_handed_on_not_copied() -> None:
    w = torch.ones(3)
    assert M.zero_pruned(w, None) is w and M.take(w, None) is w


# --------------------------------------------------------------------------- which mask lies on which tensor

LAYERS = LayerMap(
    layers={"conv": ("conv.weight", "conv.bias", "norm.mean"), "fc": ("fc.weight",), "out": ("out.weight",)},
    shapes={"conv.weight": (4, 2, 1), "conv.bias": (4,), "norm.mean": (4,), "fc.weight": (3, 12), "out.weight": (2, 3)},
    axes={
        "conv.weight": (Axis("conv"), None),
        "conv.bias": (Axis("conv"),),
        "norm.mean": (Axis("conv"),),
        "fc.weight": (Axis("fc"), Axis("conv", 3)),  # three inputs for each channel
    },
    groups={"conv": UnitGroup(4, "conv"), "fc": UnitGroup(3, "fc")},
    prunable=frozenset({"conv.weight", "fc.weight", "out.weight"}),
    buffers=frozenset({"norm.mean"}),
)
CHANNELS = {"conv": torch.tensor([0, 3])}


def lists(block: Block | None) -> tuple[list[int] | None, list[int] | None] | None:
    if block is None:
        return None
    rows, cols = (None if i is None else i.tolist() for i in (block.rows, block.cols))
    return rows, cols


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("conv.weight", ([0, 3], None)),
        ("conv.bias", ([0, 3], None)),
        ("norm.mean", ([0, 3], None)),
        ("fc.weight", (None, [0, 1, 2, 9, 10, 11])),
        ("out.weight", None),
    ],
)
def test_units_cut_their_own_rows_and_the_columns_they_feed(
    name: str, want: tuple[list[int] | None, list[int] | None] | None
) -> None:
    assert lists(M.block(name, CHANNELS, LAYERS)) == want
    kept = M.active(name, Masks(units=CHANNELS), LAYERS)
    assert not isinstance(kept, Tensor) and lists(kept) == want


def test_both_sides_are_cut_where_both_groups_are() -> None:
    units: Mapping[str, Tensor] = CHANNELS | {"fc": torch.tensor([1])}
    assert lists(M.block("fc.weight", dict(units), LAYERS)) == ([1], [0, 1, 2, 9, 10, 11])


def test_a_mask_on_weights_is_that_mask_and_nothing_else_is_cut() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    masks = Masks(weights={"out.weight": mask})
    assert M.active("out.weight", masks, LAYERS) is mask
    assert M.active("fc.weight", masks, LAYERS) is None
    assert M.active("fc.weight", Masks(), LAYERS) is None


@pytest.mark.parametrize("stale", ["abstain", "vote"])
@pytest.mark.parametrize("send", ["dense", "pruned"])
@pytest.mark.parametrize("upload", ["all", "kept", "zeros"])
def test_what_travels_of_a_layer_that_reads_cut_units(stale: str, send: str, upload: str) -> None:
    """Whole layers leave out columns that no kept unit feeds, unless these vote; zeros always travel whole."""
    masks = Masks(units=CHANNELS)
    plan = ClientPlan(0, {l: LayerPlan(send, 0.5, True, upload) for l in LAYERS.layers})
    columns, whole = (None, [0, 1, 2, 9, 10, 11]), None
    down = M.sent("fc.weight", "fc", plan, masks, LAYERS, stale)
    up = M.uploaded("fc.weight", "fc", plan, masks, LAYERS, stale)
    assert not isinstance(down, Tensor) and not isinstance(up, Tensor)
    assert lists(down) == (whole if send == "dense" and stale == "vote" else columns)
    assert lists(up) == (whole if upload == "zeros" or (upload == "all" and stale == "vote") else columns)
