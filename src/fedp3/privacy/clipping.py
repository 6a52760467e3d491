"""Per-example clipping: sum_j g_j min(1, C / ||g_j||), one joint norm over all trained coordinates.

Ghost clipping never stores the gradients g_j of single records.  A layer that multiplies its input
a_j by a weight has g_j = δ_j' a_j, where δ_j is the gradient at its output.  So one backward pass
down to the outputs gives all that is needed:
    ||g_j||² = ||δ_j||² ||a_j||²  (or the inner product of two Gram matrices)
    sum_j c_j g_j = (c ⊙ δ)' a
Other layers, shared tensors and masks inside a tensor do not factor like this.  For them
`torch.func` computes every g_j.
A record whose gradient is not finite counts as zero, so that nobody can see what it does.  Its rows
are overwritten with zeros where the sum is computed, so that a step with such a record takes as
long as any other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedp3.client.objectives import RecordLoss, cross_entropies
from fedp3.core.types import Params
from fedp3.data.inputs import Batch, Inputs, as_arguments, map_tensors
from fedp3.privacy.per_record import per_record_graph
from fedp3.privacy.settings import Mechanism

# (out, c, broken) -> out += sum_j c_j g_j without the records at the positions `broken`
AddTo = Callable[[Tensor, Tensor, Tensor], object]
# name of a tensor -> its ||g_j||² for each record (batch,), and its weighted sum
Pieces = dict[str, tuple[Tensor, AddTo]]

NORM_SLACK = 1e-6  # added to a norm: more than the rounding error of its float32 sum
FLOAT32_ROUNDING = 2.0**-24  # the relative error of one float32 addition
# A server can choose weights under which the inputs a of a layer are huge and δ vanishes.  Then c δ
# is of the size C / ||a||, which float32 cannot represent beyond this length of a, even for the
# smallest C that is allowed: a record would exceed C by 4 %.  It counts as not finite.
LONGEST_INPUT = 1e25


def add_clipped(
    out: Params,
    net: nn.Module,
    x: Inputs,
    y: Tensor,
    W: Params,
    masks: Params,
    mechanism: Mechanism,
    loss: RecordLoss = cross_entropies,
) -> None:
    """Add the clipped gradients of these records to `out`.

    Args:
        out: sums of gradients, by tensor.
        net: the network.
        x: records.
        y: their targets.
        W: the tensors of `net` that train.
        masks: active coordinates of tensors of W; a tensor that is not named is active entirely.
        mechanism: the clip, and whether ghost clipping may be used.
        loss: of each record, which must not depend on the other records.
    """
    if not len(y):
        return
    pieces, squares = gradient_pieces(net, x, y, W, masks, mechanism, loss)
    finite = squares.isfinite()
    norms = squares.sqrt() * (1 + NORM_SLACK) + NORM_SLACK
    c = (mechanism.clip / norms).clamp(max=1.0).where(finite, 0.0)
    broken = (~finite).nonzero().flatten()
    for n, (_, add) in pieces.items():
        add(out[n], c, broken)


def gradient_pieces(
    net: nn.Module,
    x: Inputs,
    y: Tensor,
    W: Params,
    masks: Params,
    mechanism: Mechanism,
    loss: RecordLoss,
) -> tuple[Pieces, Tensor]:
    """The pieces of each tensor, and the squared norm of each record's joint gradient (batch,)."""
    pieces = None
    if mechanism.ghost and not masks and isinstance(x, Tensor):
        graph = per_record_graph(net, x)
        pieces = None if graph is None else ghost_pieces(graph, x, y, W, loss)
    if pieces is None:
        pieces = func_pieces(net, x, y, W, masks, loss)
    return pieces, torch.stack([squares for squares, _ in pieces.values()]).sum(0)


# --------------------------------------------------------------------------- per-example gradients


