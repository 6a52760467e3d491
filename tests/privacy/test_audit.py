"""The audit passes the code as it is, and catches every bug that is put into it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedp3 import config
from fedp3.client.batching import LocalSettings
from fedp3.client.step_source import Gradient
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import Params
from fedp3.data import from_tensors
from fedp3.experiment.assemble import assemble_from
from fedp3.privacy import mechanism as seams
from fedp3.privacy.audit import bounds
from fedp3.privacy.audit.attacks import Finding, Subject, audit, sensitivity
from fedp3.privacy.audit.neighbours import Bench, bench, tiny
from fedp3.privacy.settings import Budget, Mechanism
from worlds import world

SUBJECT = Subject(
    budget=Budget(
        mechanism=Mechanism(clip=0.7, noise_multiplier=2.0, sample_rate=0.2, randomness="seeded"),
        steps_per_task=10,
        epsilon=8.0,
        delta=1e-5,
        allowed_steps=250,
    ),
    local=LocalSettings(steps=10),
    others="freeze",
)


def failed(subject: Subject, parts: str, runs: int = 90) -> list[Finding]:
    return [f for f in audit(subject, parts, runs) if not f.passed]


@pytest.mark.parametrize(("others", "parts"), [("freeze", "ABCDEFG"), ("noise", "ABCDG")])
def test_the_code_as_it_is_passes(others: str, parts: str) -> None:
    findings = audit(replace(SUBJECT, others=others), parts, runs=90)
    assert {f.part for f in findings} == set(parts)
    assert not [f for f in findings if not f.passed]


@pytest.mark.parametrize("kind", ["cnn", "groupnorm"])
def test_the_net_of_a_run_is_audited_as_well(kind: str) -> None:
    w = world(kind, selector="neuron", physical=True)
    network = bench(w.context, w.plans(others="freeze")[1], 6)
    findings = [
        f
        for f in audit(replace(SUBJECT, own=network), "AB")
        if f.what.endswith("in the run's network")
    ]
    assert len(findings) > 6 and all(f.passed for f in findings)


@pytest.mark.parametrize("seed", range(12))
def test_the_canary_has_a_gradient_in_any_net(seed: int) -> None:
    """Under the label that a net expects anyway it would have none, and correct code would fail."""
    w = world("mlp")
    with layers_draw_from(stream(seed, Stream.INIT)):
        initial = {n: 0.3 * torch.randn(v.shape) for n, v in w.W.items()}
    network = bench(replace(w.context, initial=initial), w.plans(others="freeze")[1], 6)
    assert all(f.passed for f in sensitivity(network, 0.7))


class Drops(nn.Module):
    """Dropout that is a function, not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.ffc = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffc(
            nn.functional.dropout(torch.relu(self.fc1(x.flatten(1))), 0.5, self.training)
        )


def dropping(seed: int) -> Bench:
    with layers_draw_from(stream(seed, Stream.INIT)):
        net = Drops()
    data = from_tensors(
        torch.randn(80, 1, 4, 4, generator=stream(seed, Stream.AUDIT)), torch.arange(80) % 3
    )
    settings = [
        "partition.kind=iid",
        "partition.clients=4",
        "run.clients_per_round=0",
        "plan.layers=full",
        "prune.keep=1.0",
    ]
    e = assemble_from(config.parse({}, settings), net, replace(data, crop=1, flip=True))
    assert e.client.local.augment
    return bench(e.client, e.first_plans[0], 6)


def test_a_net_with_dropout_on_cropped_images_passes() -> None:
    findings = [
        f
        for f in audit(replace(SUBJECT, own=dropping(0)), "AB")
        if f.what.endswith("in the run's network")
    ]
    assert len(findings) > 6 and all(f.passed for f in findings)


