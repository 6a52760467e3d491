"""Registries: open tables of named entries, and settings that name an entry."""

from collections.abc import Callable
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fedp3.core.errors import InputError
from fedp3.core.registry import NameIn, Registry, pick, suggestion
from fedp3.core.settings import STRICT

Colour = Callable[[], int]


def shade(name: str) -> Colour | None:
    """The family grey0, grey1, ...: its entries are not in the table."""
    digits = name.removeprefix("grey")
    if name.startswith("grey") and digits.isdecimal():
        return lambda: int(digits)
    return None


@pytest.fixture
def colours() -> Registry[Colour]:
    registry: Registry[Colour] = Registry("colour", find=shade)
    registry.add("red", lambda: 1)
    registry.add("blue", lambda: 2)
    return registry


# --------------------------------------------------------------------------- registering


def test_the_decorator_registers_what_it_decorates_and_returns_it(
    colours: Registry[Colour],
) -> None:
    @colours.register("green")
    def green() -> int:
        return 3

    assert green() == 3
    assert colours.pick("green") is colours["green"] is green


def test_names_are_listed_in_order_of_registration(colours: Registry[Colour]) -> None:
    colours.add("amber", lambda: 4)
    assert list(colours) == ["red", "blue", "amber"]
    assert len(colours) == 3
    assert "amber" in colours and "green" not in colours
    assert [entry() for entry in colours.values()] == [1, 2, 4]


def test_a_duplicate_name_is_refused_and_the_first_entry_stays(colours: Registry[Colour]) -> None:
    red = colours["red"]
    with pytest.raises(InputError, match="there is a colour 'red' already; choose another name"):
        colours.add("red", lambda: 9)
    with pytest.raises(InputError, match="already"):
        colours.register("red")(lambda: 9)
    assert colours["red"] is red


def test_the_same_entry_can_be_registered_again(colours: Registry[Colour]) -> None:
    """A module that is imported twice must not fail."""
    red = colours["red"]
    assert colours.add("red", red) is red
    assert list(colours) == ["red", "blue"]


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_must_be_a_nonempty_string(colours: Registry[Colour], name: object) -> None:
    with pytest.raises(InputError, match="name of a colour must be a nonempty string"):
        colours.add(name, lambda: 9)  # type: ignore[arg-type]
    assert list(colours) == ["red", "blue"]


# --------------------------------------------------------------------------- looking up


def test_an_unknown_name_is_refused_with_the_nearest_match(colours: Registry[Colour]) -> None:
    with pytest.raises(InputError, match=r"^unknown colour 'bleu' \(did you mean 'blue'\?\)$"):
        colours.pick("bleu")


def test_a_name_like_no_other_is_refused_with_all_names(colours: Registry[Colour]) -> None:
    with pytest.raises(InputError, match=r"^unknown colour 'xyz' \(known: blue, red\)$"):
        colours.pick("xyz")


def test_a_family_is_found_by_its_finder_and_not_listed(colours: Registry[Colour]) -> None:
    assert colours.pick("grey7")() == 7
    assert "grey7" not in colours
    with pytest.raises(InputError, match="unknown colour 'greyish'"):
        colours.pick("greyish")


def test_an_entry_of_the_table_precedes_its_family(colours: Registry[Colour]) -> None:
    colours.add("grey7", lambda: -7)
    assert colours.pick("grey7")() == -7
    assert colours.pick("grey8")() == 8


def test_a_registry_without_a_finder_knows_its_table_alone() -> None:
    with pytest.raises(InputError, match=r"unknown fruit 'apple' \(known: \)"):
        Registry("fruit").pick("apple")


def test_any_mapping_can_be_picked_from() -> None:
    assert pick({"a": 1}, "a", "letter") == 1
    with pytest.raises(InputError, match=r"unknown letter 'b' \(known: a\)"):
        pick({"a": 1}, "b", "letter")


def test_a_suggestion_is_the_nearest_name_or_all_of_them() -> None:
    assert suggestion("sead", ["rounds", "seed"]) == "did you mean 'seed'?"
    assert suggestion("x", ["rounds", "seed"]) == "known: rounds, seed"


# --------------------------------------------------------------------------- settings

SHAPES: Registry[int] = Registry("shape")
SHAPES.add("circle", 0)
SHAPES.add("square", 4)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Drawing:
    shape: Annotated[str, NameIn(SHAPES, also=("none",))] = "circle"


@pytest.mark.parametrize("name", ["circle", "square", "none"])
def test_a_setting_accepts_registered_names_and_those_it_adds(name: str) -> None:
    assert Drawing(shape=name).shape == name
    assert TypeAdapter(Drawing).validate_python({"shape": name}).shape == name


def test_a_setting_accepts_names_that_are_registered_after_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValidationError):
        Drawing(shape="star")
    monkeypatch.setitem(SHAPES._table, "star", 5)
    assert Drawing(shape="star").shape == "star"


def test_a_setting_refuses_an_unknown_name_with_the_nearest_match() -> None:
    with pytest.raises(ValidationError, match=r"unknown shape 'sqare' \(did you mean 'square'\?\)"):
        Drawing(shape="sqare")


@pytest.mark.parametrize("value", [3, None, ["circle"]])
def test_a_setting_refuses_what_is_no_string(value: object) -> None:
    with pytest.raises(ValidationError, match="string"):
        Drawing(shape=value)  # type: ignore[arg-type]


def test_a_setting_accepts_a_family(colours: Registry[Colour]) -> None:
    adapter = TypeAdapter(Annotated[str, NameIn(colours)])
    assert adapter.validate_python("grey3") == "grey3"
    with pytest.raises(ValidationError, match="unknown colour 'greyish'"):
        adapter.validate_python("greyish")


def test_a_setting_lists_the_registered_names_for_help_texts() -> None:
    assert NameIn(SHAPES, also=("none",)).names == ["circle", "square"]
