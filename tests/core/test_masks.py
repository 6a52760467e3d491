"""Masks against a reference implementation that looks at one coordinate at a time."""

from collections.abc import Mapping
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.types import Axis, Block, ClientPlan, LayerMap, LayerPlan, Mask, Masks, UnitGroup


def is_retained(mask: Mask, at: tuple[int, ...]) -> bool:
    """The reference for every function: whether one coordinate is retained."""
    if mask is None:
        return True
    if isinstance(mask, Tensor):
        return bool(mask[at])
    return all(i is None or at[side] in i.tolist() for side, i in enumerate((mask.rows, mask.cols)))


def coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(n) for n in shape)))


@st.composite
def sides(draw: st.DrawFn, n: int) -> Tensor:
    return torch.tensor(sorted(draw(st.sets(st.integers(0, n - 1)))), dtype=torch.int64)


@st.composite
def masked_shapes(draw: st.DrawFn) -> tuple[Mask, tuple[int, ...]]:
    """Any mask on a tensor of any shape, scalars and single numbers included."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    kinds = [
        "dense",
        "bool",
        *(["rows"] if shape else []),
        *(["cols", "block"] if len(shape) > 1 else []),
    ]
    kind = draw(st.sampled_from(kinds))
    if kind == "dense":
        return None, shape
    if kind == "bool":
        n = torch.Size(shape).numel()
        return torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))).view(
            shape
        ), shape
    rows = draw(sides(shape[0])) if kind != "cols" else None
    return Block(rows, draw(sides(shape[1])) if kind != "rows" else None), shape


def numbered(shape: tuple[int, ...]) -> Tensor:
    """No two numbers alike, none zero."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).view(shape)


@given(masked_shapes())
def test_as_bool_and_count_agree_with_looking(drawn: tuple[Mask, tuple[int, ...]]) -> None:
    mask, shape = drawn
    dense = M.as_bool(mask, shape)
    assert dense.shape == shape and dense.dtype == torch.bool
    assert all(bool(dense[at]) == is_retained(mask, at) for at in coordinates(shape))
    assert M.count(mask, shape) == sum(is_retained(mask, at) for at in coordinates(shape))


@given(masked_shapes())
def test_take_gives_the_retained_values_in_order(drawn: tuple[Mask, tuple[int, ...]]) -> None:
    mask, shape = drawn
    w = numbered(shape)
    before = w.clone()
    assert M.take(w, mask).flatten().tolist() == [
        float(w[at]) for at in coordinates(shape) if is_retained(mask, at)
    ]
    assert torch.equal(w, before)


@given(masked_shapes())
def test_put_is_the_inverse_of_take_and_zero_elsewhere(drawn: tuple[Mask, tuple[int, ...]]) -> None:
    mask, shape = drawn
    w = numbered(shape)
    back = M.put(M.take(w, mask), mask, shape)
    assert back.shape == shape
    assert all(
        float(back[at]) == (float(w[at]) if is_retained(mask, at) else 0)
        for at in coordinates(shape)
    )
    assert torch.equal(M.zero_pruned(w, mask), back)
    assert torch.equal(w, numbered(shape))


@given(masked_shapes())
def test_add_at_changes_retained_coordinates_alone(drawn: tuple[Mask, tuple[int, ...]]) -> None:
    mask, shape = drawn
    w, out = numbered(shape), torch.full(shape, 0.5)
    M.add_at(out, M.take(w, mask), mask)
    assert all(
        float(out[at]) == 0.5 + (float(w[at]) if is_retained(mask, at) else 0)
        for at in coordinates(shape)
    )


@given(masked_shapes())
def test_what_is_pruned_is_plain_zero_whatever_was_there(
    drawn: tuple[Mask, tuple[int, ...]],
) -> None:
    """Neither -0.0 nor NaN may remain: a message of retained values could not carry them."""
    mask, shape = drawn
    for value in (-1.0, float("nan"), float("-inf")):
        zeroed = M.zero_pruned(torch.full(shape, value), mask)
        bits = zeroed.view(torch.int32) if shape else zeroed.reshape(1).view(torch.int32)
        gone = ~M.as_bool(mask, shape).view(bits.shape)
        assert not bits[gone].any()


