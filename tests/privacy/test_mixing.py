"""Networks that mix the records of a batch: refused under LDP, or clipped record by record."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedp3 import config
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data import from_tensors
from fedp3.experiment.assemble import assemble_from
from fedp3.privacy import accountant, trial
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


def resolved_mechanism(net: nn.Module, seed: int = 0, batch: int = 48) -> Mechanism:
    """What a run of this net under LDP would use; raises if it is refused.

    Each of the four clients has 14 training records.
    """
    settings = {
        "local": {"batch": batch},
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


@pytest.mark.parametrize(("records", "batch"), [(4, 48), (7, 48), (7, 7), (11, 48), (14, 14)])
def test_records_that_meet_only_in_large_batches_are_refused(records: int, batch: int) -> None:
    with pytest.raises(InputError, match="depends on the others in its batch"):
        resolved_mechanism(
            Between(lambda h: h + h.mean(0) if len(h) >= records else h), batch=batch
        )


@pytest.mark.parametrize("batch", [6, 9, 14, 48])
def test_records_that_meet_only_in_full_batches_are_refused(batch: int) -> None:
    full = min(batch, 14)  # no client has more records
    net = Between(lambda h: h + h.roll(1, 0) if len(h) == full else h)
    with pytest.raises(InputError, match=f"of {full} records"):
        resolved_mechanism(net, batch=batch)


def test_one_pair_of_many_records_that_meet_is_found() -> None:
    for i, j in ((0, 1), (1, 0), (0, 4), (7, 3)):

        def pair(h: Tensor, i: int = i, j: int = j) -> Tensor:
            if len(h) != 8:
                return h
            return h + h[j] * (torch.arange(8)[:, None] == i)

        with pytest.raises(InputError, match="depends on the others in its batch"):
            resolved_mechanism(Between(pair))


@given(st.integers(1, 5000))
def test_batches_are_tried_from_2_to_the_largest_that_a_step_computes(largest: int) -> None:
    sizes = trial._trial_sizes(largest)
    assert sizes == sorted(set(sizes)) and {2, 3} <= set(sizes)
    assert sizes[-1] == max(3, largest)
    assert all(b <= 1.7 * a for a, b in pairwise(sizes[1:]))


@given(st.integers(2, 8))
def test_each_of_up_to_8_records_changes_while_each_other_one_does_not(size: int) -> None:
    separated = torch.zeros(size, size, dtype=torch.bool)
    for unchanged in trial._splits(size):
        separated |= unchanged[:, None] & ~unchanged
    assert bool((separated | torch.eye(size, dtype=torch.bool)).all())


def test_a_net_that_mixes_at_a_size_that_is_not_tried_is_clipped_record_by_record() -> None:
    untried = min({*range(2, 14)} - {*trial._trial_sizes(14)})
    mixes = Between(lambda h: h + h.mean(0) if len(h) == untried else h)
    assert not resolved_mechanism(mixes).ghost


class Remembers(nn.Module):
    """Two layers, and a memory that `remember` may use and change."""

    def __init__(self, remember: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.remember = nn.Linear(6, 8), nn.Linear(8, 3), remember
        self.past: Any = deque()
        self.calls = 0
        self.register_buffer("table", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        if isinstance(x, torch.fx.Proxy):
            out: Tensor = self.fc2(h)
            return out
        return self.fc2(self.remember(self, h))  # type: ignore[no-any-return]


def after_40_calls(m: Any, h: Tensor) -> Tensor:
    m.past.append(h.detach().sum(0))
    return h + m.past[-41] if len(m.past) > 40 else h


def counted(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h


def running_mean(m: Any, h: Tensor) -> Tensor:
    if m.training:
        m.table.mul_(0.9).add_(h.detach().mean(0))
    return h + 0.0 * m.table


def moved_weight(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.fc2.weight[0, 0] += 1e-6 * h.sum()
    return h


REMEMBERED = {
    "past": after_40_calls,
    "calls": counted,
    "table": running_mean,
    "fc2": moved_weight,
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_net_that_remembers_earlier_batches_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"changes its attribute \S*{name}"):
        resolved_mechanism(Remembers(REMEMBERED[name]))


def test_a_net_that_remembers_the_last_batch_elsewhere_is_refused() -> None:
    last = [torch.zeros(8)]

    def remember(m: Any, h: Tensor) -> Tensor:
        out = h + last[0]
        last[0] = h.detach().mean(0)
        return out

    with pytest.raises(InputError, match="LDP refused"):
        resolved_mechanism(Remembers(remember))


def test_a_memory_elsewhere_that_is_not_noticed_does_not_run_in_ghost_clipping() -> None:
    """What `forward` does besides the operations of its graph has no effect on gradients."""
    past: list[Tensor] = []

    def remember(h: Tensor) -> Tensor:
        if isinstance(h, torch.fx.Proxy):
            return h
        past.append(h.detach().sum(0))
        return h + past[-401] if len(past) > 400 else h

    net = Between(remember)
    mechanism = resolved_mechanism(net)
    assert mechanism.ghost
    W, y = dict(net.named_parameters()), torch.arange(5) % 3
    x = torch.randn(500, 5, 6, generator=stream(0, Stream.AUDIT))

    def total(records: Tensor) -> Tensor:
        out = {n: torch.zeros_like(w) for n, w in W.items()}
        add_clipped(out, net, records, y, W, {}, mechanism)
        return torch.cat([g.flatten() for g in out.values()])

    first = total(x[0])
    for batch in x:
        total(1e3 * batch)
    assert torch.equal(total(x[0]), first)


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
