"""The run folder: the description of a run, its record, and its checkpoints.

    config.toml          the complete config
    run.json             plan, labels, versions, plugins
    initial.json         G, D and C before the first round
    events.jsonl         one line per round, synced to disk
    checkpoint/          the last two states, each with its sha256
    initial.safetensors  W_0, if the network was passed in and not built from the config
    result.json          the result of a finished run
    report.html          the report
Every file is written under another name, synced, then moved into place.  Nothing is unpickled.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import json_line, write_atomic, write_json
from fedp3.server.central import CentralScore
from fedp3.server.context import RoundRecord
from fedp3.server.evaluation import Scores

INITIAL_SCORES = "initial.json"


def create(
    folder: Path,
    config_toml: str,
    description: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Make the run folder of a new run.

    The config is written last: a folder with a config holds a run.

    Args:
        folder: the run folder.
        config_toml: the complete config.
        description: run.json.
        files: further files.
    """
    try:
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the run folder {folder}: {error.strerror or error}"
        ) from None
    for name, data in (files or {}).items():
        write_atomic(folder / name, data)
    write_json(folder / "run.json", description)
    write_atomic(folder / "config.toml", config_toml.encode())


# --------------------------------------------------------------------------- events


def as_event(record: RoundRecord) -> dict[str, Any]:
    """A round as plain data."""
    # not asdict(record), which would copy every list of clients
    event = {f.name: getattr(record, f.name) for f in fields(record)}
    for kind in ("G", "D", "P", "C"):
        if event[kind] is not None:
            event[kind] = asdict(event[kind])
    if record.clock is not None:
        event["clock"] = asdict(record.clock)
    event["rejected"] = {
        i: {"code": str(r.code), "text": r.text} for i, r in record.rejected.items()
    }
    return event


def write_initial(folder: Path, scores: Mapping[str, Scores | CentralScore | None]) -> None:
    """Record the scores before the first round."""
    plain = {kind: None if score is None else asdict(score) for kind, score in scores.items()}
    write_json(folder / INITIAL_SCORES, plain)


def append_event(folder: Path, record: RoundRecord) -> None:
    """Append one line for one round, which is on disk when this returns."""
    path = folder / "events.jsonl"
    line = json_line(as_event(record) | {"round": record.t + 1})
    try:
        with path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"cannot write {len(line)} bytes to {path}: {error.strerror or error}"
        ) from error


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The rounds recorded so far; a last line that a crash cut short is left out."""
    path = folder / "events.jsonl"
    events: list[dict[str, Any]] = []
    if not path.exists():
        return events
    for line in path.read_bytes().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
        if not isinstance(events[-1], dict) or not {"t", "rejected", "G"} <= events[-1].keys():
            raise InputError(f"{path}: line {len(events)} is not a round of a run")
    return events


def truncate_events(folder: Path, t: int) -> None:
    """Retain the first t rounds of the record; those after them will be run again."""
    lines = [json.dumps(e) + "\n" for e in read_events(folder) if e["t"] < t]
    write_atomic(folder / "events.jsonl", "".join(lines).encode())
