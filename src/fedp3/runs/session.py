"""The life of a run folder: begin, resume, train, finish.

The API, the command line and Flower all use this module.  One rule holds everywhere: an existing
run is continued only if the caller passes `resume`, and it is never overwritten.
A round is recorded before it is checkpointed, and a resumed run cuts its record back to its
checkpoint: after any crash the two agree, and no round is lost or counted twice.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors

from fedp3 import config
from fedp3.config import Config
from fedp3.config.plugins import Plugin, plugin_records, reload
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.files import locked, read_json, write_json
from fedp3.core.hashing import model_sha256
from fedp3.engines.base import Engine, States
from fedp3.experiment.assemble import Experiment, with_noise
from fedp3.experiment.fingerprint import INITIAL, check_fingerprint, with_initial
from fedp3.privacy.client_level.budget import open_releases
from fedp3.privacy.ledger import Ledger, open_ledger
from fedp3.privacy.record_ledger import RecordLedger, join
from fedp3.runs.checkpoint import Checkpoint, load_checkpoint
from fedp3.runs.description import client_spent_of, describe, result_of, spent_of
from fedp3.runs.run_folder import as_event, create, read_events, truncate_events
from fedp3.runs.writer import Write, round_writer
from fedp3.server.context import RoundRecord, ServerState
from fedp3.server.rounds import finish, run

# What a run that was interrupted before it began may have left in its folder.
OWN_FILES = {"checkpoint", "client_level", "flower.json", "initial.safetensors", "run.json"}
DIVERGED = 1e3  # a training loss of this many times that of guessing
SEEDS = "seeds.json"  # in a folder of several seeds: what they are seeds of

OnRound = Callable[[RoundRecord], None]
StartEngine = Callable[[Experiment, States | None], Engine]
Tell = Callable[[str], None]
# (run, events of earlier rounds) -> a context in which rounds are shown as they end
Watch = Callable[[Experiment, Sequence[Mapping[str, Any]]], AbstractContextManager[OnRound]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run: where the server ended, and the numbers that every output shows."""

    state: ServerState
    result: Mapping[str, Any]


def watch_with(on_round: OnRound | None) -> Watch:
    """Watch a run by one function, or not at all."""
    return lambda experiment, events: nullcontext(on_round or (lambda record: None))


# --------------------------------------------------------------------------- begin and resume


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / "config.toml").exists()


def refuse_existing(folder: Path, how: str = "") -> None:
    """Raise if a run, or a series of seeds, was begun in this folder.

    Args:
        folder: the run folder.
        how: what the user types to continue the run; `fedp3 resume FOLDER` by default.
    """
    if holds_run(folder) or (folder / SEEDS).exists():
        how = how or f"fedp3 resume {folder}"
        raise InputError(f"{folder} holds a run already; continue it with: {how}")


def refuse_foreign(folder: Path) -> None:
    """Raise if a folder contains files of somebody else, among which a run would be lost."""
    try:
        foreign = [p.name for p in sorted(folder.iterdir()) if _is_foreign(p.name)]
    except OSError:
        return  # it does not exist yet, or its own error comes when it is written
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise InputError(
            f"{folder} is not empty: it contains {foreign[0]}{more}; choose a new folder"
        )


def _is_foreign(name: str) -> bool:
    return not (name.startswith(".") or name in OWN_FILES)


