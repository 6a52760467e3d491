"""What the documents show works as it stands."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

from fedp3 import config

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent


def test_the_tutorial_runs_and_is_short(tmp_path):
    code = re.search(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.S)[1]
    assert len(code.splitlines()) < 40
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "['0', '2', '4']" in done.stdout
    score = float(re.search(r"'G': '([\d.]+) %'", done.stdout)[1])
    assert score > 80, done.stdout
    assert (tmp_path / "runs/tutorial/report.html").stat().st_size > 10_000


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_functions_named_in_the_paper_map_exist():

    for module, name in re.findall(
        r"`(plan|server|prune|client|steps|aggregate)\.(\w+)", (DOCS / "paper-map.md").read_text()
    ):
        assert hasattr(importlib.import_module(f"fedp3.{module}"), name), f"{module}.{name}"


def test_paper_lines_cited_in_the_code_are_in_the_paper_map():
    page = (DOCS / "paper-map.md").read_text()
    for path in (ROOT / "src" / "fedp3").glob("*.py"):
        for number in re.findall(r"# Alg\. (\d)", path.read_text()):
            assert f"## Algorithm {number}" in page or number in "45", f"{path.name} cites Algorithm {number}"


def test_every_experiment_file_is_a_config():
    files = sorted((ROOT / "experiments").glob("*.toml"))
    assert files
    for path in files:
        assert config.load(path).run.rounds > 0
        assert f"fedp3 run experiments/{path.name}" in path.read_text(), "its header names the command"


def test_tests_named_on_the_page_of_faults_exist():
    page = (DOCS / "faults.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) == page.count("::") > 100
    for path, name in named:
        assert (ROOT / path).is_file(), f"faults.md names {path}"
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"faults.md names {path}::{name}"
