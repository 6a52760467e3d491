"""Tables of the page: headings with their meaning, and cells with a small note."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Cell = tuple[str, str]  # value, note


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The heading of a column."""

    name: str
    meaning: str
    number: bool = True  # the column is sorted by numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under headings.

    Attributes:
        name: of the CSV file.
        title: what the table shows.
        heads: one per column.
        rows: cells.
        runs: for each row the index of its run, which is shown as a coloured dot; or nothing.
    """

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    runs: tuple[int, ...] = ()


def plain(rows: Iterable[Sequence[str]]) -> tuple[tuple[Cell, ...], ...]:
    """Rows of cells without notes."""
    return tuple(tuple((value, "") for value in row) for row in rows)
