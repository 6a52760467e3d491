"""Runs under LDP: refused before they start, or within their budget over crashes and workers."""

import html
import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedp3
from fedp3 import config
from fedp3.cli import main
from fedp3.client.hooks import Exchange, Hooks, Pass, StepHook
from fedp3.client.update import local_update
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.types import Task
from fedp3.data import from_tensors
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.planning.dispatch import dispatch
from fedp3.privacy import accountant, disclosure, requirements
from fedp3.privacy.budget import count_tasks, plan_budget
from fedp3.privacy.ledger import read
from fedp3.privacy.mechanism import PrivateSteps, mechanism_of

CLIENTS, RECORDS = 4, 80
RNG = torch.Generator().manual_seed(2)
Y = torch.randint(3, (RECORDS,), generator=RNG)
X = torch.randn(3, 6, generator=RNG)[Y] + 0.3 * torch.randn(RECORDS, 6, generator=RNG)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "partition": {"kind": "iid", "clients": CLIENTS},
    "plan": {"layers": "opu1"},
    "local": {"steps": 3, "lr": 0.3, "batch": 8},
    "privacy": {
        "enabled": True,
        "epsilon": 6.0,
        "delta": 1e-3,
        "sample_rate": 0.3,
        "randomness": "seeded",
    },
    "run": {"rounds": 4, "clients_per_round": 2, "eval_every": 2},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accountant.ACCOUNTANTS, "PLD", accountant.rdp)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def merged(**changes: Mapping[str, Any]) -> dict[str, Any]:
    return {s: {**SETTINGS.get(s, {}), **changes.get(s, {})} for s in {*SETTINGS, *changes}}


def run(
    out: Path | None = None,
    workers: int = 1,
    on_round: Callable[..., None] | None = None,
    resume: bool = False,
    **changes: Any,
) -> Any:
    return fedp3.run(
        net(),
        (X, Y),
        out=out,
        workers=workers,
        on_round=on_round,
        resume=resume,
        **merged(**changes),
    )


def assembled(model: nn.Module | None = None, **changes: Any) -> Experiment:
    return assemble_from(
        config.parse(merged(**changes)), model or net(), from_tensors(X, Y, classes=3)
    )


# --------------------------------------------------------------------------- disclosure


def test_every_client_stays_within_the_budget_and_the_result_says_how_it_was_counted(
    tmp_path: Path,
) -> None:
    result = run(tmp_path / "a").outcome.result
    privacy = result["privacy"]
    assert 0 < result["epsilon_max"] == privacy["spent"]["max"] <= 6.0
    assert result["epsilon_max"] > 5.9, (
        "the client that takes part most often spends what was allowed"
    )
    assert {
        "adjacency",
        "sampling",
        "delta",
        "accountant",
        "noise_multiplier",
        "unaccounted",
    } <= privacy.keys()
    tasks = count_tasks(assembled().schedule)
    charged = {
        i: sum(c.steps for c in read(tmp_path / "a") if c.client == i) for i in range(CLIENTS)
    }
    assert charged == {i: 3 * tasks[i] for i in range(CLIENTS)}, (
        "each round's three steps, and those of the last probe"
    )
    planned = json.loads((tmp_path / "a" / "run.json").read_text())["privacy"]["planned"]
    assert {int(i): e for i, e in planned.items()} == pytest.approx(result["epsilon"])
    events = [
        json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()
    ]
    assert [e["loss"] for e in events] == [None] * 4
    assert sorted(e["epsilon"] for e in events) == [e["epsilon"] for e in events]


