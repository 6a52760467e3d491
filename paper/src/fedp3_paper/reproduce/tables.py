"""Tables of texts, and their Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title.

    Args:
        title: its title.
        columns: the names of the columns.
        rows: the texts of the cells.
        notes: lines below it.
        words: the number of columns of words; they are aligned left and come before the numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: int = 1


def markdown(table: Table) -> str:
    """The table as Markdown."""
    sides = [":--" if j < table.words else "--:" for j in range(len(table.columns))]
    lines = [table.columns, sides, *table.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "".join(f"\n{note}\n" for note in table.notes)
    return f"### {table.title}\n\n{text}\n{notes}"


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number, or a dash where there is none."""
    if value is None:
        return "-"
    shown = round(value, digits) + 0.0  # no minus before a zero
    return f"{shown:+,.{digits}f}" if sign else f"{shown:,.{digits}f}"
