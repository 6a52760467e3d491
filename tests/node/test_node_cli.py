"""`fedp3 node` and `fedp3 permit` as their users type them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedp3.cli import main

SMALL = ["model.width=0.02", "run.rounds=2", "local.steps=2"]


@pytest.fixture
def fedp3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    call("init", "my.toml")
    return call


def test_a_policy_is_written_once_and_a_config_tried_against_it(fedp3: Any, tmp_path: Path) -> None:
    code, out, _ = fedp3("node", "init", "--client", "0")
    assert code == 0 and "partition-id=0" in out
    assert fedp3("node", "init", "--client", "0")[0] == 2, "a policy is never overwritten"
    code, out, err = fedp3("node", "check", "my.toml", *SMALL, "--client", "0")
    assert code == 1 and "under LDP only" in out and "refuses it" in err
    ldp = ["privacy.enabled=true", *SMALL]
    code, out, _ = fedp3("node", "check", "my.toml", *ldp, "--client", "0", "--json")
    trial = json.loads(out.splitlines()[-1])
    assert code == 0 and trial["accepted"] and 0 < trial["epsilon"] <= 8
    policy = tmp_path / "state" / "fedp3" / "nodes" / "client-0" / "policy.toml"
    policy.write_text(f'[runs]\nconfigs = ["{trial["digest"]}"]\n[privacy]\nepsilon = 0.1\n')
    code, out, _ = fedp3("node", "check", "my.toml", *ldp, "--client", "0")
    assert code == 1 and "the policy allows 0.1" in out and "does not list" not in out
    code, out, _ = fedp3("node", "check", "my.toml", *ldp, "run.seed=3", "--client", "0")
    assert code == 1 and "does not list the config" in out


def test_status_and_caches_of_a_new_node(fedp3: Any, tmp_path: Path) -> None:
    assert fedp3("node", "status", "--client", "4")[0] == 2, "there is no such node"
    assert fedp3("node", "status")[0] == 2
    fedp3("node", "init", "--client", "4", "--folder", "kept")
    code, out, _ = fedp3("node", "status", "--folder", "kept", "--json")
    about = json.loads(out.splitlines()[-1])
    assert code == 0 and about["client"] == 4 and about["epsilon"] == 0.0
    assert "epsilon 0.000" in fedp3("node", "status", "--folder", "kept")[1]
    (tmp_path / "kept" / "runs" / "ab").mkdir(parents=True)
    code, out, _ = fedp3("node", "caches", "--folder", "kept", "--clear", "all")
    assert code == 0 and "deleted 1" in out and not (tmp_path / "kept" / "runs" / "ab").exists()


def test_a_permit_is_signed_for_one_config(fedp3: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    code, out, _ = fedp3("permit", "key", "owner.key")
    assert code == 0 and "owners = [" in out
    assert fedp3("permit", "key", "owner.key")[0] == 2, "a key is never overwritten"
    code, out, _ = fedp3("permit", "sign", "my.toml", "--key", "owner.key", "--days", "2")
    permit = json.loads((tmp_path / "permit.json").read_text())
    assert code == 0 and permit["config"][:16] in out
    assert fedp3("permit", "sign", "my.toml", "--key", "nokey")[0] == 2
    assert fedp3("permit", "sign", "my.toml", "--key", "owner.key", "--run", "x")[0] == 2
