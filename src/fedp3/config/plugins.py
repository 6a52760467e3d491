"""Plugins: files and packages that register aggregators, selectors, methods, models and so on.

A file is named with `--use my_rules.py`, or with `use=[...]` in Python.  A package declares an
entry point in the group `fedp3.plugins`, whose module is imported.
A run records the sha256 of its files, its worker processes import them, and it is resumed only with
the same files.  A plugin is never sent to another machine.
"""

import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError

GROUP = "fedp3.plugins"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A file that was imported.

    Unpickling a plugin imports the same file in another process of this machine.
    """

    path: str
    sha256: str

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return load_plugin, (self.path, self.sha256)


def load_plugins(paths: Iterable[str | Path]) -> tuple[Plugin, ...]:
    """Import these files, and the modules that installed packages declare."""
    _load_entry_points()
    return tuple(load_plugin(str(Path(path).absolute())) for path in paths)


def load_plugin(path: str, sha256: str = "") -> Plugin:
    """Import one file; with `sha256` it must be unchanged."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"--use {path}: cannot read it ({error.strerror or error})") from None
    digest = hashlib.sha256(content).hexdigest()
    if sha256 and digest != sha256:
        raise InputError(
            f"{path} was changed after the run began (sha256 {digest[:12]}, then {sha256[:12]}); "
            "put it back"
        )
    name = f"fedp3_use_{Path(path).stem}_{digest[:12]}"
    if name not in sys.modules:
        _import_file(name, path)
    return Plugin(path, digest)


def _import_file(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--use {path}: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its functions can be pickled by reference
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, InputError):
            raise InputError(f"--use {path}: {error}") from None
        raise InputError(f"--use {path} failed: {type(error).__name__}: {error}") from error


def _load_entry_points() -> None:
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise InputError(
                f"the plugin {entry.name!r} ({entry.value}) failed: {error}"
            ) from error


def plugin_records(plugins: Sequence[Plugin]) -> list[dict[str, str]]:
    """Path and SHA-256 of each plugin file, as run.json stores them."""
    return [{"path": p.path, "sha256": p.sha256} for p in plugins]


def reload(recorded: Sequence[Mapping[str, str]]) -> tuple[Plugin, ...]:
    """Import the files that a run recorded; refused if one was changed or is missing."""
    _load_entry_points()
    return tuple(load_plugin(entry["path"], entry["sha256"]) for entry in recorded)
