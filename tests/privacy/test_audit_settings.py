"""The audit of a config: under any settings correct code passes and a bug fails."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedp3 import config
from fedp3.experiment.assemble import assemble
from fedp3.privacy import accountant
from fedp3.privacy import mechanism as seams
from fedp3.privacy.audit.audit import audit
from fedp3.privacy.audit.findings import Finding
from fedp3.privacy.settings import Mechanism
from fedp3.runs.rehearsal import audit_subject

BASE = ["privacy.enabled=true", "model.width=0.05", "run.rounds=5"]
SETTINGS = [
    "local.schedule=linear",
    "local.schedule=cosine",
    "local.lr=1e-4",
    "local.lr=100",
    "local.momentum=0.9 local.weight_decay=0.1",
    "upload.compress=fp16",
    "upload.compress=int8",
    "upload.compress=topk",
    "upload.compress=ternary upload.entropy=true download.compress=ternary",
    "upload.compress=int4-random",
    "prune.local_pruner=uniform",
    "prune.local_pruner=uniform plan.others=noise plan.upload=retained",
    "prune.local_pruner=ordered_dropout prune.selector=ordered",
    "prune.local_pruner=ordered_dropout prune.selector=neuron",
    "prune.local_pruner=ordered_dropout prune.selector=neuron plan.others=noise "
    "plan.upload=retained",
    "privacy.clip=1e-4",
    "privacy.clip=100",
]


PARTS = ("sensitivity", "noise", "independence", "charging", "releases")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accountant.ACCOUNTANTS, "PLD", accountant.rdp)


def findings(settings: str, parts: tuple[str, ...] = PARTS) -> list[Finding]:
    """What the audit finds under these settings."""
    return audit(audit_subject(assemble(config.parse({}, [*BASE, *settings.split()]))), parts)


@pytest.mark.parametrize("settings", SETTINGS)
def test_correct_code_passes_under_any_settings(settings: str) -> None:
    checks = findings(settings)
    assert {f.part for f in checks} == set(PARTS)
    assert not [f for f in checks if not f.passed]


@pytest.mark.parametrize("settings", SETTINGS)
def test_less_noise_and_more_of_a_record_fail_under_all_of_them(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, add = seams.fill_with_noise, seams.add_clipped

    def quieter(out: Tensor, mechanism: Mechanism, rng: torch.Generator) -> None:
        fill(out, replace(mechanism, noise_multiplier=0.8 * mechanism.noise_multiplier), rng)

    def louder(*arguments: object) -> None:
        *others, mechanism, loss = arguments
        more = replace(mechanism, clip=1.1 * mechanism.clip)  # type: ignore[type-var]
        add(*others, more, loss)  # type: ignore[arg-type]

    monkeypatch.setattr(seams, "fill_with_noise", quieter)
    monkeypatch.setattr(seams, "add_clipped", louder)
    failed = [f for f in findings(settings, ("sensitivity", "noise")) if not f.passed]
    assert {f.part for f in failed} == {"sensitivity", "noise"}
    assert any(f.where.startswith("the run's network") for f in failed)
