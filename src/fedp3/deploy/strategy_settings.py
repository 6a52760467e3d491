"""The settings of a run that a user's Flower app describes, completed on the server and on nodes.

The strategy sends the settings that its user gave, and both sides complete them by the same rule,
with the number of clients that the nodes know (`num-partitions`).  So both have the same config.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedp3 import config as configs
from fedp3.config import Config
from fedp3.config.load import FILES, read_toml
from fedp3.core.errors import CodecError, ConfigError, InputError, type_of
from fedp3.core.settings import OWN
from fedp3.data import DataSettings
from fedp3.methods import METHODS
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings
from fedp3.planning.layer_sets import smallest_cover

WHERE = "fedp3.flower"
Settings = Mapping[str, Any]  # section -> key -> value, and `method`


def given_settings(config: Config | str | Path | None, sections: Settings) -> dict[str, Any]:
    """What the user of the strategy gave, section by section.

    Args:
        config: a config, or the path of a TOML file.
        sections: the same as keyword arguments.
    """
    if config is not None and sections:
        raise InputError(
            f"FedP3 got a config and the sections {', '.join(sections)}; pass one or the other"
        )
    if config is None:
        given = {s: dict(v) if isinstance(v, Mapping) else v for s, v in sections.items()}
    elif isinstance(config, Config):
        given = config.as_json()
        for section, unset in (("data", DataSettings()), ("model", ModelSettings())):
            if getattr(config, section) == unset:
                del given[section]
    elif isinstance(config, str | Path):
        named = {key: read_toml(Path(config)).get(key) for key in ("data", "model")}
        given = configs.load(Path(config)).as_json() | {"data": {}, "model": {}}
        given |= {section: keys for section, keys in named.items() if keys is not None}
    else:
        raise InputError(
            f"FedP3 got {type_of(config)} as its config; want a fedp3.Config, the path of "
            "a TOML file, or sections such as prune={'keep': 0.5}"
        )
    _refuse_parts_of_nodes(given)
    return given


def _refuse_parts_of_nodes(given: Settings) -> None:
    """Refuse a network or data set by name, and files: nodes have their own."""
    for section in ("data", "model"):
        keys = given.get(section) or {}
        name = keys.get("name", OWN) if isinstance(keys, Mapping) else OWN
        if name != OWN:
            raise ConfigError(
                f"[{section}] name = {name!r}, but data and network are those of the nodes, which "
                f"were passed to fedp3_client; remove the section [{section}]"
            )
    for (section, key), names in FILES.items():
        keys = given.get(section)
        value = keys.get(key) if isinstance(keys, Mapping) else None
        if isinstance(value, str) and value and value not in names:
            raise ConfigError(
                f"[{section}] {key} = {value!r} names a file, and nodes have no such file; give "
                "its values, or leave the key out"
            )


def from_text(text: str) -> dict[str, Any]:
    """The settings in a message."""
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise CodecError("the settings in the message are no JSON object")
    _refuse_parts_of_nodes(settings)
    return settings


def clients_in(settings: Settings) -> int | None:
    """The number of clients that the settings name; None if they name none."""
    split = settings.get("partition")
    clients = split.get("clients") if isinstance(split, Mapping) else None
    return clients if isinstance(clients, int) else None


def completed(settings: Settings, net: nn.Module, clients: int) -> Config:
    """The config of a run over these clients; what the settings leave out fits network and nodes.

    Args:
        settings: what the user gave.
        net: the network.
        clients: the number of nodes.

    Raises:
        ConfigError: lists all mistakes at once.
    """
    filled = {key: dict(v) if isinstance(v, Mapping) else v for key, v in settings.items()}
    sections = ("data", "model", "partition", "run", "plan")
    tables = {section: filled.setdefault(section, {}) for section in sections}
    if not all(isinstance(table, dict) for table in tables.values()):
        return configs.parse(filled, where=WHERE)  # which says what is wrong
    tables["data"]["name"] = tables["model"]["name"] = OWN
    tables["partition"] |= {"kind": OWN, "clients": clients}
    mode = filled.get("client_privacy")  # under it, coins choose who takes part
    if not (isinstance(mode, Mapping) and mode.get("enabled")):
        tables["run"].setdefault("clients_per_round", min(Config().run.clients_per_round, clients))
    decided = METHODS.get(str(filled.get("method", Config().method)))
    devices = filled.get("devices")
    on_devices = isinstance(devices, Mapping) and devices.get("fleet")
    if not on_devices and decided and "layers" not in decided.settings.get("plan", {}):
        hidden = len(layer_map(net).hidden)
        tables["plan"].setdefault("layers", smallest_cover(hidden, clients))
    return configs.parse(filled, where=WHERE)