def finished_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run; None if it is not finished.

    The folder may have been moved since, so that `out` is set to where it is now.
    """
    path = folder / "result.json"
    return read_json(path) | {"out": str(folder)} if path.exists() else None


def read_finished(folder: Path, settings: Config) -> Outcome | None:
    """The outcome of a finished run.

    Returns None if there is no finished run, or if none of its checkpoints is intact.

    Raises:
        InputError: the run has other settings.
    """
    result = finished_result(folder)
    if result is None:
        return None
    checkpoint, _ = load_checkpoint(folder, reopen(folder, settings).digest())
    return None if checkpoint is None else Outcome(checkpoint.state, result)


def train(
    experiment: Experiment,
    folder: Path | None,
    make_engine: StartEngine,
    *,
    resume: bool = False,
    own_model: bool = False,
    plugins: Sequence[Plugin] = (),
    files: Mapping[str, bytes] | None = None,
    watch: Watch | None = None,
    tell: Tell = lambda text: None,
    warn: Tell | None = None,
    how_to_resume: str = "",
) -> Outcome:
    """Take a run from its beginning, or from where it stopped, to its end.

    Args:
        experiment: the run.
        folder: its run folder; None writes nothing.
        make_engine: starts an engine, with the client states of a checkpoint.
        resume: continue the run in the folder, if there is one.
        own_model: the network was passed in; its W_0 is stored in the folder, since the config does
            not determine it.
        plugins: files that the run uses; recorded in the folder.
        files: further files of a new run folder.
        watch: shows rounds as they end.
        tell: is called with messages to the user.
        warn: is called with messages about damaged checkpoints; by default `tell`.
        how_to_resume: what to type, for the error text where the folder holds a run.
    """
    watch = watch or watch_with(None)
    _ = experiment.first_plans  # a mistake in them shows before anything is written
    if folder is None:
        return _train_from(experiment, None, make_engine, None, watch, warn or tell)
    if not resume:
        refuse_existing(folder, how_to_resume)
    existing = holds_run(folder)
    if existing:
        reopen(folder, experiment.config)
        _check_plugins(folder, plugins)
        check_fingerprint(folder, experiment)
        experiment = with_initial(folder, experiment) if own_model else experiment
        experiment = with_noise(experiment, _recorded_noise(folder))
    with locked(folder):
        if not existing:
            refuse_existing(folder, how_to_resume)  # another process may have begun one by now
            refuse_foreign(folder)
            _begin(experiment, folder, own_model, plugins, files or {})
        checkpoint, broken = _last_checkpoint(folder, experiment.config.digest())
        for text in broken:
            (warn or tell)(text)
        result = finished_result(folder)
        if checkpoint is not None and result is not None:
            # Nothing is evaluated again: that would spend privacy budget.
            return Outcome(checkpoint.state, result)
        if existing:
            done = checkpoint.state.t if checkpoint else 0
            tell(f"resuming after round {done} of {experiment.config.run.rounds}")
        return _train_from(experiment, folder, make_engine, checkpoint, watch, warn or tell)


def _train_from(
    experiment: Experiment,
    folder: Path | None,
    make_engine: StartEngine,
    checkpoint: Checkpoint | None,
    watch: Watch,
    warn: Tell,
) -> Outcome:
    events: list[dict[str, Any]] = []
    states, start = None, None
    if folder is not None and checkpoint is not None:
        events = read_events(folder)
        states = States({i: dict(rounds) for i, rounds in checkpoint.clients.items()})
        start = checkpoint.state
    with watch(experiment, events) as on_round:
        engine = make_engine(experiment, states)
        try:
            data = experiment.client.data
            if data.classes:  # otherwise nobody knows the loss of guessing
                on_round = _with_divergence(on_round, data.classes, warn)
            return run_rounds(experiment, engine, folder, on_round, start)
        finally:
            engine.close()


def _with_divergence(on_round: OnRound, classes: int, warn: Tell) -> OnRound:
    """The same watcher, which also says once that training diverges."""
    limit = DIVERGED * math.log(max(classes, 2))
    told = False

    def watcher(record: RoundRecord) -> None:
        nonlocal told
        on_round(record)
        if not told and record.loss is not None and not record.loss <= limit:
            told = True
            warn(
                f"the training loss of round {record.t + 1} is {record.loss:.3g}, and guessing has "
                f"{math.log(max(classes, 2)):.3g}: training diverges. Lower local.lr, or scale the "
                "inputs"
            )

    return watcher


def _recorded_noise(folder: Path) -> float | None:
    """The noise multiplier that a run was begun with; None without LDP.

    It is part of the run's identity: another version of the accountant may find another one.
    """
    noise = read_json(folder / "run.json").get("privacy", {}).get("noise_multiplier")
    return None if noise is None else float(noise)


def _begin(
    experiment: Experiment,
    folder: Path,
    own_model: bool,
    plugins: Sequence[Plugin],
    files: Mapping[str, bytes],
) -> None:
    W = experiment.start.W
    about = describe(experiment) | {
        "initial_sha256": model_sha256(W),
        "plugins": plugin_records(plugins),
    }
    initial = {INITIAL: save_tensors(dict(W))} if own_model else {}
    create(folder, config.to_toml(experiment.config), about, {**files, **initial})


def _last_checkpoint(folder: Path, digest: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to continue from, and what was wrong with newer ones.

    The record of rounds is cut back to that checkpoint.
    """
    (folder / "checkpoint").mkdir(exist_ok=True)
    checkpoint, broken = load_checkpoint(folder, digest)
    truncate_events(folder, checkpoint.state.t if checkpoint else 0)
    return checkpoint, broken


