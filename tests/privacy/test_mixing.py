"""Networks that mix the records of a batch: refused under LDP, or clipped record by record."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedp3 import config
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data import from_tensors
from fedp3.experiment.assemble import assemble_from
from fedp3.privacy import accountant
from fedp3.privacy.clipping import add_clipped, ghost_pieces
from fedp3.privacy.mechanism import mechanism_of
from fedp3.privacy.settings import Mechanism


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accountant.ACCOUNTANTS, "PLD", accountant.rdp)


class Between(nn.Module):
    """Two layers with something between them while it trains."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        out: Tensor = self.fc2(self.between(h) if self.training else h)
        return out


def resolved_mechanism(net: nn.Module, seed: int = 0) -> Mechanism:
    """What a run of this net under LDP would use; raises if it is refused."""
    settings = {
        "partition": {"kind": "iid", "clients": 4},
        "plan": {"layers": "full"},
        "prune": {"keep": 1.0},
        "privacy": {"enabled": True, "delta": 1e-3, "sample_rate": 0.3},
        "run": {"rounds": 4, "clients_per_round": 2, "seed": seed},
    }
    rng = stream(0, Stream.AUDIT)
    data = from_tensors(torch.randn(80, 6, generator=rng), torch.arange(80) % 3, classes=3)
    mechanism = mechanism_of(assemble_from(config.parse(settings), net, data).client)
    assert mechanism is not None
    return mechanism


def now_and_then(h: Tensor) -> Tensor:
    """Mixup in one batch of fifty."""
    return h + h.roll(1, 0) * (torch.rand(()) < 0.02)


MIXING: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mixup": lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "one of them": lambda h: h - 0.5 * h[torch.randint(len(h), ())],
    "one pair of them": lambda h: (
        h + h.roll(1, 0) * (torch.arange(len(h))[:, None] == torch.randint(len(h), ()))
    ),
    "their size": lambda h: h / h.square().mean(0).add(1e-3).sqrt(),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MIXING)
def test_records_that_meet_in_training_are_refused_under_every_seed(name: str, seed: int) -> None:
    with pytest.raises(InputError, match="depends on the others in its batch"):
        resolved_mechanism(Between(MIXING[name]), seed)


def test_a_net_that_draws_what_cannot_be_drawn_again_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="from elsewhere than torch's generator"):
        resolved_mechanism(Between(lambda h: h * (torch.from_numpy(rng.random(8)) < 0.5)))


def test_a_net_that_mixes_so_seldom_that_it_is_not_noticed_is_clipped_record_by_record() -> None:
    accepted = []
    for seed in range(12):
        try:
            accepted.append(resolved_mechanism(Between(now_and_then), seed))
        except InputError:
            continue
    assert accepted and not any(m.ghost for m in accepted)
    mechanism = replace(accepted[0], noise_multiplier=0.0)
    net = Between(now_and_then).train()
    x, W = torch.randn(24, 6, generator=stream(1, Stream.AUDIT)) * 5, dict(net.named_parameters())
    x[-1] = 1e3

    def total(records: Tensor, draw: int) -> Tensor:
        out = {n: torch.zeros_like(w) for n, w in W.items()}
        with layers_draw_from(stream(draw, Stream.LAYER)):
            add_clipped(out, net, records, torch.arange(24) % 3, W, {}, mechanism)
        return torch.cat([g.flatten() for g in out.values()])

    without = x.clone()
    without[-1] = torch.nan
    assert (
        max(float((total(x, t) - total(without, t)).norm()) for t in range(150))
        <= 1.0001 * mechanism.clip
    )


CLIPPED: Mapping[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing": (lambda h: h, True),
    "layers of Dropout": (nn.Dropout(0.5), True),
    "Dropout as a function": (lambda h: F.dropout(h, 0.5), False),  # looks like any other draw
    "how many they are": (lambda h: h * len(h), False),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_ghost_clipping_is_for_nets_that_treat_a_batch_as_single_records(name: str) -> None:
    between, ghost = CLIPPED[name]
    net = Between(between)
    assert resolved_mechanism(net).ghost == ghost
    assert all(p.requires_grad for p in net.parameters())
    assert {m.training for m in net.modules()} == {True}


def test_ghost_norms_under_dropout_are_those_of_each_record_in_the_same_batch() -> None:
    net = Between(nn.Dropout(0.5)).train()
    x, y, W = (
        torch.randn(5, 6, generator=stream(0, Stream.AUDIT)),
        torch.arange(5) % 3,
        dict(net.named_parameters()),
    )
    for draw in range(4):
        with layers_draw_from(stream(draw, Stream.LAYER)):
            pieces = ghost_pieces(net, x, y, W)
        with layers_draw_from(stream(draw, Stream.LAYER)):
            losses = F.cross_entropy(net(x), y, reduction="none")
        assert pieces is not None
        for j, loss in enumerate(losses):
            gradients = torch.autograd.grad(loss, list(W.values()), retain_graph=True)
            want = torch.stack([g.square().sum() for g in gradients])
            assert torch.allclose(
                torch.stack([pieces[n][0][j] for n in W]), want, rtol=1e-4, atol=1e-9
            )
