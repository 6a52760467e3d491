"""Mistakes that several keys of a config make together, and where it differs from its method."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from fedp3 import methods
from fedp3.config.over_rounds import wrong_over_rounds
from fedp3.config.schema import Config
from fedp3.config.toml import toml_value
from fedp3.data.catalogue import TEXT
from fedp3.data.partition import ROLES
from fedp3.devices.round_ends import ROUND_ENDS
from fedp3.methods import METHODS
from fedp3.planning.layer_sets import AUTO
from fedp3.planning.prune_settings import SELECTORS
from fedp3.planning.schedules import SCHEDULES
from fedp3.privacy.requirements import refused_settings
from fedp3.server.aggregators import MEANS_OF_CHANGES


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
    if layers == AUTO and ("upload", "compress") not in given and not config.privacy.enabled:
        # Random rounding to 8 bits is unbiased, and an upload takes a quarter of the time.
        config = replace(config, upload=replace(config.upload, compress="int8"))
    return config, mistakes


def resolve_participants(config: Config, given: Collection[tuple[str, str]]) -> Config:
    """The config, in which under client-level DP all clients are candidates unless it says not."""
    if not config.client_privacy.enabled or ("run", "clients_per_round") in given:
        return config
    return replace(config, run=replace(config.run, clients_per_round=0))


def contradictions(c: Config, given: Collection[tuple[str, str]] = ()) -> list[str]:
    """All mistakes that several keys make together.

    Args:
        c: the config.
        given: (section, key) of the keys that the user set.
    """
    mistakes = _wrong_sizes(c, given) + _wrong_uploads(c) + wrong_over_rounds(c)
    mistakes += _wrong_data(c, given) + _wrong_steps(c)
    mistakes += refused_settings(c.plan, c.privacy) + _wrong_client_privacy(c)
    mistakes += _wrong_devices(c, given)
    return mistakes + methods.clashes(c.hooks, c.plan, c.prune, c.local)


def _wrong_sizes(c: Config, given: Collection[tuple[str, str]]) -> list[str]:
    """Numbers that do not fit the number of clients."""
    n = c.partition.clients
    per_round = c.run.clients_per_round
    participants = per_round or n
    default = "" if ("run", "clients_per_round") in given else " (the default)"
    reasons = {
        f"[run] clients_per_round: {per_round}{default} of {n} clients; set 1 to {n}, or 0 for "
        "all": per_round > n,
        f"[run] quorum: {c.run.quorum}, more than the {participants} participants of a round": (
            c.run.quorum > participants
        ),
        "[run] patience: without evaluations, nobody knows whether G improves; set [run] "
        "eval_every": c.run.patience > 0 and c.run.eval_every == 0,
        f"[partition] sizes: {c.partition.sizes!r}, but with kind 'roles' each client has what its "
        "role says; leave sizes out": (
            c.partition.kind == ROLES and c.partition.sizes != type(c.partition)().sizes
        ),
        f"[partition] sizes: {_length(c.partition.sizes)} numbers for {n} clients": (
            isinstance(c.partition.sizes, tuple) and len(c.partition.sizes) != n
        ),
        "[prune] keep: the list is empty; name a share in (0, 1] for all clients, or one for each "
        "device class": c.prune.keep == (),
        "[local] steps: 0 steps and 0 epochs train nothing; set one of them": (
            c.local.steps == 0 and c.local.epochs == 0
        ),
        f"[prune] keep: {_length(c.prune.keep)} device classes for {n} clients": (
            isinstance(c.prune.keep, tuple) and len(c.prune.keep) > n
        ),
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_data(c: Config, given: Collection[tuple[str, str]]) -> list[str]:
    """Settings of texts for another data set, and a text without a file."""
    if c.data.name == TEXT:
        return [] if c.data.path else ["[data] path: name = 'text' needs a file; set path"]
    usual = type(c.data)()
    unused = sorted(key for section, key in given if section == "data" and key != "name")
    return [
        f"[data] {key}: only read with name = 'text'"
        for key in unused
        if getattr(c.data, key) != getattr(usual, key)
    ]


def _wrong_steps(c: Config) -> list[str]:
    """Settings of local steps that do not go together."""
    local = c.local
    by_units = SELECTORS.pick(c.prune.selector).units is not None and c.prune.shrinks
    reasons = {
        f"[local] momentum: {local.optimizer!r} has betas in its place; leave it at 0": (
            local.momentum > 0 and local.optimizer != "sgd"
        ),
        "[local] optimizer_state: 'client' remembers numbers for weights, and a selector of units "
        "leaves a client other weights in every round; set 'round', or [prune] physical to false": (
            local.optimizer_state == "client" and by_units
        ),
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_uploads(c: Config) -> list[str]:
    """Plans whose uploads make no sense."""
    plan, topk = c.plan, c.upload.compress == "topk"
    reasons = {
        "[plan] layers: 'prune-all' uploads pruned layers; set [plan] upload to 'retained' or "
        "'zeros'": (
            plan.layers == "prune-all" and plan.upload == "none" and plan.others != "personal"
        ),
        f"[plan] others: what is uploaded pruned ([plan] upload={plan.upload!r}) is trained, not "
        "frozen; set upload to 'none', or others to 'train'": (
            plan.others in ("freeze", "hold") and plan.upload != "none" and not c.privacy.enabled
        ),
        "[plan] others: personal layers must be the same for the entire run; set redraw to false "
        "and schedule to 'always'": plan.others == "personal" and plan.changes,
        "[upload] compress: 'topk' sends changes, and a head that is never sent has none; use "
        "'fp16' or 'int8'": topk and plan.head == "personal_uploaded",
        "[upload] compress: 'topk' sends a share of every tensor, of which 'magnitude_all' may "
        "retain nothing": topk and c.prune.selector == "magnitude_all",
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_client_privacy(c: Config) -> list[str]:
    """Settings that would break the guarantee of client-level DP."""
    mode, run = c.client_privacy, c.run
    if not mode.enabled:
        return []
    reasons = {
        "[client_privacy] enabled: [privacy] is enabled too; one protects clients from everybody "
        "but the server, the other records from the server as well, and their epsilons cannot be "
        "told apart in one run; disable one of them": c.privacy.enabled,
        "[client_privacy] noise_multiplier: 0 means no noise, which only an infinite epsilon "
        "allows; set epsilon to inf, or noise_multiplier to 'auto'": (
            mode.noise_multiplier == 0 and math.isfinite(mode.epsilon)
        ),
        f"[aggregate] rule: {c.aggregate.rule!r} gives clients different weights, and the clip of "
        "client-level DP bounds the influence of a client only if all count the same; set "
        "'simple'": c.aggregate.rule != "simple",
        "[aggregate] damp, recycle, select, interval: under client-level DP a round releases "
        "nothing but its noised sum; set damp, recycle and select to 0, and interval to 1": (
            c.aggregate.damp > 0
            or c.aggregate.recycle > 0
            or c.aggregate.select > 0
            or c.aggregate.interval > 1
        ),
        f"[run] clients_per_round: {run.clients_per_round} clients in each round is no Poisson "
        "sampling; set 0, and the share of clients with [client_privacy] sample_rate": (
            run.clients_per_round != 0
        ),
        f"[run] quorum: {run.quorum}: under client-level DP no round is void because few clients "
        "answered, since that would be seen; leave quorum at 1, which is not applied": (
            run.quorum > 1
        ),
        "[plan] head: 'personal_uploaded' is never sent, so that its upload is no change, which is "
        "what client-level DP clips; set 'shared' or 'personal'": (
            c.plan.head == "personal_uploaded"
        ),
        f"[prune] selector: {c.prune.selector!r} divides units among the participants; under "
        "client-level DP no upload may depend on who else takes part; use another one": (
            SELECTORS.pick(c.prune.selector).deals
        ),
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_devices(c: Config, given: Collection[tuple[str, str]]) -> list[str]:
    """Settings of devices that make no sense together."""
    devices = c.devices
    if not devices.described:
        unused = [key for section, key in given if section == "devices" and key != "fleet"]
        fresh = type(devices)()
        differing = [key for key in unused if getattr(devices, key) != getattr(fresh, key)]
        return [
            f"[devices] {key}: no devices are described; set fleet, e.g. to 'phones'"
            for key in sorted(differing)
        ]
    mode = ROUND_ENDS.pick(devices.round_end)
    participants = c.run.clients_per_round or c.partition.clients
    reasons = {
        f"[devices] fleet: {_length(devices.fleet)} devices for {c.partition.clients} clients; "
        "want one for each": (
            isinstance(devices.fleet, tuple) and len(devices.fleet) != c.partition.clients
        ),
        "[devices] round_end: 'deadline' needs one; set round_seconds": (
            devices.round_end == "deadline" and not devices.round_seconds
        ),
        f"[devices] round_end: {devices.round_end!r} lets the number of participants depend on "
        "who else takes part, which client-level DP does not allow; set 'wait' or 'deadline'": (
            c.client_privacy.enabled and (mode.over_selects or mode.end is None)
        ),
        f"[devices] buffer: {devices.buffer} arrivals end a round, but only {participants} clients "
        "compute at any time; set 1 to that number, or 0 for half of it": (
            mode.end is None and devices.buffer > participants
        ),
    }
    if mode.end is None:
        reasons |= _wrong_overlap(c)
    return [text for text, applies in reasons.items() if applies]


def _wrong_overlap(c: Config) -> dict[str, bool]:
    """What rounds that overlap do not allow."""
    return {
        "[devices] round_end: 'buffered' is not accounted for under LDP; set 'wait'": (
            c.privacy.enabled
        ),
        f"[aggregate] rule: {c.aggregate.rule!r} weighs an update by where it is, which says "
        "nothing about one that started from an older model ([devices] round_end = 'buffered'); "
        "set 'simple', 'examples' or 'weighted'": c.aggregate.rule not in MEANS_OF_CHANGES,
        f"[hooks] exchange: the tensors of {c.hooks.exchange!r} belong to one round, and with "
        "[devices] round_end = 'buffered' rounds overlap; set 'wait' or 'deadline'": (
            c.hooks.exchange != type(c.hooks)().exchange
        ),
        f"[prune] selector: {c.prune.selector!r} divides units among the clients of a round, and "
        "with [devices] round_end = 'buffered' rounds overlap": (
            SELECTORS.pick(c.prune.selector).deals
        ),
    }


def _length(value: object) -> int:
    return len(value) if isinstance(value, tuple) else 0


def overruled(c: Config) -> list[str]:
    """Settings of this config that differ from those of its method.

    The capacities of devices (`prune.keep`) describe the fleet, so that they do not count, unless
    the method prunes nothing and they do not say who is weak either.
    """
    differences = []
    for section, keys in METHODS.pick(c.method).settings.items():
        settings = getattr(c, section)
        usual = type(settings)(**keys)
        for key in keys:
            value, of_method = getattr(settings, key), getattr(usual, key)
            is_capacity = (section, key) == ("prune", "keep") and (
                of_method != 1.0 or c.plan.weak_below > 0
            )
            is_capacity = is_capacity or value == AUTO
            if value != of_method and not is_capacity:
                differences.append(
                    f"{section}.{key}={toml_value(value)} ({c.method}: {toml_value(of_method)})"
                )
    return differences
