"""Weights that a server chose against the clip: no rounding of 32 bits lets a record move the sum by more."""

import math

import pytest
import torch
from torch import nn

from fedp3.privacy.clip import add_clipped
from fedp3.types import Private


def moved(net: nn.Module, x: torch.Tensor, names: set[str], private: Private) -> float:
    """The norm of what this record of label 0 adds, where these tensors train."""
    for n, p in net.named_parameters():
        p.requires_grad_(n in names)
    W = {n: p for n, p in net.named_parameters() if n in names}
    out = {n: torch.zeros_like(w) for n, w in W.items()}
    add_clipped(out, net, x, torch.tensor([0]), W, {}, private)
    return math.sqrt(sum(float(g.double().square().sum()) for g in out.values()))


@pytest.mark.parametrize("ghost", [True, False])
@pytest.mark.parametrize("tiny", [1e-21, 2.4e-23, 1e-25])
def test_activations_too_small_for_a_square_of_32_bits_are_clipped_all_the_same(tiny: float, ghost: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4096, bias=False), nn.Linear(4096, 8, bias=False), nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(tiny / 4)
        net[1].weight.zero_()
        net[2].weight.copy_(torch.tensor([[-4e18], [4e18]]).expand(2, 8))
    one = moved(net, torch.ones(1, 4), {"1.weight"}, Private(1e-6, ghost=ghost))
    assert 0.98e-6 <= one <= 1e-6
