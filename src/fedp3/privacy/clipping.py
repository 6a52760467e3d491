"""Per-example clipping: sum_j g_j min(1, C / ||g_j||), one joint norm over all trained coordinates.

Ghost clipping never stores the gradients g_j of single records.  A layer that multiplies its input
a_j by a weight has g_j = δ_j' a_j, where δ_j is the gradient at its output.  So one backward pass
down to the outputs gives all that is needed:
    ||g_j||² = ||δ_j||² ||a_j||²  (or the inner product of two Gram matrices)
    sum_j c_j g_j = (c ⊙ δ)' a
Other layers, shared tensors and masks inside a tensor do not factor like this.  For them
`torch.func` computes every g_j.
A record whose gradient is not finite counts as zero, so that nobody can see what it does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fedp3.core.types import Params
from fedp3.privacy.settings import Mechanism

AddTo = Callable[[Tensor, Tensor], object]  # (out, c) -> out += sum_j c_j g_j
# name of a tensor -> its ||g_j||² for each record (batch,), and its weighted sum
Pieces = dict[str, tuple[Tensor, AddTo]]

NORM_SLACK = 1e-6  # added to a norm: more than the rounding error of its float32 sum
FLOAT32_ROUNDING = 2.0**-24  # the relative error of one float32 addition


def add_clipped(
    out: Params,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Params,
    masks: Params,
    mechanism: Mechanism,
) -> None:
    """Add the clipped gradients of these records to `out`.

    Args:
        out: sums of gradients, by tensor.
        net: the network.
        x: records.
        y: their labels.
        W: the tensors of `net` that train.
        masks: active coordinates of tensors of W; a tensor that is not named is active entirely.
        mechanism: the clip, and whether ghost clipping may be used.
    """
    if not len(x):
        return
    rng_state = torch.random.get_rng_state()
    pieces, squares = _gradient_pieces(net, x, y, W, masks, mechanism)
    finite = squares.isfinite()
    if not bool(finite.all()):
        if not bool(finite.any()):
            return
        # Put a finite record in the place of each broken one, with weight zero: so Dropout draws
        # the same for the other records as before.
        positions = torch.arange(len(x), device=x.device)
        substitutes = positions.where(finite, finite.nonzero()[0])
        torch.random.set_rng_state(rng_state)
        pieces, squares = _gradient_pieces(net, x[substitutes], y[substitutes], W, masks, mechanism)
        if not bool(squares.isfinite().all()):  # which records break depends on what is drawn
            add_clipped(out, net, x[finite], y[finite], W, masks, mechanism)
            return
    norms = squares.sqrt() * (1 + NORM_SLACK) + NORM_SLACK
    c = (mechanism.clip / norms).clamp(max=1.0) * finite
    for n, (_, add) in pieces.items():
        add(out[n], c)


def _gradient_pieces(
    net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params, mechanism: Mechanism
) -> tuple[Pieces, Tensor]:
    """The pieces of each tensor, and the squared norm of each record's joint gradient (batch,)."""
    pieces = None
    if mechanism.ghost and not masks:
        pieces = ghost_pieces(net, x, y, W)
    if pieces is None:
        pieces = func_pieces(net, x, y, W, masks)
    return pieces, torch.stack([squares for squares, _ in pieces.values()]).sum(0)


# --------------------------------------------------------------------------- per-example gradients


def func_pieces(net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params) -> Pieces:
    """Per-example gradients of any network, by `torch.func`.

    This is the reference; it needs memory for batch size times parameters.
    """

    def loss(w: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, w, (one[None],)), label[None])

    per_example = torch.func.vmap(
        torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different"
    )
    gradients = per_example({n: w.detach() for n, w in W.items()}, x, y)
    pieces = {}
    for n, g in gradients.items():
        pieces[n] = _materialised(g.mul_(masks[n]) if n in masks else g)
    return pieces


def _materialised(gradients: Tensor) -> tuple[Tensor, AddTo]:
    """The pieces of one tensor, from its gradient for each record."""
    flat = gradients.flatten(1)  # (batch, coordinates)
    return flat.square().sum(1), lambda out, c: out.view(-1).addmv_(flat.T, c)


# --------------------------------------------------------------------------- ghost clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a layer."""

    module: nn.Module
    a: Tensor  # its input
    version: int  # of the input at the call; a later version means that the input was overwritten
    out: GradientEdge  # not the output itself: an in-place ReLU behind the layer would change it


