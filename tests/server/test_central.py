"""C: the server's model on a test set of no client."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedp3
from fedp3.cli import main
from fedp3.core.errors import InputError, RunError
from fedp3.experiment.assemble import assemble_from
from fedp3.privacy.disclosure import warnings as privacy_warnings
from fedp3.report.comparison import compare
from fedp3.report.equality import inequalities
from fedp3.report.runs import load_runs
from fedp3.runs.description import describe
from fedp3.runs.tuning import validation_split

RNG = torch.Generator().manual_seed(0)
Y = torch.arange(140) % 3
X = torch.randn(140, 5, generator=RNG) + 2 * torch.eye(3, 5)[Y]
TRAIN, TEST = (X[:80], Y[:80]), (X[80:], Y[80:])
SETTINGS: dict[str, Any] = {
    "partition": {"kind": "iid", "clients": 4},
    "plan": {"layers": "full"},
    "run": {"rounds": 3, "clients_per_round": 0, "eval_every": 1},
}


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, outputs))


def by_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Accuracy and mean loss, one sample at a time."""
    right, loss = 0, 0.0
    with torch.no_grad():
        for row, label in zip(x, y, strict=True):
            logits = model(row[None])[0]
            right += int(logits.argmax() == label)
            loss += float(torch.logsumexp(logits, 0) - logits[label])
    return right / len(y), loss / len(y)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("central") / "run"
    fedp3.run(net(), (TRAIN, TEST), out=folder, **SETTINGS)
    return folder


def test_c_is_what_a_loop_over_the_test_set_finds() -> None:
    result = fedp3.run(net(), TRAIN, test=TEST, **SETTINGS)
    accuracy, loss = by_loop(result.model, *TEST)
    final = result.outcome.result["final"]["C"]
    assert result.scores["C"] == result.accuracy["C"] == final["mean"] == accuracy
    assert final["loss"] == pytest.approx(loss, rel=1e-5) and final["samples"] == 60
    assert result.history[-1]["C"] == accuracy and "C " in repr(result)
    assert len({row["C"] for row in result.history}) > 1


def test_c_has_the_score_of_the_objective() -> None:
    x, y = X, X[:, :2] - X[:, 2:4]
    result = fedp3.run(
        net(2), (x[:80], y[:80]), test=(x[80:], y[80:]), objective="regression", **SETTINGS
    )
    with torch.no_grad():
        errors = [
            float((result.model(a[None])[0] - b).square().mean())
            for a, b in zip(x[80:], y[80:], strict=True)
        ]
    assert result.scores["C"] == pytest.approx((sum(errors) / 60) ** 0.5, rel=1e-5)
    assert result.accuracy["C"] is None


def test_a_test_set_changes_nothing_but_c() -> None:
    with_c, without = (fedp3.run(net(), TRAIN, test=t, **SETTINGS) for t in (TEST, None))
    assert with_c.model_sha256 == without.model_sha256
    assert "C" not in without.scores and "C " not in repr(without)
    assert {kind: with_c.scores[kind] for kind in "GDP"} == without.scores
    pair = fedp3.run(net(), (TRAIN, TEST), **SETTINGS)
    assert pair.scores == with_c.scores


def test_events_history_and_initial_scores_have_c(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["C"]["samples"] for event in events] == [60, 60, 60]
    assert json.loads((folder / "initial.json").read_text())["C"]["samples"] == 60
    about = json.loads((folder / "run.json").read_text())
    assert about["central"] == {"samples": 60, "absent": None}
    result = json.loads((folder / "result.json").read_text())
    assert result["score_central"] == result["accuracy_central"] == events[-1]["C"]["mean"]


def test_a_line_of_progress_has_c(capsys: Any) -> None:
    one = {**SETTINGS, "run": {"rounds": 1, "clients_per_round": 0}}
    result = fedp3.run(net(), (TRAIN, TEST), progress=True, **one)
    assert f"C {100 * (result.scores['C'] or 0):.1f} %" in capsys.readouterr().err
    fedp3.run(net(), TRAIN, progress=True, **one)
    assert "C " not in capsys.readouterr().err


