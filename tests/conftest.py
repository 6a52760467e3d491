"""How tests run: Hypothesis with the same examples every time, torch on one thread, commands as users type them.

HYPOTHESIS_PROFILE=explore draws new examples, and ten times as many.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedp3 import cli

settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("fixed"), derandomize=False, max_examples=400)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(PROFILE)
torch.set_num_threads(1)


def pytest_runtest_setup() -> None:
    """What a test draws without a generator is the same whichever tests ran before it; `explore` leaves it free."""
    if PROFILE == "fixed":
        torch.manual_seed(0)


@pytest.fixture
def fedp3(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDP3_DATA", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            cli.main(list(arguments))
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
