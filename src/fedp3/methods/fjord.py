"""FjORD's local step with self-distillation (Horváth et al., 2021)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fedp3.client.hooks import StepHook
from fedp3.client.sgd import LocalPass, extract_units, named_tensors, prepare, take_step
from fedp3.core import masks as M
from fedp3.core.types import Group
from fedp3.data.inputs import Inputs, call


def distilled_step(
    this: LocalPass, k: int, x: Inputs, y: Tensor, units: Mapping[Group, Tensor]
) -> float:
    """One step of two losses.

    The client's full width learns from the labels, and the drawn width learns from the full one.
    """
    context, layers, plan = this.context, this.context.layers, this.task.plan
    tensors = named_tensors(context.net)
    W = {n: tensors[n] for n in prepare(context.net, plan, layers)}
    logits = call(context.net, x)
    loss = F.cross_entropy(logits, y)
    grads = list(torch.autograd.grad(loss, list(W.values()), materialize_grads=True))
    units = {g: indices.to(context.device) for g, indices in units.items()}
    small_context, small, _ = extract_units(context, units)
    small_W = {n: small[n] for n in prepare(small_context.net, plan, small_context.layers)}
    distilled = F.cross_entropy(call(small_context.net, x), logits.detach().softmax(1))
    small_grads = torch.autograd.grad(distilled, list(small_W.values()), materialize_grads=True)
    by_name = dict(zip(W, grads, strict=True))
    for n, g in zip(small_W, small_grads, strict=True):
        M.add_at(by_name[n], g, M.block(n, units, layers))
    take_step(this, k, W, grads, this.optimizer, this.masks, this.proximal)
    return float(loss.detach())


DISTILLED = StepHook(run=distilled_step, full_passes=1)
