"""Mistakes that several keys of a config make together, and where it differs from its method."""

import math
from collections.abc import Collection

from fedp3 import methods
from fedp3.config.over_rounds import wrong_over_rounds
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
from fedp3.privacy.requirements import refused_settings
from fedp3.server.products import WEIGHTS


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
        ]
    combined = ADAPTER_RULES.pick(adapter.rule).combines
    by_norm = adapter.weights == "norm"
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
        f"[adapter] weights: 'norm' is of a product of two matrices that are both averaged; under "
        f"{adapter.rule!r} set 'rule', or set rule = 'factors'": (
            by_norm and adapter.rule != "factors"
        ),
        "[aggregate] rule: with [adapter] weights = 'norm' set 'simple', 'examples' or 'weighted', "
        f"which layers without adapters follow; got {aggregate.rule!r}": (
            by_norm and aggregate.rule not in WEIGHTS
        ),
        "[adapter] weights: 'norm' gives clients different weights, which client-level DP does not "
        "allow; set 'rule'": by_norm and c.client_privacy.enabled,
        "[hooks] scale: the outputs of an adapter are not divided by its share of the rank; set "
        "scale to false": c.hooks.scale,
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
