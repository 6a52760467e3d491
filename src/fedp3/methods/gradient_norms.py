"""Squared norms of a client's gradient, layer by layer, from which the server selects layers.

With every update a client sends ||g_l||^2 of each layer l: g is the gradient of its loss at the
weights that it was sent, over the first batch of its samples, whichever layers it trains.
"""

from collections.abc import Sequence

import torch

from fedp3.client.hooks import Exchange, TrainedClient
from fedp3.client.sgd import load_weights, named_tensors
from fedp3.core.types import LayerMap, Params
from fedp3.server.selection import NORMS


def _begin(layers: LayerMap, classes: int) -> Params:
    return {NORMS: torch.zeros(len(layers.layers))}


def _reply(trained: TrainedClient) -> tuple[Params, Params]:
    net = trained.net
    load_weights(named_tensors(net), trained.start)
    net.eval()  # draws nothing, and running statistics stay
    weights = dict(net.named_parameters())
    for w in weights.values():
        w.requires_grad_(True)
    x, y = next(trained.batches())
    grads = torch.autograd.grad(
        trained.loss(x, y), list(weights.values()), materialize_grads=True, allow_unused=True
    )
    squares = {n: float(g.double().square().sum()) for n, g in zip(weights, grads, strict=True)}
    by_layer = [sum(squares.get(n, 0.0) for n in names) for names in trained.layers.layers.values()]
    return {NORMS: torch.tensor(by_layer)}, {}


def _combine(stored: Params, replies: Sequence[Params], clients: int) -> Params:
    """The aggregator keeps the norms of each client; what is sent to clients stays zero."""
    return stored


GRADIENT_NORMS = Exchange(begin=_begin, reply=_reply, combine=_combine)
