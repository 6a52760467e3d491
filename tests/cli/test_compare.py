"""`fedp3 compare` as a user types it: verdicts, budgets, warnings and narrow terminals."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from fedp3.cli import terminal
from processes import run_fedp3

TINY = [
    "model.width=0.03",
    "partition.clients=6",
    "run.clients_per_round=3",
    "run.rounds=3",
    "run.eval_every=1",
    "local.steps=2",
]
PLAY = Path(__file__).parents[1] / "play.txt"
TEXT = [
    *("data.name=text", f"data.path={PLAY}", "data.length=16", "partition.kind=roles"),
    *("partition.clients=3", "model.name=gpt", "model.width=0.125", "model.blocks=1"),
    *("local.optimizer=adam", "local.lr=0.01", "run.clients_per_round=0", "run.rounds=3"),
    "run.eval_every=1",
]
LONG = "heterofl-with-a-very-long-name-of-44-letters"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a config and a sweep: fedavg and fedp3 with three seeds each."""
    folder = tmp_path_factory.mktemp("sweep")
    config, out = str(folder / "my.toml"), str(folder / "d")
    methods = ["--methods", "fedavg,fedp3", "--seeds", "3"]
    assert run_fedp3("init", config) == 0
    assert run_fedp3("sweep", config, *TINY, *methods, "--out", out) == 0
    return folder