def func_pieces(
    net: nn.Module,
    x: Inputs,
    y: Tensor,
    W: Params,
    masks: Params,
    loss: RecordLoss = cross_entropies,
) -> Pieces:
    """Per-example gradients of any network, by `torch.func`.

    This is the reference; it needs memory for batch size times parameters.
    """

    def loss_of_one(w: dict[str, Tensor], one: Inputs, target: Tensor) -> Tensor:
        alone = Batch(map_tensors(lambda v: v[None], one), target[None])
        outputs = torch.func.functional_call(net, w, *as_arguments(alone.x))
        return loss(outputs, alone).sum()

    per_example = torch.func.vmap(
        torch.func.grad(loss_of_one), in_dims=(None, 0, 0), randomness="different"
    )
    # Of attention, only the plain computation can be mapped over records at once.
    with sdpa_kernel(SDPBackend.MATH):
        gradients = per_example({n: w.detach() for n, w in W.items()}, x, y)
    pieces = {}
    for n, g in gradients.items():
        # Where no record has a gradient, all records share one row, which cannot be written to.
        pieces[n] = _materialised(g.contiguous().mul_(masks[n]) if n in masks else g)
    return pieces


def _materialised(gradients: Tensor) -> tuple[Tensor, AddTo]:
    """The pieces of one tensor, from its gradient for each record, which may be overwritten."""
    flat = gradients.flatten(1).contiguous()  # (batch, coordinates)

    def add(out: Tensor, c: Tensor, broken: Tensor) -> None:
        flat.index_fill_(0, broken, 0)  # because 0 * inf is not 0
        out.view(-1).addmv_(flat.T, c)

    return flat.square().sum(1), add


# --------------------------------------------------------------------------- ghost clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a layer."""

    module: nn.Module
    a: Tensor  # its input
    version: int  # of the input at the call; a later version means that the input was overwritten
    out: GradientEdge  # not the output itself: an in-place ReLU behind the layer would change it


def ghost_pieces(
    net: nn.Module, x: Tensor, y: Tensor, W: Params, loss: RecordLoss = cross_entropies
) -> Pieces | None:
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
        total = loss(net(x), Batch(x, y)).sum()
    finally:
        for hook in hooks:
            hook.remove()
    if sorted(id(call.module) for call in calls) != sorted(map(id, owners)):
        return None  # a layer was called twice or not at all
    if any(len(call.a) != len(x) or call.a._version != call.version for call in calls):
        return None
    deltas = torch.autograd.grad(total, [call.out for call in calls], allow_unused=True)
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
        norms[0].masked_fill_(norms[0] > LONGEST_INPUT, torch.inf)
        squares = (norms[0] * norms[1]).square().to(a.dtype)
    elif T * (inputs + outputs) < inputs * outputs:  # Gram matrices are cheaper than gradients
        squares = _gram_squares(a.double(), delta.double()).to(a.dtype)
    else:
        return {
            "weight": _materialised(torch.bmm(delta.transpose(1, 2), a)),
            "bias": _materialised(delta.sum(1)),
        }

    def add(out: Tensor, c: Tensor, broken: Tensor) -> None:
        scaled = (delta * c[:, None, None]).index_fill_(0, broken, 0)
        finite = a.index_fill(0, broken, 0)  # a copy: the inputs may be the records themselves
        out.view(outputs, inputs).addmm_(scaled.flatten(0, 1).T, finite.flatten(0, 1))

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
    lengths = gram_a.diagonal(dim1=1, dim2=2)  # ||a_t||²
    diagonals = lengths * gram_delta.diagonal(dim1=1, dim2=2)
    terms = diagonals.sqrt().sum(1)  # sum_t ||a_t|| ||δ_t||
    norms = (gram_a * gram_delta).sum((1, 2)).clamp(min=0).sqrt()
    norms.masked_fill_(lengths.amax(1) > LONGEST_INPUT**2, torch.inf)
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


def ghost_agrees(
    net: nn.Module, x: Inputs, y: Tensor, W: Params, loss: RecordLoss = cross_entropies
) -> bool:
    """Whether ghost norms of this network equal those of its per-example gradients.

    They are those of the network's graph, so that this network must have one that provably computes
    record by record.  Ghost norms may be slightly larger, by the bound on rounding errors of a sum
    over many places.
    """
    if not isinstance(x, Tensor):
        return False
    graph = per_record_graph(net, x)
    ghost = None if graph is None else ghost_pieces(graph, x, y, W, loss)
    if ghost is None:
        return False
    zeros = torch.zeros(len(x), device=x.device)
    for n, (expected, _) in func_pieces(net, x, y, W, {}, loss).items():
        squares = ghost[n][0] if n in ghost else zeros
        agrees = (squares >= expected * 0.999 - 1e-8) & (squares <= expected * 1.005 + 1e-8)
        if not bool(agrees.all()):
            return False
    return True
