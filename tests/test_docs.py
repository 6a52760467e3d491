"""The programs, commands, names and links in the documents work as they stand."""

import importlib
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fedp3
from fedp3.cli import main
from fedp3.client.objectives import OBJECTIVES, SHIPPED
from fedp3.core.types import RejectionCode
from test_package import PACKAGES

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "img"))

import draw  # noqa: E402  # docs/img/draw.py


def test_the_tutorial_runs_and_is_short(tmp_path):
    page = (DOCS / "tutorials" / "own-net.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert len(code.splitlines()) < 40
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "['0', '2', '4']" in done.stdout
    score = float(re.search(r"'G': '([\d.]+) %'", done.stdout)[1])
    assert score > 80, done.stdout
    assert (tmp_path / "runs/tutorial/report.html").stat().st_size > 10_000


@pytest.mark.parametrize("page", ["uneven-devices", "private"])
def test_the_commands_of_a_tutorial_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "tutorials" / f"{page}.md").read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    commands = []
    variables = {}
    for line in lines:
        name, is_variable, value = line.partition("=")
        if is_variable and name.isupper():
            variables[f"${name}"] = value.strip('"').split()
        else:
            words = line.partition("#")[0].split()
            commands.append([part for word in words for part in variables.get(word, [word])])
    assert len(commands) >= 4
    smaller = {
        "run": [
            "model.width=0.1",
            "run.rounds=1",
            "partition.clients=4",
            "run.clients_per_round=2",
        ],
        "audit": ["--only", "accountant"],
    }
    for program, *words in commands:
        assert program == "fedp3"
        with pytest.raises(SystemExit) as ended:
            main([*words, *smaller.get(words[0], [])])
        assert not ended.value.code, words


def test_the_parts_of_your_own_on_the_how_to_page_run(tmp_path):
    page = (DOCS / "how-to" / "own-parts.md").read_text()
    (tmp_path / "my_parts.py").write_text("".join(re.findall(r"```python\n(.*?)```", page, re.S)))
    commands = re.search(r"```sh\n(.*?)```", page, re.S)[1].splitlines()
    assert len(commands) == 2
    for command in commands:
        program, *arguments = command.split()
        assert program == "fedp3"
        done = subprocess.run(
            [sys.executable, "-m", "fedp3", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/mine/result.json").read_text())
    assert result["method"] == "half"
    about = json.loads((tmp_path / "runs/mine/run.json").read_text())
    assert about["config"]["aggregate"]["rule"] == "root"
    assert about["config"]["prune"]["selector"] == "every_other"
    assert result["accuracy_global"] > 0.6


def test_the_callbacks_on_the_how_to_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where the page writes its logs
    first, own = re.findall(r"```python\n(.*?)```", (DOCS / "how-to" / "log.md").read_text(), re.S)
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    names = {"fedp3": fedp3, "net": net, "data": (x, y)}
    exec(first, names)
    assert list((tmp_path / "logs").iterdir()) and "<Result fedp3" in capsys.readouterr().out
    exec(own, names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "fedp3 None" and len(printed) == 2 + len(names["result"].history)


def test_the_objectives_page_runs_and_lists_every_objective():
    page = (DOCS / "how-to" / "objectives.md").read_text()
    names: dict[str, object] = {}
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.S)), names)
    assert names["result"].score.name == "loss"
    rows = set(re.findall(r"^\| `(\w+)` \| \(N", page, re.M))
    assert rows == {name for name, o in OBJECTIVES.items() if o in SHIPPED}


def test_the_page_on_data_of_your_own_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fedp3, "run", partial(fedp3.run, run={"rounds": 1}))  # to be quick
    page = (DOCS / "how-to" / "own-data.md").read_text()
    assert len(page.split()) <= 450
    names: dict[str, object] = {}
    seen = []
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, names)
        seen.append(names.get("result"))
    texts, loader, clients, central, lazy = seen[1:]
    assert texts.class_names == ("ash", "birch", "cedar")
    assert loader.experiment.config.local.batch == 16
    assert [row["name"] for row in clients.per_client] == ["anna", "bob"]
    assert 0 <= central.scores["C"] <= 1 and "C" not in lazy.scores
    assert lazy.experiment.client.data.rows is not None


