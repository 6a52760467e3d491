"""`fedp3 privacy` and `fedp3 audit` as a user types them, and the ledger of a node."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedp3.cli import main
from fedp3.core.errors import InputError, RunError
from fedp3.privacy.ledger import read
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Mechanism
from worlds import world

SIZES = ["--sample-rate", "0.12245", "--steps", "100", "--delta", "1e-5"]


def output(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out = capsys.readouterr()
    assert (end.value.code or 0) == code, out.err
    return out.err if code else out.out


def as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(output([*arguments, "--json"], capsys).splitlines()[-1])
    return value


def test_the_calculators_name_what_they_computed(capsys: pytest.CaptureFixture[str]) -> None:
    spent = as_json(["privacy", "epsilon", "--noise-multiplier", "1.047", *SIZES], capsys)
    assert spent["epsilon"] == pytest.approx(8.0, abs=0.05)
    assert spent["adjacency"] == "add/remove one record" and spent["accountant"].startswith(
        "PLD (dp-accounting"
    )
    noise = as_json(["privacy", "sigma", "--epsilon", "8", *SIZES], capsys)
    assert noise["noise_multiplier"] == pytest.approx(1.047, abs=0.005)
    assert [round(form["epsilon"], 1) for form in noise["paper"]] == [15.9, 8.1]
    assert "unbounded" in output(["privacy", "sigma", "--epsilon", "inf", *SIZES], capsys)
    assert "really gives epsilon 15.93" in output(
        ["privacy", "sigma", "--epsilon", "8", *SIZES], capsys
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["privacy", "epsilon", "--noise-multiplier", "-1", *SIZES],
        ["privacy", "epsilon", "--noise-multiplier", "1", "--sample-rate", "1.5", "--steps", "10"],
        ["privacy", "epsilon", "--noise-multiplier", "1", "--sample-rate", "0.5", "--steps", "0"],
        ["privacy", "sigma", "--epsilon", "0", *SIZES],
        [
            "privacy",
            "sigma",
            "--epsilon",
            "1",
            "--sample-rate",
            "0.1",
            "--steps",
            "10",
            "--delta",
            "2",
        ],
    ],
)
def test_what_cannot_be_computed_is_said(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "fedp3: " in output(arguments, capsys, 2)


def test_a_config_without_ldp_has_nothing_to_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.toml").write_text("[model]\nwidth = 0.02\n")
    assert "nothing to audit" in output(["audit", str(tmp_path / "my.toml")], capsys, 2)


@pytest.fixture
def private_config(tmp_path: Path) -> str:
    path = tmp_path / "my.toml"
    path.write_text("[model]\nwidth = 0.02\n[privacy]\nenabled = true\nnoise_multiplier = 2.0\n")
    return str(path)


def test_an_audit_shows_its_parts_and_ends_with_the_next_command(
    private_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["audit", private_config, "--only", "sensitivity, accountant", "--seed", "3"]
    shown = output(arguments, capsys)
    assert "sensitivity" in shown and "accountant" in shown and "sampling" not in shown
    assert "could refute epsilon up to" in shown
    assert "fedp3 run" in shown


def test_an_audit_as_json_lists_every_finding(
    private_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = as_json(["audit", private_config, "--only", "sensitivity,noise"], capsys)
    assert result["passed"] is True
    assert {f["part"] for f in result["findings"]} == {"sensitivity", "noise"}
    assert all(f["passed"] and f["error"] == "" for f in result["findings"])


def test_a_failed_audit_is_a_failed_command(
    private_config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("fedp3.privacy.mechanism.private_batches", broken)
    with pytest.raises(SystemExit) as end:
        main(["audit", private_config, "--only", "sampling"])
    told = capsys.readouterr()
    assert end.value.code == 1
    assert "FAILED: ZeroDivisionError: float division by zero" in told.out
    assert "auditing: sampling" in told.err and "do not release" in told.err
    assert "Traceback" not in told.out + told.err


def test_an_unknown_part_of_an_audit_is_refused(
    private_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = output(["audit", private_config, "--only", "noisiness"], capsys, 2)
    assert "no part 'noisiness'" in shown and "sensitivity" in shown


# --------------------------------------------------------------------------- a node of Flower


def test_a_node_charges_its_own_ledger_before_it_trains_and_refuses_what_is_too_dear(
    tmp_path: Path,
) -> None:
    from fedp3.engines.flower import node

    w = world("mlp", steps=10)
    mechanism = Mechanism(clip=1.0, noise_multiplier=1.5, sample_rate=0.2)
    context = replace(w.context, steps=PrivateSteps(mechanism))
    task = w.tasks(w.plans())[1]
    settings: dict[str, object] = {
        "partition-id": 1,
        "folder": str(tmp_path),
        "epsilon": 3,
        "delta": 1e-3,
    }
    home = node.home_of(settings, "run-0")

    def until_refused() -> None:
        for t in range(20):
            node.admit(
                replace(task, t=t), context, settings, node.home_of(settings, f"run-{t % 2}")
            )

    with pytest.raises(RunError, match="this device allows 3"):
        until_refused()
    charged = read(tmp_path)
    assert 0 < len(charged) < 20 and {c.steps for c in charged} == {10}
    assert {c.run for c in charged} == {"run-0", "run-1"}, "all runs are on one account"
    node.admit(replace(task, kind="evaluate"), context, settings, home)
    with pytest.raises(RunError, match="under LDP only"):
        node.admit(task, w.context, settings, home)
    with pytest.raises(InputError, match="epsilon"):
        node.admit(task, context, settings | {"epsilon": "much"}, home)