def test_a_run_is_resumed_only_with_its_test_set(folder: Path) -> None:
    fedp3.run(net(), (TRAIN, TEST), out=folder, resume=True, **SETTINGS)
    with pytest.raises(InputError, match="other test"):
        fedp3.run(net(), (TRAIN, (TEST[0] + 1, TEST[1])), out=folder, resume=True, **SETTINGS)
    with pytest.raises(InputError, match="test"):
        fedp3.run(net(), TRAIN, out=folder, resume=True, **SETTINGS)


def test_comparison_page_and_command_show_c(folder: Path, tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "other"
    fedp3.run(net(), TRAIN, out=other, **SETTINGS)
    row, without = compare([folder, other])
    assert row["C"] is not None and without["C"] is None
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(folder), "--score", "C"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"{100 * float(str(row['C'])):.1f} %" in out
    page = fedp3.report.write_report([folder], tmp_path / "page.html").read_text()
    assert "C, central" in page and "60 samples of no client" in page
    assert "On a test set of no client it has" in page
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(folder), str(other), "--score", "C"])
    assert stopped.value.code == 2
    assert "not all of these runs have C" in capsys.readouterr().err
    assert not [i for i in inequalities(load_runs([folder, other])) if i.condition == "data"]
    assert load_runs([folder])[0].seeds[0].initial["C"]


def test_without_a_complete_model_c_is_absent_with_the_reason() -> None:
    personal = {**SETTINGS, "plan": {"layers": "full", "head": "personal"}}
    result = fedp3.run(net(), (TRAIN, TEST), **personal)
    assert "C" not in result.scores and result.scores["G"] is not None
    about = describe(result.experiment)
    assert "stays on the clients" in about["central"]["absent"]
    assert "gives no C" in about["warnings"]["M5"]


def test_tuning_does_not_look_at_the_test_set() -> None:
    data = fedp3.from_tensors(*TRAIN)
    config = fedp3.make_config(
        **{"data": {"name": "own", "test": "own"}, "model": {"name": "own"}, **SETTINGS}
    )
    data = replace(data, test=fedp3.from_tensors(*TEST))
    experiment = assemble_from(config, net(), data)
    assert experiment.server.central is not None
    assert experiment.client.data.test is None, "clients and workers do not carry the test set"
    assert validation_split(experiment).server.central is None


def test_under_ldp_c_is_free_and_the_statement_does_not_speak_of_it() -> None:
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    private = {"enabled": True, "epsilon": 20.0, "sample_rate": 0.3, "randomness": "seeded"}
    settings = {**SETTINGS, "privacy": private}
    values = {n: w.clone() for n, w in plain.state_dict().items()}
    with_c = fedp3.run(plain, (TRAIN, TEST), **settings)
    plain.load_state_dict(values)
    without = fedp3.run(plain, TRAIN, **settings)
    assert with_c.scores["C"] is not None
    assert with_c.outcome.result["epsilon"] == without.outcome.result["epsilon"]
    said, said_without = (
        privacy_warnings(r.experiment.client, r.experiment.turn_plans, r.experiment.server.budget)
        for r in (with_c, without)
    )
    assert said == said_without


def test_a_sample_that_cannot_be_scored_ends_the_run_in_words() -> None:
    test = (torch.cat([TEST[0][:2], TEST[0][2:3] + 1e6]), TEST[1][:3])
    with pytest.raises(RunError, match="cannot be scored on the central test set: ValueError: no"):
        fedp3.run(nn.Sequential(Picky(), *net()), TRAIN, test=test, **SETTINGS)


class Picky(nn.Module):
    """A layer that computes nothing of large numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_tracing() and bool((x > 1e5).any()):
            raise ValueError("no number is so large")
        return x


def test_a_test_set_that_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(InputError, match="the central test set does not fit"):
        fedp3.run(net(), TRAIN, test=(TEST[0][:, :4], TEST[1]), **SETTINGS)
    with pytest.raises(InputError, match="k >= 4 classes"):
        fedp3.run(net(), TRAIN, test=(TEST[0], TEST[1] + 1), **SETTINGS)
