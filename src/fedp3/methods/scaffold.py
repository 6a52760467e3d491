"""SCAFFOLD (Karimireddy et al., 2020): control variates c on the server and c_i at every client.

step    w <- w - gamma (g + c - c_i)
client  c_i' = c_i - c + (W_t - W_i) / (K gamma), of which it sends c_i' - c_i
        (option II of the paper)
server  c <- c + (1/n) sum over the round's clients of (c_i' - c_i)
"""

from collections.abc import Sequence

import torch

from fedp3.client.hooks import Exchange, TrainedClient
from fedp3.core.types import LayerMap, Params


def _begin(layers: LayerMap, classes: int) -> Params:
    return {n: torch.zeros(shape) for n, shape in layers.shapes.items() if n not in layers.buffers}


def _shift(sent: Params, state: Params) -> Params:
    return {n: c - state[n] if n in state else c for n, c in sent.items()}


def _reply(trained: TrainedClient) -> tuple[Params, Params]:
    change, variate = {}, {}
    for n, c in trained.sent.items():
        c_i = trained.state.get(n, torch.zeros_like(c))
        if trained.steps_times_lr:
            mean_gradient = (trained.start[n] - trained.end[n]) / trained.steps_times_lr
        else:
            mean_gradient = c - c_i  # without a step, c_i stays as it is
        variate[n] = c_i - c + mean_gradient
        change[n] = variate[n] - c_i
    return change, variate


def _combine(stored: Params, replies: Sequence[Params], clients: int) -> Params:
    if not replies:
        return stored
    return {n: c + torch.stack([r[n] for r in replies]).sum(0) / clients for n, c in stored.items()}


SCAFFOLD = Exchange(begin=_begin, reply=_reply, combine=_combine, shift=_shift)