def test_the_command_of_the_transformer_tutorial_trains_on_a_play(tmp_path):
    page = (DOCS / "tutorials" / "transformer.md").read_text()
    command = re.search(r"^fedp3 (run my.toml data.name=text .*)$", page, re.M)[1]
    (tmp_path / "my.toml").write_text("")
    (tmp_path / "play.txt").write_text((ROOT / "tests" / "play.txt").read_text())
    small = ["model.width=0.125", "model.blocks=1", "run.rounds=1", "partition.clients=3"]
    done = subprocess.run(
        [sys.executable, "-m", "fedp3", *command.split(), *small, "run.clients_per_round=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_key_of_a_run_folder_is_on_its_page(tmp_path):
    page = (DOCS / "how-to" / "run-folder.md").read_text()
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    fedp3.run(
        net,
        (x, y),
        out=tmp_path / "run",
        partition={"kind": "iid", "clients": 3},
        plan={"layers": "full"},
        run={"rounds": 2, "clients_per_round": 0},
        privacy={"enabled": True, "epsilon": 50.0, "sample_rate": 0.5},
    )
    for path in (tmp_path / "run").iterdir():
        assert path.name.startswith(".") or f"`{path.name.removesuffix('/')}" in page, path.name
    sections = dict(re.findall(r"## (\S+)\n(.*?)(?=\n## |\Z)", page, re.S))
    event = json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[0])
    result = json.loads((tmp_path / "run/result.json").read_text())
    about = json.loads((tmp_path / "run/run.json").read_text())
    for name, keys in {"events.jsonl": event, "result.json": result, "run.json": about}.items():
        absent = [key for key in keys if f"`{key}`" not in sections[name]]
        assert not absent, f"{name}: {absent}"
    assert all(f"- `{code}`:" in sections["events.jsonl"] for code in RejectionCode)


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "paper").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def dotted_names(page: str) -> list[str]:
    """Names such as `server.rounds.run_round` in code quotes: package, module, name."""
    return re.findall(r"`([a-z]+\.[a-z_]+\.\w+)`", page)


def test_functions_named_in_the_paper_map_exist():
    names = dotted_names((DOCS / "paper-map.md").read_text())
    assert len(names) > 20
    for dotted in names:
        module, _, name = dotted.rpartition(".")
        assert hasattr(importlib.import_module(f"fedp3.{module}"), name), dotted


def test_functions_named_in_the_walk_of_a_round_exist():
    page = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`([a-z]+/[a-z_/]+)\.py: ([\w.]+(?:`, `[\w.]+)*)`", page)
    assert len(named) > 15
    for path, names in named:
        module = importlib.import_module("fedp3." + path.replace("/", "."))
        for name in names.split("`, `"):
            owner = module
            for part in name.split("."):
                assert hasattr(owner, part), f"{path}.py has no {name}"
                owner = getattr(owner, part)


def test_the_picture_of_the_architecture_has_every_package_in_order():
    assert [name for name, _, _ in draw.PACKAGES] == PACKAGES


def test_the_pictures_are_those_that_the_program_draws():
    for name, picture in draw.PICTURES.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == picture(), (
            f"docs/img/{name} is not up to date: python docs/img/draw.py"
        )


def test_paper_lines_cited_in_the_code_are_in_the_paper_map():
    page = (DOCS / "paper-map.md").read_text()
    for path in (ROOT / "src" / "fedp3").rglob("*.py"):
        for number in re.findall(r"# Alg\. (\d)", path.read_text()):
            assert f"## Algorithm {number}" in page, f"{path.name} cites Algorithm {number}"


def test_tests_named_on_the_page_of_faults_exist():
    page = (DOCS / "faults.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) == page.count("::") > 50
    for path, name in named:
        assert (ROOT / path).is_file(), f"faults.md names {path}"
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"faults.md names {path}::{name}"
