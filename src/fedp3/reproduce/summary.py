"""What is kept of a run: its config, the scores of every evaluation, bytes, and the hash of the model.

A summary is a small JSON file, RESULTS/PROTOCOL/BENCH/SPLIT/VARIANT/seed-K.json; tables, figures and claims are made
from summaries alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from fedp3 import record
from fedp3.config import Config
from fedp3.errors import InputError
from fedp3.reproduce.cells import SCORED, Cell

KINDS = ("G", "D", "P")


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished run."""

    cell: str
    protocol: str
    seed: int
    date: str
    rounds: Sequence[int]  # after which round each evaluation took place
    scores: Mapping[str, Sequence[float | None]]  # G, D, P at each of them
    final: Mapping[str, float | None]
    mb_up: float
    mb_down: float
    density: float | None
    seconds: float
    model_sha256: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    epsilon: float | None = None  # the largest any client spent; None without LDP

    def score(self, kind: str, back: int = 0) -> float | None:
        """The mean of the last ten evaluations, in percent; or of ten that lie so many tens before them."""
        every = [s for s in self.scores[kind] if s is not None]
        some = every[: len(every) - back * SCORED][-SCORED:] if len(every) > back * SCORED else []
        return 100 * fmean(some) if some else None


def summarise(folder: Path, cell: Cell, protocol: str, seed: int) -> Summary:
    """The summary of a finished run folder."""
    about, result = record.read_json(folder / "run.json"), record.read_json(folder / "result.json")
    scored = [e for e in record.read_events(folder) if e["G"]]
    scores = {k: [round(e[k]["mean"], 6) if e[k] else None for e in scored] for k in KINDS}
    return Summary(
        cell=cell.name,
        protocol=protocol,
        seed=seed,
        date=datetime.fromtimestamp((folder / "result.json").stat().st_mtime, UTC).date().isoformat(),
        rounds=[e["t"] + 1 for e in scored],
        scores=scores,
        final={k: round(a["mean"], 6) if (a := result["final"][k]) else None for k in KINDS},
        mb_up=result["mb_up"],
        mb_down=result["mb_down"],
        density=result["density"],
        seconds=round(result["seconds"], 1),
        model_sha256=result["model_sha256"],
        config=about["config"],
        versions=about["versions"],
        epsilon=result["epsilon_max"],
    )


def path_of(results: Path, cell: str, protocol: str, seed: int) -> Path:
    """Where a summary lies."""
    return results / protocol / cell / f"seed-{seed}.json"


def write(results: Path, summary: Summary) -> Path:
    """One line a field, so that a change can be read."""
    path = path_of(results, summary.cell, summary.protocol, summary.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(k)}: {json.dumps(getattr(summary, k))}" for k in Summary.__dataclass_fields__]
    record.write_atomic(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path


def read(path: Path) -> Summary:
    """A summary from its file."""
    try:
        return Summary(**record.read_json(path))
    except (InputError, TypeError) as error:
        raise InputError(f"{path} is not a summary of a run ({error}); remove it and run its cell again") from None


def read_all(results: Path, protocol: str) -> dict[str, dict[int, Summary]]:
    """Every summary of a protocol: cell -> seed -> summary."""
    found: dict[str, dict[int, Summary]] = {}
    for path in sorted((results / protocol).glob("*/*/*/seed-*.json")):
        s = read(path)
        found.setdefault(s.cell, {})[s.seed] = s
    return found


def differences(recorded: Mapping[str, Any], config: Config) -> list[str]:
    """Settings in which a recorded config differs from this one; keys that did not exist then are no difference."""
    now = config.model_dump(mode="json")
    return [
        f"[{section}] {key} was {value!r}, is {now[section].get(key)!r}"
        for section, keys in recorded.items()
        if isinstance(keys, Mapping) and section in now
        for key, value in keys.items()
        if now[section].get(key) != value
    ]
