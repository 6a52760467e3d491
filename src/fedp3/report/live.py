"""A run that may still be training, as numbers for the page of `fedp3 watch`.

Everything is read from the run folder, so that it is the same for every engine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError
from fedp3.core.files import is_locked, read_json
from fedp3.core.scores import score_of
from fedp3.runs.existing import SEEDS
from fedp3.runs.stop_request import is_requested

RECENT = 60  # rounds in the timeline
PACE = 10  # rounds that the time left is estimated from


def check_watchable(folder: Path) -> None:
    """Refuse a folder that is not one run."""
    if (folder / SEEDS).exists():
        raise InputError(f"{folder} holds several seeds; watch one, as in {folder}/seed-0")
    if not (folder / "config.toml").exists():
        raise InputError(f"{folder} is not a run folder: it has no config.toml")


class EventReader:
    """Reads the record of rounds as it grows, and again from its beginning if it was cut back."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._file = -1  # its inode: a resumed run replaces the file
        self._read = 0
        self.events: list[dict[str, Any]] = []

    def update(self) -> bool:
        """Read what is new; returns whether anything has changed."""
        try:
            with self._path.open("rb") as file:
                return self._continue(file)
        except FileNotFoundError:
            return False

    def _continue(self, file: Any) -> bool:
        size, inode = file.seek(0, 2), self._path.stat().st_ino
        changed = inode != self._file or size < self._read
        if changed:
            self._file, self._read, self.events = inode, 0, []
        file.seek(self._read)
        for line in file:
            if not line.endswith(b"\n"):
                break  # it is being written
            self.events.append(json.loads(line))
            self._read += len(line)
            changed = True
        return changed


def state_of(folder: Path) -> str:
    """What happens to a run now.

    `running`, `stopping` after its current round, `finished`, `stopped` by a callback, or `idle`:
    no process trains it, so that it was stopped, killed or has crashed.
    """
    if is_locked(folder):
        return "stopping" if is_requested(folder) else "running"
    path = folder / "result.json"
    if not path.exists():
        return "idle"
    return "stopped" if read_json(path).get("stopped") else "finished"


def snapshot(folder: Path, events: list[dict[str, Any]], state: str) -> dict[str, Any]:
    """The numbers of a run after its last recorded round.

    Args:
        folder: the run folder.
        events: its rounds.
        state: see `state_of`.
    """
    about = read_json(folder / "run.json")
    rounds, done = about["config"]["run"]["rounds"], len(events)
    recent = [event["seconds"] for event in events[-PACE:]]
    pace = sum(recent) / len(recent) if recent else None
    active = state in ("running", "stopping")
    last = events[-1] if events else {}
    ended = (folder / "events.jsonl").stat().st_mtime if events else None
    return {
        "name": folder.resolve().name,
        "method": about["config"]["method"],
        "state": state,
        "round": done,
        "rounds": rounds,
        "seconds": sum(event["seconds"] for event in events),
        # at the time `ended`, when the last round was recorded; the page counts down from there
        "left": pace * (rounds - done) if active and pace is not None else None,
        "ended": ended,
        **{kind: _last_score(events, kind) for kind in "GDPC"},
        "percent": score_of(about).percent,
        "mb_up": sum(event["bytes_up"] for event in events) / 1e6,
        "mb_down": sum(event["bytes_down"] for event in events) / 1e6,
        **{kind: last.get(kind) for kind in ("loss", "epsilon", "client_epsilon")},
        "timeline": [_round(event) for event in events[-RECENT:]],
        "clients": clients_of(events, len(about["clients"])),
    }


def _last_score(events: list[dict[str, Any]], kind: str) -> float | None:
    return next((event[kind]["mean"] for event in reversed(events) if event.get(kind)), None)


def _round(event: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: len(event[name]) for name in ("accepted", "late", "rejected")}
    return {"round": event["t"] + 1, "seconds": event["seconds"], "void": event["void"], **counts}


def clients_of(events: list[dict[str, Any]], clients: int) -> list[dict[str, Any]]:
    """What each client did when it was last sampled, and in how many rounds it was used."""
    rows: list[dict[str, Any]] = [
        {"client": i, "did": "never", "round": None, "used": 0} for i in range(clients)
    ]
    for event in events:
        did = dict.fromkeys(event["sampled"], "rejected") | dict.fromkeys(event["late"], "late")
        did |= dict.fromkeys(event["accepted"], "used")
        for i, outcome in did.items():
            if 0 <= i < clients:  # a node may claim a client that does not exist
                rows[i] |= {"did": outcome, "round": event["t"] + 1}
                rows[i]["used"] += outcome == "used"
    return rows
