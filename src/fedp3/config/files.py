"""TOML in, a frozen and checked config out; every mistake listed at once.

Order of precedence: defaults, then what the method sets, then the file, then `key=value` overrides.
"""

import csv
import json
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedp3 import methods
from fedp3.config.schema import METHODS, Config, Section
from fedp3.errors import ConfigError
from fedp3.lookup import suggestion

SYNONYMS: Mapping[str, str] = {  # what people write from habit, too far from our names to be guessed
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

FILES = {("prune", "keep"), ("partition", "file")}  # keys that may name one


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and `section.key=value` overrides; raises one ConfigError that lists all mistakes."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"no config at {path}; write one with: fedp3 init {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return parse(raw, overrides, str(path), path.parent)


def parse(
    raw: Mapping[str, Any], overrides: Sequence[str] = (), where: str = "config", folder: Path = Path()
) -> Config:
    """A config from nested tables; relative file names are looked up in `folder`."""
    merged, mistakes = _override(raw, overrides)
    method = merged.get("method", "fedp3")
    for section, keys in METHODS.get(method if isinstance(method, str) else "", {}).items():
        mine = merged.get(section, {})
        merged[section] = {**keys, **mine} if isinstance(mine, Mapping) else mine
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {m}" for m in mistakes + _said(error))) from None
    config, more = _read_files(_others_under_ldp(config), folder)
    mistakes += more + _contradictions(config)
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
            hint = "method=NAME" if name.startswith("method") else "section.key=value (as in local.lr=0.05)"
            mistakes.append(f"override {text!r} is not of the form {hint}")
            continue
        target = merged.setdefault(section, {}) if dot else merged
        if isinstance(target, dict):
            target[name] = _typed(section, name, value.strip())
    return merged, mistakes


def _typed(section: str, name: str, text: str) -> Any:
    """The value of an override; a file is looked up from where it is typed, one that a config names from its folder."""
    value = _value(text)
    names_file = isinstance(value, str) and value and (section, name) in FILES
    return str(Path(value).absolute()) if names_file else value


def _value(text: str) -> Any:
    """A TOML value, or else the text itself, so that names need no quotes on a command line."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _said(error: ValidationError) -> list[str]:
    """Pydantic's findings in our words, one per key."""
    said: dict[str, str] = {}
    for e in error.errors(include_url=False):
        path = [str(p) for p in e["loc"]]
        where = f"[{path[0]}] {path[1]}" if len(path) > 1 else path[0]
        if e["type"] == "extra_forbidden":
            fields = Config.model_fields if len(path) == 1 else _section(path[0]).model_fields
            what = "key" if len(path) > 1 or not isinstance(e["input"], Mapping) else "section"
            prefix = f"[{path[0]}] " if len(path) > 1 else ""
            meant = SYNONYMS.get(path[-1], "")
            hint = f"did you mean {meant!r}?" if meant in fields else suggestion(path[-1], fields)
            homes = [s for s, keys in _keys().items() if path[-1] in keys]
            if len(path) == 1 and homes:
                hint = f"it is a key of [{homes[0]}]"
            said[where] = f"{prefix}unknown {what} {path[-1]!r} ({hint})"
        elif where in said:  # of several types that would do, none does
            said[where] = f"{where}: got {e['input']!r}, want {_described(path)}"
        else:
            wanted = f"should be {_described(path)}" if e["type"] == "string_pattern_mismatch" else e["msg"]
            text = wanted.removeprefix("Value error, ").replace("Input should be", "should be")
            said[where] = f"{where}: {text}, got {e['input']!r}"
    return list(said.values())


def _described(path: Sequence[str]) -> str:
    """What a key is, in its own words."""
    return str(_section(path[0]).model_fields[path[1]].description)


def _keys() -> dict[str, Collection[str]]:
    """Section -> its keys."""
    sections = {name: _section(name) for name in Config.model_fields}
    return {name: s.model_fields for name, s in sections.items() if s is not Config}


def _section(name: str) -> type[BaseModel]:
    annotation = Config.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else Config


def _read_files(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """Take the content of a keep file and the full path of a partition file, so that the config stands alone."""
    if config.partition.file:
        full = str((folder / config.partition.file).resolve())
        section = config.partition.model_copy(update={"file": full})
        config = config.model_copy(update={"partition": section})
    if not isinstance(config.prune.keep, str):
        return config, []
    path = folder / config.prune.keep
    try:
        with path.open(newline="") as file:
            rows = {int(row["client"]): float(row["keep"]) for row in csv.DictReader(file)}
        keep = tuple(rows[i] for i in range(config.partition.clients))
    except (OSError, KeyError, ValueError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        want = f"columns client,keep and a row for each of clients 0..{config.partition.clients - 1}"
        return config, [f"[prune] keep: cannot read {path} ({why}); want {want}"]
    bad = [k for k in keep if not 0 < k <= 1]
    if bad:
        return config, [f"[prune] keep: shares in {path} must be in (0, 1], got {bad[0]}"]
    section_ = config.prune.model_copy(update={"keep": keep})
    return config.model_copy(update={"prune": section_}), []


def _others_under_ldp(c: Config) -> Config:
    """Layers outside L_i under LDP: where [plan] leaves it open, [privacy] decides."""
    if not c.privacy.enabled or "others" in c.plan.model_fields_set:
        return c
    others = {"freeze": "freeze", "noise": "train"}[c.privacy.others]
    return c.model_copy(update={"plan": c.plan.model_copy(update={"others": others})})


def _contradictions(c: Config) -> list[str]:
    """Mistakes that no single key shows."""
    n, found = c.partition.clients, []
    if c.run.clients_per_round > n:
        whose = "" if "clients_per_round" in c.run.model_fields_set else " (the default)"
        found.append(
            f"[run] clients_per_round: {c.run.clients_per_round}{whose} of {n} clients; set 1 to {n}, or 0 for all"
        )
    asked = c.run.clients_per_round or n
    if c.run.quorum > asked:
        found.append(f"[run] quorum: {c.run.quorum} updates of {asked} participants can never come")
    if isinstance(c.partition.sizes, tuple) and len(c.partition.sizes) != n:
        found.append(f"[partition] sizes: {len(c.partition.sizes)} numbers for {n} clients")
    if isinstance(c.prune.keep, tuple) and len(c.prune.keep) > n:
        found.append(f"[prune] keep: {len(c.prune.keep)} device classes for {n} clients")
    if c.plan.layers == "prune-all" and c.prune.upload == "none":
        found.append("[plan] layers: 'prune-all' uploads pruned layers; set [prune] upload to 'kept' or 'zeros'")
    if c.plan.others == "freeze" and c.prune.upload != "none" and not c.privacy.enabled:
        found.append(
            f"[plan] others: what comes back pruned ([prune] upload={c.prune.upload!r}) is trained, not frozen; set "
            "upload to 'none', or others to 'train'"
        )
    if c.plan.others == "personal" and c.plan.redraw:
        found.append(
            "[plan] others: layers that stay with a client need one set of them for the run; set redraw to false"
        )
    if c.upload.compress == "topk" and c.plan.head == "personal_uploaded":
        found.append(
            "[upload] compress: 'topk' sends changes, and a head that is never sent has none; take 'fp16' or 'int8'"
        )
    if c.upload.compress == "topk" and c.prune.selector == "magnitude_all":
        found.append(
            "[upload] compress: 'topk' takes a share of every tensor, of which 'magnitude_all' may keep nothing"
        )
    if c.privacy.enabled and c.plan.others == "train" and c.privacy.others == "freeze":
        found.append(
            "[plan] others: layers outside L_i that train without noise show in the next step's upload, which breaks "
            "the guarantee; leave others out to freeze them, or set [privacy] others to 'noise' to noise them too"
        )
    return found + methods.clashes(c.parts, _around(c))


def _around(c: Config) -> methods.Around:
    return methods.Around(
        c.plan.layers, c.plan.head, c.prune.local, c.prune.physical and c.prune.hold, c.local.momentum
    )


def overruled(c: Config) -> list[str]:
    """What this config sets otherwise than its method; capacities are the fleet's, unless the method prunes nothing."""
    found = []
    for section, keys in METHODS.get(c.method, {}).items():
        here = getattr(c, section)
        usual = type(here).model_validate(keys)
        for k in keys:
            mine, theirs = getattr(here, k), getattr(usual, k)
            if mine != theirs and ((section, k) != ("prune", "keep") or theirs == 1.0):
                found.append(f"{section}.{k}={_toml(mine)} ({c.method}: {_toml(theirs)})")
    return found


# --------------------------------------------------------------------------- writing


def to_toml(config: Config) -> str:
    """The complete config, as it was run."""
    lines = [f"method = {_toml(config.method)}"]
    for name, section in config:
        if isinstance(section, Section):
            lines += ["", f"[{name}]"] + [f"{k} = {_toml(v)}" for k, v in section]
    return "\n".join(lines) + "\n"


START = ("model.width=0.25", "local.lr=0.2")  # what suits the digits: `fedp3 init` should learn in seconds


def template() -> str:
    """The config `fedp3 init` writes: every key with its value and what it means.

    What the method decides is commented out, so that changing the method is changing one line.
    """
    lines = ["# A fedp3 run.  Look at it with `fedp3 plan`, start it with `fedp3 run`.", ""]
    config, decided = parse({}, START), ("plan", "prune", "upload", "aggregate", "hooks")  # sections, and
    single = {(s, k) for sets in METHODS.values() for s, keys in sets.items() for k in keys}  # keys elsewhere
    lines += [f"method = {_toml(config.method)}  # {Config.model_fields['method'].description}"]
    for name, section in config:
        if isinstance(section, Section):
            note = "  The method sets these; take away a # to decide yourself." if name in decided else ""
            lines += ["", f"# {type(section).__doc__}{note}", f"[{name}]"]
            for k, v in section:
                mark = "# " if name in decided or (name, k) in single else ""
                pair = f"{mark}{k} = {_toml(v)}"
                lines.append(f"{pair:<30} # {type(section).model_fields[k].description}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if value == math.inf:
        return "inf"
    # TOML's strings, numbers and booleans are written as JSON's, but for two characters.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
