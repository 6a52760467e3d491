"""The audit passes the code as it is, and catches every bug that is planted in it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from audit_table import BASE, assembled, planted
from fedp3 import config
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data import from_tensors
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.messages.compressors import COMPRESSORS
from fedp3.privacy import clipping, requirements, trial
from fedp3.privacy import mechanism as seams
from fedp3.privacy.audit import audit as parts_table
from fedp3.privacy.audit.audit import NAMES, audit
from fedp3.privacy.audit.findings import LEVEL, MOST_FINDINGS, Finding
from fedp3.privacy.audit.neighbours import Bench, bench, coins, tiny
from fedp3.privacy.audit.releases import conservation
from fedp3.privacy.audit.sensitivity import sensitivity
from fedp3.privacy.settings import Mechanism
from fedp3.runs.rehearsal import audit_subject
from planted_bugs import BUGS, MORE_BUGS, _none_if_empty
from worlds import world

CLIPPED = Mechanism(clip=0.7, noise_multiplier=2.0, sample_rate=0.2)


def failed(experiment: Experiment, parts: tuple[str, ...] = NAMES, seed: int = 0) -> list[Finding]:
    return [f for f in audit(audit_subject(experiment, seed), parts) if not f.passed]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("plan.others=noise", "privacy.randomness=seeded"), marks=pytest.mark.slow),
    ],
)
def test_the_code_as_it_is_passes_every_part(settings: tuple[str, ...]) -> None:
    findings = audit(audit_subject(assembled(*settings)))
    assert {f.part for f in findings} == set(NAMES)
    assert not [f for f in findings if not f.passed]
    assert len([f for f in findings if f.p_value is not None]) * LEVEL < 1e-4


@pytest.mark.parametrize("name", [*BUGS, *MORE_BUGS])
def test_a_planted_bug_is_caught_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = {**BUGS, **MORE_BUGS}[name]
    experiment = planted(bug, monkeypatch)
    findings = failed(experiment, bug.parts)
    assert {f.part for f in findings} == set(bug.parts)
    assert not [f.error for f in findings if f.error], "caught by what it does, not by a crash"


# --------------------------------------------------------------------------- the audit itself


def test_an_exception_in_a_part_is_a_failed_finding_and_the_other_parts_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(seams, "private_batches", broken)
    findings = audit(audit_subject(assembled()), ("sensitivity", "noise", "accountant"))
    errors = {f.part: f.error for f in findings if not f.passed}
    assert set(errors) == {"sensitivity", "noise"}
    assert set(errors.values()) == {"ZeroDivisionError: float division by zero"}
    assert [f for f in findings if f.part == "accountant"]


def test_a_client_that_fails_in_a_rehearsal_is_a_failed_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("no gradient today")

    monkeypatch.setattr(seams, "private_gradient", broken)
    findings = failed(assembled(), ("charging", "releases"))
    assert {f.part for f in findings} == {"charging", "releases"}
    assert all("no gradient today" in f.error for f in findings)


def test_a_step_without_noise_on_an_empty_batch_does_not_end_in_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seams, "private_gradient", _none_if_empty)
    assert not [f for f in audit(audit_subject(assembled())) if f.error]


def test_parts_are_chosen_by_name_and_an_unknown_name_is_refused() -> None:
    subject = audit_subject(assembled())
    assert {f.part for f in audit(subject, ("independence",))} == {"independence"}
    with pytest.raises(InputError, match="no part 'noisiness'"):
        audit(subject, ("noisiness",))


def test_the_audit_tells_which_part_runs() -> None:
    told: list[str] = []
    audit(audit_subject(assembled()), ("sampling", "accountant"), told.append)
    assert told == ["sampling", "accountant"]


def test_every_test_of_an_epsilon_states_which_epsilon_it_could_have_refuted() -> None:
    names = ("distinguishing", "composition", "accountant")
    findings = audit(audit_subject(assembled()), names)
    tests = [f for f in findings if f.part in names[:2]]
    assert tests and all(f.refutable is not None and f.refutable > f.high for f in tests)
    assert [f for f in findings if f.part == "accountant" and f.refutable is not None]


def test_an_audit_of_a_large_fleet_has_few_enough_findings() -> None:
    subject = audit_subject(
        assembled("model.name=resnet18", "model.norm=group", "partition.clients=40")
    )
    plans = subject.distinct_plans()
    assert len(plans) <= parts_table.MOST_PLANS
    # about thirty findings with a probability for each plan, whatever the number of tensors
    assert 30 * (len(plans) + 2) < MOST_FINDINGS


def test_the_plans_of_all_kinds_of_clients_are_audited() -> None:
    subject = audit_subject(assembled("plan.layers=opu2"))
    kinds = {tuple(plan.layers.items()) for plan in subject.plans}
    audited = {tuple(plan.layers.items()) for plan in subject.distinct_plans()}
    assert audited == kinds and len(kinds) > 2
    assert 0 not in {plan.client for plan in subject.distinct_plans()}
    places = {f.where for f in audit(subject, ("noise",))}
    assert len(places) >= len(kinds) + 1


# --------------------------------------------------------------------------- networks


@pytest.mark.parametrize("kind", ["cnn", "groupnorm"])
def test_the_canary_reaches_the_clip_in_convolutional_networks(kind: str) -> None:
    w = world(kind, selector="neuron", physical=True)
    findings = sensitivity(bench(w.context, w.plans(others="freeze")[1], 6), CLIPPED)
    assert len(findings) == 3 and all(f.passed for f in findings)


@pytest.mark.parametrize("seed", range(12))
def test_the_canary_has_a_gradient_in_any_net(seed: int) -> None:
    """Under the label that a net expects anyway it would have none, and correct code would fail."""
    w = world("mlp")
    with layers_draw_from(stream(seed, Stream.INIT)):
        initial = {n: 0.3 * torch.randn(v.shape) for n, v in w.W.items()}
    network = bench(replace(w.context, initial=initial), w.plans(others="freeze")[1], 6)
    assert all(f.passed for f in sensitivity(network, CLIPPED))


class Drops(nn.Module):
    """Dropout that is a function, not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.ffc = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.fc1(x.flatten(1)))
        return self.ffc(nn.functional.dropout(hidden, 0.5, self.training))


