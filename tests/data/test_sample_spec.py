"""A server assembles a run from the shapes of samples that only nodes have."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedp3.core.errors import DataError
from fedp3.data import from_tensors
from fedp3.data.inputs import tensors_of
from fedp3.data.sample_spec import LARGEST, SampleSpec, TensorSpec, placeholder, sample_spec

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3)


@st.composite
def data_sets(draw):
    """Data sets with one input, several or named ones, with and without labels."""
    form, labelled = draw(st.sampled_from(["one", "tuple", "dict"])), draw(st.booleans())
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=1 if form == "one" else 3))
    inputs = [
        torch.ones(6, *shape, dtype=draw(st.sampled_from([torch.uint8, torch.float32])))
        for shape in shapes
    ]
    x = inputs[0] if form == "one" else tuple(inputs)
    if form == "dict":
        x = {f"input {k}": w for k, w in enumerate(inputs)}
    y = torch.arange(6) % 3 if labelled else torch.ones(6, *draw(SHAPES))
    return from_tensors(x, y, labelled=labelled)


@given(data_sets())
def test_a_placeholder_looks_like_the_samples_and_has_none_of_their_values(data):
    spec = sample_spec(data)
    sent = TypeAdapter(SampleSpec).validate_json(json.dumps(asdict(spec)))
    assert sent == spec
    made = placeholder(sent)
    assert type(made.x) is type(data.x) and sample_spec(made) == spec
    assert all(not w.any() for w in (*tensors_of(made.x), made.y)) and len(made.y) == 1
    assert str(spec.target) in str(spec)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorSpec(shape=(2,), dtype="complex64"),
        TensorSpec(shape=(-1,), dtype="float32"),
        TensorSpec(shape=(LARGEST, 2), dtype="uint8"),
    ],
)
def test_samples_that_no_data_set_has_are_refused(tensor):
    target = TensorSpec(shape=(), dtype="int64")
    with pytest.raises(DataError, match="sample"):
        placeholder(SampleSpec(inputs=(tensor,), target=target, classes=2))
