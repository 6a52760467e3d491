"""Summaries of finished runs, from which all tables, figures and claims are made.

A summary has the config of a run, the scores of every evaluation, the bytes sent, and the hash of
the model.  It is one line of JSON in RESULTS/PROTOCOL.jsonl, sorted by cell and seed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from fedp3.config import Config
from fedp3.config.legacy import RENAMED_KEYS, translate
from fedp3.core import files
from fedp3.core.errors import InputError
from fedp3.core.files import locked
from fedp3.runs import run_folder
from fedp3_paper.reproduce import provenance
from fedp3_paper.reproduce.cells import SCORED, Cell

KINDS = ("G", "D", "P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One finished run.

    Args:
        cell: the name of its cell.
        protocol: the protocol that it was run under.
        seed: its seed.
        date: the day on which it was finished.
        rounds: after which round each evaluation took place.
        scores: G, D and P at each evaluation.
        final: G, D and P at the end; with H, the accuracy after a round of heads.
        mb_up: megabytes that all clients uploaded.
        mb_down: megabytes that were sent to all clients.
        density: the share of retained weights that a local step uses.
        seconds: how long the run took.
        model_sha256: the hash of the server's model.
        config: its config, in the keys of the version that made it.
        versions: the versions of fedp3, Python, torch and NumPy.
        epsilon: the largest epsilon that a client spent; None without LDP.
        commit: the commit of the checkout in which it was recorded; None outside git.
    """

    cell: str
    protocol: str
    seed: int
    date: str
    rounds: Sequence[int]
    scores: Mapping[str, Sequence[float | None]]
    final: Mapping[str, float | None]
    mb_up: float
    mb_down: float
    density: float | None
    seconds: float
    model_sha256: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    epsilon: float | None = None
    commit: str | None = None

    def score(self, kind: str, back: int = 0) -> float | None:
        """The mean of ten evaluations in percent; None if the run had too few.

        Args:
            kind: the accuracy: G, D or P.
            back: 0 takes the last ten evaluations, 1 the ten before them, and so on.
        """
        known = [score for score in self.scores[kind] if score is not None]
        end = len(known) - back * SCORED
        if end <= 0:
            return None
        return 100 * fmean(known[:end][-SCORED:])


def summarise(folder: Path, cell: Cell, protocol: str, seed: int) -> Summary:
    """The summary of a finished run folder."""
    about, result = files.read_json(folder / "run.json"), files.read_json(folder / "result.json")
    scored = [e for e in run_folder.read_events(folder) if e["G"]]
    finished = datetime.fromtimestamp((folder / "result.json").stat().st_mtime, UTC)
    return Summary(
        cell=cell.name,
        protocol=protocol,
        seed=seed,
        date=finished.date().isoformat(),
        rounds=[e["t"] + 1 for e in scored],
        scores={kind: [_rounded_mean(e[kind]) for e in scored] for kind in KINDS},
        final={kind: _rounded_mean(result["final"][kind]) for kind in KINDS},
        mb_up=result["mb_up"],
        mb_down=result["mb_down"],
        density=result["density"],
        seconds=round(result["seconds"], 1),
        model_sha256=result["model_sha256"],
        config=about["config"],
        versions=about["versions"],
        epsilon=result["epsilon_max"],
        commit=provenance.commit(),
    )


def _rounded_mean(accuracy: Mapping[str, float] | None) -> float | None:
    return round(accuracy["mean"], 6) if accuracy else None


def path_of(results: Path, protocol: str) -> Path:
    """The file with all summaries of a protocol."""
    return results / f"{protocol}.jsonl"


def read_all(results: Path, protocol: str) -> dict[str, dict[int, Summary]]:
    """Every summary of a protocol: cell -> seed -> summary."""
    path = path_of(results, protocol)
    if not path.exists():
        return {}
    summaries: dict[str, dict[int, Summary]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            s = Summary(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"line {number} of {path} is not a summary of a run ({error}); "
                "remove it and run its cell again"
            ) from None
        summaries.setdefault(s.cell, {})[s.seed] = s
    return summaries


def add(results: Path, protocol: str, new: Iterable[Summary]) -> None:
    """Add summaries, in place of older ones of the same cell and seed.

    Several processes may do so at the same time.
    """
    with locked(results, f".{protocol}.lock", wait=True):
        summaries = read_all(results, protocol)
        for s in new:
            summaries.setdefault(s.cell, {})[s.seed] = s
        lines = []
        for cell in sorted(summaries):
            lines += [_line(summaries[cell][seed]) for seed in sorted(summaries[cell])]
        files.write_atomic(path_of(results, protocol), "".join(lines).encode())


def _line(summary: Summary) -> str:
    return json.dumps(asdict(summary), separators=(",", ":")) + "\n"


def differences(recorded: Mapping[str, Any], config: Config) -> list[str]:
    """The settings in which a recorded config differs from another one.

    Args:
        recorded: the config of a result, perhaps of an older version with other names for its keys.
        config: the config to compare it with.

    Returns:
        One line per setting.  Keys that did not exist when the result was made are no difference.
    """
    settings = config.as_json()
    lines = []
    for section, keys in _in_current_keys(recorded).items():
        if not isinstance(keys, Mapping) or section not in settings:
            continue
        for key, value in keys.items():
            current = settings[section].get(key)
            if current != value:
                lines.append(f"[{section}] {key} was {value!r}, is {current!r}")
    return lines


def _in_current_keys(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recorded config in today's keys; results made before the keys were renamed stay valid."""
    if any(key in recorded.get(section, {}) for section, key in RENAMED_KEYS):
        return translate(recorded)[0]
    return recorded
