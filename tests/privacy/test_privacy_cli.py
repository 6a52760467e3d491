"""`fedp3 privacy` and `fedp3 audit` as a user types them, and the node's own ledger."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedp3.cli import main
from fedp3.errors import InputError, RunError
from fedp3.privacy.ledger import read
from fedp3.types import Private
from worlds import world

SIZES = ["--sample-rate", "0.12245", "--steps", "100", "--delta", "1e-5"]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out = capsys.readouterr()
    assert (end.value.code or 0) == code, out.err
    return out.err if code else out.out


def found(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(said([*arguments, "--json"], capsys).splitlines()[-1])
    return value


def test_the_calculators_name_what_they_computed(capsys: pytest.CaptureFixture[str]) -> None:
    spent = found(["privacy", "epsilon", "--noise-multiplier", "1.047", *SIZES], capsys)
    assert spent["epsilon"] == pytest.approx(8.0, abs=0.05)
    assert spent["adjacency"] == "add/remove one record" and spent["accountant"].startswith("PLD (dp-accounting")
    noise = found(["privacy", "sigma", "--epsilon", "8", *SIZES], capsys)
    assert noise["noise_multiplier"] == pytest.approx(1.047, abs=0.005)
    assert [round(form["epsilon"], 1) for form in noise["paper"]] == [15.9, 8.1]
    assert "unbounded" in said(["privacy", "sigma", "--epsilon", "inf", *SIZES], capsys)
    assert "really gives epsilon 15.93" in said(["privacy", "sigma", "--epsilon", "8", *SIZES], capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["privacy", "epsilon", "--noise-multiplier", "-1", *SIZES],
        ["privacy", "epsilon", "--noise-multiplier", "1", "--sample-rate", "1.5", "--steps", "10"],
        ["privacy", "epsilon", "--noise-multiplier", "1", "--sample-rate", "0.5", "--steps", "0"],
        ["privacy", "sigma", "--epsilon", "0", *SIZES],
        ["privacy", "sigma", "--epsilon", "1", "--sample-rate", "0.1", "--steps", "10", "--delta", "2"],
        ["privacy", "utility", "mpl", "--out", "x"],
    ],
)
def test_what_cannot_be_computed_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "fedp3: " in said(arguments, capsys, 2)


def test_a_config_without_ldp_has_nothing_to_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text("[model]\nwidth = 0.02\n")
    assert "nothing to audit" in said(["audit", str(tmp_path / "my.toml")], capsys, 2)


def test_a_failed_audit_is_a_failed_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedp3.privacy import audit

    (tmp_path / "my.toml").write_text("[model]\nwidth = 0.02\n[privacy]\nenabled = true\nnoise_multiplier = 2.0\n")
    good, bad = audit.Finding("A", "this", 1.0, 0.9, 1.1), audit.Finding("B", "that", 2.0, 0.9, 1.1)
    monkeypatch.setattr(audit, "audit", lambda subject: [good])
    assert "1 of 1 checks passed" in said(["audit", str(tmp_path / "my.toml")], capsys)
    monkeypatch.setattr(audit, "audit", lambda subject: [good, bad])
    assert "do not release" in said(["audit", str(tmp_path / "my.toml")], capsys, 1)


# --------------------------------------------------------------------------- a node of Flower


def test_a_node_charges_its_own_ledger_before_it_trains_and_refuses_what_is_too_dear(tmp_path: Path) -> None:
    from fedp3.engines.flower import node

    w = world("mlp", steps=10)
    recipe = replace(w.recipe, private=Private(1.0, 1.5, 0.2))
    task = w.tasks(w.plans())[1]
    mine: dict[str, object] = {"partition-id": 1, "folder": str(tmp_path), "epsilon": 3, "delta": 1e-3}
    home = node.home_of(mine, "run-0")

    def until_refused() -> None:
        for t in range(20):
            node.admit(replace(task, t=t), recipe, mine, node.home_of(mine, f"run-{t % 2}"))

    with pytest.raises(RunError, match="this device allows 3"):
        until_refused()
    charged = read(tmp_path)
    assert 0 < len(charged) < 20 and {c.steps for c in charged} == {10}
    assert {c.run for c in charged} == {"run-0", "run-1"}, "all runs are on one account"
    node.admit(replace(task, kind="evaluate"), recipe, mine, home)
    with pytest.raises(RunError, match="under LDP only"):
        node.admit(task, w.recipe, mine, home)
    with pytest.raises(InputError, match="epsilon"):
        node.admit(task, recipe, mine | {"epsilon": "much"}, home)


# --------------------------------------------------------------------------- utility


def test_utility_runs_its_cells_once_and_ends_in_a_table_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedp3.cli import utility

    (tmp_path / "c.toml").write_text(
        "[model]\nwidth = 0.01\n[partition]\nclients = 3\n[run]\nrounds = 1\nclients_per_round = 2\n"
        '[privacy]\nenabled = true\nrandomness = "seeded"\n'
    )
    monkeypatch.setitem(utility.TABLES, "mlp", ("epsilon", utility._by_epsilon(("inf",))))  # type: ignore[misc]
    out = tmp_path / "u"
    command = ["privacy", "utility", "mlp", "--config", str(tmp_path / "c.toml"), "--out", str(out)]
    first = found(command, capsys)
    assert [c["layers"] for c in first["cells"]] == ["full", "opu2", "lowerb"]
    assert (out / "utility.svg").exists() and "| OPU2 |" in (out / "table.md").read_text()
    before = (out / "opu2-inf" / "seed-0" / "result.json").stat().st_mtime_ns
    assert found(command, capsys) == first
    assert (out / "opu2-inf" / "seed-0" / "result.json").stat().st_mtime_ns == before, "finished cells are read"