def ghost_pieces(net: nn.Module, x: Tensor, y: Tensor, W: Params) -> Pieces | None:
    """The same pieces without per-example gradients.

    Returns None where the network uses these tensors in a way that cannot be followed.
    """
    owners = _owners(net, W)
    if owners is None:
        return None
    calls: list[_Call] = []

    def record_call(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        a = inputs[0]
        edge = get_gradient_edge(out)
        calls.append(_Call(module=module, a=a.detach(), version=a._version, out=edge))

    hooks = [module.register_forward_hook(record_call) for module in owners]
    try:
        loss = F.cross_entropy(net(x), y, reduction="sum")
    finally:
        for hook in hooks:
            hook.remove()
    if sorted(id(call.module) for call in calls) != sorted(map(id, owners)):
        return None  # a layer was called twice or not at all
    if any(len(call.a) != len(x) or call.a._version != call.version for call in calls):
        return None
    deltas = torch.autograd.grad(loss, [call.out for call in calls], allow_unused=True)
    pieces: Pieces = {}
    for call, delta in zip(calls, deltas, strict=True):
        if delta is not None:
            of_module = RULES[type(call.module)](call.module, call.a, delta)
            for local_name, n in owners[call.module].items():
                pieces[n] = of_module[local_name]
    return pieces or None


def _owners(net: nn.Module, W: Params) -> dict[nn.Module, dict[str, str]] | None:
    """The modules that own the tensors of W, each with {name in the module: name in W}.

    Returns None if a tensor has no owner or several, or if there is no rule for an owner.
    """
    names = {id(w): n for n, w in W.items()}
    owners: dict[nn.Module, dict[str, str]] = {}
    for module in net.modules():
        parameters = module._parameters.items()
        owned = {local_name: names[id(p)] for local_name, p in parameters if id(p) in names}
        if owned:
            owners[module] = owned
    if sorted(n for owned in owners.values() for n in owned.values()) != sorted(W):
        return None
    if not all(_has_rule(module) for module in owners):
        return None
    return owners


def _has_rule(module: nn.Module) -> bool:
    if type(module) not in RULES:
        return False
    if not isinstance(module, nn.Conv2d):
        return True
    return module.groups == 1 and module.padding_mode == "zeros" and module.padding != "same"


def _linear(m: Any, a: Tensor, delta: Tensor) -> Pieces:
    inputs = a.flatten(1, -2) if a.dim() > 2 else a[:, None]
    return _product(inputs, delta.reshape(len(a), -1, m.out_features))


def _convolution(m: Any, a: Tensor, delta: Tensor) -> Pieces:
    padding = 0 if m.padding == "valid" else m.padding
    patches = F.unfold(a, m.kernel_size, m.dilation, padding, m.stride)  # (batch, inputs, places)
    return _product(patches.transpose(1, 2), delta.flatten(2).transpose(1, 2))


def _product(a: Tensor, delta: Tensor) -> Pieces:
    """The pieces of a layer that applies its weight at T places of each record.

    Args:
        a: inputs (batch, T, inputs).
        delta: gradients at the outputs, δ (batch, T, outputs).
    """
    T, inputs, outputs = a.shape[1], a.shape[2], delta.shape[2]
    if T == 1:
        # In 64 bits, because a server can choose weights that make one factor vanish and the other
        # one grow.
        norms = [torch.linalg.vector_norm(w, dim=(1, 2), dtype=torch.float64) for w in (a, delta)]
        squares = (norms[0] * norms[1]).square().to(a.dtype)
    elif T * (inputs + outputs) < inputs * outputs:  # Gram matrices are cheaper than gradients
        squares = _gram_squares(a.double(), delta.double()).to(a.dtype)
    else:
        return {
            "weight": _materialised(torch.bmm(delta.transpose(1, 2), a)),
            "bias": _materialised(delta.sum(1)),
        }

    def add(out: Tensor, c: Tensor) -> None:
        scaled = (delta * c[:, None, None]).flatten(0, 1)
        out.view(outputs, inputs).addmm_(scaled.T, a.flatten(0, 1))

    return {"weight": (squares, add), "bias": _materialised(delta.sum(1))}


def _gram_squares(a: Tensor, delta: Tensor) -> Tensor:
    """An upper bound on ||sum_t δ_t' a_t||² of each record, by Gram matrices.

    A server can choose weights under which the terms of this sum cancel.  Then 32 bits would miss
    the norm.  The sum that `add` computes in 32 bits misses it too, by up to one rounding for each
    place; the bound covers these.
    """
    slack = FLOAT32_ROUNDING * (a.shape[1] + 8)
    gram_a = torch.bmm(a, a.transpose(1, 2))
    gram_delta = torch.bmm(delta, delta.transpose(1, 2))
    diagonals = gram_a.diagonal(dim1=1, dim2=2) * gram_delta.diagonal(dim1=1, dim2=2)
    terms = diagonals.sqrt().sum(1)  # sum_t ||a_t|| ||δ_t||
    norms = (gram_a * gram_delta).sum((1, 2)).clamp(min=0).sqrt()
    return (norms + slack * terms).square()


def _group_norm(m: Any, a: Tensor, delta: Tensor) -> Pieces:
    def per_channel(w: Tensor) -> Tensor:
        return w.flatten(2).sum(2) if w.dim() > 2 else w

    normalised = F.group_norm(a, m.num_groups, eps=m.eps)
    return {
        "weight": _materialised(per_channel(delta * normalised)),
        "bias": _materialised(per_channel(delta)),
    }


# (module, its input, the gradient at its output) -> the pieces of its tensors
RULES: Mapping[type[nn.Module], Callable[[Any, Tensor, Tensor], Pieces]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
}


# --------------------------------------------------------------------------- before training


def ghost_agrees(net: nn.Module, x: Tensor, y: Tensor, W: Params) -> bool:
    """Whether ghost norms of this network equal those of its per-example gradients.

    Ghost norms may be slightly larger, by the bound on rounding errors of a sum over many places.
    """
    ghost = ghost_pieces(net, x, y, W)
    if ghost is None:
        return False
    zeros = torch.zeros(len(x), device=x.device)
    for n, (expected, _) in func_pieces(net, x, y, W, {}).items():
        squares = ghost[n][0] if n in ghost else zeros
        agrees = (squares >= expected * 0.999 - 1e-8) & (squares <= expected * 1.005 + 1e-8)
        if not bool(agrees.all()):
            return False
    return True
