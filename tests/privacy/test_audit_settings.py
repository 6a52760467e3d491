"""The audit of a config's own net: correct code passes under any settings, and a bug fails under all of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedp3 import config
from fedp3.experiment import assemble
from fedp3.privacy import account, mechanism
from fedp3.privacy.audit import Finding, at_home
from fedp3.privacy.neighbours import bench
from fedp3.server import plans_for
from fedp3.types import Private

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
    "prune.local=uniform",
    "prune.local=uniform privacy.others=noise prune.upload=kept",
    "prune.local=ordered_dropout prune.selector=ordered",
    "prune.local=ordered_dropout prune.selector=neuron",
    "prune.local=ordered_dropout prune.selector=neuron privacy.others=noise prune.upload=kept",
    "privacy.clip=1e-4",
    "privacy.clip=100",
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "best", lambda: "RDP")  # test_account.py compares the two


def found(settings: str) -> list[Finding]:
    """What the audit says of the config's own net."""
    e = assemble(config.parse({}, [*BASE, *settings.split()]))
    assert e.recipe.private is not None
    return at_home(bench(e.recipe, plans_for(e.problem, 0)[0], 6), e.recipe.private)


@pytest.mark.parametrize("settings", SETTINGS)
def test_correct_code_passes_under_any_settings(settings: str) -> None:
    said = found(settings)
    assert {f.part for f in said} == {"A", "B"}
    assert not [f for f in said if not f.passed]


@pytest.mark.parametrize("settings", SETTINGS)
def test_less_noise_and_more_of_a_record_fail_under_all_of_them(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, add = mechanism.fill_with_noise, mechanism.add_clipped

    def quieter(out: Tensor, private: Private, rng: torch.Generator) -> None:
        fill(out, replace(private, noise=0.8 * private.noise), rng)

    def louder(*to: object) -> None:
        *most, private = to
        add(*most, replace(private, clip=1.1 * private.clip))  # type: ignore[arg-type, type-var]

    monkeypatch.setattr(mechanism, "fill_with_noise", quieter)
    monkeypatch.setattr(mechanism, "add_clipped", louder)
    assert {f.part for f in found(settings) if not f.passed} == {"A", "B"}
