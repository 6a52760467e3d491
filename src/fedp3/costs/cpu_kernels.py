"""What torch's CPU kernels do that the meta device, which computes nothing, does not show.

Two things matter for memory.  Attention runs as one kernel that never stores the matrix of scores.
And oneDNN, which computes convolutions, has a memory layout of its own: it copies what it reads and
writes, unless the network is in the channels-last layout, where it copies the kernel alone.  A copy
lives as long as the operation, so it counts only where it makes the peak.  Two details depend on
the processor and are left out: channels of a copy may be padded to a multiple of 8 or 16, and a
strided convolution may need a third copy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
ATTENTION = F.scaled_dot_product_attention


# --------------------------------------------------------------------------- attention


class FusedAttention(TorchFunctionMode):
    """Inside this context, meta tensors attend to each other by the kernel that a CPU uses."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            return attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # it calls the other inside, unseen by a mode
            with mock.patch.object(F, ATTENTION.__name__, attention):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def attention(*args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention` as a CPU computes it, for meta tensors."""
    call = _attention_arguments(*args, **kwargs)
    return _fused(**call) if _is_fused(**call) else ATTENTION(*args, **kwargs)


def _attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The arguments of `scaled_dot_product_attention` by name, with its defaults."""
    return dict(locals())


def _is_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
    **_: Any,
) -> bool:
    """Whether the CPU has one kernel for this; otherwise it computes step by step, as meta does."""
    tensors = (query, key, value)
    if any(t.device.type != "meta" or t.dim() != 4 or t.stride(3) != 1 for t in tensors):
        return False
    shared = query.shape[1] // key.shape[1] if enable_gqa and key.shape[1] else 1
    return (
        len({(t.shape[0], t.shape[3]) for t in tensors}) == 1
        and query.shape[1] == shared * key.shape[1] == shared * value.shape[1]
        and all(t.numel() for t in tensors)
        and dropout_p == 0
        and (attn_mask is None or (attn_mask.dim() in (2, 4) and not attn_mask.requires_grad))
    )


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    **_: Any,
) -> Any:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # the kernel adds its mask
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


# --------------------------------------------------------------------------- convolutions


def working_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """The most bytes that an operation has allocated at once, for its results and for copies.

    Zero for an operation that allocates nothing but its results.

    Args:
        func: the operation, as a dispatch mode sees it.
        args: its arguments.
        result: what it returned.
    """
    count = WORKING_BYTES.get(func)
    return count(args, result) if count else 0


def _forward(args: Sequence[Any], y: Tensor) -> int:
    x, w = args[0], args[1]
    return _working_bytes(w, [(x, w, y)])


def _backward(args: Sequence[Any], grads: Sequence[Tensor | None]) -> int:
    grad_y, x, w = args[0], args[1], args[2]
    grad_x, grad_w = grads[0], grads[1]
    passes = []
    if grad_x is not None:
        passes.append((grad_y, w, grad_x))
    if grad_w is not None:
        passes.append((grad_y, x, grad_w))
    return _working_bytes(w, passes)


def _working_bytes(w: Tensor, passes: Sequence[tuple[Tensor, Tensor, Tensor]]) -> int:
    """Passes that run one after the other, each from two tensors to a third one.

    Args:
        w: the kernel, whose layout decides.
        passes: for each pass what is read, and last what is written.
    """
    peak = written = 0
    for a, b, result in passes:
        if _is_channels_last(w):  # w is copied, and so is its gradient
            working = result.nbytes + w.nbytes * (2 if result.shape == w.shape else 1)
        else:  # computed as a copy first, from copies; then copied back
            working = result.nbytes + max(a.nbytes + b.nbytes, result.nbytes)
        peak = max(peak, written + working)
        written += result.nbytes
    return peak


def _is_channels_last(w: Tensor) -> bool:
    if w.dim() != 4:
        return False
    last = torch.empty(w.shape, device="meta", memory_format=torch.channels_last)
    return w.stride() == last.stride()


WORKING_BYTES: Mapping[Any, Callable[[Sequence[Any], Any], int]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
