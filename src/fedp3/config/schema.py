"""The config of one run: the settings of all stages as sections, and a description of each key.

Every section is a settings dataclass that is declared beside the code that reads it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from fedp3.client.batching import LocalSettings
from fedp3.core.registry import NameIn
from fedp3.core.settings import STRICT, RunSettings
from fedp3.data import DataSettings
from fedp3.data.partition import PartitionSettings
from fedp3.devices.settings import DevicesSettings
from fedp3.messages.compression import DownloadSettings, UploadSettings
from fedp3.methods import METHODS, HookSettings
from fedp3.models.adapters import AdapterSettings
from fedp3.models.zoo import ModelSettings
from fedp3.planning.client_plans import PlanSettings
from fedp3.planning.prune_settings import PruneSettings
from fedp3.privacy.client_level.settings import ClientPrivacySettings
from fedp3.privacy.settings import PrivacySettings
from fedp3.server.aggregators import AggregateSettings


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a run, by section.

    Example:
        >>> from fedp3 import Config, PruneSettings
        >>> Config(method="fedavg", prune=PruneSettings(keep=1.0)).prune.keep
        1.0
    """

    method: Annotated[str, NameIn(METHODS)] = Field(
        default="fedp3",
        description="training method, which sets defaults of other keys; `fedp3 methods` lists all",
    )
    data: DataSettings = Field(default_factory=DataSettings)
    partition: PartitionSettings = Field(default_factory=PartitionSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    adapter: AdapterSettings = Field(default_factory=AdapterSettings)
    plan: PlanSettings = Field(default_factory=PlanSettings)
    prune: PruneSettings = Field(default_factory=PruneSettings)
    local: LocalSettings = Field(default_factory=LocalSettings)
    upload: UploadSettings = Field(default_factory=UploadSettings)
    download: DownloadSettings = Field(default_factory=DownloadSettings)
    aggregate: AggregateSettings = Field(default_factory=AggregateSettings)
    hooks: HookSettings = Field(default_factory=HookSettings)
    privacy: PrivacySettings = Field(default_factory=PrivacySettings)
    client_privacy: ClientPrivacySettings = Field(default_factory=ClientPrivacySettings)
    devices: DevicesSettings = Field(default_factory=DevicesSettings)
    run: RunSettings = Field(default_factory=RunSettings)

    def as_json(self) -> dict[str, Any]:
        """The config as plain data, section by section."""
        data: dict[str, Any] = ADAPTER.dump_python(self, mode="json")
        return data

    def digest(self) -> str:
        """SHA-256 of the config as JSON: equal exactly if all settings are equal."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()


ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)


def fields_of(settings: type[Any]) -> Mapping[str, FieldInfo]:
    """The fields of a settings dataclass, with their descriptions."""
    described: Mapping[str, FieldInfo] = settings.__pydantic_fields__
    return described


def _sections() -> dict[str, type[Any]]:
    kinds = {name: info.annotation for name, info in fields_of(Config).items() if name != "method"}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type)}


SECTIONS: Mapping[str, type[Any]] = _sections()


@plain_dataclass(frozen=True, slots=True)
class Key:
    """One key of a config, as help texts show it."""

    section: str
    name: str
    default: Any
    description: str  # with the registered names, where the key names something registered


def describe_keys(section: str) -> list[Key]:
    """The keys of one section, in order."""
    settings = SECTIONS[section]
    default = settings()
    return [
        Key(section, name, getattr(default, name), _describe(info))
        for name, info in fields_of(settings).items()
    ]


def describe_method() -> str:
    """The description of the key `method`."""
    return str(fields_of(Config)["method"].description)


def _describe(info: FieldInfo) -> str:
    """The description of a key, with the registered names that it does not mention."""
    description = str(info.description)
    names = next((m.names for m in info.metadata if isinstance(m, NameIn)), [])
    missing = [name for name in names if not _mentions(description, name)]
    if not missing:
        return description
    if len(missing) == len(names):
        return f"{description}: {', '.join(names)}"
    return f"{description} (also {', '.join(missing)})"


def _mentions(description: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", description) is not None
