"""Per-example clipping: sum_j g_j min(1, C / ||g_j||), one joint norm over all trained coordinates.

Ghost clipping never holds the g_j.  A layer that multiplies its input a_j by a weight has g_j = δ_j' a_j, with δ_j the
gradient at its output, so one backward pass down to the outputs gives all that is needed:
    ||g_j||² = ||δ_j||² ||a_j||²  (or the inner product of two Gram matrices),    sum_j c_j g_j = (c ⊙ δ)' a
Other layers, shared tensors and masks inside a tensor do not factor like this: there `torch.func` makes every g_j.
A record whose gradient is not finite counts as zero: what it does must not show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fedp3.types import Params, Private

AddTo = Callable[[Tensor, Tensor], object]  # (out, c) -> out += sum_j c_j g_j
Pieces = dict[str, tuple[Tensor, AddTo]]  # tensor of a module -> its ||g_j||² (batch,), and its weighted sum
SLACK = 1e-6  # on a norm, above the rounding of its float32 sum
EACH = 2.0**-24  # the same for each term of a sum that may cancel: what one addition in float32 can lose


def add_clipped(out: Params, net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params, private: Private) -> None:
    """Add the clipped gradients of these records to `out`; `masks` tells which coordinates of a tensor of W count."""
    if not len(x):
        return
    drawn = torch.random.get_rng_state()
    pieces, squares = _pieces(net, x, y, W, masks, private)
    counts = squares.isfinite()
    if not bool(counts.all()):
        if not bool(counts.any()):
            return
        # A sound record stands in their places and counts as none, so that Dropout gives the others what it gave them.
        at = torch.arange(len(x), device=x.device).where(counts, counts.nonzero()[0])
        torch.random.set_rng_state(drawn)
        pieces, squares = _pieces(net, x[at], y[at], W, masks, private)
        if not bool(squares.isfinite().all()):  # which of them break depends on what is drawn
            add_clipped(out, net, x[counts], y[counts], W, masks, private)
            return
    c = (private.clip / (squares.sqrt() * (1 + SLACK) + SLACK)).clamp(max=1.0) * counts
    for n, (_, add) in pieces.items():
        add(out[n], c)


def _pieces(net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params, private: Private) -> tuple[Pieces, Tensor]:
    """By tensor, and the squared norm of each record's whole gradient (batch,)."""
    pieces = (ghost_pieces(net, x, y, W) if private.ghost and not masks else None) or func_pieces(net, x, y, W, masks)
    return pieces, torch.stack([s for s, _ in pieces.values()]).sum(0)


# --------------------------------------------------------------------------- every gradient by itself


