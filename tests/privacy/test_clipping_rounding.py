"""Weights that a server chose against the clip: no rounding lets a record exceed it."""

import math

import pytest
import torch
from torch import nn

from fedp3.privacy.clipping import _product, add_clipped, ghost_agrees
from fedp3.privacy.settings import Mechanism


def moved(net: nn.Module, x: torch.Tensor, names: set[str], mechanism: Mechanism) -> float:
    """The norm of what this record of label 0 adds, where these tensors train."""
    for n, p in net.named_parameters():
        p.requires_grad_(n in names)
    W = {n: p for n, p in net.named_parameters() if n in names}
    out = {n: torch.zeros_like(w) for n, w in W.items()}
    add_clipped(out, net, x, torch.tensor([0]), W, {}, mechanism)
    return math.sqrt(sum(float(g.double().square().sum()) for g in out.values()))


@pytest.mark.parametrize("ghost", [True, False])
@pytest.mark.parametrize("tiny", [1e-21, 2.4e-23, 1e-25])
def test_activations_too_small_for_a_square_of_32_bits_are_clipped_all_the_same(
    tiny: float, ghost: bool
) -> None:
    net = nn.Sequential(
        nn.Linear(4, 4096, bias=False), nn.Linear(4096, 8, bias=False), nn.Linear(8, 2, bias=False)
    )
    with torch.no_grad():
        net[0].weight.fill_(tiny / 4)
        net[1].weight.zero_()
        net[2].weight.copy_(torch.tensor([[-4e18], [4e18]]).expand(2, 8))
    one = moved(net, torch.ones(1, 4), {"1.weight"}, Mechanism(clip=1e-6, ghost=ghost))
    assert 0.98e-6 <= one <= 1e-6


@pytest.mark.parametrize("clip", [1e-6, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("length", [1e15, 1e24, 9e24, 1.1e25, 1e30, 1e35, 1e38])
def test_activations_too_large_for_a_factor_of_32_bits_are_clipped_or_count_as_none(
    length: float, clip: float
) -> None:
    for places, outputs in ((1, 8), (1, 1000), (2, 8), (2, 1000)):
        net = nn.Sequential(
            nn.Linear(64, 64, bias=False),
            nn.Linear(64, outputs, bias=False),
            nn.Flatten(),
            nn.Linear(places * outputs, 2, bias=False),
        )
        rng = torch.Generator().manual_seed(0)
        direction = torch.randn(places * outputs, generator=rng) * 1e12 / length
        with torch.no_grad():
            net[0].weight.copy_(length / 8 * torch.eye(64))
            net[1].weight.zero_()
            net[3].weight.copy_(torch.stack([-direction, direction]))
        x = torch.rand(1, places, 64, generator=rng)
        one = moved(net, x, {"1.weight"}, Mechanism(clip=clip))
        assert one <= clip
        if length <= 1e24:
            assert one >= 0.98 * clip


class Tokens(nn.Module):
    """A layer at T places, whose answers are summed with weights of the server's choice."""

    def __init__(self, T: int, side: int) -> None:
        super().__init__()
        self.fc, self.pool, self.head = (
            nn.Linear(side, side),
            nn.Linear(T, 1, bias=False),
            nn.Linear(side, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.pool(self.fc(x).transpose(1, 2)).squeeze(2))
        return out


@pytest.mark.parametrize("names", [{"fc.weight"}, {"fc.weight", "fc.bias"}])
@pytest.mark.parametrize("T", [128, 384])
def test_a_sum_over_many_places_that_cancels_stays_within_the_clip(T: int, names: set[str]) -> None:
    side, v, first = 1024, 1.4962565898895264, int(0.3 * T)
    assert T * 2 * side < side * side, "so norms come from Gram matrices"
    net = Tokens(T, side)
    shares = torch.full((T,), v)
    shares[first:] = -v * first / (T - first)
    with torch.no_grad():
        net.pool.weight.copy_(shares[None])
        net.head.weight.copy_(torch.tensor([[-1e3], [1e3]]).expand(2, side))
        net.head.bias.zero_()
        net.fc.bias.zero_()
    assert moved(net, torch.ones(1, T, side), names, Mechanism(clip=1.0)) <= 1.0


def test_a_net_that_uses_a_layer_at_many_places_is_followed_all_the_same() -> None:
    net = Tokens(256, 640)
    x = torch.randn(3, 256, 640, generator=torch.Generator().manual_seed(0))
    assert ghost_agrees(net, x, torch.zeros(3, dtype=torch.int64), dict(net.named_parameters()))


def test_what_the_bound_adds_to_an_ordinary_norm_is_little() -> None:
    rng = torch.Generator().manual_seed(0)
    for T, side in ((16, 64), (64, 256), (384, 1024)):
        a, delta = (torch.randn(2, T, side, generator=rng).relu() for _ in range(2))
        true = torch.bmm(delta.double().transpose(1, 2), a.double()).flatten(1).norm(dim=1)
        bound = _product(a, delta)["weight"][0].double().sqrt()
        assert bool((true <= bound).all()) and bool((bound <= 1.0005 * true).all())
