"""The table of what a target took, for the terminal and the page alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedp3.core.scores import score_of
from fedp3.report import text
from fedp3.report.runs import Json


@dataclass(frozen=True, slots=True)
class TargetTable:
    """Columns after the name of the run, and one line of cells for each run.

    A heading comes with its meaning, and a cell with a small note.
    """

    title: str
    heads: tuple[tuple[str, str], ...]
    lines: tuple[tuple[tuple[str, str], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    axis: str
    total: str  # key of a row that is None for a run without this cost
    unit: text.Unit
    head: str
    meaning: str


def target_table(rows: Sequence[Json]) -> TargetTable | None:
    """The table of these rows of a comparison; None if no run was evaluated.

    All times have one unit, and so have all energies, so that a column can be sorted.
    """
    if rows[0]["target"] is None:
        return None
    columns = _columns(rows)
    return TargetTable(
        _title(rows[0]),
        tuple((c.head, c.meaning) for c in columns),
        tuple(tuple(_cell(row, c) for c in columns) for row in rows),
    )


def _columns(rows: Sequence[Json]) -> list[_Column]:
    once = text.Unit("", 1)
    columns = [
        _Column(
            axis="round",
            total="seeds",
            unit=once,
            head="rounds",
            meaning="until the first evaluated round with this G",
        ),
        _Column(
            axis="mb",
            total="seeds",
            unit=once,
            head="MB",
            meaning="sent until the end of that round, up and down together",
        ),
    ]
    times = [row["virtual_seconds"] for row in rows if row["virtual_seconds"] is not None]
    energies = [row["joules"] for row in rows if row["joules"] is not None]
    if times:
        unit = text.unit(text.TIMES, max(times))
        columns.append(
            _Column(
                axis="seconds",
                total="virtual_seconds",
                unit=unit,
                head=f"virtual {unit.name}",
                meaning="time on the devices until the end of that round",
            )
        )
    if energies:
        unit = text.unit(text.ENERGIES, max(energies))
        columns.append(
            _Column(
                axis="joules",
                total="joules",
                unit=unit,
                head=unit.name,
                meaning="energy of all clients until the end of that round",
            )
        )
    return columns


def _title(row: Json) -> str:
    origin = f", {row['target_origin']}" if row["target_origin"] else ""
    score = score_of(row)
    score_name, target = text.score_name(score, "G"), text.score(score, row["target"])
    return f"To reach a {score_name} of {target}{origin}"


def _cell(row: Json, column: _Column) -> tuple[str, str]:
    if row[column.total] is None:
        return text.NONE, ""
    missed = row["seeds"] - row["seeds_at_target"]
    if missed:
        word = "not yet" if row["unfinished"] else "never"
        return word, f"in {missed} of {row['seeds']} seeds" if row["seeds"] > 1 else ""
    key = f"{column.axis}_to_target"
    if row[key] is None:
        return text.NONE, ""
    std = row[f"{key}_std"]
    if column.axis == "round" and not std:
        return f"{row[key]:.0f}", "" if std is None else "± 0"
    return text.number(row[key] / column.unit.size), (
        "" if std is None else f"± {text.number(std / column.unit.size)}"
    )
