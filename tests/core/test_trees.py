"""Nested states survive the way through JSON and named tensors."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedp3.core.errors import InputError
from fedp3.core.files import json_line
from fedp3.core.trees import flatten, unflatten

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any shape, scalars and empty tensors included."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    n = math.prod(shape)
    values = draw(st.lists(st.integers(-100, 100), min_size=n, max_size=n))
    return torch.tensor(values).reshape(shape).to(draw(st.sampled_from(DTYPES)))


numbers = st.booleans() | st.integers() | st.floats()
keys = st.text(max_size=5) | st.integers()
trees = st.recursive(
    st.none() | numbers | st.text(max_size=5) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, types and order of keys included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        if list(a) != list(b) or [type(k) for k in a] != [type(k) for k in b]:
            return False
        return all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


@given(trees)
def test_a_tree_survives_the_round_trip_through_json(tree: Any) -> None:
    plain, named = flatten(tree, "state")
    assert same(unflatten(json.loads(json.dumps(plain, allow_nan=False)), named), tree)


@given(trees)
def test_tensors_are_numbered_below_the_prefix_and_contiguous(tree: Any) -> None:
    _, named = flatten(tree, "some/prefix")
    assert list(named) == [f"some/prefix/{i}" for i in range(len(named))]
    assert all(w.is_contiguous() and not w.requires_grad for w in named.values())


def test_a_transposed_tensor_with_a_gradient_comes_back_as_its_values() -> None:
    w = torch.arange(6.0).view(2, 3).requires_grad_()
    plain, named = flatten([w.t()], "s")
    assert same(unflatten(plain, named), [torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks_survive_in_a_line_of_a_checkpoint(value: float) -> None:
    plain, named = flatten({"best": value}, "s")
    line = json_line({"aggregator": plain})
    assert same(unflatten(json.loads(line)["aggregator"], named), {"best": value})


def test_a_key_that_is_a_number_and_one_that_is_its_text_stay_apart() -> None:
    tree = {1: "number", "1": "text"}
    plain, named = flatten(tree, "s")
    assert same(unflatten(json.loads(json.dumps(plain)), named), tree)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "a set"),
        (b"bytes", "a bytes"),
        (object(), "an object"),
        (1j, "a complex"),
        (len, "a builtin"),
    ],
)
def test_values_of_unsupported_types_are_refused(value: Any, kind: str) -> None:
    for tree in (value, [value], {"a": (0, value)}):
        with pytest.raises(InputError, match=f"got {kind}"):
            flatten(tree, "s")


@pytest.mark.parametrize("key", [None, True, 1.5, (1, 2), b"a"])
def test_keys_of_unsupported_types_are_refused(key: Any) -> None:
    with pytest.raises(InputError, match="keys of a saved state are strings or integers"):
        flatten([{"inner": {key: 0}}], "s")


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown part 'set'"):
        unflatten(["list", [["set", [1]]]], {})
    with pytest.raises(KeyError):
        unflatten(["tensor", "s/0"], {})
