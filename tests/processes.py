"""Processes for tests that kill a run, send it a signal, or need two of them.

A new interpreter imports torch again, which takes longer than what most tests do in it.  These
processes are forks of one that has imported it already.  They are real: they have a process id, an
exit code and files of their own.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedp3 import cli

PRELOADED = ["fedp3.engines.process_pool", "fedp3.cli.training", "sklearn.datasets"]


def start(log: Path, function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a process that calls a function of a module; what it prints goes to the log."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_call, args=(str(log), function, arguments))
    process.start()
    return process


def start_fedp3(log: Path, *arguments: str) -> BaseProcess:
    """Start the command line."""
    return start(log, cli.main, list(arguments))


def run_fedp3(*arguments: str) -> int:
    """Run the command line in this process; returns its exit code."""
    try:
        cli.main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def ended(process: BaseProcess, seconds: float = 300) -> int:
    """Wait until a process ends; returns its exit code, which is negative for a signal."""
    process.join(seconds)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode


def _call(log: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    function(*arguments)
