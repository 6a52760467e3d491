"""Mistakes that several keys of a config make together, and where it differs from its method."""

from collections.abc import Collection
from dataclasses import replace

from fedp3 import methods
from fedp3.config.schema import Config
from fedp3.config.toml import toml_value
from fedp3.methods import METHODS
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


def contradictions(c: Config, given: Collection[tuple[str, str]] = ()) -> list[str]:
    """All mistakes that several keys make together.

    Args:
        c: the config.
        given: (section, key) of the keys that the user set.
    """
    mistakes = _wrong_sizes(c, given) + _wrong_uploads(c)
    mistakes += refused_settings(c.plan, c.privacy)
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
