"""The life of a run folder: begin, resume, train, finish.

The API, the command line and Flower all use this module.  One rule holds everywhere: an existing
run is continued only if the caller passes `resume`, and it is never overwritten.
A round is recorded before it is checkpointed, and a resumed run cuts its record back to its
checkpoint: after any crash the two agree, and no round is lost or counted twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors

from fedp3 import config
from fedp3.config import Config
from fedp3.config.plugins import Plugin, plugin_records
from fedp3.core.files import locked, read_json, write_json
from fedp3.core.hashing import model_sha256
from fedp3.core.types import ClientState, Params
from fedp3.engines.base import Engine, States
from fedp3.experiment.budgets import with_noise
from fedp3.experiment.experiment import Experiment
from fedp3.experiment.fingerprint import INITIAL, check_fingerprint, with_initial
from fedp3.privacy.client_level.budget import open_releases
from fedp3.privacy.ledger import Ledger, open_ledger
from fedp3.privacy.record_ledger import RecordLedger, join
from fedp3.runs.callbacks import (
    Callback,
    RunStart,
    call_begin,
    call_end,
    call_model,
    call_round,
    reason_to_stop,
)
from fedp3.runs.checkpoint import Checkpoint, load_checkpoint
from fedp3.runs.description import client_spent_of, describe, result_of, spent_of
from fedp3.runs.existing import (
    check_plugins,
    finished_result,
    holds_run,
    recorded_result,
    refuse_existing,
    refuse_foreign,
    reopen,
)
from fedp3.runs.extension import extend
from fedp3.runs.history import History
from fedp3.runs.round_warnings import OnRound, Tell, divergence_warning, failure_warning
from fedp3.runs.run_folder import (
    as_event,
    create,
    read_events,
    truncate_events,
    write_initial,
)
from fedp3.runs.stop_request import forget_request, stop_if_requested
from fedp3.runs.writer import Write, round_writer
from fedp3.server.context import RoundRecord, ServerContext, ServerState
from fedp3.server.rounds import run
from fedp3.server.scoring import finish, initial_scores

StartEngine = Callable[[Experiment, States | None], Engine]
# events of all rounds so far -> the reason to stop, or None
Stop = Callable[[Sequence[Mapping[str, Any]]], str | None]
# (run, events of earlier rounds) -> a context in which rounds are shown as they end
Watch = Callable[[Experiment, Sequence[Mapping[str, Any]]], AbstractContextManager[OnRound]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that has ended.

    Args:
        state: where the server ended.
        result: the numbers that every output shows.
        clients: client -> round -> its state, as in a checkpoint; empty if nodes store them.
    """

    state: ServerState
    result: Mapping[str, Any]
    clients: Mapping[int, Mapping[int, ClientState]] = field(default_factory=dict)


def watch_with(on_round: OnRound | None) -> Watch:
    """Watch a run by one function, or not at all."""
    return lambda experiment, events: nullcontext(on_round or (lambda record: None))


