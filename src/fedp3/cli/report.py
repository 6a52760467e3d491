"""`fedp3 report`: one self-contained page about one or several runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import Folders, Target
from fedp3.core.errors import InputError


def report(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Page to write; by default report.html in the first run folder"),
    ] = None,
    target: Target = None,
) -> None:
    """Write one self-contained page about one or several runs, and its figures as files.

    Example: fedp3 report runs/a runs/b --out compare.html
    """
    from fedp3.report import write_figures, write_report

    folders = run_folders(folders)
    page = write_report(folders, out, target)
    figures = write_figures(folders, page.parent / "figures", target)
    terminal.line(f"{len(figures)} figures in {os.path.relpath(page.parent / 'figures')}")
    terminal.line(f"open {os.path.relpath(page)}")


def run_folders(paths: list[Path]) -> list[Path]:
    """The run folders among these paths; raises if a folder is not one.

    Plain files are left out, since `DIR/*` may name them as well.
    """
    folders = [path for path in paths if not path.is_file()] or paths
    for folder in folders:
        if not (folder / "config.toml").exists() and not (folder / "seeds.json").exists():
            raise InputError(f"{folder} is not a run folder: it has no config.toml")
    return folders
