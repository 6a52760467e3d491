"""One way to look a name up in a table, one text for every unknown name."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from fedp3.errors import InputError

T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The tail of an error text: the nearest known name, or all of them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """`table[name]`, or an error that names what was looked for and the nearest match."""
    if name not in table:
        raise InputError(f"unknown {what} {name!r} ({suggestion(name, table)})")
    return table[name]