def test_without_ldp_nothing_is_called_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.toml").write_text(
        "[model]\nwidth = 0.05\n[run]\nrounds = 1\nclients_per_round = 2\n"
    )
    place = tmp_path / "r"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedp3"])
    for arguments in (
        ["plan", "my.toml"],
        ["plan", "my.toml", "--json"],
        ["run", "my.toml", "--out", "r"],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert not end.value.code
    page = (place / "report.html").read_text()
    shown = "".join(capsys.readouterr()) + page
    assert "priva" not in shown.lower()
    assert "no formal guarantee" in shown and "training samples can be computed" in shown
    # `aggregate.server_epsilon` belongs to the server's optimizer.
    assert "epsilon" not in page.lower().replace("server_epsilon", "")


def test_the_report_of_a_private_run_names_each_client_and_what_is_not_accounted(
    tmp_path: Path,
) -> None:
    page = html.unescape(run(tmp_path / "a").report(tmp_path / "page.html").read_text())
    for text in (
        "Privacy",
        "add/remove one record",
        "Poisson",
        "RDP (fedp3)",
        "simulation only",
        "ε over",
        *disclosure.UNACCOUNTED,
    ):
        assert text in page, text
    assert re.search("not (accounted for )?in ε", page)


def test_warnings_fit_the_run() -> None:
    def ids(**changes: Any) -> set[str]:
        e = assembled(**changes)
        return set(disclosure.warnings(e.client, e.first_plans, e.server.budget))

    assert ids() == {"W5", "W7"}
    assert ids(privacy={"randomness": "os", "epsilon": 50.0}) == {"W6", "W7"}
    assert ids(privacy={"enabled": False}) == {"W1", "W2", "W4"}
    assert ids(privacy={"enabled": False}, local={"batch": 4}) == {"W1", "W2", "W3", "W4"}


# --------------------------------------------------------------------------- refusals


class Mixer(nn.Module):
    """Centres its batch: every record is in every answer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.out(torch.relu(self.fc(x - x.mean(0))))
        return h


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Buffered(nn.Module):
    """Has a buffer of its own, which belongs to no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.register_buffer("positions", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x + self.positions)
        return h


class Brittle(nn.Module):
    """Cannot compute what is not in its training data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not bool(torch.isin(x, X).all()):
            raise KeyError("a value that was never seen")
        h: Tensor = self.fc(x)
        return h


REFUSED: Mapping[str, tuple[dict[str, Any], Callable[[], nn.Module], str]] = {
    "E1 others train": ({"plan": {"others": "train"}}, net, "train without noise"),
    "E2 batch norm": ({}, batch_normed, "statistics over a batch"),
    "an uploaded buffer": ({}, Buffered, "the buffer positions would be uploaded without noise"),
    "E2 mixing": ({}, Mixer, "depends on the others in its batch"),
    "a net that cannot be tried out": ({}, Brittle, "KeyError: 'a value that was never seen'"),
    "E4 delta": ({"privacy": {"delta": 0.08}}, net, "is not below 1/m"),
    "too dear": ({"privacy": {"noise_multiplier": 0.3}}, net, "one task of 3 steps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_break_the_guarantee_is_refused_before_training(name: str) -> None:
    changes, model, why = REFUSED[name]
    with pytest.raises(InputError, match=why):
        assembled(model(), **changes)


def test_a_record_held_twice_is_refused(tmp_path: Path) -> None:
    e = assembled()
    shards = {0: type(e.shards[0])(torch.tensor([1, 2, 2]), e.shards[0].test)}
    with pytest.raises(InputError, match="has a training record twice"):
        requirements.check(e.client, shards, 1e-5)


EXCHANGE = Exchange(begin=lambda *_: {}, reply=lambda *_: ({}, {}), combine=lambda *_: {})
HOOKS = [  # hooks, and the setting that the error names
    (Hooks(exchange=EXCHANGE), "hooks.exchange"),
    (Hooks(loss=lambda *_: torch.zeros(())), "hooks.loss"),
    (Hooks(transform_outputs=lambda outputs, labels: outputs * labels), "hooks.loss"),
    (Hooks(step=StepHook(run=lambda *_: 0.0)), "hooks.distil"),
    (Hooks(after_pass=lambda *_: None), "hooks.static_norm"),
    (Hooks(forward=lambda *_: nullcontext()), "hooks.scale"),
    (Hooks(passes=(Pass(), Pass(layers="head"))), "hooks.passes"),
    (Hooks(passes=(Pass(mu=0.1),)), "hooks.mu"),
    (Hooks(probe=(Pass(share=3.0),)), "hooks.finetune_factor"),
]


def test_a_method_that_does_more_than_plan_is_refused() -> None:
    e = assembled()
    requirements.check(e.client, e.shards, 1e-5)
    for hooks, setting in HOOKS:
        client = replace(e.client, spec=replace(e.client.spec, hooks=hooks))
        with pytest.raises(InputError, match=setting) as refused:
            requirements.check(client, e.shards, 1e-5)
        assert len(str(refused.value).splitlines()) == 1


def test_other_layers_freeze_unless_they_are_noised_too() -> None:
    assert config.parse(merged()).plan.others == "freeze"
    assert config.parse(merged(plan={"others": "noise"})).plan.others == "noise"
    assert config.parse(merged(privacy={"enabled": False})).plan.others == "train"
    with pytest.raises(ConfigError):
        config.parse(merged(plan={"others": "train"}))
    again = config.parse(merged(plan={"others": "noise"}, privacy={"epsilon": float("inf")}))
    assert config.parse(again.as_json()) == again


@pytest.mark.parametrize("noise", [-1.0, float("nan"), "none"])
def test_a_noise_multiplier_is_a_number_from_0_or_auto(noise: object) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        config.parse(merged(privacy={"noise_multiplier": noise}))


def test_no_noise_needs_an_infinite_epsilon() -> None:
    assert config.parse(merged()).privacy.noise_multiplier == "auto"
    with pytest.raises(ConfigError, match="0 means no noise"):
        config.parse(merged(privacy={"noise_multiplier": 0.0}))
    clipping = {"noise_multiplier": 0.0, "epsilon": float("inf")}
    budget = assembled(privacy=clipping).server.budget
    assert budget is not None and budget.mechanism.noise_multiplier == 0.0


@pytest.mark.parametrize("clip", [1e-45, 1e-38, 1e-8, 9e-7, 1.1e6, 1e12, 1e38])
def test_a_clip_that_32_bits_cannot_hold_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="use a clip from 1e-06 to 1e"):
        config.parse(merged(privacy={"clip": clip}))
    config.parse(merged(privacy={"clip": clip, "enabled": False}))


@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
def test_a_clip_at_the_limits_is_allowed(clip: float) -> None:
    assert config.parse(merged(privacy={"clip": clip})).privacy.clip == clip


@pytest.mark.parametrize("noise", [1e-300, 1e-45, 9e-4, 1.1e6, 1e38])
def test_noise_that_32_bits_would_lose_is_refused(noise: float) -> None:
    with pytest.raises(ConfigError, match="lost in 32-bit sums"):
        config.parse(merged(privacy={"noise_multiplier": noise}))
    config.parse(merged(privacy={"noise_multiplier": noise, "enabled": False}))


def test_noise_on_other_layers_is_refused_without_ldp() -> None:
    with pytest.raises(ConfigError, match="for runs under LDP"):
        config.parse(merged(plan={"others": "noise"}, privacy={"enabled": False}))


def test_seeded_noise_is_refused_in_a_deployment() -> None:
    seeded = config.parse(merged()).privacy
    assert "simulation" in requirements.refused_deployment(seeded)
    assert not requirements.refused_deployment(replace(seeded, randomness="os"))
    assert not requirements.refused_deployment(replace(seeded, enabled=False))


def test_noise_cannot_be_found_for_clients_of_unknown_size() -> None:
    e = assembled()
    schedule = replace(e.schedule, examples={})
    mechanism = mechanism_of(e.client)
    assert mechanism is not None
    with pytest.raises(InputError, match=r"LDP refused: the number of records .* is not known"):
        plan_budget(schedule, e.client.local, mechanism, 6.0, 1e-3, find_noise=True)
    set_by_hand = plan_budget(schedule, e.client.local, mechanism, 6.0, 1e-3, find_noise=False)
    assert set_by_hand == e.server.budget


# --------------------------------------------------------------------------- budgets


def test_a_client_without_budget_is_left_out_and_the_run_ends_when_nobody_is_left(
    tmp_path: Path,
) -> None:
    e = assembled(privacy={"noise_multiplier": 1.2}, run={"rounds": 30})
    assert e.server.budget is not None
    allowed = e.server.budget.allowed_steps
    result = run(
        tmp_path / "a", privacy={"noise_multiplier": 1.2}, run={"rounds": 30}
    ).outcome.result
    assert result["rounds"] < 30 and result["epsilon_max"] <= 6.0
    spent = [sum(c.steps for c in read(tmp_path / "a") if c.client == i) for i in range(CLIENTS)]
    assert all(allowed - 3 < s <= allowed for s in spent), (
        "everybody's budget is used up, and no more"
    )


class Crash(Exception):
    pass


def crash_at(t: int) -> Callable[..., None]:
    def stop(record: Any) -> None:
        if record.t == t:
            raise Crash

    return stop


@pytest.mark.filterwarnings("ignore:resuming after round")
@pytest.mark.parametrize("randomness", ["seeded", "os"])
def test_a_crash_forgets_no_charge(randomness: str, tmp_path: Path) -> None:
    changes = {"privacy": {"randomness": randomness}}
    uninterrupted = run(tmp_path / "whole", **changes).outcome.result
    place = tmp_path / "broken"
    with pytest.raises(Crash):
        run(place, on_round=crash_at(2), **changes)
    for checkpoint in sorted((place / "checkpoint").glob("00000003.*")):
        checkpoint.unlink()  # as if the machine had died before it was written: round 2 is redone
    before = read(place)
    result = run(place, resume=True, **changes).outcome.result
    assert read(place)[: len(before)] == before, "the ledger only grows"
    third = {c.client for c in before if c.t == 2}
    redone = {i for i, e in result["epsilon"].items() if e > uninterrupted["epsilon"].get(i, 0.0)}
    if randomness == "seeded":
        assert result["model_sha256"] == uninterrupted["model_sha256"] and not redone
    else:
        assert redone <= third and result["epsilon_max"] <= 6.0
        assert sum(c.t == 2 for c in read(place)) > sum(c.t == 2 for c in before), (
            "a new draw is a new charge"
        )


@pytest.mark.parametrize("rule", ["simple", "examples", "weighted", "attention", "distance"])
def test_every_aggregation_takes_private_uploads(rule: str) -> None:
    assert run(aggregate={"rule": rule}, run={"rounds": 2}).outcome.result["rejected"] == 0


@pytest.mark.parametrize("schedule", ["cycle", "paced", "random"])
def test_plans_that_change_by_round_cost_what_fixed_ones_cost(schedule: str) -> None:
    """A task is charged for its steps, whichever layers they train, and the others are frozen."""
    changing = {"layers": "full", "schedule": schedule, "warm": 0, "stretch": 1, "period": 2}
    fixed, scheduled = run(plan={"layers": "full"}), run(plan=changing)
    assert scheduled.outcome.result["rejected"] == 0
    assert scheduled.outcome.result["epsilon"] == fixed.outcome.result["epsilon"]
    assert assembled(plan=changing).config.plan.others == "freeze"


def test_recycled_changes_are_computed_from_noised_uploads_and_cost_nothing() -> None:
    fixed = run(plan={"layers": "full"})
    recycled = run(plan={"layers": "full"}, aggregate={"recycle": 0.5})
    assert recycled.outcome.result["epsilon"] == fixed.outcome.result["epsilon"]
    assert recycled.outcome.result["mb_up"] < fixed.outcome.result["mb_up"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"plan": {"weak_below": 1.0, "weak_steps": 1}}, "charged for all local steps"),
        (
            {
                "hooks": {"through_threshold": True},
                "prune": {"selector": "magnitude_all", "keep": 0.5},
                "plan": {"layers": "prune-all", "upload": "retained"},
            },
            "hooks.through_threshold",
        ),
    ],
)
def test_what_ldp_does_not_account_for_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        assembled(**changes)
    assert text in str(caught.value)


@pytest.mark.parametrize("head", ["personal", "personal_uploaded"])
def test_layers_that_stay_with_a_client_are_noised_too(head: str) -> None:
    settings = {"layers": "opu1", "head": head}
    assert run(plan=settings, run={"rounds": 2}).outcome.result["rejected"] == 0
    e = assembled(plan=settings)
    plan, mechanism = e.first_plans[0], mechanism_of(e.client)
    ((dispatched, masks),) = dispatch(e.start.W, [plan], e.client.layers, e.client.pruning, 0, 0)
    assert mechanism is not None

    def personal_head(noise: float) -> Tensor:
        never = replace(mechanism, noise_multiplier=noise, sample_rate=1e-12)  # draws no record
        context = replace(e.client, steps=PrivateSteps(never))
        task = Task(t=0, plan=plan, weights=dispatched, masks=masks)
        state = local_update(context, e.shards[0], task, None)[1]
        assert state is not None
        return torch.cat([w.flatten() for w in state.tensors.values()])

    noisy = personal_head(mechanism.noise_multiplier) - personal_head(0.0)
    assert len(noisy) == 8 * 3 + 3 and bool((noisy != 0).all())


class Sentences(nn.Module):
    """Token ids to classes, by a table of vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.fc = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(torch.relu(self.words(x.long())).mean(1))
        return h


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_a_net_on_token_ids_trains_under_ldp(kind: torch.dtype) -> None:
    tokens = torch.randint(7, (RECORDS, 9), generator=torch.Generator().manual_seed(0)).to(kind)
    result = fedp3.run(Sentences(), (tokens, Y), **merged(run={"rounds": 2})).outcome.result
    assert result["rejected"] == 0 and 0 < result["epsilon_max"] <= 6.0
    assert result["privacy"]["clipping"] == "torch.func"


def test_processes_change_no_bit_of_a_seeded_run(tmp_path: Path) -> None:
    assert run().model_sha256 == run(workers=2).model_sha256


def test_an_infinite_epsilon_is_clipping_alone() -> None:
    result = run(privacy={"epsilon": float("inf")}).outcome.result
    assert result["privacy"]["noise_multiplier"] == 0.0 and result["epsilon_max"] is None
    assert result["privacy"]["spent"]["max"] is None and json.dumps(result, allow_nan=False)
