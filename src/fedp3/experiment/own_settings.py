"""Settings of a run of a user's own network and data, and defaults that fit them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedp3.client.batching import AUTO as AUTO_OBJECTIVE
from fedp3.client.objectives import OBJECTIVES, Objective
from fedp3.config import Config
from fedp3.core.errors import InputError, type_of
from fedp3.core.settings import OWN
from fedp3.core.types import Layer
from fedp3.data import Dataset
from fedp3.data.catalogue import POOLED
from fedp3.data.gathering import Gathered
from fedp3.methods import METHODS
from fedp3.models.layer_map import layer_map
from fedp3.planning.layer_sets import smallest_cover

SAMPLES_PER_CLIENT = 10  # at least, where the number of clients is left out


def check_arguments(model: object, on_round: object, settings: Mapping[str, Any]) -> None:
    """Refuse arguments of `fedp3.run` that are something else, before anything is trained."""
    if isinstance(model, type):
        raise InputError(f"the model is the class {model.__name__}; pass an instance of it")
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {type_of(model)}, want an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model is scripted, and its layers cannot be followed; pass the "
            "nn.Module that it was scripted from"
        )
    if isinstance(model, torch.fx.GraphModule) and "train" in vars(model):
        # torch.export replaces this method by one that raises.
        raise InputError(
            "the model is exported, and can no longer be trained; pass the nn.Module that it was "
            "exported from"
        )
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round is {type_of(on_round)}, want a function of one record")
    for section, what in (("data", "data set"), ("model", "model")):
        named = settings.get(section)
        name = named.get("name", OWN) if isinstance(named, Mapping) else OWN
        if name != OWN:
            raise InputError(
                f"{section}={{'name': {name!r}}} names a {what}, and fedp3.run is passed one; to "
                "use a name, write a config and call fedp3 run, or pass fedp3.load_dataset(...)"
            )
    part = _section_of(settings, "data").get("test", POOLED)
    if part not in (POOLED, OWN):
        raise InputError(
            f"data={{'test': {part!r}}} is for data sets with a name; pass "
            "fedp3.load_dataset(..., test='official'), or a test set of your own as test="
        )


def chosen_objective(objective: object, settings: Mapping[str, Any]) -> Objective | None:
    """The objective that was passed to `fedp3.run`, or named in its settings; None if none was."""
    local = settings.get("local", {})
    named = local.get("objective", AUTO_OBJECTIVE) if isinstance(local, Mapping) else AUTO_OBJECTIVE
    if objective != AUTO_OBJECTIVE and named != AUTO_OBJECTIVE:
        raise InputError("objective= and local={'objective': ...} both name one; pass one of them")
    chosen = named if objective == AUTO_OBJECTIVE else objective
    if isinstance(chosen, Objective) and chosen is objective:
        return chosen
    if not isinstance(chosen, str):
        raise InputError(f"the objective is {type_of(chosen)}, want a name or an Objective")
    return None if chosen == AUTO_OBJECTIVE else OBJECTIVES.pick(chosen)


def with_own_parts(
    settings: Mapping[str, Any], objective: str | Objective, gathered: Gathered
) -> dict[str, Any]:
    """The settings, in which the parts that were passed to `fedp3.run` are named as such."""
    own: dict[str, dict[str, Any]] = {"data": {"name": OWN}, "model": {"name": OWN}}
    if gathered.data.test is not None:
        own["data"]["test"] = OWN
    if objective != AUTO_OBJECTIVE:
        own["local"] = {"objective": objective if isinstance(objective, str) else OWN}
    if gathered.parts is not None:
        clients = len(gathered.parts)
        given = _section_of(settings, "partition").get("clients", clients)
        if given != clients:
            raise InputError(
                f"partition={{'clients': {given!r}}}: the data are those of {clients} clients; "
                "leave it out"
            )
        own["partition"] = {"kind": OWN, "clients": clients}
    if gathered.batch is not None:  # what the settings name comes first
        batch = {"batch": gathered.batch, **_section_of(settings, "local")}["batch"]
        own.setdefault("local", {})["batch"] = batch
    merged = {s: {**_section_of(settings, s), **keys} for s, keys in own.items()}
    return {**settings, **merged}


def with_fitting_defaults(
    settings: Mapping[str, Any],
    model: nn.Module,
    data: Dataset,
    layers: Mapping[Layer, Sequence[str]] | None,
) -> dict[str, Any]:
    """The settings, in which what the user left out fits this network and these data.

    The defaults of a config file are those of a fleet of 20 clients with several classes each.
    Fewer classes, samples or clients than that must not make the shortest call fail.
    """
    filled = {key: dict(v) if isinstance(v, Mapping) else v for key, v in settings.items()}
    sections = {s: filled.setdefault(s, {}) for s in ("partition", "run", "plan")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return filled  # the config says what is wrong
    split, run, plan = sections.values()
    standard = Config()
    if "file" not in split:
        enough = max(1, min(standard.partition.clients, len(data.y) // SAMPLES_PER_CLIENT))
        split.setdefault("clients", enough)
        if data.labelled:
            trained = int(data.y.max()) + 1  # a test set may have further classes
            split.setdefault("classes", min(standard.partition.classes, trained))
        else:
            split.setdefault("kind", "iid")
    clients = split.get("clients", standard.partition.clients)
    if not isinstance(clients, int) or clients < 1:
        return filled
    mode = filled.get("client_privacy", {})  # under it, coins choose who takes part
    if not (isinstance(mode, Mapping) and mode.get("enabled")):
        run.setdefault("clients_per_round", min(standard.run.clients_per_round, clients))
    decided = METHODS.get(str(filled.get("method", standard.method)))
    devices = filled.get("devices", {})
    if isinstance(devices, Mapping) and devices.get("fleet"):
        return filled  # layers are chosen for devices, or as the config says
    if decided is None or "layers" not in decided.settings.get("plan", {}):
        plan.setdefault("layers", smallest_cover(len(layer_map(model, layers).hidden), clients))
    return filled


def _section_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, Mapping):
        raise InputError(f"{name}={section!r:.40}: want a dict of settings, as in {name}={{...}}")
    return section
