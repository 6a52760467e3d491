"""Mistakes that several keys of a config make together, and where it differs from its method."""

import math
from collections.abc import Collection
from dataclasses import replace

from fedp3 import methods
from fedp3.config.schema import Config
from fedp3.config.toml import toml_value
from fedp3.methods import METHODS
from fedp3.planning.prune_settings import SELECTORS
from fedp3.privacy.requirements import refused_settings


def resolve_others(config: Config) -> Config:
    """The config with `plan.others = "auto"` resolved.

    Layers outside L_i train; under LDP they are frozen.
    """
    if config.plan.others != "auto":
        return config
    if config.privacy.enabled:
        return replace(config, plan=replace(config.plan, others="freeze"))
    return replace(config, plan=replace(config.plan, others="train"))


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
    mistakes = _wrong_sizes(c, given) + _wrong_uploads(c)
    mistakes += refused_settings(c.plan, c.privacy) + _wrong_client_privacy(c)
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
        f"[run] quorum: {c.run.quorum} updates of {participants} participants can never come": (
            c.run.quorum > participants
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
            plan.others == "freeze" and plan.upload != "none" and not c.privacy.enabled
        ),
        "[plan] others: personal layers must be the same for the entire run; set redraw to false": (
            plan.others == "personal" and plan.redraw
        ),
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


def _length(value: object) -> int:
    return len(value) if isinstance(value, tuple) else 0


def overruled(c: Config) -> list[str]:
    """Settings of this config that differ from those of its method.

    The capacities of devices (`prune.keep`) describe the fleet, so that they do not count, unless
    the method prunes nothing.
    """
    differences = []
    for section, keys in METHODS.pick(c.method).settings.items():
        settings = getattr(c, section)
        usual = type(settings)(**keys)
        for key in keys:
            value, of_method = getattr(settings, key), getattr(usual, key)
            is_capacity = (section, key) == ("prune", "keep") and of_method != 1.0
            if value != of_method and not is_capacity:
                differences.append(
                    f"{section}.{key}={toml_value(value)} ({c.method}: {toml_value(of_method)})"
                )
    return differences
