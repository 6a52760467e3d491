"""From TOML to a checked config; all mistakes are listed at once.

Later sources win: defaults, then the settings of the method, then the file, then `key=value`
overrides.
"""

import csv
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedp3.config.contradictions import contradictions
from fedp3.config.legacy import new_name
from fedp3.config.resolution import resolve_devices, resolve_others, resolve_participants
from fedp3.config.schema import ADAPTER, SECTIONS, Config, fields_of
from fedp3.core.errors import ConfigError, InputError, PlanError
from fedp3.core.registry import suggestion
from fedp3.devices.clock import PRESENCES, make_timings
from fedp3.devices.fleet_file import SUFFIX
from fedp3.devices.fleets import FLEETS, make_fleet
from fedp3.devices.settings import NODES, row_of
from fedp3.methods import METHODS
from fedp3.planning.layer_sets import AUTO

# names from other libraries that are too far from ours to be found by similarity
SYNONYMS: Mapping[str, str] = {
    "learning_rate": "lr",
    "learn_rate": "lr",
    "batch_size": "batch",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "pruning_ratio": "keep",
    "ratio": "keep",
    "dataset": "name",
}

# keys that may name a file or folder, and texts that do not
FILES: Mapping[tuple[str, str], Collection[str]] = {
    ("prune", "keep"): {AUTO},
    ("partition", "file"): (),
    ("devices", "fleet"): {NODES, *FLEETS},
    ("devices", "bandwidth"): (),
    ("devices", "availability"): PRESENCES,
}


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and `section.key=value` overrides.

    Args:
        path: the file.
        overrides: as on the command line, e.g. `["local.lr=0.05"]`.

    Raises:
        ConfigError: lists all mistakes at once.
    """
    return parse(read_toml(path), overrides, str(path), path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"no config at {path}; write one with: fedp3 init {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; texts need quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"{path} is not TOML: {error}{hint}") from None
    except IsADirectoryError:
        inside = path / "config.toml"
        hint = f"; did you mean {inside}?" if inside.exists() else ", want a TOML file"
        raise ConfigError(f"{path} is a folder{hint}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def parse(
    raw: Mapping[str, Any],
    overrides: Sequence[str] = (),
    where: str = "config",
    folder: Path = Path(),
) -> Config:
    """A config from nested tables.

    Args:
        raw: section -> key -> value, and `method`.
        overrides: as on the command line, e.g. `["local.lr=0.05"]`.
        where: what error texts call the source.
        folder: where relative file names are looked up.

    Raises:
        ConfigError: lists all mistakes at once.
    """
    merged, mistakes = _override(raw, overrides)
    tables = {section: keys for section, keys in merged.items() if isinstance(keys, Mapping)}
    given = {(section, key) for section, keys in tables.items() for key in keys}
    method = merged.get("method", "fedp3")
    row = METHODS.get(method) if isinstance(method, str) else None
    if row is not None:
        for section, keys in row.settings.items():
            if section not in merged or section in tables:
                merged[section] = {**keys, **tables.get(section, {})}
    mistakes += _truth_values(tables)
    try:
        config = ADAPTER.validate_python(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {m}" for m in mistakes + _explain(error))) from None
    config, more = resolve_devices(config, given)
    mistakes += more
    config = resolve_participants(resolve_others(config), given)
    config, more = _read_files(config, folder)
    mistakes += more + contradictions(config, given)
    if mistakes:
        raise ConfigError("\n".join(f"{where}: {m}" for m in mistakes))
    return config


def _override(raw: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    mistakes = []
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().rpartition(".")
        if not equals or (not dot and name != "method"):
            form = "section.key=value (as in local.lr=0.05)"
            if name.startswith("method"):
                form = "method=NAME"
            homes = [s for s, kind in SECTIONS.items() if equals and name in fields_of(kind)]
            hint = f"; did you mean {' or '.join(f'{s}.{text}' for s in homes)}?" if homes else ""
            mistakes.append(f"override {text!r} is not of the form {form}{hint}")
            continue
        target = merged.setdefault(section, {}) if dot else merged
        if isinstance(target, dict):
            target[name] = _typed(section, name, value.strip())
    return merged, mistakes


def _typed(section: str, name: str, text: str) -> Any:
    """The value of an override.

    A file name in an override is relative to the working directory; one in a config file is
    relative to the folder of that file.
    """
    value = _value(text)
    if not isinstance(value, str) or not value or value in FILES.get((section, name), {value}):
        return value
    if (section, name) == ("devices", "fleet") and Path(value).suffix.lower() != SUFFIX:
        return value  # the name of a fleet that does not exist
    return str(Path(value).absolute())


def _value(text: str) -> Any:
    """A TOML value, or else the text itself, so that names need no quotes on a command line."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


# --------------------------------------------------------------------------- mistakes