def test_a_dense_tensor_is_returned_not_copied() -> None:
    w = torch.ones(3)
    assert M.zero_pruned(w, None) is w and M.take(w, None) is w


# --------------------------------------------------------------------------- masks of tensors

LAYERS = LayerMap(
    layers={
        "conv": ("conv.weight", "conv.bias", "norm.mean"),
        "fc": ("fc.weight",),
        "out": ("out.weight",),
    },
    shapes={
        "conv.weight": (4, 2, 1),
        "conv.bias": (4,),
        "norm.mean": (4,),
        "fc.weight": (3, 12),
        "out.weight": (2, 3),
    },
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
def test_pruned_units_take_their_rows_and_the_columns_they_feed(
    name: str, want: tuple[list[int] | None, list[int] | None] | None
) -> None:
    assert lists(M.block(name, CHANNELS, LAYERS)) == want
    mask = M.active(name, Masks(units=CHANNELS), LAYERS)
    assert not isinstance(mask, Tensor) and lists(mask) == want


def test_both_sides_are_pruned_where_both_groups_are() -> None:
    units: Mapping[str, Tensor] = CHANNELS | {"fc": torch.tensor([1])}
    assert lists(M.block("fc.weight", dict(units), LAYERS)) == ([1], [0, 1, 2, 9, 10, 11])


def test_a_mask_on_weights_is_that_mask_and_nothing_else_is_pruned() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    masks = Masks(weights={"out.weight": mask})
    assert M.active("out.weight", masks, LAYERS) is mask
    assert M.active("fc.weight", masks, LAYERS) is None
    assert M.active("fc.weight", Masks(), LAYERS) is None


@pytest.mark.parametrize("unfed_columns", ["abstain", "vote"])
@pytest.mark.parametrize("send", ["dense", "pruned"])
@pytest.mark.parametrize("upload", ["all", "retained", "zeros"])
def test_what_is_exchanged_of_a_layer_that_reads_pruned_units(
    unfed_columns: str, send: str, upload: str
) -> None:
    """Dense layers omit columns that no retained unit feeds, unless these vote; zeros do not."""
    masks = Masks(units=CHANNELS)
    plan = ClientPlan(
        0, {l: LayerPlan(send=send, keep=0.5, train=True, upload=upload) for l in LAYERS.layers}
    )
    columns, dense = (None, [0, 1, 2, 9, 10, 11]), None
    down = M.sent("fc.weight", "fc", plan, masks, LAYERS, unfed_columns)
    up = M.uploaded("fc.weight", "fc", plan, masks, LAYERS, unfed_columns)
    assert not isinstance(down, Tensor) and not isinstance(up, Tensor)
    votes = unfed_columns == "vote"
    assert lists(down) == (dense if send == "dense" and votes else columns)
    assert lists(up) == (dense if upload == "zeros" or (upload == "all" and votes) else columns)


@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_units_of_an_axis_with_parts_are_those_of_a_loop(
    data: st.DataObject, units: int, repeat: int, parts: int
) -> None:
    retained = data.draw(sides(units))
    layers = LayerMap(
        layers={"a": ("a.weight",)},
        shapes={"a.weight": (units * repeat * parts, 2)},
        axes={"a.weight": (Axis("a", repeat, parts), None)},
        groups={"a": UnitGroup(units, "a")},
        prunable=frozenset(),
        buffers=frozenset(),
    )
    expected = [
        row
        for row, (_, unit, _) in enumerate(product(range(parts), range(units), range(repeat)))
        if unit in retained.tolist()
    ]
    found = M.block("a.weight", {"a": retained}, layers)
    assert found is not None and found.rows is not None and found.rows.tolist() == expected
