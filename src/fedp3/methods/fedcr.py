"""FedCR (Zhang et al., ICML 2023): personal heads on a shared stochastic code.

The code of x is N(mu(x), diag sigma(x)²).  The server stores one Gaussian r_y = N(m_y, diag s_y²)
per class, towards which the codes of that class are drawn.
    loss    mean over the batch of
                mean over M draws z of CE(head(z), y)  +  beta KL(r_y || N(mu(x), sigma(x)²))
    client  per class the product of its samples' Gaussians:
                precision = sum 1/sigma²,  mean = (sum mu/sigma²) / precision
    server  per class the product of the clients' Gaussians and one standard normal
A client sends s = 0 for a class that it does not have.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3.client.hooks import Exchange, LossInputs, TrainedClient
from fedp3.core.errors import InputError
from fedp3.core.types import LayerMap, Params
from fedp3.data.inputs import Inputs, call
from fedp3.models.zoo import ModelSettings, Tail, plain_tail, scale_width

NEEDS_CODE = (
    "this method needs a network with a stochastic code before its head: one of the models that "
    "come with fedp3"
)
FLOOR = 1e-8  # the least sigma that is divided by, or whose logarithm is taken


def gaussian(out: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a code, from the 2 z outputs of its layer."""
    mu, rho = out.chunk(2, dim=1)
    return mu, F.softplus(rho)


class Code(nn.Module):
    """A stochastic code of z numbers: a draw in training mode, its mean otherwise."""

    def __init__(self, inputs: int, z: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * z)

    def forward(self, x: Tensor) -> Tensor:
        mu, sigma = gaussian(self.linear(x))
        return mu + sigma * torch.randn_like(sigma) if self.training else mu


def _coded_tail(features: int, classes: int, *, z: int) -> tuple[nn.Module, nn.Linear]:
    return Code(features, z), nn.Linear(z, classes)


def coded_tail(code: int, model: ModelSettings) -> Tail:
    """The last layers of a network with a stochastic code.

    Args:
        code: how many numbers the code has at width 1; 0 means no code.
        model: the network, with its width.
    """
    return partial(_coded_tail, z=scale_width(model.width, code)) if code else plain_tail


def _code_of(net: nn.Module) -> Code:
    code = getattr(net, "code", None)
    if not isinstance(code, Code):
        raise InputError(NEEDS_CODE)
    return code


def code_loss(
    net: nn.Module, x: Inputs, y: Tensor, inputs: LossInputs, *, beta: float, samples: int
) -> Tensor:
    """Cross-entropy over draws of the code, and the KL divergence from its class's Gaussian."""
    outputs: list[Tensor] = []
    handle = _code_of(net).linear.register_forward_hook(lambda m, _, out: outputs.append(out))
    try:
        logits = [call(net, x)]
    finally:
        handle.remove()
    mu, sigma = gaussian(outputs[0])
    head: Any = net.ffc
    logits += [head(mu + sigma * torch.randn_like(sigma)) for _ in range(samples - 1)]
    fit = torch.stack([F.cross_entropy(drawn, y) for drawn in logits]).mean()
    return fit + beta * divergence(inputs.sent["mean"][y], inputs.sent["std"][y], mu, sigma).mean()


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
def _reply(trained: TrainedClient) -> tuple[Params, Params]:
    """The Gaussians of the client's classes, from one pass over its training samples."""
    net = trained.net.eval()
    outputs: list[Tensor] = []
    shape = trained.sent["mean"].shape
    precision, weighted = torch.zeros(shape), torch.zeros(shape)
    handle = _code_of(net).linear.register_forward_hook(lambda m, _, out: outputs.append(out))
    try:
        for x, y in trained.batches():
            outputs.clear()
            call(net, x)
            mu, sigma = gaussian(outputs[0])
            trust = sigma.clamp(min=FLOOR) ** -2
            precision.index_add_(0, y.cpu(), trust.cpu())
            weighted.index_add_(0, y.cpu(), (trust * mu).cpu())
    finally:
        handle.remove()
    present = precision > 0
    mean = torch.where(present, weighted / precision.clamp(min=FLOOR), 0.0)
    std = torch.where(present, precision.clamp(min=FLOOR) ** -0.5, 0.0)
    return {"mean": mean, "std": std}, {}


def _combine(stored: Params, replies: Sequence[Params], clients: int) -> Params:
    # the standard normal
    precision, weighted = torch.ones_like(stored["mean"]), torch.zeros_like(stored["mean"])
    for r in replies:
        trust = torch.where(r["std"] > 0, r["std"].clamp(min=FLOOR) ** -2, 0.0)
        precision += trust
        weighted += trust * r["mean"]
    return {"mean": weighted / precision, "std": precision**-0.5}


GAUSSIANS = Exchange(begin=_begin, reply=_reply, combine=_combine, by_class=True)
