"""Tests of this package find its commands in `fedp3` whether or not it is installed."""

import tomllib
from importlib.metadata import EntryPoint

import pytest

from fedp3.cli import GROUP
from fedp3_paper import PAPER


def offered() -> list[EntryPoint]:
    """The commands that `pyproject.toml` announces."""
    project = tomllib.loads((PAPER / "pyproject.toml").read_text())["project"]
    commands = project["entry-points"][GROUP]
    return [EntryPoint(name, value, GROUP) for name, value in commands.items()]


@pytest.fixture
def commands() -> list[EntryPoint]:
    return offered()
