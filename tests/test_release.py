"""What a release says about itself in several places is the same everywhere."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import fedp3

ROOT = Path(__file__).parents[1]


def test_the_package_alone_names_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.M) == [fedp3.__version__]


def test_the_citation_names_the_version_of_the_package() -> None:
    named = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert named == [fedp3.__version__], "CITATION.cff and fedp3.__version__ go together"


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] in ("Unreleased", fedp3.__version__)


def test_the_pinned_torch_is_in_the_range_that_pip_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = Requirement(next(d for d in project["dependencies"] if d.startswith("torch")))
    pin = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(pin) == 1 and pin[0] in required.specifier
    major, minor, _ = map(int, pin[0].split("."))
    assert f"{major}.{minor + 1}.0" not in required.specifier, "a version that no test has seen"