# --------------------------------------------------------------------------- begin and resume


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
    return None if checkpoint is None else Outcome(checkpoint.state, result, checkpoint.clients)


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
    callbacks: Sequence[Callback] = (),
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
        callbacks: what else to call; they may stop the run.
        tell: is called with messages to the user.
        warn: is called with messages about damaged checkpoints; by default `tell`.
        how_to_resume: what to type, for the error text where the folder holds a run.
    """
    watch = watch or watch_with(None)
    _ = experiment.first_plans  # a mistake in them shows before anything is written
    if folder is None:
        return _train_from(experiment, None, make_engine, None, watch, callbacks, warn or tell)
    if not resume:
        refuse_existing(folder, how_to_resume)
    existing = holds_run(folder)
    if existing:
        if extend(folder, experiment, plugins):
            tell(f"{folder} is extended to {experiment.config.run.rounds} rounds")
        reopen(folder, experiment.config)
        check_plugins(folder, plugins)
        check_fingerprint(folder, experiment)
        experiment = with_initial(folder, experiment) if own_model else experiment
        experiment = with_noise(experiment, _recorded_noise(folder))
    with locked(folder):
        if not existing:
            refuse_existing(folder, how_to_resume)  # another process may have begun one by now
            refuse_foreign(folder)
            _begin(experiment, folder, own_model, plugins, files or {})
        forget_request(folder)
        checkpoint, broken = _last_checkpoint(folder, experiment.config.digest())
        for text in broken:
            (warn or tell)(text)
        result = recorded_result(folder)
        if checkpoint is not None and result is not None:
            if not result.get("stopped") or reason_to_stop(callbacks, read_events(folder)):
                # Nothing is evaluated again: that would spend privacy budget.
                return Outcome(checkpoint.state, result, checkpoint.clients)
            (folder / "result.json").unlink()  # from here on the run is not stopped any more
        if existing:
            done = checkpoint.state.t if checkpoint else 0
            tell(f"resuming after round {done} of {experiment.config.run.rounds}")
        return _train_from(
            experiment, folder, make_engine, checkpoint, watch, callbacks, warn or tell
        )


def _train_from(
    experiment: Experiment,
    folder: Path | None,
    make_engine: StartEngine,
    checkpoint: Checkpoint | None,
    watch: Watch,
    callbacks: Sequence[Callback],
    warn: Tell,
) -> Outcome:
    events: list[dict[str, Any]] = []
    states, start = None, None
    if folder is not None and checkpoint is not None:
        events = read_events(folder)
        states = States({i: dict(rounds) for i, rounds in checkpoint.clients.items()})
        start = checkpoint.state
    warnings = [failure_warning(warn)]
    if experiment.client.data.classes:  # otherwise nobody knows the loss of guessing
        warnings.append(divergence_warning(experiment.client.data.classes, warn))
    outcome = None
    call_begin(
        callbacks, RunStart(config=experiment.config, folder=folder, history=History(events))
    )
    try:
        with watch(experiment, events) as show:

            def on_round(record: RoundRecord) -> None:
                show(record)
                for warn_of in warnings:
                    warn_of(record)
                call_round(callbacks, record)

            engine = make_engine(experiment, states)
            try:
                stop = partial(reason_to_stop, callbacks)
                show_model = partial(call_model, callbacks)
                outcome = run_rounds(experiment, engine, folder, on_round, start, stop, show_model)
            finally:
                engine.close()
    finally:
        call_end(callbacks, None if outcome is None else outcome.result)
    return outcome


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


# --------------------------------------------------------------------------- the loop


def run_rounds(
    experiment: Experiment,
    engine: Engine,
    folder: Path | None = None,
    on_round: OnRound | None = None,
    start: ServerState | None = None,
    stop: Stop = lambda events: None,
    on_model: Callable[[int, Params], None] = lambda rounds, W: None,
) -> Outcome:
    """Train to the end, or until `stop` has a reason, and evaluate.

    Whatever stops it, short of a kill, the last complete round is on disk.

    Args:
        experiment: the run.
        engine: computes its clients.
        folder: the run folder; None writes nothing.
        on_round: called with the record of every finished round.
        start: the state to start from, where it is not the beginning.
        stop: is asked after every round but the last whether to stop, and why.
        on_model: called after every round with the number of rounds so far, and the model.
    """
    server, digest = experiment.server, experiment.config.digest()
    state = saved = start or experiment.start
    ledger, over_runs = _ledgers(experiment, folder, state.t)
    mode = server.client_level
    releases = None if mode is None else open_releases(mode.budget, digest, folder, state.t)
    events: list[dict[str, Any]] = read_events(folder) if folder else []
    began, last, reason = time.perf_counter(), None, None
    # Every round must be on disk before the next begins if repeating it would cost privacy, or is
    # not possible: a node stores its state of its last task, and of none before.
    at_once = ledger is not None or releases is not None or engine.remote_state
    every = 1 if at_once else server.run.checkpoint_every
    writing: AbstractContextManager[Write] = nullcontext(lambda record, checkpoint: None)
    if folder is not None:
        writing = round_writer(folder, digest, at_once=at_once)
    # Scores under privacy, and those that a node returns, are limited or cost something.
    if folder is not None and state.t == 0 and server.run.eval_every and not at_once:
        write_initial(folder, initial_scores(server, state, engine.execute))
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
                on_model(new.t, new.W)
                stop_if_requested(folder)
                stopped = stops_early(experiment, events)
                reason = stop(events) if new.t < server.run.rounds else None
                if reason or stopped:
                    break
            # A run that was stopped pays for no more than it has trained.
            measured = without_p(server) if reason and ledger is not None else server
            final = finish(measured, state, engine.execute, ledger, last)
        finally:
            if saved is not state:
                write(None, _checkpoint(state, engine))
    trained = sum(e["seconds"] for e in events if e["t"] >= (start.t if start else 0))
    extra = max(0.0, time.perf_counter() - began - trained)
    result = result_of(experiment, state, final, events, folder, extra)
    result["stopped"] = reason
    result["stopped_early"] = stopped
    result |= spent_of(ledger) | client_spent_of(experiment, releases)
    if over_runs is not None:
        result["epsilon_over_runs"] = over_runs.epsilon_max(experiment.config.privacy.delta)
    if folder is not None:
        write_json(folder / "result.json", result)
    return Outcome(state, result, _checkpoint(state, engine).clients)


def without_p(server: ServerContext) -> ServerContext:
    """The server, which does not measure P at the end."""
    return replace(server, run=replace(server.run, final_p=False))


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
