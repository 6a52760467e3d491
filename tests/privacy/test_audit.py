"""The audit passes the code as it is, and catches every bug that is put into it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedp3 import config
from fedp3.data import from_tensors
from fedp3.experiment import assemble_own
from fedp3.privacy import bounds, mechanism
from fedp3.privacy.audit import Finding, Subject, audit, sensitivity
from fedp3.privacy.ledger import Budget
from fedp3.privacy.neighbours import Bench, bench, tiny
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.server import plans_for
from fedp3.types import Local, Params, Private
from worlds import world

SUBJECT = Subject(Budget(Private(0.7, 2.0, 0.2, "seeded"), 10, 8.0, 1e-5, "RDP", 250), Local(steps=10), "freeze")


def failed(subject: Subject, parts: str, runs: int = 90) -> list[Finding]:
    return [f for f in audit(subject, parts, runs) if not f.passed]


@pytest.mark.parametrize(("others", "parts"), [("freeze", "ABCDEFG"), ("noise", "ABCDG")])
def test_the_code_as_it_is_passes(others: str, parts: str) -> None:
    found = audit(replace(SUBJECT, others=others), parts, runs=90)
    assert {f.part for f in found} == set(parts)
    assert not [f for f in found if not f.passed]


@pytest.mark.parametrize("kind", ["cnn", "groupnorm"])
def test_the_net_of_a_run_is_audited_as_well(kind: str) -> None:
    w = world(kind, selector="neuron", physical=True)
    own = bench(w.recipe, w.plans(others="freeze")[1], 6)
    found = [f for f in audit(replace(SUBJECT, own=own), "AB") if f.what.endswith("own net")]
    assert len(found) > 6 and all(f.passed for f in found)


@pytest.mark.parametrize("seed", range(12))
def test_the_canary_has_a_gradient_in_any_net(seed: int) -> None:
    """Under the label that a net expects anyway it would have none, and correct code would fail."""
    w = world("mlp")
    with layers_draw_from(stream(seed, Use.INIT)):
        initial = {n: 0.3 * torch.randn(v.shape) for n, v in w.W.items()}
    own = bench(replace(w.recipe, initial=initial), w.plans(others="freeze")[1], 6)
    assert all(f.passed for f in sensitivity(own, 0.7))


class Drops(nn.Module):
    """Dropout that is a function, not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.ffc = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffc(nn.functional.dropout(torch.relu(self.fc1(x.flatten(1))), 0.5, self.training))


def dropping(seed: int) -> Bench:
    with layers_draw_from(stream(seed, Use.INIT)):
        net = Drops()
    data = from_tensors(torch.randn(80, 1, 4, 4, generator=stream(seed, Use.AUDIT)), torch.arange(80) % 3)
    said = [
        "partition.kind=iid",
        "partition.clients=4",
        "run.clients_per_round=0",
        "plan.layers=full",
        "prune.keep=1.0",
    ]
    e = assemble_own(config.parse({}, said), net, replace(data, crop=1, flip=True))
    assert e.recipe.local.augment
    return bench(e.recipe, plans_for(e.problem, 0)[0], 6)


def test_a_net_with_dropout_on_cropped_images_passes() -> None:
    found = [f for f in audit(replace(SUBJECT, own=dropping(0)), "AB") if f.what.endswith("own net")]
    assert len(found) > 6 and all(f.passed for f in found)


def test_a_draw_of_dropout_that_leaves_the_canary_no_gradient_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    benches = [dropping(seed) for seed in range(40)]
    with monkeypatch.context() as m:
        m.setattr("fedp3.privacy.audit.DRAWS", 1)
        unlucky = [b for b in benches if not sensitivity(b, 1.0)[0].passed]
    assert unlucky
    assert all(sensitivity(b, 1.0)[0].passed for b in unlucky)


# --------------------------------------------------------------------------- bugs, one by one

fill, add, generator = mechanism.fill_with_noise, mechanism.add_clipped, mechanism.draws
gradient_of = mechanism.private_gradient


def noise_divided_by_b(out: Tensor, private: Private, rng: torch.Generator) -> None:
    fill(out, replace(private, noise=private.noise / (private.rate * 24)), rng)


def a_third_of_the_noise(out: Tensor, private: Private, rng: torch.Generator) -> None:
    fill(out, replace(private, noise=private.noise / 3), rng)


def no_noise(out: Tensor, private: Private, rng: torch.Generator) -> None:
    out.zero_()


def one_tensor_without_noise(out: Tensor, private: Private, rng: torch.Generator) -> None:
    fill(out, private if out.shape != (4, 8) else replace(private, noise=0.0), rng)


def noise_where_it_was_zero_before(out: Tensor, private: Private, rng: torch.Generator) -> None:
    """As if only coordinates with a gradient were noised: dead units would show."""
    fill(out, private, rng)
    if out.dim() == 2:
        out[0] = 0.0


def batch_is_clipped(
    out: Params, net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params, private: Private
) -> None:
    total = {n: torch.zeros_like(w) for n, w in out.items()}
    add(total, net, x, y, W, masks, replace(private, clip=math.inf))
    norm = torch.cat([w.flatten() for w in total.values()]).norm() / len(x)
    for n, w in total.items():
        out[n].add_(w, alpha=min(1.0, private.clip / float(norm)))


def tensors_are_clipped(
    out: Params, net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params, private: Private
) -> None:
    for n in W:
        add(
            {n: out[n]}, net, x, y, {n: W[n]}, {k: m for k, m in masks.items() if k == n}, replace(private, ghost=False)
        )


