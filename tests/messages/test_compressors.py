"""Codes of changes against plain loops, over shapes and masks."""

import math
import struct
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.types import Block, Mask
from fedp3.messages import compressors, tensor_code
from fedp3.messages.compression import UploadSettings
from fedp3.messages.compressors import (
    COMPRESSORS,
    TERNARY_THRESHOLD,
    Compressor,
    add_to,
    pack_remembering,
    pack_tensor,
    scale_shape,
    value_of,
)
from fedp3.messages.framing import Reader

CODES = [name for name in COMPRESSORS if name != "none"]
BY_ROWS = ["int4", "ternary"]


def code_of(name: str) -> Compressor:
    code = COMPRESSORS.pick(name)
    assert code is not None
    return code


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Tensor, Mask]:
    """A change, and which of its coordinates are exchanged."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    rng = generator(draw(st.integers(0, 10**6)))
    change = torch.randn(shape, generator=rng) * 10.0 ** draw(st.integers(-5, 2))
    change[torch.rand(shape, generator=rng) < draw(st.sampled_from([0.0, 0.5]))] = 0
    kind = draw(st.sampled_from(["all", "single", "rows", "both"]))
    if kind == "all":
        return change, None
    if kind == "single":
        return change, torch.rand(shape, generator=rng) < 0.6
    rows = torch.randperm(shape[0], generator=rng)[: draw(st.integers(1, shape[0]))].sort().values
    if kind == "rows" or len(shape) < 2:
        return change, Block(rows, None)
    cols = torch.randperm(shape[1], generator=rng)[: draw(st.integers(1, shape[1]))].sort().values
    return change, Block(rows, cols)


def half(x: float) -> float:
    """A number as 16 bits hold it."""
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


def rows_of(change: Tensor) -> list[list[int]]:
    """For each row of a tensor the flat indices of its coordinates."""
    rows = change.shape[0] if change.dim() > 1 else 1
    length = change.numel() // rows
    return [list(range(r * length, (r + 1) * length)) for r in range(rows)]


def naive(name: str, change: Tensor, mask: Mask) -> list[float]:
    """What a code makes of a change: plain loops over rows and numbers."""
    exchanged = M.as_bool(mask, tuple(change.shape)).flatten().tolist()
    flat = [
        x if here else 0.0 for x, here in zip(change.flatten().tolist(), exchanged, strict=True)
    ]
    out = [0.0] * len(flat)
    for row in rows_of(change):
        sizes = [abs(flat[j]) for j in row]
        if name == "int4":
            scale = half(max(sizes) / 7)
            for j in row:
                out[j] = scale * max(-7, min(7, round(flat[j] / scale))) if scale else 0.0
        else:
            if not any(sizes):
                continue
            least = TERNARY_THRESHOLD * sum(size * size for size in sizes) / sum(sizes)
            sent = [size for size in sizes if size >= least]
            scale = half(sum(sent) / len(sent))
            for j in row:
                out[j] = math.copysign(scale, flat[j]) if abs(flat[j]) >= least else 0.0
    return out


@pytest.mark.parametrize("name", BY_ROWS)
@given(changes())
def test_a_code_by_rows_is_what_plain_loops_make(name: str, case: tuple[Tensor, Mask]) -> None:
    change, mask = case
    sent, scale = pack_tensor(change, mask, code_of(name), 1.0, generator())
    got = value_of(sent, scale).flatten()
    want = torch.tensor(naive(name, change, mask))
    # In float32 a number may fall on the other side of a limit; then it is one step away.
    step = want.abs().max()
    off = (got - want).abs()
    assert bool((off <= 1e-5 * step).float().mean() > 0.9) or float(step) == 0
    assert float(off.max()) <= float(step) * 1.001


@pytest.mark.parametrize("name", CODES)
@given(changes())
def test_what_is_written_is_read_again_and_has_the_counted_size(
    name: str, case: tuple[Tensor, Mask]
) -> None:
    change, mask = case
    shape, code = tuple(change.shape), code_of(name)
    if code.sparse and M.count(mask, shape) == 0:
        return  # such uploads are refused
    for entropy in (False, True):
        coding = UploadSettings(compress=name, share=0.4, entropy=entropy)
        sent, scale = pack_tensor(change, mask, code, coding.share, generator())
        data = tensor_code.encode(sent, scale, mask, code, coding)
        rows = tensor_code.exchanged_rows(mask, shape)
        size = tensor_code.size(M.count(mask, shape), rows, code, coding)
        assert len(data) == size if not (entropy and code.packing) else len(data) <= size
        reader = Reader(memoryview(data))
        again, its_scale = tensor_code.decode(reader, mask, shape, code, coding)
        reader.finish()
        assert torch.equal(again, sent)
        assert (its_scale is None) == (scale is None) == (scale_shape(shape, code) is None)
        assert torch.equal(value_of(again, its_scale), value_of(sent, scale))


@pytest.mark.parametrize("name", ["int4-random", "ternary-random", "int8"])
def test_random_rounding_is_right_in_the_mean(name: str) -> None:
    change = torch.randn(3, 40, generator=generator(1))
    draws = []
    for seed in range(600):
        sent, scale = pack_tensor(change, None, code_of(name), 1.0, generator(seed))
        draws.append(value_of(sent, scale))
    assert scale is not None
    # a draw is off by less than one step, so its variance is at most a quarter of a step squared
    tolerance = 5 * float(scale.max()) / math.sqrt(4 * 600)
    # a scale in half precision may be too small for the largest number of its row
    tolerance += float(change.abs().max()) / 1024
    assert float((torch.stack(draws).mean(0) - change).abs().max()) < tolerance


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(name: str, value: float) -> None:
    change = torch.randn(3, 4, generator=generator())
    change[1, 2] = value
    sent, scale = pack_tensor(change, None, code_of(name), 0.5, generator())
    decoded = value_of(sent, scale)
    visible = not decoded.isfinite().all() or (scale is not None and not scale.isfinite().all())
    assert visible, "the gate rejects it"


@pytest.mark.parametrize("name", CODES)
def test_no_change_is_sent_as_no_change(name: str) -> None:
    sent, scale = pack_tensor(torch.zeros(3, 4), None, code_of(name), 0.5, generator())
    assert not value_of(sent, scale).any()


@pytest.mark.parametrize("name", ["int4", "ternary", "topk"])
def test_with_feedback_everything_arrives_in_the_end(name: str) -> None:
    """The sum of what is sent over many rounds is the sum of the changes, but for one residual."""
    code, rng = code_of(name), generator(5)
    error, total, arrived = torch.zeros(4, 30), torch.zeros(4, 30), torch.zeros(4, 30)
    largest = 0.0
    for _ in range(60):
        change = torch.randn(4, 30, generator=rng)
        total += change
        sent, scale = pack_tensor(change + error, None, code, 0.1, rng)
        error = change + error - value_of(sent, scale)
        arrived += value_of(sent, scale)
        largest = max(largest, float(error.norm()))
    torch.testing.assert_close(arrived + error, total, atol=1e-3, rtol=0)
    assert largest < 20 * math.sqrt(120), "residuals stay bounded"


@pytest.mark.parametrize("name", ["int4", "ternary"])
@given(
    rows=st.integers(1, 9),
    columns=st.integers(0, 7),
    seed=st.integers(0, 99),
    at_once=st.integers(1, 40),
)
def test_coding_a_few_rows_at_a_time_changes_no_bit(
    name: str, rows: int, columns: int, seed: int, at_once: int
) -> None:
    code, rng = COMPRESSORS.pick(name), torch.Generator().manual_seed(seed)
    assert code is not None
    change, base = (torch.randn(rows, columns, generator=rng) for _ in range(2))
    change[: rows // 2] *= 1e-3
    sent, scale = pack_tensor(change, None, code, 1.0, torch.Generator())
    with mock.patch.object(compressors, "CACHED", at_once):
        residual = change.clone()
        symbols, scales = pack_remembering(residual, code, 1.0, torch.Generator())
        total = add_to(base, symbols, scales)
    assert scale is not None and scales is not None
    assert torch.equal(symbols, sent) and torch.equal(scales, scale)
    assert torch.equal(residual, change - value_of(sent, scale))
    assert torch.equal(total, value_of(sent, scale) + base)
