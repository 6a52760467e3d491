"""FedCR (Zhang et al., ICML 2023): personal heads on a shared stochastic code, classes held together by Gaussians.

The code of x is N(mu(x), diag sigma(x)²); the server holds one Gaussian r_y = N(m_y, diag s_y²) per class.
    loss    mean over the batch of  mean over M draws z of CE(head(z), y)  +  beta KL(r_y || N(mu(x), sigma(x)²))
    client  per class the product of its samples' Gaussians: precision sum 1/sigma², mean sum mu/sigma² / precision
    server  per class the product of the clients' Gaussians and one standard normal
A class that a client does not have travels as s = 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3.errors import InputError
from fedp3.hooks import Exchange, Given, Trained
from fedp3.models import Code, gaussian
from fedp3.types import LayerMap, Params

NEEDS_CODE = "this method needs a net with a stochastic code before its head: one of fedp3's own models"
FLOOR = 1e-8  # of sigma, where it is divided by or its logarithm is taken


def _code_of(net: nn.Module) -> Code:
    code = getattr(net, "code", None)
    if not isinstance(code, Code):
        raise InputError(NEEDS_CODE)
    return code


def code_loss(net: nn.Module, x: Tensor, y: Tensor, given: Given, *, beta: float, samples: int) -> Tensor:
    """Cross-entropy over draws of the code, and the KL divergence from its class's Gaussian."""
    said: list[Tensor] = []
    handle = _code_of(net).linear.register_forward_hook(lambda m, _, out: said.append(out))
    try:
        logits = [net(x)]
    finally:
        handle.remove()
    mu, sigma = gaussian(said[0])
    head: Any = net.ffc
    logits += [head(mu + sigma * torch.randn_like(sigma)) for _ in range(samples - 1)]
    fit = torch.stack([F.cross_entropy(each, y) for each in logits]).mean()
    return fit + beta * divergence(given.sent["mean"][y], given.sent["std"][y], mu, sigma).mean()


def divergence(m: Tensor, s: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    """KL(N(m, s²) || N(mu, sigma²)) of diagonal Gaussians, summed over the code."""
    s, sigma = s.clamp(min=FLOOR), sigma.clamp(min=FLOOR)
    return ((sigma / s).log() + (s**2 + (m - mu) ** 2) / (2 * sigma**2) - 0.5).sum(1)


def _begin(layers: LayerMap, classes: int) -> Params:
    if "ffc.weight" not in layers.shapes:
        raise InputError(NEEDS_CODE)
    z = layers.shapes["ffc.weight"][1]
    return {"mean": torch.zeros(classes, z), "std": torch.ones(classes, z)}


@torch.no_grad()
def _reply(trained: Trained) -> tuple[Params, Params]:
    """The client's classes, from one pass over its training samples with the net it ended with."""
    net, said = trained.net.eval(), list[Tensor]()
    shape = trained.sent["mean"].shape
    precision, weighted = torch.zeros(shape), torch.zeros(shape)
    handle = _code_of(net).linear.register_forward_hook(lambda m, _, out: said.append(out))
    try:
        for x, y in trained.batches():
            said.clear()
            net(x)
            mu, sigma = gaussian(said[0])
            trust = sigma.clamp(min=FLOOR) ** -2
            precision.index_add_(0, y.cpu(), trust.cpu())
            weighted.index_add_(0, y.cpu(), (trust * mu).cpu())
    finally:
        handle.remove()
    here = precision > 0
    mean = torch.where(here, weighted / precision.clamp(min=FLOOR), 0.0)
    return {"mean": mean, "std": torch.where(here, precision.clamp(min=FLOOR) ** -0.5, 0.0)}, {}


def _combine(held: Params, replies: Sequence[Params], clients: int) -> Params:
    precision, weighted = torch.ones_like(held["mean"]), torch.zeros_like(held["mean"])  # the standard normal
    for r in replies:
        trust = torch.where(r["std"] > 0, r["std"].clamp(min=FLOOR) ** -2, 0.0)
        precision += trust
        weighted += trust * r["mean"]
    return {"mean": weighted / precision, "std": precision**-0.5}


GAUSSIANS = Exchange(_begin, _reply, _combine)
