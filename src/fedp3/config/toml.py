"""Write values as TOML, which the standard library can only read."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass


def toml_value(value: object) -> str:
    """One value: a text, number, boolean, list or inline table; of a record, what is not None."""
    if is_dataclass(value):
        known = {f.name: getattr(value, f.name) for f in fields(value)}
        value = {k: v for k, v in known.items() if v is not None}
    if isinstance(value, Mapping):
        pairs = [f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    # Texts, numbers and booleans are written as in JSON, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_document(tables: Mapping[str, object]) -> str:
    """A document of top-level keys and one level of tables."""
    lines = [f"{k} = {toml_value(v)}" for k, v in tables.items() if not isinstance(v, Mapping)]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in table.items())]
    return "\n".join(lines).lstrip("\n") + "\n"
