"""The commit of the checkout that this package is in, to record which code made a result."""

import subprocess
from pathlib import Path

from fedp3_paper import PAPER

CODE = ("src", "paper/src")  # the library and this package; other files do not affect a run


def commit(root: Path = PAPER.parent) -> str | None:
    """The commit of a checkout, with "+dirty" if its code was changed since; None outside git."""
    answer = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if answer is None:
        return None
    top, head = answer.splitlines()
    if Path(top) != root.resolve():  # a copy of these files inside another repository
        return None
    return head + ("+dirty" if _git(root, "status", "--porcelain", "--", *CODE) else "")


def _git(root: Path, *arguments: str) -> str | None:
    """The output of git; None where git is missing or fails."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