def test_a_draw_of_dropout_that_leaves_the_canary_no_gradient_is_drawn_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benches = [dropping(seed) for seed in range(40)]
    with monkeypatch.context() as m:
        m.setattr("fedp3.privacy.audit.attacks.DRAWS", 1)
        unlucky = [b for b in benches if not sensitivity(b, 1.0)[0].passed]
    assert unlucky
    assert all(sensitivity(b, 1.0)[0].passed for b in unlucky)


# --------------------------------------------------------------------------- bugs, one by one

fill, add, generator = seams.fill_with_noise, seams.add_clipped, seams.secret_generator
gradient_of, batches_of = seams.private_gradient, seams.private_batches


def noise_divided_by_b(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
    reduced = mechanism.noise_multiplier / (mechanism.sample_rate * 24)
    fill(out, replace(mechanism, noise_multiplier=reduced), rng)


def a_third_of_the_noise(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
    fill(out, replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 3), rng)


def no_noise(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
    out.zero_()


def one_tensor_without_noise(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
    if out.shape == (4, 8):
        mechanism = replace(mechanism, noise_multiplier=0.0)
    fill(out, mechanism, rng)


def noise_where_it_was_zero_before(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
    """As if only coordinates with a gradient were noised: dead units would show."""
    fill(out, mechanism, rng)
    if out.dim() == 2:
        out[0] = 0.0


def batch_is_clipped(
    out: Params,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Params,
    masks: Params,
    mechanism: Mechanism,
) -> None:
    total = {n: torch.zeros_like(w) for n, w in out.items()}
    add(total, net, x, y, W, masks, replace(mechanism, clip=math.inf))
    norm = torch.cat([w.flatten() for w in total.values()]).norm() / len(x)
    for n, w in total.items():
        out[n].add_(w, alpha=min(1.0, mechanism.clip / float(norm)))


def tensors_are_clipped(
    out: Params,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Params,
    masks: Params,
    mechanism: Mechanism,
) -> None:
    for n in W:
        add(
            {n: out[n]},
            net,
            x,
            y,
            {n: W[n]},
            {k: m for k, m in masks.items() if k == n},
            replace(mechanism, ghost=False),
        )


def everybody_every_time(
    samples: int, rate: float, steps: int, rng: torch.Generator
) -> Iterator[Tensor]:
    return (torch.arange(samples) for _ in range(steps))


def shuffled_epochs(
    samples: int, rate: float, steps: int, rng: torch.Generator
) -> Iterator[Tensor]:
    size = max(1, round(rate * samples))
    for k in range(steps):
        if k * size % samples < size:
            order = torch.randperm(samples, generator=rng)
        yield order[k * size % samples :][:size]


def twice_the_sample_rate(
    mechanism: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int
) -> Iterator[Tensor]:
    more = replace(mechanism, sample_rate=2 * mechanism.sample_rate)
    return batches_of(more, local, samples, seed, *address)


def the_same_noise_again(
    mechanism: Mechanism, use: Stream, seed: int, *address: int
) -> torch.Generator:
    if use is Stream.NOISE:
        return torch.Generator().manual_seed(5)
    return generator(mechanism, use, seed, *address)


def seeded_only(leaked: Stream) -> Callable[..., torch.Generator]:
    """A bug: what this stream draws comes from the run's seed, which the server knows."""

    def seeded(mechanism: Mechanism, use: Stream, seed: int, *address: int) -> torch.Generator:
        if use is leaked:
            mechanism = replace(mechanism, randomness="seeded")
        return generator(mechanism, use, seed, *address)

    return seeded


def others_without_noise(
    mechanism: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int
) -> Gradient:
    private = gradient_of(mechanism, local, samples, seed, *address)

    def gradient(
        net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params
    ) -> tuple[float, list[Tensor]]:
        loud = {n: w for n, w in W.items() if not n.startswith("0.")}
        ok = x.isfinite().all(1)
        loss = nn.functional.cross_entropy(net(x[ok]), y[ok])
        plain = dict(zip(W, torch.autograd.grad(loss, list(W.values())), strict=True))
        noisy = dict(
            zip(
                loud,
                private(net, x, y, loud, {n: m for n, m in masks.items() if n in loud})[1],
                strict=True,
            )
        )
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
    "fedp3.privacy.mechanism.private_batches:rate": (twice_the_sample_rate, "E"),
    "fedp3.privacy.mechanism.secret_generator:again": (the_same_noise_again, "B"),
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
    monkeypatch.setattr(seams, "add_clipped" if bug is batch_is_clipped else "fill_with_noise", bug)
    assert {f.part for f in failed(SUBJECT, "D", runs=300)} == {"D"}


@pytest.mark.parametrize(("leaked", "what"), [(Stream.AUGMENT, "crops"), (Stream.LAYER, "Dropout")])
def test_crops_and_dropout_from_a_seed_are_caught(
    leaked: Stream, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded draws go by position: one more record would shift the crops of all after it."""
    secret = replace(
        SUBJECT,
        budget=replace(
            SUBJECT.budget, mechanism=replace(SUBJECT.budget.mechanism, randomness="os")
        ),
    )
    assert not failed(secret, "B")
    monkeypatch.setattr("fedp3.privacy.mechanism.secret_generator", seeded_only(leaked))
    (finding,) = failed(secret, "B")
    assert finding.what == f"share of an upload that repeats, by {what}"
    assert finding.measured == 1.0


def test_a_claim_of_subsampling_without_it_is_caught_by_attack_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedp3.privacy.mechanism.poisson", everybody_every_time)
    assert failed(SUBJECT, "F", runs=300)


def test_a_ledger_that_counts_rounds_is_caught() -> None:
    rounds = replace(SUBJECT, budget=replace(SUBJECT.budget, steps_per_task=1))
    (finding,) = failed(rounds, "G")
    assert finding.measured == pytest.approx(10, rel=0.1)


def test_other_layers_that_train_without_noise_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedp3.privacy.mechanism.private_gradient", others_without_noise)
    findings = failed(replace(SUBJECT, others="noise"), "AB")
    assert {f.what for f in findings} >= {
        "over two steps, by little more than 2 C",
        "variance of the noise on 0.weight",
    }


# --------------------------------------------------------------------------- bounds


def test_bounds_are_those_of_the_textbook() -> None:
    from scipy import stats

    for k, n, p in ((3, 10, 0.2), (0, 50, 0.1), (50, 50, 0.9), (17, 40, 0.5)):
        assert bounds.binomial_tail(k, n, p) == pytest.approx(stats.binom.sf(k - 1, n, p), rel=1e-9)
    for errors, n in ((0, 75), (4, 100), (60, 100)):
        assert bounds.rate_above(errors, n) == pytest.approx(
            stats.beta.isf(bounds.ERROR_PROBABILITY, errors + 1, n - errors), rel=1e-6
        )
    for mu, epsilon in (
        (1.0, 4.3766),
        (4.0, 24.382),
        (5.0, 33.10),
        (8.0, 65.32),
    ):  # with logarithms of the tail
        assert bounds.gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, rel=3e-4)


def test_the_proven_epsilon_is_below_the_true_one_and_grows_with_the_runs() -> None:
    rng = torch.Generator().manual_seed(0)

    def proven(runs: int, mu: float) -> float:
        scores = torch.randn(2, runs, generator=rng, dtype=torch.float64) + torch.tensor(
            [[0.0], [mu]]
        )
        return bounds.gaussian_lower(*scores.tolist(), 1e-5)

    assert proven(4000, 0.0) == 0.0
    few, many = proven(300, 3.0), proven(6000, 3.0)
    assert 0 < few < many < bounds.gaussian_epsilon(3.0, 1e-5)


def test_the_canary_is_the_only_difference_between_neighbours() -> None:
    b = tiny("freeze")
    assert torch.equal(b.with_canary[:-1], b.without[:-1]) and bool(b.without[-1].isnan().all())
