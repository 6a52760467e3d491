"""SCAFFOLD (Karimireddy et al., 2020): control variates c on the server and c_i at every client.

step    w <- w - gamma (g + c - c_i)
client  c_i' = c_i - c + (W_t - W_i) / (K gamma)            (option II of the paper); sends c_i' - c_i
server  c <- c + (1/n) sum over the round's clients of (c_i' - c_i)
"""

from collections.abc import Sequence

import torch

from fedp3.hooks import Exchange, Trained
from fedp3.types import LayerMap, Params


def _begin(layers: LayerMap, classes: int) -> Params:
    return {n: torch.zeros(shape) for n, shape in layers.shapes.items() if n not in layers.buffers}


def _shift(sent: Params, kept: Params) -> Params:
    return {n: c - kept[n] if n in kept else c for n, c in sent.items()}


def _reply(trained: Trained) -> tuple[Params, Params]:
    change, mine = {}, {}
    for n, c in trained.sent.items():
        c_i = trained.kept.get(n, torch.zeros_like(c))
        moved = (trained.start[n] - trained.end[n]) / trained.reach if trained.reach else c - c_i
        mine[n] = c_i - c + moved
        change[n] = mine[n] - c_i
    return change, mine


def _combine(held: Params, replies: Sequence[Params], clients: int) -> Params:
    return {n: c + torch.stack([r[n] for r in replies]).sum(0) / clients if replies else c for n, c in held.items()}


SCAFFOLD = Exchange(_begin, _reply, _combine, _shift)
