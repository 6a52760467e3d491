"""The meta device, corrected, allocates what the kernels of a CPU allocate."""

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fedp3.costs.cpu_kernels import FusedAttention, working_bytes

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default

needs_onednn = pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),
    reason="other processors compute convolutions in another way",
)


# --------------------------------------------------------------------------- convolutions


def allocated(work: Callable[[], Any]) -> int:
    """The most bytes an operation had allocated at once, by torch's own profiler."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        current += e.nbytes()
        peak = max(peak, current)
    return peak


@needs_onednn
@settings(max_examples=20)
@given(
    inputs=st.sampled_from([64, 128]),
    outputs=st.sampled_from([64, 96]),
    side=st.sampled_from([1, 3, 5]),
    pixels=st.sampled_from([8, 16]),
    depthwise=st.booleans(),
    layout=st.sampled_from([torch.contiguous_format, torch.channels_last]),
    grads=st.sampled_from([(True, False), (False, True), (True, True)]),
)
def test_a_convolution_works_on_as_many_bytes_as_a_real_one(
    inputs: int,
    outputs: int,
    side: int,
    pixels: int,
    depthwise: bool,
    layout: torch.memory_format,
    grads: tuple[bool, bool],
) -> None:
    assume(side == 3 or not depthwise)  # other kernels of one channel have buffers of fixed size
    groups = inputs if depthwise else 1
    outputs = inputs if depthwise else outputs
    x = torch.zeros(16, inputs, pixels, pixels).to(memory_format=layout)
    w = torch.zeros(outputs, inputs // groups, side, side).to(memory_format=layout)
    options = ([1, 1], [side // 2] * 2, [1, 1], False, [0, 0], groups)
    forward, backward = aten.convolution.default, aten.convolution_backward.default
    y = forward(x, w, None, *options)
    mask = [*grads, False]

    def bytes_of(func: Any, *args: Any) -> tuple[int, int]:
        meta = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
        return working_bytes(func, meta, func(*meta)), allocated(lambda: func(*args))

    for predicted, real in (
        bytes_of(forward, x, w, None, *options),
        bytes_of(backward, y, x, w, None, *options, mask),
    ):
        assert predicted == pytest.approx(real, rel=0.02, abs=2**17)  # small buffers of the kernel


def test_other_operations_allocate_their_results_alone() -> None:
    x = torch.zeros(3, 3)
    assert working_bytes(aten.mm.default, (x, x), x @ x) == 0


# --------------------------------------------------------------------------- attention


class Seen(TorchDispatchMode):
    """Remembers the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "self-attention": ((2, 4, 6, 8), (2, 4, 6, 8), {}),
    "cross-attention": ((2, 4, 6, 8), (2, 4, 5, 8), {}),
    "causal": ((2, 4, 6, 8), (2, 4, 6, 8), {"is_causal": True}),
    "scaled": ((2, 4, 6, 8), (2, 4, 6, 8), {"scale": 0.5}),
    "dropout": ((2, 4, 6, 8), (2, 4, 6, 8), {"dropout_p": 0.1}),
    "without heads": ((2, 6, 8), (2, 6, 8), {}),
    "shared heads": ((2, 4, 6, 8), (2, 2, 6, 8), {"enable_gqa": True}),
    "boolean mask": ((2, 4, 6, 8), (2, 4, 6, 8), {"attn_mask": torch.ones(6, 6).bool()}),
    "added mask": ((2, 4, 6, 8), (2, 4, 6, 8), {"attn_mask": torch.zeros(6, 6)}),
}


@pytest.mark.parametrize(("query", "key", "options"), CALLS.values(), ids=CALLS.keys())
def test_attention_on_meta_runs_the_kernel_of_the_cpu(
    query: tuple[int, ...], key: tuple[int, ...], options: dict[str, Any]
) -> None:
    def fused(device: str) -> tuple[bool, torch.Size]:
        q, k, v = (torch.zeros(s, device=device, requires_grad=True) for s in (query, key, key))
        there = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
        with FusedAttention(), Seen() as seen:
            result = F.scaled_dot_product_attention(q, k, v, **there)
            torch.autograd.grad(result.sum(), (q, k, v))
        return FUSED in seen.operations, result.shape

    assert fused("meta") == fused("cpu")


def test_attention_inside_torch_is_found_and_torch_left_as_it_was() -> None:
    net = torch.nn.MultiheadAttention(8, 2, batch_first=True).to("meta")
    x, before = torch.zeros(2, 3, 8, device="meta"), F.scaled_dot_product_attention
    with FusedAttention(), Seen() as seen:
        net(x, x, x, need_weights=False)
    assert FUSED in seen.operations and F.scaled_dot_product_attention is before


def test_arguments_by_name_are_understood() -> None:
    q = torch.zeros(1, 2, 3, 4, device="meta")
    with FusedAttention(), Seen() as seen:
        F.scaled_dot_product_attention(query=q, key=q, value=q)
    assert FUSED in seen.operations
