"""`fedp3 privacy` and `fedp3 audit` as a user types them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedp3.cli import main
from fedp3.privacy.ledger import read

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


# --------------------------------------------------------------------------- ledger and statement


def test_a_statement_says_what_was_promised_drawn_and_released(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output(["init", "my.toml"], capsys)
    small = ["model.width=0.02", "run.rounds=2", "run.clients_per_round=2", "local.steps=2"]
    run = ["run", "my.toml", *small, "privacy.enabled=true", "run.final_p=false", "--out", "a"]
    output(run, capsys)
    shown = output(["privacy", "ledger", "a"], capsys)
    assert "4 lines, chain complete" in shown
    exported = output(["privacy", "ledger", "a", "--csv"], capsys).splitlines()
    assert len(exported) == 5 and exported[0].startswith("client,t,steps,noise_multiplier")
    assert "a/privacy.md" in output(["privacy", "statement", "a"], capsys)
    text = (tmp_path / "a" / "privacy.md").read_text()
    drawn = {c.noise_multiplier for c in read(tmp_path / "a")}
    assert f"noise multiplier {drawn.pop():g}, sample rate 0.1: 4 tasks" in text and not drawn
    for words in ("add/remove one record", "4 updates", "Outside epsilon", "Assumptions"):
        assert words in text
    assert "probe" not in text and "discarded" not in text, "P was switched off"
    changed = (tmp_path / "a" / "ledger.jsonl").read_text().replace('"steps": 2', '"steps": 1', 1)
    (tmp_path / "a" / "ledger.jsonl").write_text(changed)
    assert "was changed" in output(["privacy", "ledger", "a"], capsys, 1)
    output(["run", "my.toml", *small, "--out", "b"], capsys)
    assert "nothing is promised" in output(["privacy", "statement", "b"], capsys, 2)
    assert "is not a ledger" in output(["privacy", "ledger", "my.toml"], capsys, 2)
