"""Mistakes that several keys of a config make together, and where it differs from its method."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from fedp3 import methods
from fedp3.config.over_rounds import wrong_downloads, wrong_over_rounds
from fedp3.config.schema import Config
from fedp3.config.toml import toml_value
from fedp3.data.catalogue import OF_FILES
from fedp3.data.partition import ROLES
from fedp3.devices.round_ends import ROUND_ENDS
from fedp3.messages.compressors import COMPRESSORS
from fedp3.messages.versions import is_coded
from fedp3.methods import METHODS
from fedp3.models.adapters import ADAPTER_RULES, NONE
from fedp3.models.hf import HF
from fedp3.planning.layer_sets import AUTO
from fedp3.planning.prune_settings import SELECTORS
from fedp3.planning.schedules import SCHEDULES
from fedp3.privacy.requirements import refused_settings
from fedp3.server.products import WEIGHTS


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


# Codes of uploads among which each device gets the finest that costs it no local step.  Rounding
# to 8 bits at random is unbiased; what the shorter ones lose is added to the next change.
UPLOAD_CODES = ("int8", "int4", "ternary")
# A copy has 16 bits a value, and ten changes fit into one: most phones of a round need fewer.
DOWNLOAD_CODE = "ternary"


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
    mistakes += _wrong_devices(c, given) + _wrong_adapters(c, given)
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
    """Settings of files for another data set or network, and a file or folder that is missing."""
    reasons = []
    read = OF_FILES.get(c.data.name, frozenset())
    usual = type(c.data)()
    if read and not c.data.path:
        reasons.append(f"[data] path: name = {c.data.name!r} needs a file; set path")
    if read and c.data.test != usual.test:
        reasons.append(
            f"[data] test: {c.data.test!r} is for published data sets; with name = "
            f"{c.data.name!r} name a second file in test_path"
        )
    if c.model.name == HF and not c.model.path:
        reasons.append("[model] path: name = 'hf' needs a folder; set path")
    for section, key in sorted(given):
        if section != "data" or key in ("name", "test", *read):
            continue
        if getattr(c.data, key) != getattr(usual, key):
            readers = [repr(name) for name, keys in OF_FILES.items() if key in keys]
            reasons.append(f"[data] {key}: only read with name = {' or '.join(readers)}")
    if c.model.path and c.model.name != HF:
        reasons.append("[model] path: only read with name = 'hf'")
    return reasons


def _wrong_steps(c: Config) -> list[str]:
    """Settings of local steps that do not go together."""
    local = c.local
    by_units = SELECTORS.pick(c.prune.selector).units is not None and c.prune.shrinks
    reasons = {
        f"[local] momentum: {local.optimizer!r} has betas in its place; leave it at 0": (
            local.momentum > 0 and local.optimizer != "sgd"
        ),
        "[prune] heads: [hooks] scale divides the outputs of pruned layers, and heads have no "
        "outputs of their own that could be; set one of them to false": (
            c.prune.heads and c.hooks.scale
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
        "[aggregate] damp, recycle, interval: under client-level DP a round releases nothing but "
        "its noised sum; set damp and recycle to 0, and interval to 1": (
            c.aggregate.damp > 0 or c.aggregate.recycle > 0 or c.aggregate.interval > 1
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


def _wrong_adapters(c: Config, given: Collection[tuple[str, str]]) -> list[str]:
    """Adapters, and rules for them, that do not go with the rest."""
    adapter, aggregate = c.adapter, c.aggregate
    if adapter.kind == NONE:
        unused = sorted(key for section, key in given if section == "adapter" and key != "kind")
        usual = type(adapter)()
        return [
            f"[adapter] {key}: there are no adapters; set kind = 'lora'"
            for key in unused
            if getattr(adapter, key) != getattr(usual, key)
        ] + _wrong_norm(c)
    combined = ADAPTER_RULES.pick(adapter.rule).combines
    after = f"[adapter] rule: under {adapter.rule!r} the matrices of two rounds have nothing in "
    after += "common but their product, so that "
    reasons = {
        f"[aggregate] rule: {aggregate.rule!r} does not say how much a client's product counts; "
        f"with [adapter] rule = {adapter.rule!r} set 'simple', 'examples' or 'weighted'": (
            combined and aggregate.rule not in WEIGHTS
        ),
        after + "no optimizer, damping, recycling or interval can follow the mean; set [aggregate] "
        "server to 'none', server_lr and interval to 1, damp and recycle to 0": combined
        and (
            aggregate.server != "none"
            or aggregate.server_lr != 1
            or aggregate.damp > 0
            or aggregate.recycle > 0
            or aggregate.interval > 1
        ),
        after + "an update of an older model cannot be moved to the present one; set [devices] "
        "round_end to 'wait' or 'deadline'": (
            combined and ROUND_ENDS.pick(c.devices.round_end).end is None
        ),
        after + "changes of matrices that are coded on the way down do not add up; set [download] "
        "compress to 'none', or the rule to 'freeze_a' or 'factors'": (
            combined and is_coded(c.download)
        ),
        after + "their change has no meaning that client-level DP could clip; set 'freeze_a'": (
            combined and c.client_privacy.enabled
        ),
        "[adapter] rule: 'stack' sends all clients what was added to the weights, and [devices] "
        "planner = 'auto' does not count that; use another rule, or planner = 'manual'": (
            adapter.rule == "stack" and c.devices.plans
        ),
        "[hooks] scale: the outputs of an adapter are not divided by its share of the rank; set "
        "scale to false": c.hooks.scale,
    }
    return [text for text, applies in reasons.items() if applies] + _wrong_norm(c)


def _wrong_norm(c: Config) -> list[str]:
    exact = c.adapter.kind != NONE and c.adapter.rule == "factors"
    if c.aggregate.rule != "product_norm" or exact:
        return []
    return [
        "[aggregate] rule: 'product_norm' weighs clients by the product of two matrices that both "
        "are uploaded; set [adapter] kind = 'lora' and rule = 'factors'"
    ]


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
    if devices.codes:
        reasons |= _wrong_codes(c)
    return [text for text, applies in reasons.items() if applies]


def _wrong_codes(c: Config) -> dict[str, bool]:
    """Where no code can be chosen for each device."""
    sparse = [code for code in c.devices.codes if (x := COMPRESSORS.pick(code)) and x.sparse]
    return {
        "[devices] codes: chosen together with windows of layers, and this run chooses none; leave "
        "codes out and set [upload] compress, or set [devices] planner to 'auto' with a method "
        "such as fedp3": c.plan.layers != AUTO,
        "[devices] codes: under LDP all devices have one code, which the audit checks; leave codes "
        "out and set [upload] compress": c.privacy.enabled,
        f"[devices] codes: {', '.join(sparse)} sends some coordinates, whose number is not what "
        "bits are chosen for; leave it out": bool(sparse),
    }


def _wrong_overlap(c: Config) -> dict[str, bool]:
    """What rounds that overlap do not allow."""
    return {
        "[devices] round_end: 'buffered' is not accounted for under LDP; set 'wait'": (
            c.privacy.enabled
        ),
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
