"""Runs under client-level DP: refused, within budget, the same bits anywhere, never called LDP."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedp3
from fedp3 import config
from fedp3.cli import main
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.types import Reply, Task
from fedp3.data import from_tensors
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.privacy import accountant
from fedp3.privacy.client_level import disclosure, requirements
from fedp3.privacy.client_level.budget import EVERYBODY, FOLDER
from fedp3.privacy.ledger import read
from fedp3.runs import session
from fedp3.runs.tuning import validate

CLIENTS, RECORDS = 6, 90
RNG = torch.Generator().manual_seed(2)
Y = torch.randint(3, (RECORDS,), generator=RNG)
X = torch.randn(3, 6, generator=RNG)[Y] + 0.3 * torch.randn(RECORDS, 6, generator=RNG)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "partition": {"kind": "iid", "clients": CLIENTS},
    "plan": {"layers": "opu1"},
    "local": {"steps": 3, "lr": 0.3, "batch": 8},
    "client_privacy": {
        "enabled": True,
        "epsilon": 6.0,
        "delta": 1e-3,
        "sample_rate": 0.5,
        "randomness": "seeded",
    },
    "run": {"rounds": 4, "eval_every": 2},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accountant.ACCOUNTANTS, "PLD", accountant.rdp)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def merged(**changes: Any) -> dict[str, Any]:
    sections = {s: {**keys, **changes.get(s, {})} for s, keys in SETTINGS.items()}
    return {**{s: v for s, v in changes.items() if s not in sections}, **sections}


def assembled(**changes: Any) -> Experiment:
    return assemble_from(config.parse(merged(**changes)), net(), from_tensors(X, Y))


def run(folder: Path | None = None, **changes: Any) -> fedp3.Result:
    how = {k: changes.pop(k) for k in ("on_round", "resume", "workers") if k in changes}
    return fedp3.run(net(), (X, Y), out=folder, **how, **merged(**changes))


# --------------------------------------------------------------------------- refusals

REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "LDP as well": ({"privacy": {"enabled": True}}, r"\[privacy\] is enabled too"),
    "a weighted rule": ({"aggregate": {"rule": "weighted"}}, "'weighted' gives clients different"),
    "attention": ({"aggregate": {"rule": "attention"}}, "'attention' gives clients different"),
    "weights by examples": ({"method": "fedavg"}, "'examples' gives clients different weights"),
    "a quorum": ({"run": {"quorum": 2}}, r"\[run\] quorum: 2: .* no round is void"),
    "a number of participants": ({"run": {"clients_per_round": 3}}, "is no Poisson sampling"),
    "no noise": ({"client_privacy": {"noise_multiplier": 0.0}}, "0 means no noise"),
    "a head that is never sent": ({"plan": {"head": "personal_uploaded"}}, "is never sent"),
    "units that are dealt out": (
        {
            "prune": {"selector": "dealt", "keep": 0.5},
            "plan": {"layers": "prune-all", "upload": "retained"},
        },
        "may depend on who else takes part",
    ),
    "tensors of the method": (
        {"method": "scaffold", "plan": {"layers": "full"}, "aggregate": {"rule": "simple"}},
        r"hooks\.exchange",
    ),
    "a delta of one client": ({"client_privacy": {"delta": 0.2}}, "is not below 1/n"),
    "a budget below one round": (
        {"client_privacy": {"noise_multiplier": 0.1}},
        "one round with noise multiplier 0.1",
    ),
    "nothing to release": (
        {"method": "local", "plan": {"layers": "prune-all"}},
        "nothing is released",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_break_the_guarantee_is_refused_with_its_reason(name: str) -> None:
    changes, why = REFUSED[name]
    with pytest.raises(InputError, match=why) as refused:
        assembled(**changes)
    assert "client" in str(refused.value)


def test_a_config_that_was_built_in_python_is_checked_too() -> None:
    built = replace(config.parse(merged()), aggregate=fedp3.AggregateSettings(rule="weighted"))
    with pytest.raises(ConfigError, match="'weighted' gives clients different weights"):
        assemble_from(built, net(), from_tensors(X, Y))


def test_without_the_mode_its_rules_do_not_apply() -> None:
    off = {"client_privacy": {"enabled": False}, "privacy": {"enabled": False}}
    for changes, _ in REFUSED.values():
        run = {"clients_per_round": 3} | changes.get("run", {})
        config.parse(merged(**{**changes, **off, "run": run}))


def test_all_clients_are_candidates_unless_the_config_says_otherwise() -> None:
    settings = config.parse(merged())
    assert settings.run.clients_per_round == 0
    assert config.parse(settings.as_json()) == settings
    assert (
        config.parse(
            merged(client_privacy={"enabled": False, "delta": 0.5}, partition={"clients": 20})
        ).run.clients_per_round
        == 10
    )


def test_a_deadline_is_refused_where_clients_share_a_machine() -> None:
    with pytest.raises(InputError, match=r"one more client can make others late"):
        run(run={"deadline": 5.0})


def test_seeded_noise_is_refused_in_a_deployment() -> None:
    seeded = config.parse(merged()).client_privacy
    assert "simulation" in requirements.refused_deployment(seeded)
    assert not requirements.refused_deployment(replace(seeded, randomness="os"))
    assert not requirements.refused_deployment(replace(seeded, enabled=False))


def test_no_app_is_written_for_seeded_noise(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedp3.deploy.app_files import write_app

    settings = config.parse(merged())
    with pytest.raises(ConfigError, match=r"\[client_privacy\] randomness = 'seeded'"):
        write_app(tmp_path / "app", settings, tmp_path / "out", None)
    secret = replace(settings.client_privacy, randomness="os")
    written = write_app(
        tmp_path / "app", replace(settings, client_privacy=secret), tmp_path / "out", None
    )
    assert config.load(next(written.rglob("config.toml"))).client_privacy == secret


def test_settings_are_not_tuned_on_the_data_that_are_protected() -> None:
    settings = config.parse(merged())
    with pytest.raises(InputError, match="choose it without client-level DP"):
        validate(settings, None, 1, lambda record: None)


# --------------------------------------------------------------------------- accounting


@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_auto_noise_costs_the_target_or_slightly_less(epsilon: float) -> None:
    result = run(client_privacy={"epsilon": epsilon}).outcome.result
    assert 0.99 * epsilon < result["client_epsilon"] <= epsilon
    assert result["rounds"] == 4


def test_the_epsilon_of_a_run_is_that_of_its_rounds(tmp_path: Path) -> None:
    fixed = {"noise_multiplier": 2.0, "epsilon": 20.0}
    done = run(tmp_path / "a", client_privacy=fixed)
    want = [accountant.epsilon({(2.0, 0.5): k}, 1e-3, "RDP") for k in range(1, 5)]
    assert done.history.column("client_epsilon") == want
    assert done.outcome.result["client_epsilon"] == want[-1]
    planned = json.loads((tmp_path / "a/run.json").read_text())["client_privacy"]["planned"]
    assert planned == want[-1]
    charges = read(tmp_path / "a" / FOLDER)
    assert [(c.client, c.t, c.steps) for c in charges] == [(EVERYBODY, t, 1) for t in range(4)]
    assert not (tmp_path / "a/ledger.jsonl").exists(), "that is the ledger of LDP"


def test_a_run_ends_when_its_budget_is_spent() -> None:
    done = run(client_privacy={"noise_multiplier": 1.2}, run={"rounds": 30})
    allowed = assembled(client_privacy={"noise_multiplier": 1.2}).server.client_level
    assert allowed is not None
    assert done.outcome.result["rounds"] == allowed.budget.allowed_steps < 30
    assert done.outcome.result["client_epsilon"] <= 6.0


def test_an_infinite_epsilon_is_clipping_alone() -> None:
    result = run(client_privacy={"epsilon": math.inf}).outcome.result
    assert result["client_privacy"]["noise_multiplier"] == 0.0
    assert result["client_epsilon"] is None and json.dumps(result, allow_nan=False)


class Crash(Exception):
    pass


def crash_at(t: int) -> Callable[..., None]:
    def stop(record: Any) -> None:
        if record.t == t:
            raise Crash

    return stop


@pytest.mark.filterwarnings("ignore:resuming after round")
@pytest.mark.parametrize("server", ["none", "adam"])
@pytest.mark.parametrize("randomness", ["seeded", "os"])
def test_a_repeated_round_is_the_same_release_or_is_charged_again(
    randomness: str, server: str, tmp_path: Path
) -> None:
    changes = {
        "client_privacy": {"randomness": randomness, "noise_multiplier": 2.0, "epsilon": 20.0},
        "aggregate": {"server": server, "server_lr": 0.5},
    }
    uninterrupted = run(tmp_path / "whole", **changes).outcome.result
    place = tmp_path / "broken"
    with pytest.raises(Crash):
        run(place, on_round=crash_at(2), **changes)
    for checkpoint in sorted((place / "checkpoint").glob("00000003.*")):
        checkpoint.unlink()  # as if the machine had died before it was written: round 2 is redone
    before = read(place / FOLDER)
    result = run(place, resume=True, **changes).outcome.result
    after = read(place / FOLDER)
    assert after[: len(before)] == before and [c.t for c in after] == [0, 1, 2, 2, 3]
    steps = 4 if randomness == "seeded" else 5
    assert result["client_epsilon"] == accountant.epsilon({(2.0, 0.5): steps}, 1e-3, "RDP")
    identical = result["model_sha256"] == uninterrupted["model_sha256"]
    assert identical == (randomness == "seeded")


def test_every_release_is_on_disk_before_anything_is_sent(tmp_path: Path) -> None:
    e = assembled(client_privacy={"sample_rate": 1.0})
    engine, charged = sequential(e.client, e.shards), []

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        charged.append((tasks[0].kind, len(read(tmp_path / FOLDER))))
        return engine.execute(tasks)

    (tmp_path / "checkpoint").mkdir()
    session.run_rounds(e, replace(engine, execute=execute), tmp_path)
    assert [k for kind, k in charged if kind == "train"] == [1, 2, 3, 4]
    assert charged[-1] == ("probe", 4), "the final P trains once more, and is no release"


# --------------------------------------------------------------------------- the same bits


def test_processes_change_no_bit_of_a_seeded_run() -> None:
    assert run().model_sha256 == run(workers=2).model_sha256


def test_the_operating_systems_draws_repeat_nothing() -> None:
    changes = {"client_privacy": {"randomness": "os"}}
    assert run(**changes).model_sha256 != run(**changes).model_sha256


def test_a_network_with_buffers_and_compressed_uploads_runs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    quiet = {"noise_multiplier": 0.01, "epsilon": 1e9, "sample_rate": 1.0}
    changes = merged(
        client_privacy=quiet,
        plan={"layers": "full"},
        upload={"compress": "int8"},
        run={"rounds": 8},
    )
    done = fedp3.run(model, (X, Y), **changes)
    assert done.outcome.result["rejected"] == 0 and done.outcome.result["void"] == 0
    assert done.outcome.result["accuracy_global"] > 0.8


# --------------------------------------------------------------------------- what is said


def test_a_result_never_calls_it_just_epsilon(tmp_path: Path) -> None:
    result = run(tmp_path / "a").outcome.result
    assert result["epsilon_max"] is None and not {"epsilon", "privacy"} & result.keys()
    about = json.loads((tmp_path / "a/run.json").read_text())
    assert "privacy" not in about and about["client_privacy"]["level"] == "client"
    for event in map(json.loads, (tmp_path / "a/events.jsonl").read_text().splitlines()):
        assert event["epsilon"] is None and event["client_epsilon"] > 0
    for listed in ("inside", "outside", "assumes"):
        assert result["client_privacy"][listed] == list(getattr(disclosure, listed.upper()))


def test_the_mode_without_its_section_is_off() -> None:
    done = run(client_privacy={"enabled": False}, run={"rounds": 1, "clients_per_round": 2})
    assert done.outcome.result["client_epsilon"] is None
    assert "client_privacy" not in done.outcome.result
    assert done.history.column("client_epsilon") == [None]


CLI = (
    "partition.clients=6", "model.width=0.015625", "run.rounds=2", "run.clients_per_round=0",
    "client_privacy.enabled=true", "client_privacy.randomness=seeded",
    "client_privacy.sample_rate=0.5",
)  # fmt: skip


def test_every_line_of_output_names_the_client_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = []
    for words in (
        ["init", "my.toml"],
        ["plan", "my.toml", *CLI],
        ["run", "my.toml", *CLI, "--out", "a"],
        ["compare", "a"],
        ["compare", "a", "--markdown"],
    ):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)
        out.append("".join(capsys.readouterr()))
    for text in out:
        lines = [line for line in text.splitlines() if "epsilon" in line]
        assert lines or "wrote" in text
        assert all("client-level" in line for line in lines), lines
    assert all("which is trusted" in text for text in out[1:])
    page = (tmp_path / "a/report.html").read_text()
    assert "Client-level ε" in page and "Client-level DP, with a trusted server" in page
    assert all(
        line.lower().count("ε") == line.lower().count("client-level ε")
        for line in re.findall(r"[^<>\n]*ε[^<>\n]*", page)
    )
    assert all(text in page for text in ("It does not cover:", "It assumes that:"))


def test_both_sections_are_in_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["init", "my.toml"])
    text = (tmp_path / "my.toml").read_text()
    assert "[privacy]" in text and "[client_privacy]" in text and "trusted" in text
    with pytest.raises(ConfigError, match="disable one of them"):
        config.load(Path("my.toml"), ["client_privacy.enabled=true", "privacy.enabled=true"])


def test_its_statement_cannot_be_mistaken_for_one_of_ldp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fedp3(*arguments: str) -> None:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert not end.value.code

    fedp3("init", "my.toml")
    small = ["model.width=0.02", "run.rounds=2", "local.steps=2", "run.clients_per_round=0"]
    fedp3("run", "my.toml", *small, "client_privacy.enabled=true", "--out", "a")
    fedp3("privacy", "statement", "a")
    text = (tmp_path / "a" / "privacy.md").read_text()
    assert "This is **not** local differential privacy" in text
    assert "client-level epsilon" in text and "in 2 releases" in text
    assert "add/remove one client" in text and "record" not in text.split("##")[1]
