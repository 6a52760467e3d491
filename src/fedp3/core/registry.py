"""Open tables: named entries of one kind, which users can extend.

Each table, such as the selectors, is one `Registry`.  The package and its users fill it with the
same decorator (`fedp3.register`).  Error messages suggest the nearest name, and help texts list
the names that are registered.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fedp3.core.errors import InputError

T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known name, or all known names."""
    names = sorted(known)
    near = [n for n in names if n.lower() == name.lower()]
    near = near or get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """Return `table[name]`, or raise an `InputError` with the nearest match.

    Args:
        table: the entries by name.
        name: the name to look up.
        what: the kind of the entries, for the error message, e.g. "selector".
    """
    if name not in table:
        raise InputError(f"unknown {what} {name!r} ({suggestion(name, table)})")
    return table[name]


class Registry(Mapping[str, T], Generic[T]):
    """A table of entries of one kind by name, in order of registration.

    Args:
        kind: the kind of the entries, for error messages, e.g. "selector".
        find: looks up a name that is not in the table, e.g. one of a family such as `opu4`.
            It returns None where it does not know the name either.
    """

    def __init__(self, kind: str, find: Callable[[str], T | None] | None = None) -> None:
        self.kind = kind
        self._find = find
        self._table: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def add(self, name: str, entry: T) -> T:
        """Register an entry under a name that no other entry has."""
        if not isinstance(name, str) or not name:
            raise InputError(f"the name of a {self.kind} must be a nonempty string, got {name!r}")
        if self._table.get(name, entry) is not entry:
            raise InputError(f"there is a {self.kind} {name!r} already; choose another name")
        self._table[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates."""
        return lambda entry: self.add(name, entry)

    def pick(self, name: str) -> T:
        """Return the entry of this name, or raise an `InputError` with the nearest match."""
        if name not in self._table and self._find is not None:
            entry = self._find(name)
            if entry is not None:
                return entry
        return pick(self._table, name, self.kind)


@dataclass(frozen=True, slots=True)
class NameIn:
    """Mark a setting as the name of a registered entry: `Annotated[str, NameIn(SELECTORS)]`.

    Args:
        registry: the table in which the name is looked up when a config is read.
        also: further names that are allowed; the code that reads the setting gives them a meaning.
    """

    registry: Registry[Any]
    also: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name in self.also:
            return name
        try:
            self.registry.pick(name)
        except InputError as error:
            raise ValueError(str(error)) from None
        return name

    @property
    def names(self) -> list[str]:
        """All registered names; names in `also`, and families such as opu4, are not among them."""
        return list(self.registry)
