"""The table of virtual time and energy to a target, for the terminal and the page alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedp3.report import text
from fedp3.report.runs import Json


@dataclass(frozen=True, slots=True)
class ClockTable:
    """Columns after the name of the run, and one line of cells for each run.

    A heading comes with its meaning, and a cell with a small note.
    """

    title: str
    heads: tuple[tuple[str, str], ...]
    lines: tuple[tuple[tuple[str, str], ...], ...]


def clock_table(rows: Sequence[Json]) -> ClockTable | None:
    """The table of these rows of a comparison; None if no run has a virtual clock.

    All times have one unit, and so have all energies, so that a column can be sorted.
    """
    times = [row["virtual_seconds"] for row in rows if row["virtual_seconds"] is not None]
    energies = [row["joules"] for row in rows if row["joules"] is not None]
    if not times:
        return None
    time, energy = (
        text.unit(text.TIMES, max(times)),
        text.unit(text.ENERGIES, max(energies, default=0)),
    )
    target = text.percent(rows[0]["target"])
    heads = [
        (f"{time.name} to {target}", "virtual time until the first evaluated round with this G"),
        (f"virtual {time.name}", "virtual time of all rounds"),
    ]
    if energies:
        heads += [
            (f"{energy.name} to {target}", "energy of all clients until that round"),
            (energy.name, "energy of all clients over the run"),
        ]
    lines = []
    for row in rows:
        cells = [_to_target(row, "seconds", time), _total(row, "virtual_seconds", time)]
        if energies:
            cells += [_to_target(row, "joules", energy), _total(row, "joules", energy)]
        lines.append(tuple(cells))
    return ClockTable(title_of(rows[0]), tuple(heads), tuple(lines))


def title_of(row: Json) -> str:
    """What the table shows, with the origin of the target."""
    if row["target"] is None:
        return "Virtual time; no run was evaluated yet"
    origin = f", {row['target_origin']}" if row["target_origin"] else ""
    return f"Virtual time until G is at least {text.percent(row['target'])}{origin}"


def _to_target(row: Json, quantity: str, unit: text.Unit) -> tuple[str, str]:
    total = "virtual_seconds" if quantity == "seconds" else quantity
    if row["target"] is None or row[total] is None:
        return text.NONE, ""
    missed = row["seeds"] - row["seeds_at_target"]
    if missed:
        word = "not yet" if row["unfinished"] else "never"
        return word, f"in {missed} of {row['seeds']} seeds" if row["seeds"] > 1 else ""
    return _scaled(row, f"{quantity}_to_target", unit)


def _total(row: Json, key: str, unit: text.Unit) -> tuple[str, str]:
    return (text.NONE, "") if row[key] is None else _scaled(row, key, unit)


def _scaled(row: Json, key: str, unit: text.Unit) -> tuple[str, str]:
    std = row[f"{key}_std"]
    return text.number(row[key] / unit.size), (
        "" if std is None else f"± {text.number(std / unit.size)}"
    )