def reopen(folder: Path, like: Config | None = None) -> Config:
    """The config of a run folder; its plugins are imported.

    Args:
        folder: the run folder.
        like: the config that the caller has; refused if the run's config is another one.
    """
    if not holds_run(folder):
        raise InputError(f"{folder} is not a run folder: it has no config.toml")
    about = read_json(folder / "run.json")
    if not {"config", "versions"} <= about.keys():
        raise InputError(
            f"{folder}/run.json is not the description of a run; start a new one in another folder"
        )
    _refuse_old_keys(about, folder, folder / "config.toml")
    reload(about["plugins"])
    now = config.load(folder / "config.toml")
    _refuse_unknown_keys(folder, now, about)
    _refuse_changed_config(folder, now, about["config"])
    if like is not None and like.digest() != now.digest():
        raise InputError(_differences(folder, now, like))
    return now


def _refuse_old_keys(about: Mapping[str, Any], folder: Path, source: Path) -> None:
    """Refuse what a version wrote whose keys had other names: it recorded no plugins."""
    if "plugins" in about:
        return
    version = about.get("versions", {}).get("fedp3", "0.1.0.dev0")
    raise InputError(
        f"{folder} was begun with fedp3 {version}, whose settings had other names; continue it "
        f"with that version, or translate its config with: fedp3 init NEW.toml --from {source}"
    )


def _refuse_unknown_keys(folder: Path, now: Config, about: Mapping[str, Any]) -> None:
    """Refuse a run of a version that did not have some of today's keys."""
    new = [f"{s}.{k}" for s, k in _by_key(now) if k not in about["config"].get(s, {})]
    if new:
        raise InputError(
            f"{folder} was begun with fedp3 {about['versions']['fedp3']}, which did not know "
            f"{', '.join(new)}; continue it with that version, or start a new run with: "
            "fedp3 run CONFIG --out NEW_FOLDER"
        )


def _refuse_changed_config(folder: Path, now: Config, then: Mapping[str, Any]) -> None:
    """Refuse a config.toml that was edited after the run began."""
    changed = [
        f"  [{s}] {k}: was {then[s][k]!r}, is {value!r}"
        for (s, k), value in _by_key(now).items()
        if then[s][k] != value
    ]
    if changed:
        lines = "\n".join(changed)
        raise ConfigError(
            f"{folder}/config.toml was changed after the run began:\n{lines}\n"
            "put it back, or start a new run with: fedp3 run CONFIG --out NEW_FOLDER"
        )


def _differences(folder: Path, there: Config, given: Config) -> str:
    """Where the config of a run folder differs from the caller's."""
    values = _by_key(given)
    lines = [
        f"  [{s}] {k}: there {value!r}, here {values[s, k]!r}"
        for (s, k), value in _by_key(there).items()
        if values[s, k] != value
    ]
    if given.method != there.method:
        lines.append(f"  method: there {there.method!r}, here {given.method!r}")
    differences = "\n".join(lines)
    return f"{folder} was begun with other settings:\n{differences}\nchoose another folder"


def plugins_of(folder: Path) -> tuple[Plugin, ...]:
    """The plugins that a run or a series of seeds was begun with, imported again."""
    recorded = folder / SEEDS if (folder / SEEDS).exists() else folder / "run.json"
    return reload(read_json(recorded).get("plugins", []))


def _check_plugins(folder: Path, plugins: Sequence[Plugin]) -> None:
    """Refuse to resume a run with other plugin files than it began with."""
    then = {p["sha256"]: p["path"] for p in read_json(folder / "run.json")["plugins"]}
    now = {p.sha256: p.path for p in plugins}
    if then.keys() != now.keys():
        begun = ", ".join(then.values()) or "none"
        given = ", ".join(now.values()) or "none"
        raise InputError(f"{folder} was begun with other plugins: then {begun}, now {given}")


def _by_key(settings: Config) -> dict[tuple[str, str], Any]:
    """(section, key) -> value."""
    sections = settings.as_json().items()
    return {(s, k): v for s, keys in sections if isinstance(keys, Mapping) for k, v in keys.items()}


# --------------------------------------------------------------------------- the loop


