"""A run that goes on for more rounds is the run that would have had them from the start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedp3
from fedp3.cli import main
from fedp3.core import files
from fedp3.core.errors import InputError

SMALL = "run.eval_every=2", "partition.clients=6", "run.clients_per_round=3", "local.steps=2"
LDP: dict[str, Any] = {"enabled": True, "epsilon": 4.0, "sample_rate": 0.2, "delta": 1e-3}


def command(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    if ended.value.code:
        raise AssertionError(f"exit code {ended.value.code}")


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    command("init", tmp_path / "my.toml")
    command("run", tmp_path / "my.toml", *SMALL, "run.rounds=3", "--out", tmp_path / "a")
    return tmp_path / "a"


def test_an_extended_run_ends_at_the_bits_of_one_that_had_all_rounds(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = begun.with_name("whole")
    command("run", begun.with_name("my.toml"), *SMALL, "run.rounds=7", "--out", whole)
    capsys.readouterr()
    command("resume", begun, "run.rounds=7", "--json")
    printed = json.loads(capsys.readouterr().out)
    a, b = (files.read_json(f / "result.json") for f in (begun, whole))
    assert a["model_sha256"] == b["model_sha256"] == printed["model_sha256"]
    assert a["accuracy_global"] == b["accuracy_global"] and a["rounds"] == 7
    assert a["mb_up"] == b["mb_up"], "rounds before the extension are counted, once"
    rounds = (begun / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in rounds] == list(range(1, 8))


def test_the_folder_says_that_it_was_extended_and_stays_resumable(begun: Path) -> None:
    before = files.read_json(begun / "run.json")["digest"]
    command("resume", begun, "run.rounds=5")
    command("resume", begun, "run.rounds=5")  # the same command again changes nothing
    command("resume", begun, "run.rounds=6")
    about = files.read_json(begun / "run.json")
    first, second = about["extended"]
    assert first["changes"] == {"run.rounds": [3, 5]} and first["after_round"] == 3
    assert second["changes"] == {"run.rounds": [5, 6]} and first["digest_before"] == before
    assert (
        about["config"]["run"]["rounds"] == 6
        and "rounds = 6" in (begun / "config.toml").read_text()
    )
    (begun / "result.json").unlink()
    command("resume", begun)
    assert files.read_json(begun / "result.json")["rounds"] == 6


def test_a_config_that_was_edited_by_hand_is_still_refused(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = begun / "config.toml"
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 9"))
    assert "was changed after the run began" in refused(capsys, "resume", begun)
    assert "was changed after" in refused(capsys, "resume", begun, "run.rounds=9")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["run.rounds=2"], "it has 3 rounds, and run.rounds=2 is not more"),
        (["run.rounds=9", "local.lr=0.5"], "not with local.lr=0.5"),
        (["run.rounds=many"], "rounds"),
        (["rounds=9"], "not with rounds=9"),
        (["privacy.epsilon=9"], "it has 3 rounds"),
    ],
)
def test_what_is_no_extension_is_refused_and_changes_nothing(
    begun: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], text: str
) -> None:
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    assert text in refused(capsys, "resume", begun, *overrides)
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before


def test_several_seeds_cannot_be_extended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("init", tmp_path / "my.toml")
    words = *SMALL, "run.rounds=1", "--seeds", "2", "--out", tmp_path / "s"
    command("run", tmp_path / "my.toml", *words)
    assert "several seeds" in refused(capsys, "resume", tmp_path / "s", "run.rounds=2")


# --------------------------------------------------------------------------- in Python


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(80) % 2
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None]
    return x, y


def run(data: Any, rounds: int, out: Path | None = None, **sections: Any) -> fedp3.Result:
    settings = {
        "partition": {"kind": "iid", "clients": 4},
        "local": {"steps": 2, "lr": 0.1},
        "run": {"rounds": rounds, "clients_per_round": 2, "eval_every": 0},
    }
    for section, keys in sections.items():
        settings[section] = {**settings.get(section, {}), **keys}
    return fedp3.run(net(), data, out=out, resume=out is not None, **settings)  # type: ignore[arg-type]


def test_a_run_of_python_is_extended_by_the_same_call_with_more_rounds(
    data: Any, tmp_path: Path
) -> None:
    run(data, 2, tmp_path / "r")
    assert run(data, 5, tmp_path / "r").model_sha256 == run(data, 5).model_sha256
    with pytest.raises(InputError, match=r"it has 5 rounds, and run.rounds=4 is not more"):
        run(data, 4, tmp_path / "r")
    with pytest.raises(InputError, match="begun with other settings"):
        run(data, 9, tmp_path / "r", local={"lr": 0.2})
    x, y = data
    with pytest.raises(InputError, match="begun with other data"):
        run((x + 1, y), 9, tmp_path / "r")
    assert files.read_json(tmp_path / "r" / "run.json")["config"]["run"]["rounds"] == 5


def test_a_learning_rate_that_falls_over_the_rounds_is_refused(data: Any, tmp_path: Path) -> None:
    cosine = {"local": {"schedule": "cosine"}}
    run(data, 2, tmp_path / "r", **cosine)
    with pytest.raises(InputError, match="'cosine' lowers the learning rate over the 2 rounds"):
        run(data, 4, tmp_path / "r", **cosine)


@pytest.mark.parametrize("randomness", ["os", "seeded"])
def test_derived_noise_needs_a_new_total_which_is_never_exceeded(
    data: Any, tmp_path: Path, randomness: str
) -> None:
    ldp = {**LDP, "randomness": randomness}
    first = run(data, 3, tmp_path / "r", privacy=ldp)
    noise = first.outcome.result["privacy"]["noise_multiplier"]
    with pytest.raises(InputError, match="its noise was derived from 3 rounds"):
        run(data, 6, tmp_path / "r", privacy=ldp)
    with pytest.raises(InputError, match=r"its rounds cost epsilon .* in all; give") as refusal:
        run(data, 6, tmp_path / "r", privacy={**ldp, "epsilon": 4.5})
    needed = float(str(refusal.value).rpartition("privacy.epsilon=")[2].split()[0])
    longer = run(data, 6, tmp_path / "r", privacy={**ldp, "epsilon": needed})
    spent = longer.outcome.result
    assert spent["rounds"] == 6 and spent["privacy"]["noise_multiplier"] == noise
    assert 4.0 < spent["epsilon_max"] <= needed < 1.05 * spent["epsilon_max"]
    again = run(data, 6, tmp_path / "r", privacy={**ldp, "epsilon": needed})
    assert again.model_sha256 == longer.model_sha256, "it is read, not trained"


def test_noise_that_the_user_chose_needs_no_new_total(data: Any, tmp_path: Path) -> None:
    ldp = {**LDP, "noise_multiplier": 3.0}
    run(data, 2, tmp_path / "r", privacy=ldp)
    assert run(data, 3, tmp_path / "r", privacy=ldp).outcome.result["rounds"] == 3


def test_client_level_noise_needs_a_new_total_too(data: Any, tmp_path: Path) -> None:
    mode: dict[str, Any] = {"enabled": True, "epsilon": 20.0, "sample_rate": 0.5, "delta": 1e-2}
    whole = {"client_privacy": mode, "run": {"clients_per_round": 0}, "plan": {"layers": "full"}}
    first = run(data, 2, tmp_path / "r", **whole)
    noise = first.outcome.result["client_privacy"]["noise_multiplier"]
    with pytest.raises(InputError, match=r"also give a new total, as in client_privacy.epsilon"):
        run(data, 4, tmp_path / "r", **whole)
    whole["client_privacy"] = {**mode, "epsilon": 60.0}
    result = run(data, 4, tmp_path / "r", **whole).outcome.result
    assert result["client_privacy"]["noise_multiplier"] == noise and result["rounds"] == 4


def test_a_run_on_nodes_is_refused(data: Any, tmp_path: Path) -> None:
    run(data, 2, tmp_path / "r")
    (tmp_path / "r" / "flower.json").write_text('{"run": "x"}')
    with pytest.raises(InputError, match="its nodes agreed to the config"):
        run(data, 4, tmp_path / "r")