def everybody_every_time(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    return (torch.arange(samples) for _ in range(steps))


def shuffled_epochs(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    size = max(1, round(rate * samples))
    for k in range(steps):
        if k * size % samples < size:
            order = torch.randperm(samples, generator=rng)
        yield order[k * size % samples :][:size]


def the_same_noise_again(private: Private, use: Use, *at: int) -> torch.Generator:
    return torch.Generator().manual_seed(5) if use is Use.NOISE else generator(private, use, *at)


def draws_that_anybody_can_name(private: Private, use: Use, *at: int) -> torch.Generator:
    return generator(None, use, *at)


def others_without_noise(private: Private, local: Local, samples: int, *at: int) -> mechanism.Gradient:
    mine = gradient_of(private, local, samples, *at)

    def gradient(net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params) -> tuple[float, list[Tensor]]:
        loud = {n: w for n, w in W.items() if not n.startswith("0.")}
        ok = x.isfinite().all(1)
        loss = nn.functional.cross_entropy(net(x[ok]), y[ok])
        plain = dict(zip(W, torch.autograd.grad(loss, list(W.values())), strict=True))
        noisy = dict(zip(loud, mine(net, x, y, loud, {n: m for n, m in masks.items() if n in loud})[1], strict=True))
        return loss.item(), [noisy.get(n, plain[n]) for n in W]

    return gradient


BUGS: dict[str, tuple[Callable[..., object], str]] = {
    "fedp3.privacy.mechanism.fill_with_noise:b": (noise_divided_by_b, "BC"),
    "fedp3.privacy.mechanism.fill_with_noise:tensor": (one_tensor_without_noise, "B"),
    "fedp3.privacy.mechanism.fill_with_noise:dead": (noise_where_it_was_zero_before, "B"),
    "fedp3.privacy.mechanism.add_clipped:batch": (batch_is_clipped, "AC"),
    "fedp3.privacy.mechanism.add_clipped:tensor": (tensors_are_clipped, "A"),
    "fedp3.privacy.mechanism.poisson:all": (everybody_every_time, "E"),
    "fedp3.privacy.mechanism.poisson:shuffled": (shuffled_epochs, "E"),
    "fedp3.privacy.mechanism.draws:again": (the_same_noise_again, "B"),
}


@pytest.mark.parametrize("place", BUGS)
def test_a_bug_is_caught(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, parts = BUGS[place]
    monkeypatch.setattr(place.partition(":")[0], bug)
    assert {f.part for f in failed(SUBJECT, parts)} == set(parts)


@pytest.mark.parametrize("bug", [a_third_of_the_noise, no_noise, batch_is_clipped])
def test_a_gross_bug_is_proven_by_a_test_of_two_neighbours(
    bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mechanism, "add_clipped" if bug is batch_is_clipped else "fill_with_noise", bug)
    assert {f.part for f in failed(SUBJECT, "D", runs=300)} == {"D"}


@pytest.mark.parametrize("place", ["fedp3.steps.draws", "fedp3.passes.draws"])
def test_crops_and_dropout_from_a_seed_are_caught(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the seed gives goes by places in the batch: one record more would shift the crops of all after it."""
    secret = replace(SUBJECT, budget=replace(SUBJECT.budget, private=replace(SUBJECT.budget.private, randomness="os")))
    assert not failed(secret, "B")
    monkeypatch.setattr(place, draws_that_anybody_can_name)
    (found,) = failed(secret, "B")
    assert found.what.startswith("share of an upload that repeats") and found.measured == 1.0


def test_a_claim_of_subsampling_without_it_is_caught_by_attack_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedp3.privacy.mechanism.poisson", everybody_every_time)
    assert failed(SUBJECT, "F", runs=300)


def test_a_ledger_that_counts_rounds_is_caught() -> None:
    rounds = replace(SUBJECT, budget=replace(SUBJECT.budget, steps=1))
    (found,) = failed(rounds, "G")
    assert found.measured == pytest.approx(10, rel=0.1)


def test_other_layers_that_train_without_noise_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedp3.steps.private_gradient", others_without_noise)
    found = failed(replace(SUBJECT, others="noise"), "AB")
    assert {f.what for f in found} >= {"over two steps, by little more than 2 C", "variance of the noise on 0.weight"}


# --------------------------------------------------------------------------- bounds


def test_bounds_are_those_of_the_textbook() -> None:
    from scipy import stats

    for k, n, p in ((3, 10, 0.2), (0, 50, 0.1), (50, 50, 0.9), (17, 40, 0.5)):
        assert bounds.binomial_tail(k, n, p) == pytest.approx(stats.binom.sf(k - 1, n, p), rel=1e-9)
    for errors, n in ((0, 75), (4, 100), (60, 100)):
        assert bounds.rate_above(errors, n) == pytest.approx(
            stats.beta.isf(bounds.SURE, errors + 1, n - errors), rel=1e-6
        )
    for mu, epsilon in ((1.0, 4.3766), (4.0, 24.382), (5.0, 33.10), (8.0, 65.32)):  # with logarithms of the tail
        assert bounds.gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, rel=3e-4)


def test_the_proven_epsilon_is_below_the_true_one_and_grows_with_the_runs() -> None:
    rng = torch.Generator().manual_seed(0)

    def proven(runs: int, mu: float) -> float:
        scores = torch.randn(2, runs, generator=rng, dtype=torch.float64) + torch.tensor([[0.0], [mu]])
        return bounds.gaussian_lower(*scores.tolist(), 1e-5)

    assert proven(4000, 0.0) == 0.0
    few, many = proven(300, 3.0), proven(6000, 3.0)
    assert 0 < few < many < bounds.gaussian_epsilon(3.0, 1e-5)


def test_the_canary_is_the_only_difference_between_neighbours() -> None:
    b = tiny("freeze")
    assert torch.equal(b.with_canary[:-1], b.without[:-1]) and bool(b.without[-1].isnan().all())
