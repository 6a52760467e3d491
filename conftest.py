"""Settings and fixtures of all tests.

Hypothesis draws the same examples every time; HYPOTHESIS_PROFILE=explore draws new ones, and ten
times as many.  torch uses one thread, and the fixture `fedp3` runs commands as users type them.
"""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedp3 import cli

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("fixed"), derandomize=False, max_examples=400
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(PROFILE)
torch.set_num_threads(1)


def pytest_runtest_setup() -> None:
    """Seed torch's global generator, so that no test depends on those that ran before it.

    The profile `explore` leaves it unseeded.
    """
    if PROFILE == "fixed":
        torch.manual_seed(0)


@pytest.fixture
def commands() -> Sequence[EntryPoint]:
    """The commands that other packages add to `fedp3`: none, whatever is installed.

    Tests of such a package override this fixture.
    """
    return ()


@pytest.fixture
def fedp3(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commands: Sequence[EntryPoint],
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDP3_DATA", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            cli.main(list(arguments), commands)
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