class Remembers(nn.Module):
    """A network with a buffer that holds the mean of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.ffc = nn.Linear(16, 12), nn.Linear(12, 3)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.copy_(x.detach().flatten(1).mean(0))
        return self.ffc(torch.relu(self.fc1(x.flatten(1))))


def experiment_of(net: nn.Module, seed: int = 0, *settings: str) -> Experiment:
    """A run of this network on small images that are cropped and flipped at random."""
    x = torch.randn(80, 1, 4, 4, generator=stream(seed, Stream.AUDIT))
    data = replace(from_tensors(x, torch.arange(80) % 3), crop=1, flip=True)
    always = (
        "partition.kind=iid",
        "partition.clients=4",
        "run.clients_per_round=0",
        "plan.layers=full",
        "prune.keep=1.0",
    )
    return assemble_from(config.parse({}, [*always, *settings]), net, data)


def dropping(seed: int) -> Bench:
    with layers_draw_from(stream(seed, Stream.INIT)):
        net = Drops()
    e = experiment_of(net, seed)
    assert e.client.local.augment
    return bench(e.client, e.first_plans[0], 6)


def test_a_net_with_dropout_on_cropped_images_passes() -> None:
    with layers_draw_from(stream(0, Stream.INIT)):
        net = Drops()
    experiment = experiment_of(net, 0, "privacy.enabled=true", "privacy.noise_multiplier=4")
    assert not failed(experiment, ("sensitivity", "noise", "independence", "charging", "releases"))


def test_a_draw_of_dropout_that_leaves_the_canary_no_gradient_is_drawn_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benches = [dropping(seed) for seed in range(40)]

    def reaches_the_clip(b: Bench) -> bool:
        return all(f.passed for f in sensitivity(b, Mechanism()))

    with monkeypatch.context() as m:
        m.setattr("fedp3.privacy.audit.sensitivity.DRAWS", 1)
        unlucky = [b for b in benches if not reaches_the_clip(b)]
    assert unlucky
    assert all(reaches_the_clip(b) for b in unlucky)


def _accept_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the refusals, and the proof without which ghost clipping is not used."""
    monkeypatch.setattr(requirements, "check", lambda *arguments: None)
    monkeypatch.setattr(trial, "uses_ghost", lambda context: True)
    monkeypatch.setattr(clipping, "per_record_graph", lambda net, x: net)