@pytest.fixture
def sweep(fedp3, trained, tmp_path):
    """A copy of it in the working directory: my.toml, d/fedavg and d/fedp3."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def last(out):
    return json.loads(out.strip().splitlines()[-1])


def test_the_answer_comes_first_and_as_json(fedp3, sweep):
    code, out, _ = fedp3("compare", "d/fedavg", "d/fedp3")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("At ") and "of traffic" in lines[0]
    assert lines[1].startswith("At 3 rounds of training") and "over 3 seeds" in lines[1]
    assert "better" in out or "worse" in out or "not decided" in out
    code, out, _ = fedp3("compare", "d/fedavg", "d/fedp3", "--json")
    by_axis = {answer["at"]: answer for answer in last(out)["answers"]}
    assert set(by_axis) == {"mb", "round"}
    other = next(run for run in by_axis["round"]["runs"] if run["verdict"])
    assert other["seeds"] == 3 and other["low"] < other["difference"] < other["high"]


def test_a_budget_a_reference_and_a_score_can_be_chosen(fedp3, sweep):
    chosen = ("--at-round", "2", "--at-mb", "0.3", "--against", "fedavg", "--score", "D")
    code, out, _ = fedp3("compare", "d/fedavg", "d/fedp3", *chosen, "--json")
    answers = last(out)["answers"]
    assert code == 0 and [(a["at"], a["budget"]) for a in answers] == [("mb", 0.3), ("round", 2)]
    assert {a["reference"] for a in answers} == {"fedavg"}
    events = [
        json.loads(Path(f"d/fedp3/seed-{s}/events.jsonl").read_text().splitlines()[1])
        for s in range(3)
    ]
    shown = next(run for run in answers[1]["runs"] if run["run"] == "fedp3")
    assert shown["score"] == pytest.approx(sum(e["D"]["mean"] for e in events) / 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--at-round", "99"], "not all runs have a G at 99 rounds"),
        (["--at-mb", "999"], "they were evaluated: fedavg from 0 bytes to"),
        (["--against", "fedprox"], "no such run; the runs are: fedavg, fedp3"),
        (["--score", "F1"], "want one of G, D, P"),
        (["--at-mb", "nan"], "--at-mb nan: want a number"),
        (["--at-seconds", "inf"], "--at-seconds inf: want a number"),
        (["--at-joules", "3"], "runs cannot be compared by energy: no device has watts"),
    ],
)
def test_what_cannot_be_answered_is_refused(fedp3, sweep, options, text):
    code, out, err = fedp3("compare", "d/fedavg", "d/fedp3", *options)
    assert code == 2 and text in err.replace("\u00a0", " ") and out == ""


def test_runs_that_differ_in_what_should_be_equal_are_warned_about(fedp3, sweep):
    _, out, err = fedp3("compare", "d/fedavg", "d/fedp3")
    assert "differ in what a comparison should keep equal" in err
    assert "fleet: prune.keep=1.0 (fedavg); prune.keep=0.9 (fedp3)" in err
    assert "fleet s" not in out.split("Cost of the entire run")[1].split("G: server's")[0]
    fedp3("run", "my.toml", *TINY, "partition.classes=3", "--seeds", "3", "--out", "other")
    _, out, err = fedp3("compare", "d/fedp3", "other")
    assert "split: partition.classes=5 (fedp3); partition.classes=3 (other)" in err
    assert ": no verdict" in err and "not comparable (other split)" in out


def test_at_80_columns_nothing_is_cut(fedp3, sweep, monkeypatch):
    Path("d/fedavg").rename(f"d/{LONG}")
    monkeypatch.setattr(terminal, "out", Console(width=80))
    code, out, _ = fedp3("compare", f"d/{LONG}", "d/fedp3")
    assert code == 0 and "…" not in out
    tables = out.split("\nAt ")[-1].split("G: server's model")[0]
    for line in tables.splitlines()[1:]:
        assert len(line.rstrip()) <= 80 or line.startswith("To reach"), line
    assert tables.count(LONG) >= 6, "wide tables are split, and each part has the names"
    for heading in ("worst", "MB up", "MB down", "GFLOP", "seconds", "verdict", "rounds"):
        assert heading in tables


def test_a_table_that_fits_is_not_split(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "out", Console(width=40))
    columns = {"run": "left", "a": "right", "note": "left"}
    terminal.table(columns, [["x", "12.5", "one or two words"], ["long-name", "3", "short"]])
    printed = capsys.readouterr().out
    assert printed.count("run") == 1 and max(map(len, printed.splitlines())) <= 40
    monkeypatch.setattr(terminal, "out", Console(width=14))
    terminal.table(columns, [["x", "12.5", "words"], ["long-name", "3", "short"]])
    printed = capsys.readouterr().out
    assert printed.count("run") == 2 and printed.count("long-name") == 2 and "12.5" in printed


def test_runs_with_another_score_are_compared_by_it(fedp3, tmp_path):
    fedp3("init", "my.toml")
    methods = ("--methods", "fedavg,fedp3", "--seeds", "3", "--out", "t")
    code, *_ = fedp3("sweep", "my.toml", *TEXT, *methods)
    assert code == 0
    code, out, _ = fedp3("compare", "t/fedavg", "t/fedp3", "--target", "3.5", "--score", "D")
    assert code == 0
    answers, tables = out.split("Cost of the entire run")[0].split("Scores at the end", 1)
    assert answers.startswith("At ") and "D (nats) " in answers.splitlines()[0]
    assert "%" not in answers + tables and "points" not in out
    assert "Scores at the end (nats, lower is better)" in out
    assert "worst: the highest G of any client" in out and "differences are of nats" in out
    assert "To reach a G (nats) of 3.500" in out

    code, out, _ = fedp3("compare", "t/fedavg", "t/fedp3", "--json")
    shown = last(out)
    for row in shown["runs"]:
        assert row["score"] == {"name": "nats", "lower_is_better": True, "percent": False}
        assert f"{row['G']:.3f}" in next(
            a["answer"] for a in shown["answers"] if a["at"] == "round"
        )
        assert row["worst"] > row["G"] > 1
    for answer in shown["answers"]:
        scores = {row["run"]: row["score"] for row in answer["runs"]}
        assert scores[answer["reference"]] == min(scores.values())
    code, _, err = fedp3("report", "t/fedavg", "--target", "nan", "--out", "new/page.html")
    assert code == 2 and "a value of nats" in err and not (tmp_path / "new").exists()


def test_the_target_of_an_accuracy_is_a_share(fedp3, sweep):
    code, _, err = fedp3("compare", "d/fedavg", "--target", "80")
    assert code == 2 and "accuracy is a share, so want a number from 0 to 1" in err