def _explain(error: ValidationError) -> list[str]:
    """Pydantic's errors as sentences, one per key."""
    explained: dict[str, str] = {}
    for e in error.errors(include_url=False):
        path = [str(p) for p in e["loc"]]
        where = f"[{path[0]}] {path[1]}" if len(path) > 1 else path[0]
        if e["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            explained[where] = _unknown(path, e["input"])
        elif where in explained:  # the key allows several types, and the value has none of them
            explained[where] = f"{where}: got {e['input']!r}, want {_description(path)}"
        else:
            wanted = e["msg"]
            if e["type"] == "string_pattern_mismatch":
                wanted = f"should be {_description(path)}"
            text = wanted.removeprefix("Value error, ").replace("Input should be", "should be")
            explained[where] = f"{where}: {text}, got {e['input']!r}"
    return list(explained.values())


def _unknown(path: Sequence[str], value: object) -> str:
    """The text for a section or key that does not exist, with the nearest one that does."""
    name = path[-1]
    if len(path) == 1:
        known = [*SECTIONS, "method"]
        what = "section" if isinstance(value, Mapping) else "key"
        homes = [section for section in SECTIONS if name in _keys(section)]
        hint = f"it is a key of [{homes[0]}]" if homes else suggestion(name, known)
        return f"unknown {what} {name!r} ({hint})"
    section = path[0]
    renamed = new_name(section, name)
    synonym = SYNONYMS.get(name, "")
    if renamed:
        hint = f"it is {renamed} now; translate a config with: fedp3 init NEW.toml --from OLD.toml"
    elif synonym in _keys(section):
        hint = f"did you mean {synonym!r}?"
    else:
        hint = suggestion(name, _keys(section))
    return f"[{section}] unknown key {name!r} ({hint})"


def _keys(section: str) -> list[str]:
    return list(fields_of(SECTIONS[section]))


def _description(path: Sequence[str]) -> str:
    """The description of a key."""
    return str(fields_of(SECTIONS[path[0]])[path[1]].description)


def _truth_values(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """True and false where a number is wanted, which Python would take for 1 and 0."""
    mistakes = []
    for section, keys in tables.items():
        fields = fields_of(SECTIONS[section]) if section in SECTIONS else {}
        for key, value in keys.items():
            items = value if isinstance(value, list | tuple) else [value]
            given = [item for item in items if isinstance(item, bool)]
            if key in fields and given and "bool" not in str(fields[key].annotation):
                text = str(given[0]).lower()
                mistakes.append(f"[{section}] {key}: got {text}, want {fields[key].description}")
    return mistakes


# ------------------------------------------------------------------------ files that a config names


def _read_files(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """Replace keep and fleet files by their content, and other files by their full paths.

    The config then does not depend on the folder that it was read from.
    """
    if config.partition.file:
        full = str((folder / config.partition.file).resolve())
        config = replace(config, partition=replace(config.partition, file=full))
    config, mistakes = _read_devices(config, folder)
    config, more = _read_keep(config, folder)
    return config, mistakes + more


def _read_devices(config: Config, folder: Path) -> tuple[Config, list[str]]:
    devices, mistakes = config.devices, []
    for key in ("bandwidth", "availability"):
        value = getattr(devices, key)
        if value and value not in FILES["devices", key]:
            full = (folder / value).resolve()
            full_path: Any = {key: str(full)}
            devices = replace(devices, **full_path)
            if not full.exists():
                mistakes.append(f"[devices] {key}: there is no file {full}")
    if mistakes:
        return config, mistakes
    try:
        make_timings([], 0, devices.availability, devices.bandwidth)
    except InputError as error:
        return config, [f"[devices] {error}"]
    fleet = devices.fleet
    if isinstance(fleet, dict):
        try:
            make_fleet(fleet, config.partition.clients, config.run.seed)
        except (InputError, PlanError) as error:
            return config, [f"[devices] fleet: {error}"]
    if isinstance(fleet, str) and fleet and fleet not in FILES["devices", "fleet"]:
        try:
            is_file = Path(fleet).suffix.lower() == SUFFIX
            place = str(folder / fleet) if is_file else fleet
            rows = make_fleet(place, config.partition.clients, config.run.seed)
        except InputError as error:
            return config, [f"[devices] fleet: {error}"]
        devices = replace(devices, fleet=tuple(map(row_of, rows)))
    return replace(config, devices=devices), []


def _read_keep(config: Config, folder: Path) -> tuple[Config, list[str]]:
    if not isinstance(config.prune.keep, str) or config.prune.keep == AUTO:
        return config, []
    path = folder / config.prune.keep
    try:
        with path.open(newline="") as file:
            rows = {int(row["client"]): float(row["keep"]) for row in csv.DictReader(file)}
        keep = tuple(rows[i] for i in range(config.partition.clients))
    except (OSError, KeyError, ValueError, TypeError) as error:
        why = str(error)
        if isinstance(error, KeyError):
            missing = error.args[0]
            what = f"client {missing}" if isinstance(missing, int) else f"column {missing!r}"
            why = f"it has no row for {what}" if isinstance(missing, int) else f"it has no {what}"
        want = (
            f"columns client,keep and a row for each of clients 0..{config.partition.clients - 1}"
        )
        return config, [f"[prune] keep: cannot read {path} ({why}); want {want}"]
    invalid = [share for share in keep if not 0 < share <= 1]
    if invalid:
        return config, [f"[prune] keep: shares in {path} must be in (0, 1], got {invalid[0]}"]
    return replace(config, prune=replace(config.prune, keep=keep)), []