def test_a_buffer_that_leaves_without_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such networks are refused, so that the refusal has to be removed to plant this bug."""
    _accept_every_network(monkeypatch)
    with layers_draw_from(stream(0, Stream.INIT)):
        net = Remembers()
    experiment = experiment_of(net, 0, "privacy.enabled=true", "privacy.noise_multiplier=4")
    findings = failed(experiment, ("releases",))
    assert not [f.error for f in findings if f.error]
    (difference,) = [f for f in findings if "buffers" in f.what]
    assert difference.measured > 1


class Mixes(nn.Module):
    """A network that mixes its records, but only in batches of seven or more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.ffc = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.fc1(x.flatten(1)))
        if len(x) >= 7:
            hidden = hidden + hidden.mean(0)
        return self.ffc(hidden)


def test_a_net_that_mixes_records_in_larger_batches_only_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _accept_every_network(monkeypatch)
    with layers_draw_from(stream(0, Stream.INIT)):
        net = Mixes()
    experiment = experiment_of(net, 0, "privacy.enabled=true", "privacy.noise_multiplier=4")
    findings = failed(experiment, ("sensitivity",))
    assert findings and all(f.where.startswith("the run's network") for f in findings)


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_uploads_and_what_compression_leaves_out_are_the_noised_gradients(compress: str) -> None:
    """So a residual is computed from noised values alone: keeping it costs no privacy."""
    compressor = COMPRESSORS.pick(compress)
    exact = compressor is None or compressor.feedback
    experiment = assembled(f"upload.compress={compress}")
    subject = audit_subject(experiment)
    for plan in subject.distinct_plans():
        own = bench(subject.context, plan, 4)
        (finding,) = conservation(own, subject.budget.mechanism)
        assert finding.passed
        assert exact == (finding.high < 0.01)


# --------------------------------------------------------------------------- made-up records


def test_the_canary_is_the_only_difference_between_neighbours() -> None:
    b = tiny("freeze")
    assert torch.equal(b.with_canary[:-1], b.without[:-1]) and bool(b.without[-1].isnan().all())


def test_uploads_of_one_hot_records_count_how_often_each_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = [torch.tensor([0, 3]), torch.tensor([3]), torch.tensor([], dtype=torch.int64)]
    monkeypatch.setattr(seams, "poisson", lambda samples, rate, steps, rng: iter(drawn))
    noiseless = Mechanism(clip=0.1, noise_multiplier=0.0, sample_rate=0.5)
    (upload,) = coins(5).update(noiseless, False, 3, lr=1e-3).values()
    counts = upload.norm(dim=0) / noiseless.clip
    assert torch.allclose(counts, torch.tensor([1.0, 0, 0, 2, 0]), atol=1e-3)


def test_nothing_is_audited_without_ldp() -> None:
    settings = [s for s in BASE if not s.startswith("privacy")]
    from fedp3.experiment.assemble import assemble

    with pytest.raises(InputError, match="nothing to audit"):
        audit_subject(assemble(config.parse({}, settings)))


def test_a_value_that_is_not_a_number_never_passes() -> None:
    assert not Finding(part="noise", what="this", measured=math.nan).passed
    assert not Finding(part="noise", what="this", measured=1.0, error="ValueError").passed
    assert Finding(part="noise", what="this", measured=1.0, p_value=LEVEL).passed
    assert not Finding(part="noise", what="this", measured=1.0, p_value=LEVEL / 2).passed
