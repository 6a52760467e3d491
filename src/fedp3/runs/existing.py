"""Run folders that exist: whether one holds a run, and whether it is still the one that was begun.

A run is continued with the config, the plugins and the versions of settings that it began with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedp3 import config
from fedp3.config import Config
from fedp3.config.plugins import Plugin, plugin_records, reload
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.files import read_json, write_json

# What a run that was interrupted before it began may have left in its folder.
OWN_FILES = {
    *("checkpoint", "client_level", "flower.json", "initial.safetensors", "run.json", "stop"),
}
SEEDS = "seeds.json"  # in a folder of several seeds: what they are seeds of


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / "config.toml").exists()


def refuse_existing(folder: Path, how: str = "") -> None:
    """Raise if a run, or a series of seeds, was begun in this folder.

    Args:
        folder: the run folder.
        how: what the user types to continue the run; `fedp3 resume FOLDER` by default.
    """
    if holds_run(folder) or (folder / SEEDS).exists():
        how = how or f"fedp3 resume {folder}"
        raise InputError(f"{folder} holds a run already; continue it with: {how}")


def refuse_foreign(folder: Path) -> None:
    """Raise if a folder contains files of somebody else, among which a run would be lost."""
    try:
        foreign = [p.name for p in sorted(folder.iterdir()) if _is_foreign(p.name)]
    except OSError:
        return  # it does not exist yet, or its own error comes when it is written
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise InputError(
            f"{folder} is not empty: it contains {foreign[0]}{more}; choose a new folder"
        )


def _is_foreign(name: str) -> bool:
    return not (name.startswith(".") or name in OWN_FILES)


def finished_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run; None if it is not finished, or was stopped before its end."""
    result = recorded_result(folder)
    return None if result is None or result.get("stopped") else result


def recorded_result(folder: Path) -> dict[str, Any] | None:
    """The result of a run that is finished or was stopped by a callback; None if it has none.

    The folder may have been moved since, so that `out` is set to where it is now.
    """
    path = folder / "result.json"
    return read_json(path) | {"out": str(folder)} if path.exists() else None


# --------------------------------------------------------------------------- its config


def reopen(folder: Path, like: Config | None = None) -> Config:
    """The config of a run folder; its plugins are imported.

    Args:
        folder: the run folder.
        like: the config that the caller has; refused if the run's config is another one.
    """
    if not holds_run(folder):
        raise InputError(f"{folder} is not a run folder: it has no config.toml")
    about = read_json(folder / "run.json")
    if not {"config", "versions"} <= about.keys():
        raise InputError(
            f"{folder}/run.json is not the description of a run; start a new one in another folder"
        )
    _refuse_old_keys(about, folder, folder / "config.toml")
    reload(about["plugins"])
    now = config.load(folder / "config.toml")
    _refuse_unknown_keys(folder, now, about)
    _refuse_changed_config(folder, now, about["config"])
    if like is not None and like.digest() != now.digest():
        raise InputError(_differences(folder, now, like))
    return now


def _refuse_old_keys(about: Mapping[str, Any], folder: Path, source: Path) -> None:
    """Refuse what a version wrote whose keys had other names: it recorded no plugins."""
    if "plugins" in about:
        return
    version = about.get("versions", {}).get("fedp3", "0.1.0.dev0")
    raise InputError(
        f"{folder} was begun with fedp3 {version}, whose settings had other names; continue it "
        f"with that version, or translate its config with: fedp3 init NEW.toml --from {source}"
    )


def _refuse_unknown_keys(folder: Path, now: Config, about: Mapping[str, Any]) -> None:
    """Refuse a run of a version that did not have some of today's keys."""
    new = [f"{s}.{k}" for s, k in by_key(now) if k not in about["config"].get(s, {})]
    if new:
        raise InputError(
            f"{folder} was begun with fedp3 {about['versions']['fedp3']}, which did not know "
            f"{', '.join(new)}; continue it with that version, or start a new run with: "
            "fedp3 run CONFIG --out NEW_FOLDER"
        )


def _refuse_changed_config(folder: Path, now: Config, then: Mapping[str, Any]) -> None:
    """Refuse a config.toml that was edited after the run began."""
    changed = [
        f"  [{s}] {k}: was {then[s][k]!r}, is {value!r}"
        for (s, k), value in by_key(now).items()
        if then[s][k] != value
    ]
    if changed:
        lines = "\n".join(changed)
        raise ConfigError(
            f"{folder}/config.toml was changed after the run began:\n{lines}\n"
            "put it back, or start a new run with: fedp3 run CONFIG --out NEW_FOLDER"
        )


def _differences(folder: Path, there: Config, given: Config) -> str:
    """Where the config of a run folder differs from the caller's."""
    values = by_key(given)
    lines = [
        f"  [{s}] {k}: there {value!r}, here {values[s, k]!r}"
        for (s, k), value in by_key(there).items()
        if values[s, k] != value
    ]
    if given.method != there.method:
        lines.append(f"  method: there {there.method!r}, here {given.method!r}")
    differences = "\n".join(lines)
    return f"{folder} was begun with other settings:\n{differences}\nchoose another folder"


def plugins_of(folder: Path) -> tuple[Plugin, ...]:
    """The plugins that a run or a series of seeds was begun with, imported again."""
    recorded = folder / SEEDS if (folder / SEEDS).exists() else folder / "run.json"
    return reload(read_json(recorded).get("plugins", []))


def check_plugins(folder: Path, plugins: Sequence[Plugin]) -> None:
    """Refuse to resume a run with other plugin files than it began with."""
    then = {p["sha256"]: p["path"] for p in read_json(folder / "run.json")["plugins"]}
    now = {p.sha256: p.path for p in plugins}
    if then.keys() != now.keys():
        begun = ", ".join(then.values()) or "none"
        given = ", ".join(now.values()) or "none"
        raise InputError(f"{folder} was begun with other plugins: then {begun}, now {given}")


def by_key(settings: Config) -> dict[tuple[str, str], Any]:
    """(section, key) -> value."""
    sections = settings.as_json().items()
    return {(s, k): v for s, keys in sections if isinstance(keys, Mapping) for k, v in keys.items()}


# --------------------------------------------------------------------------- several seeds


def seed_configs(settings: Config, folder: Path, seeds: int) -> dict[Path, Config]:
    """The run folder and config of each of several seeds."""
    first = settings.run.seed
    return {
        folder / f"seed-{k}": replace(settings, run=replace(settings.run, seed=first + k))
        for k in range(seeds)
    }


def begin_seeds(settings: Config, folder: Path, seeds: int, plugins: Sequence[Plugin] = ()) -> None:
    """Record what a folder of several seeds is, so that it can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = {"seeds": seeds, "config": settings.as_json(), "plugins": plugin_records(plugins)}
    write_json(folder / SEEDS, recorded)


def recorded_seeds(folder: Path) -> tuple[Config, int] | None:
    """The config and the number of seeds of such a folder; None if it is not one.

    Its plugins are imported.
    """
    path = folder / SEEDS
    if not path.exists():
        return None
    recorded = read_json(path)
    _refuse_old_keys(recorded, folder, folder / "seed-0" / "config.toml")
    reload(recorded["plugins"])
    return config.parse(recorded["config"]), int(recorded["seeds"])
