"""Settings that follow from others where the user leaves them open."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from fedp3.config.over_rounds import wrong_downloads
from fedp3.config.schema import Config
from fedp3.methods import METHODS
from fedp3.planning.layer_sets import AUTO
from fedp3.planning.schedules import SCHEDULES

# Codes of uploads among which each device gets the finest that costs it no local step.  Rounding
# to 8 bits at random is unbiased; what the shorter ones lose is added to the next change.
UPLOAD_CODES = ("int8", "int4", "ternary")
# A copy has 16 bits a value, and ten changes fit into one: most phones of a round need fewer.
DOWNLOAD_CODE = "ternary"


def resolve_others(config: Config) -> Config:
    """The config with `plan.others = "auto"` resolved.

    Layers outside L_i train.  They are frozen under LDP, under schedules that say so, and where
    layers are chosen for devices: what is trained there and not uploaded costs time and memory, and
    the server gains nothing.
    """
    plan = config.plan
    if plan.others != "auto":
        return config
    if config.privacy.enabled or plan.layers == AUTO or SCHEDULES.pick(plan.schedule).freezes:
        return replace(config, plan=replace(config.plan, others="freeze"))
    return replace(config, plan=replace(config.plan, others="train"))


def resolve_devices(config: Config, given: Collection[tuple[str, str]]) -> tuple[Config, list[str]]:
    """The config in which layers and shares are chosen for devices, if it asks for that.

    Methods of sub-models and FedAvg have no layer sets to choose; the former have shares.
    """
    plans = config.devices.plans
    if not plans:
        named = {"[plan] layers": config.plan.layers, "[prune] keep": config.prune.keep}
        return config, [
            f"{key}: 'auto' chooses for each device, and no devices are described; set "
            "[devices] fleet, with planner = 'auto'"
            for key, value in named.items()
            if value == AUTO
        ]
    row = METHODS.pick(config.method).settings
    of_method = row.get("plan", {}).get("layers", AUTO)
    layers = str(of_method) if of_method in ("full", "prune-all") else AUTO
    keep = 1.0 if layers == "full" else AUTO
    wanted: Mapping[tuple[str, str], object] = {("plan", "layers"): layers, ("prune", "keep"): keep}
    mistakes = [
        f"[{section}] {key}: {value!r}, but [devices] planner = 'auto' chooses it for each device; "
        "leave it out, or set planner = 'manual'"
        for (section, key), chosen in wanted.items()
        if (section, key) in given and (value := getattr(getattr(config, section), key)) != chosen
    ]
    plan = replace(config.plan, layers=layers)
    config = replace(config, plan=plan, prune=replace(config.prune, keep=keep))
    if layers == AUTO and not config.privacy.enabled:
        config = _with_codes(config, {*given, *((s, key) for s in row for key in row[s])})
    return config, mistakes


def _with_codes(config: Config, named: Collection[tuple[str, str]]) -> Config:
    """The config with codes in both directions, where neither the user nor the method names one."""
    if ("upload", "compress") not in named:
        finest, *coarser = UPLOAD_CODES
        config = replace(config, upload=replace(config.upload, compress=finest))
        if ("devices", "codes") not in named:
            config = replace(config, devices=replace(config.devices, codes=tuple(coarser)))
    if ("download", "compress") in named:
        return config
    coded = replace(config, download=replace(config.download, compress=DOWNLOAD_CODE))
    return config if wrong_downloads(coded) else coded


def resolve_participants(config: Config, given: Collection[tuple[str, str]]) -> Config:
    """The config in which, under client-level DP, all clients are candidates by default."""
    if not config.client_privacy.enabled or ("run", "clients_per_round") in given:
        return config
    return replace(config, run=replace(config.run, clients_per_round=0))
