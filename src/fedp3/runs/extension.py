"""More rounds for a run than it was begun with.

A round does not depend on how many rounds follow it, so that a run of 100 rounds that goes on to
300 ends at the same bits as one of 300.  Runs in which something was derived from the number of
rounds are refused.  The folder records every extension, and its config is the extended one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedp3 import config
from fedp3.config import Config
from fedp3.config.plugins import Plugin
from fedp3.core.errors import InputError
from fedp3.core.files import locked, read_json, write_atomic, write_json
from fedp3.experiment.experiment import Experiment
from fedp3.experiment.fingerprint import check_fingerprint
from fedp3.privacy import accountant, ledger
from fedp3.privacy.budget import count_tasks
from fedp3.privacy.client_level.budget import FOLDER as RELEASES
from fedp3.privacy.settings import AUTO, Budget
from fedp3.runs.checkpoint import load_checkpoint, save_checkpoint
from fedp3.runs.description import describe
from fedp3.runs.existing import by_key, check_plugins, reopen

ROUNDS = ("run", "rounds")
MODES = ("privacy", "client_privacy")  # sections with an epsilon that is for the entire run
EXTENDABLE = (ROUNDS, *((mode, "epsilon") for mode in MODES))
CHANGED = {*EXTENDABLE, *((mode, "noise_multiplier") for mode in MODES)}
# of run.json, what the extended config changes
DESCRIBED = ("config", "digest", "privacy", "client_privacy", "warnings")

Changes = Mapping[tuple[str, str], tuple[Any, Any]]  # (section, key) -> before and after


def extended(folder: Path, wanted: Config) -> Config:
    """The config with which a run goes on, if it is wanted with more rounds.

    The noise multiplier is the one that the run was begun with: "auto" would find another one.
    Nothing is written.

    Args:
        folder: the run folder.
        wanted: the config that the caller has.

    Raises:
        InputError: the run cannot be extended like this.
    """
    now, about = reopen(folder), read_json(folder / "run.json")
    if not about.get("extended") and not _changes(now, wanted).keys() & set(EXTENDABLE):
        return wanted
    for mode in MODES:
        noise = about.get(mode, {}).get("noise_multiplier")
        if noise is not None:
            wanted = _with(wanted, mode, noise_multiplier=noise)
    changes = _changes(now, wanted)
    if not changes or not changes.keys() <= CHANGED:
        return wanted  # the same run, or another one, which is refused as such
    reasons = [reason for rule in REFUSALS for reason in rule(folder, now, changes)]
    if reasons:
        raise InputError(f"{folder} cannot be extended: " + "; ".join(reasons))
    return wanted


def _changes(before: Config, after: Config) -> Changes:
    old, new = by_key(before), by_key(after)
    return {key: (old[key], value) for key, value in new.items() if old[key] != value}


def _with(settings: Config, section: str, **values: Any) -> Config:
    changed = replace(getattr(settings, section), **values)
    return replace(settings, **{section: changed})


# --------------------------------------------------------------------------- refusals


def _rounds_grow(folder: Path, now: Config, changes: Changes) -> Sequence[str]:
    before, after = changes.get(ROUNDS, (now.run.rounds, now.run.rounds))
    if after > before:
        return []
    return [f"it has {before} rounds, and run.rounds={after} is not more"]


def _on_nodes(folder: Path, now: Config, changes: Changes) -> Sequence[str]:
    if not (folder / "flower.json").exists():
        return []
    return ["its nodes agreed to the config that it was begun with; start a new run"]


def _learning_rate(folder: Path, now: Config, changes: Changes) -> Sequence[str]:
    if now.local.schedule == "constant":
        return []
    return [
        f"local.schedule = {now.local.schedule!r} lowers the learning rate over the "
        f"{now.run.rounds} rounds that it was begun with"
    ]


def _noise(folder: Path, now: Config, changes: Changes) -> Sequence[str]:
    return [
        f"its noise was derived from {now.run.rounds} rounds and {mode}.epsilon = "
        f"{getattr(now, mode).epsilon:g}; also give a new total, as in {mode}.epsilon=..."
        for mode in MODES
        if getattr(now, mode).enabled
        and getattr(now, mode).noise_multiplier == AUTO
        and (mode, "epsilon") not in changes
    ]


# Each returns the reasons why a run cannot be extended.  What derives something else from the
# number of rounds adds a rule here.
REFUSALS: Sequence[Callable[[Path, Config, Changes], Sequence[str]]] = (
    _rounds_grow,
    _on_nodes,
    _learning_rate,
    _noise,
)


# --------------------------------------------------------------------------- on disk


def extend(folder: Path, experiment: Experiment, plugins: Sequence[Plugin]) -> bool:
    """Record that a run continues with this experiment's config; returns whether it is new.

    Whoever reads the folder while it is written finds the old run, or the extended one.

    Args:
        folder: the run folder.
        experiment: the run, assembled from a config of `extended`.
        plugins: the files that the caller uses.
    """
    now, new = reopen(folder), experiment.config
    changes = _changes(now, new)
    if ROUNDS not in changes or not changes.keys() <= CHANGED:
        return False
    check_plugins(folder, plugins)
    check_fingerprint(folder, experiment)
    with locked(folder):
        checkpoint, _ = load_checkpoint(folder, now.digest())
        done = 0 if checkpoint is None else checkpoint.state.t
        _check_affordable(folder, experiment, now, done)
        about = read_json(folder / "run.json")
        entry = {
            "after_round": done,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "changes": {f"{s}.{k}": [before, after] for (s, k), (before, after) in changes.items()},
            "digest_before": now.digest(),
        }
        described = describe(experiment)
        about |= {key: described[key] for key in DESCRIBED if key in described}
        about["extended"] = [*about.get("extended", []), entry]
        if checkpoint is not None:
            save_checkpoint(folder, checkpoint, new.digest())
        (folder / "result.json").unlink(missing_ok=True)
        write_json(folder / "run.json", about)
        write_atomic(folder / "config.toml", config.to_toml(new).encode())
    return True


def _check_affordable(folder: Path, experiment: Experiment, before: Config, done: int) -> None:
    """Refuse a total epsilon that the remaining rounds exceed, where it was found for fewer.

    With a noise multiplier of the user's own, a run ends when its budget does, as it always has.
    """
    server = experiment.server
    if server.budget is not None and before.privacy.noise_multiplier == AUTO:
        tasks = count_tasks(experiment.schedule, first=done)
        spent = ledger.open_ledger(server.budget, "", folder, done)
        steps = server.budget.steps_per_task
        most = max((spent.spent(i, done) + steps * n for i, n in tasks.items()), default=0)
        _check_total("privacy", server.budget, most)
    if server.client_level is not None and before.client_privacy.noise_multiplier == AUTO:
        charged = ledger.read(folder / RELEASES)
        left = experiment.config.run.rounds - done
        budget = server.client_level.budget
        _check_total("client_privacy", budget, sum(c.steps for c in charged) + left)


def _check_total(section: str, budget: Budget, steps: int) -> None:
    if steps <= budget.allowed_steps:
        return
    mechanism = budget.mechanism
    noise, rate = mechanism.noise_multiplier, mechanism.sample_rate
    needed = accountant.epsilon({(noise, rate): steps}, budget.delta)
    raise InputError(
        f"with the noise multiplier {noise:g} that this run was begun with, its rounds cost "
        f"epsilon {needed:.4g} in all; give {section}.epsilon={needed + 0.005:.2f} or more, "
        "or fewer rounds"
    )