def func_pieces(net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params) -> Pieces:
    """Per-example gradients of any net, by `torch.func`: the reference, and as large as batch times parameters."""

    def loss(w: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, w, (one[None],)), label[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    grads = each({n: w.detach() for n, w in W.items()}, x, y)
    return {n: _materialised(g.mul_(masks[n]) if n in masks else g) for n, g in grads.items()}


def _materialised(each: Tensor) -> tuple[Tensor, AddTo]:
    flat = each.flatten(1)  # (batch, coordinates)
    return flat.square().sum(1), lambda out, c: out.view(-1).addmv_(flat.T, c)


# --------------------------------------------------------------------------- ghost clipping


@dataclass(frozen=True, slots=True)
class _Call:
    """One use of a layer: its input, as it was then, and where the gradient of its output will come by."""

    module: nn.Module
    a: Tensor
    version: int
    out: GradientEdge  # not the output itself: an in-place ReLU behind the layer would change it


def ghost_pieces(net: nn.Module, x: Tensor, y: Tensor, W: Params) -> Pieces | None:
    """The same without per-example gradients; None where the net's use of these tensors cannot be followed."""
    owned = _owned(net, W)
    if owned is None:
        return None
    calls: list[_Call] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        calls.append(_Call(module, inputs[0].detach(), inputs[0]._version, get_gradient_edge(out)))

    hooks = [module.register_forward_hook(note) for module in owned]
    try:
        loss = F.cross_entropy(net(x), y, reduction="sum")
    finally:
        for hook in hooks:
            hook.remove()
    once = sorted(id(c.module) for c in calls) == sorted(map(id, owned))
    if not once or any(len(c.a) != len(x) or c.a._version != c.version for c in calls):
        return None
    deltas = torch.autograd.grad(loss, [c.out for c in calls], allow_unused=True)
    pieces: Pieces = {}
    for c, delta in zip(calls, deltas, strict=True):
        if delta is not None:
            found = RULES[type(c.module)](c.module, c.a, delta)
            pieces |= {n: found[own] for own, n in owned[c.module].items()}
    return pieces or None


def _owned(net: nn.Module, W: Params) -> dict[nn.Module, dict[str, str]] | None:
    """Module -> its own name of each tensor of W -> the name in W; None if one has two owners or an owner no rule."""
    name = {id(w): n for n, w in W.items()}
    found = {m: {own: name[id(p)] for own, p in m._parameters.items() if id(p) in name} for m in net.modules()}
    owned = {m: names for m, names in found.items() if names}
    once = sorted(n for names in owned.values() for n in names.values()) == sorted(W)
    return owned if once and all(type(m) in RULES and _plain(m) for m in owned) else None


def _plain(m: nn.Module) -> bool:
    """Whether a convolution is the one the rule below unfolds."""
    return not isinstance(m, nn.Conv2d) or (m.groups == 1 and m.padding_mode == "zeros" and m.padding != "same")


def _linear(m: Any, a: Tensor, delta: Tensor) -> Pieces:
    return _product(a.flatten(1, -2) if a.dim() > 2 else a[:, None], delta.reshape(len(a), -1, m.out_features))


def _convolution(m: Any, a: Tensor, delta: Tensor) -> Pieces:
    padding = 0 if m.padding == "valid" else m.padding
    patches = F.unfold(a, m.kernel_size, m.dilation, padding, m.stride)  # (batch, inputs, places)
    return _product(patches.transpose(1, 2), delta.flatten(2).transpose(1, 2))


def _product(a: Tensor, delta: Tensor) -> Pieces:
    """A layer that applies its weight at T places of each record: a is (batch, T, inputs), δ (batch, T, outputs)."""
    T, inputs, outputs = a.shape[1], a.shape[2], delta.shape[2]
    if T == 1:  # in 64 bits: whoever chooses the weights can let one factor vanish and the other grow
        lengths = [torch.linalg.vector_norm(w, dim=(1, 2), dtype=torch.float64) for w in (a, delta)]
        squares = (lengths[0] * lengths[1]).square().to(a.dtype)
    elif T * (inputs + outputs) < inputs * outputs:  # the Gram matrices are cheaper than the gradients
        squares = _inner(a.double(), delta.double()).to(a.dtype)
    else:
        return {"weight": _materialised(torch.bmm(delta.transpose(1, 2), a)), "bias": _materialised(delta.sum(1))}

    def add(out: Tensor, c: Tensor) -> None:
        out.view(outputs, inputs).addmm_((delta * c[:, None, None]).flatten(0, 1).T, a.flatten(0, 1))

    return {"weight": (squares, add), "bias": _materialised(delta.sum(1))}


def _inner(a: Tensor, delta: Tensor) -> Tensor:
    """||sum_t δ_t' a_t||² of each record by its Gram matrices; an upper bound, however much of the sum cancels.

    Whoever chooses the weights can make it cancel: then 32 bits would miss the norm, and its sum `add` misses it still,
    by up to as many roundings as there are places.
    """
    slack = EACH * (a.shape[1] + 8)
    gram = torch.bmm(a, a.transpose(1, 2)), torch.bmm(delta, delta.transpose(1, 2))
    terms = (gram[0].diagonal(dim1=1, dim2=2) * gram[1].diagonal(dim1=1, dim2=2)).sqrt().sum(1)  # sum_t ||a_t|| ||δ_t||
    return ((gram[0] * gram[1]).sum((1, 2)).clamp(min=0).sqrt() + slack * terms).square()


def _group_norm(m: Any, a: Tensor, delta: Tensor) -> Pieces:
    def per_channel(w: Tensor) -> Tensor:
        return w.flatten(2).sum(2) if w.dim() > 2 else w

    normal = F.group_norm(a, m.num_groups, eps=m.eps)
    return {"weight": _materialised(per_channel(delta * normal)), "bias": _materialised(per_channel(delta))}


RULES: Mapping[type[nn.Module], Callable[[Any, Tensor, Tensor], Pieces]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
}


# --------------------------------------------------------------------------- before training


def ghost_agrees(net: nn.Module, x: Tensor, y: Tensor, W: Params) -> bool:
    """Whether ghost norms of this net are those of its real per-example gradients; asked once, before training.

    They may be above by what a sum over many places adds for its rounding.
    """
    ghost = ghost_pieces(net, x, y, W)
    if ghost is None:
        return False
    want = func_pieces(net, x, y, W, {})
    nothing = torch.zeros(len(x), device=x.device)

    def between(got: Tensor, s: Tensor) -> bool:
        return bool((got >= s * 0.999 - 1e-8).all()) and bool((got <= s * 1.005 + 1e-8).all())

    return all(between(ghost[n][0] if n in ghost else nothing, s) for n, (s, _) in want.items())