def run_rounds(
    experiment: Experiment,
    engine: Engine,
    folder: Path | None = None,
    on_round: OnRound | None = None,
    start: ServerState | None = None,
) -> Outcome:
    """Train to the end and evaluate.

    Whatever stops it, short of a kill, the last complete round is on disk.

    Args:
        experiment: the run.
        engine: computes its clients.
        folder: the run folder; None writes nothing.
        on_round: called with the record of every finished round.
        start: the state to start from, where it is not the beginning.
    """
    server, digest = experiment.server, experiment.config.digest()
    state = saved = start or experiment.start
    ledger, over_runs = _ledgers(experiment, folder, state.t)
    mode = server.client_level
    releases = None if mode is None else open_releases(mode.budget, digest, folder, state.t)
    events: list[dict[str, Any]] = read_events(folder) if folder else []
    began, last = time.perf_counter(), None
    # Every round must be on disk before the next begins if repeating it would cost privacy, or is
    # not possible: a node stores its state of its last task, and of none before.
    at_once = ledger is not None or releases is not None or engine.remote_state
    every = 1 if at_once else server.run.checkpoint_every
    writing: AbstractContextManager[Write] = nullcontext(lambda record, checkpoint: None)
    if folder is not None:
        writing = round_writer(folder, digest, at_once=at_once)
    with writing as write:
        try:
            stopped = stops_early(experiment, events)
            rounds = () if stopped else run(server, state, engine.execute, ledger, releases)
            for new, last in rounds:
                due = new.t % every == 0 or new.t == server.run.rounds
                write(last, _checkpoint(new, engine) if due else None)
                state = new  # not before: a checkpoint needs the event before it
                saved = new if due else saved
                events.append(as_event(last))
                if on_round is not None:
                    on_round(last)
                stopped = stops_early(experiment, events)
                if stopped:
                    break
            final = finish(server, state, engine.execute, ledger, last)
        finally:
            if saved is not state:
                write(None, _checkpoint(state, engine))
    trained = sum(e["seconds"] for e in events if e["t"] >= (start.t if start else 0))
    extra = max(0.0, time.perf_counter() - began - trained)
    result = result_of(experiment, state, final, events, folder, extra)
    result["stopped_early"] = stopped
    result |= spent_of(ledger) | client_spent_of(experiment, releases)
    if over_runs is not None:
        result["epsilon_over_runs"] = over_runs.epsilon_max(experiment.config.privacy.delta)
    if folder is not None:
        write_json(folder / "result.json", result)
    return Outcome(state, result)


def stops_early(experiment: Experiment, events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether G has not improved for `run.patience` evaluations.

    It is a function of the recorded rounds, so that a resumed run stops where it would have.
    """
    patience, kind = experiment.server.run.patience, experiment.server.spec.objective.score
    scores = [e["G"]["mean"] for e in events if e["G"]]
    if not patience or len(scores) <= patience:
        return False
    before, recent = scores[:-patience], scores[-patience:]
    return not kind.better(kind.best(recent), kind.best(before))


def _ledgers(
    experiment: Experiment, folder: Path | None, rounds: int
) -> tuple[Ledger | None, RecordLedger | None]:
    """The ledger of a run under LDP, and the one over several runs if the config names one."""
    budget, digest = experiment.server.budget, experiment.config.digest()
    if budget is None:
        return None, None
    ledger, path = open_ledger(budget, digest, folder, rounds), experiment.config.privacy.ledger
    if not path:
        return ledger, None
    seeded = budget.mechanism.randomness != "os"
    data, shards = experiment.client.data, experiment.shards
    over_runs = join(Path(path), digest, data, shards, seeded=seeded)
    return replace(ledger, also=over_runs.charge), over_runs


def _checkpoint(state: ServerState, engine: Engine) -> Checkpoint:
    """A copy of the run as it is now: clients' states change while this one is written."""
    return Checkpoint(state, {i: dict(rounds) for i, rounds in engine.states.by_client.items()})


# --------------------------------------------------------------------------- several seeds


def seed_configs(settings: Config, folder: Path, seeds: int) -> dict[Path, Config]:
    """The run folder and config of each of several seeds."""
    first = settings.run.seed
    return {
        folder / f"seed-{k}": replace(settings, run=replace(settings.run, seed=first + k))
        for k in range(seeds)
    }


def begin_seeds(settings: Config, folder: Path, seeds: int, plugins: Sequence[Plugin] = ()) -> None:
    """Record what a folder of several seeds is, so that it can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = {"seeds": seeds, "config": settings.as_json(), "plugins": plugin_records(plugins)}
    write_json(folder / SEEDS, recorded)


def recorded_seeds(folder: Path) -> tuple[Config, int] | None:
    """The config and the number of seeds of such a folder; None if it is not one.

    Its plugins are imported.
    """
    path = folder / SEEDS
    if not path.exists():
        return None
    recorded = read_json(path)
    _refuse_old_keys(recorded, folder, folder / "seed-0" / "config.toml")
    reload(recorded["plugins"])
    return config.parse(recorded["config"]), int(recorded["seeds"])
