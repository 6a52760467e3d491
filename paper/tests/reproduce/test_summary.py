"""Results as lines of a file: sorted, complete, with the code that made them."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial

import pytest

from fedp3.core.errors import InputError
from fedp3_paper import PAPER
from fedp3_paper.reproduce.provenance import commit
from fedp3_paper.reproduce.summary import Summary, add, path_of, read_all

CELL = "b/classes/x"
BASE = Summary(
    cell=CELL,
    protocol="desk",
    seed=0,
    date="2026-01-01",
    rounds=[1, 2],
    scores={"G": [0.5, 0.75], "D": [0.5, None], "P": [None, 0.25]},
    final={},
    mb_up=1.5,
    mb_down=2.5,
    density=None,
    seconds=3.0,
    model_sha256="0" * 64,
    config={"run": {}},
    versions={"torch": "x"},
)


def test_summaries_survive_the_disk_sorted_by_cell_and_seed(tmp_path):
    for cell, seed in ((CELL, 1), ("a/classes/x", 0), (CELL, 0), (CELL, 10)):
        add(tmp_path, "desk", [replace(BASE, cell=cell, seed=seed)])
    found = read_all(tmp_path, "desk")
    assert found[CELL][0] == BASE
    assert list(found) == ["a/classes/x", CELL] and list(found[CELL]) == [0, 1, 10]
    lines = path_of(tmp_path, "desk").read_text().splitlines()
    names = [field.name for field in fields(Summary)]
    assert [list(json.loads(line)) for line in lines] == [names] * 4
    assert read_all(tmp_path, "paper") == {}


def test_a_run_made_again_takes_the_place_of_the_old_one(tmp_path):
    add(tmp_path, "desk", [BASE, replace(BASE, seed=1)])
    add(tmp_path, "desk", [replace(BASE, mb_up=9.0)])
    assert {k: s.mb_up for k, s in read_all(tmp_path, "desk")[CELL].items()} == {0: 9.0, 1: 1.5}


def test_nobody_who_adds_at_the_same_time_is_lost(tmp_path):
    def add_one(seed):
        add(tmp_path, "desk", [replace(BASE, seed=seed)])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add_one, range(40)))
    assert list(read_all(tmp_path, "desk")[CELL]) == list(range(40))


@pytest.mark.parametrize("damaged", ["{", "[]", '{"cell": "x"}', ""])
def test_a_damaged_line_is_named_and_nothing_is_overwritten(tmp_path, damaged):
    add(tmp_path, "desk", [BASE])
    path = path_of(tmp_path, "desk")
    path.write_text(path.read_text() + damaged + "\n")
    before = path.read_bytes()
    for step in (partial(read_all, tmp_path, "desk"), partial(add, tmp_path, "desk", [BASE])):
        with pytest.raises(InputError, match=r"line 2 of .*desk\.jsonl is not a summary"):
            step()
    assert path.read_bytes() == before


@pytest.mark.parametrize("protocol", ["desk", "released-desk"])
def test_shipped_results_are_sorted_and_say_what_made_them(protocol):
    path = path_of(PAPER / "results", protocol)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = [(line["cell"], line["seed"]) for line in lines]
    assert names == sorted(set(names))
    for line in lines:
        assert re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", line["commit"])
        assert line["versions"]["torch"]


# --------------------------------------------------------------------------- which code


def git(folder, *arguments):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_result_names_its_commit_and_says_whether_code_was_changed_since(tmp_path):
    assert commit(tmp_path) is None, "outside git"
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None, "before the first commit"
    for name in ("src/a.py", "paper/src/b.py", "paper/results/desk.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "paper/results/desk.jsonl").write_text("a result")
    assert commit(tmp_path) == head, "results are no code"
    (tmp_path / "paper/src/new.py").write_text("")
    assert commit(tmp_path) == f"{head}+dirty"
    assert commit(tmp_path / "paper") is None, "a folder inside another repository"


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None
