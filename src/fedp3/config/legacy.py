"""Keys of 0.1.0.dev that were renamed, and the translation of an old config."""

from collections.abc import Mapping
from typing import Any

from fedp3.methods import METHODS

# (section, key) in 0.1.0.dev -> (section, key) now
RENAMED_KEYS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("data", "augment"): ("local", "augment"),
    ("prune", "upload"): ("plan", "upload"),
    ("prune", "hold"): ("prune", "freeze_pruned"),
    ("prune", "stale"): ("prune", "unfed_columns"),
    ("prune", "local"): ("prune", "local_pruner"),
    ("prune", "q_of"): ("prune", "q_relative_to"),
    ("aggregate", "adapt"): ("aggregate", "server_epsilon"),
    ("hooks", "tune"): ("hooks", "finetune_factor"),
    ("privacy", "others"): ("plan", "others"),
}
# (section, key) now -> old value -> value now
RENAMED_VALUES: Mapping[tuple[str, str], Mapping[Any, Any]] = {
    ("plan", "upload"): {"kept": "retained"},
    ("plan", "layers"): {"head": "prune-all"},
    ("prune", "q_relative_to"): {"kept": "retained", "whole": "layer"},
}


def new_name(section: str, key: str) -> str:
    """What a key of 0.1.0.dev is called now; empty if it was not renamed."""
    if (section, key) not in RENAMED_KEYS:
        return ""
    new_section, new_key = RENAMED_KEYS[section, key]
    return f"[{new_section}] {new_key}"


def translate(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config of 0.1.0.dev in today's keys, and one line for each change.

    If a config has the new name of a key beside the old one, the new one wins.
    """
    translated: dict[str, Any] = {}
    notes = []
    for section, keys in raw.items():
        if not isinstance(keys, Mapping):
            translated[section] = keys
            continue
        translated.setdefault(section, {})
        for key, value in keys.items():
            if (section, key) == ("privacy", "others"):
                continue
            new_section, new_key = RENAMED_KEYS.get((section, key), (section, key))
            new_value = _translate_value(new_section, new_key, value)
            renamed = (new_section, new_key) != (section, key)
            if renamed or new_value != value:
                new = f"[{new_section}] {new_key} = {new_value!r}"
                notes.append(f"[{section}] {key} = {value!r} is now {new}")
            if renamed and new_key in raw.get(new_section, {}):
                continue
            translated.setdefault(new_section, {})[new_key] = new_value
    if "others" in raw.get("privacy", {}):
        notes.append(_translate_others(raw, translated))
    return translated, notes


def _translate_value(section: str, key: str, value: Any) -> Any:
    """The value of a key in today's words."""
    if (section, key) == ("privacy", "noise_multiplier") and value == 0:
        return "auto"
    if isinstance(value, str):
        return RENAMED_VALUES.get((section, key), {}).get(value, value)
    return value


def _translate_others(raw: Mapping[str, Any], translated: dict[str, Any]) -> str:
    """Merge [privacy] others, which had an effect under LDP alone, into [plan] others."""
    old = raw["privacy"]["others"]
    method = METHODS.get(raw.get("method", "fedp3"))
    of_method = {} if method is None else method.settings.get("plan", {})
    others = raw.get("plan", {}).get("others", of_method.get("others"))
    replaces = others is None or (others == "train" and old == "noise")
    if not raw["privacy"].get("enabled", False) or not replaces:
        return f"[privacy] others = {old!r} had no effect and is left out"
    translated.setdefault("plan", {})["others"] = old
    return f"[privacy] others = {old!r} is now [plan] others = {old!r}"
