"""Results of long benchmarks, as lines of JSON in benchmarks/results.

A run takes minutes and a benchmark hours: what is recorded is not trained again.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedp3.core.errors import BusyError
from fedp3.core.files import locked

RESULTS = Path(__file__).parent / "results"


def find(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of a benchmark with these values.

    Args:
        name: of the benchmark.
        **wanted: values that a line must have.
    """
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if all(line.get(k) == v for k, v in wanted.items())]


def write(name: str, entry: Mapping[str, Any]) -> None:
    """Add a line."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({**entry, "torch": torch.__version__}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def once(name: str, make: Callable[[], Mapping[str, Any]], **key: Any) -> dict[str, Any] | None:
    """The line with this key, made now if there is none; None if another process makes it.

    Args:
        name: of the benchmark.
        make: makes what the line says besides its key.
        **key: identifies the line.
    """
    lock = Path(tempfile.gettempdir()) / "-".join(["fedp3", name, *map(str, key.values())])
    lock.mkdir(exist_ok=True)
    with suppress(BusyError), locked(lock):
        if not find(name, **key):
            print(name, key, flush=True)
            write(name, {**key, **make()})
    known = find(name, **key)
    return known[0] if known else None
