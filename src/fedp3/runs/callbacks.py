"""What is called while a run trains: to stop it early, or to show its rounds in another program.

A `Callback` is a record of optional functions.  Those that stop a run read its history and
nothing else, so that they decide the same after a run was resumed.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedp3.config import Config
from fedp3.core.errors import InputError, type_of
from fedp3.core.scores import Score
from fedp3.core.types import Params
from fedp3.runs.history import History
from fedp3.server.context import RoundRecord

UNITS = {"mb": "MB", "seconds": "seconds", "epsilon": "epsilon"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run that is about to train.

    Args:
        config: its complete config.
        folder: its run folder; None if it has none.
        history: the rounds before it was resumed.
    """

    config: Config
    folder: Path | None
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """Functions that a run calls; those that are left out do nothing.

    Args:
        check: called with the run's score before anything is written; raises an InputError if the
            callback makes no sense for it.
        on_begin: called once, before the first round that is trained.
        on_round: called with the record of every round, when it has ended.
        on_model: called after every round with the number of rounds so far, and the server's model
            by names of tensors, which must not be changed.
        stop: called with the history after every round but the last, and before a stopped run is
            continued; returns the reason to stop, or None to go on.
        on_end: called once, with the numbers of result.json, or with None if an error or Ctrl-C
            ended the run.
    """

    check: Callable[[Score], None] | None = None
    on_begin: Callable[[RunStart], None] | None = None
    on_round: Callable[[RoundRecord], None] | None = None
    on_model: Callable[[int, Params], None] | None = None
    stop: Callable[[History], str | None] | None = None
    on_end: Callable[[Mapping[str, Any] | None], None] | None = None


def check_callbacks(callbacks: object) -> None:
    """Refuse what is not a sequence of callbacks, before anything is trained."""
    if not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks is {type_of(callbacks)}, want a list of Callback")
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise InputError(
                f"callbacks[{i}] is {type_of(callback)}, want a fedp3.Callback, as "
                "fedp3.stop_at(0.9) returns one, or fedp3.Callback(on_round=FUNCTION)"
            )


def check_score(callbacks: Sequence[Callback], score: Score) -> None:
    """Call every `check` with the score of a run."""
    for callback in callbacks:
        if callback.check is not None:
            callback.check(score)


def reason_to_stop(
    callbacks: Sequence[Callback], events: Sequence[Mapping[str, Any]]
) -> str | None:
    """The reason of the first callback that wants to stop a run with these rounds."""
    stops = [callback.stop for callback in callbacks if callback.stop is not None]
    history = History(events if stops else ())
    return next((reason for stop in stops if (reason := stop(history))), None)


def call_begin(callbacks: Sequence[Callback], start: RunStart) -> None:
    """Call every `on_begin`."""
    for callback in callbacks:
        if callback.on_begin is not None:
            callback.on_begin(start)


def call_round(callbacks: Sequence[Callback], record: RoundRecord) -> None:
    """Call every `on_round`."""
    for callback in callbacks:
        if callback.on_round is not None:
            callback.on_round(record)


def call_model(callbacks: Sequence[Callback], rounds: int, W: Params) -> None:
    """Call every `on_model`."""
    for callback in callbacks:
        if callback.on_model is not None:
            callback.on_model(rounds, W)


def call_end(callbacks: Sequence[Callback], result: Mapping[str, Any] | None) -> None:
    """Call every `on_end`."""
    for callback in callbacks:
        if callback.on_end is not None:
            callback.on_end(result)


# --------------------------------------------------------------------------- to stop a run


def stop_at(score: float, kind: Literal["G", "D", "P"] = "G") -> Callback:
    """Stop as soon as an evaluated round reaches a score.

    Args:
        score: the target, as in 0.9 for an accuracy.
        kind: which score: G of the server's model, D as dispatched, or P after local training.
    """
    _check_kind(kind)
    if not math.isfinite(score):
        raise InputError(f"stop_at: the score is {score!r}, want a finite number")

    def check(of: Score) -> None:
        if of.percent and not 0 < score <= 1:
            raise InputError(f"stop_at: the {of.name} is {score!r}, want a share in (0, 1]")

    def stop(history: History) -> str | None:
        of, scores = history.score, [s for s in history.column(kind) if s is not None]
        if not scores or not of.reaches(scores[-1], score):
            return None
        return f"{kind} is {of.text(scores[-1])}, and the target is {of.text(score)}"

    return Callback(check=check, stop=stop)


def stop_early(
    patience: int, min_gain: float = 0.0, kind: Literal["G", "D", "P"] = "G"
) -> Callback:
    """Stop when several evaluations in a row were no better than the best one before them.

    Args:
        patience: how many evaluations; `run.eval_every` says how many rounds are between them.
        min_gain: what counts as better, as in 0.001.
        kind: which score; see `stop_at`.
    """
    _check_kind(kind)
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise InputError(f"stop_early: patience is {patience!r}, want an integer of at least 1")
    if not min_gain >= 0:
        raise InputError(f"stop_early: min_gain is {min_gain!r}, want a number of at least 0")

    def stop(history: History) -> str | None:
        of, best, since = history.score, math.nan, 0
        for score in history.column(kind):
            if score is None:
                continue
            gain = of.utility(score) - of.utility(best)
            since = since + 1 if gain <= min_gain else 0
            best = score if since == 0 else best
        if since < patience:
            return None
        return f"{kind} was not better than {of.text(best)} in {since} evaluations"

    return Callback(stop=stop)


def stop_after(
    *, mb: float | None = None, seconds: float | None = None, epsilon: float | None = None
) -> Callback:
    """Stop after the round in which a run has spent one of these budgets.

    The round that reaches a limit is the last one, and may exceed it.  Under differential privacy,
    `privacy.epsilon` and `client_privacy.epsilon` are limits that are never exceeded.

    Args:
        mb: traffic in millions of bytes, up and down together.
        seconds: wall time of all rounds, also of those before a run was resumed.
        epsilon: the largest epsilon that any client has spent, under LDP or client-level DP.
    """
    limits = {"mb": mb, "seconds": seconds, "epsilon": epsilon}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if not given or not all(limit > 0 for limit in given.values()):
        raise InputError(f"stop_after: got {given}, want at least one limit above 0")

    def begin(start: RunStart) -> None:
        private = start.config.privacy.enabled or start.config.client_privacy.enabled
        if epsilon is not None and not private:
            raise InputError(
                "stop_after: this run has no epsilon; enable [privacy] or [client_privacy], or "
                "leave epsilon out"
            )

    def spent(history: History) -> dict[str, float]:
        sent = sum(history.column("bytes_up")) + sum(history.column("bytes_down"))
        last = history[-1] if len(history) else {}
        epsilons = (last.get(key) or 0.0 for key in ("epsilon", "client_epsilon"))
        return {
            "mb": sent / 1e6,
            "seconds": sum(history.column("seconds")),
            "epsilon": max(epsilons),
        }

    def stop(history: History) -> str | None:
        amounts = spent(history)
        for name, limit in given.items():
            if amounts[name] >= limit:
                return f"the budget of {limit:g} {UNITS[name]} is spent: {amounts[name]:.4g}"
        return None

    return Callback(on_begin=begin, stop=stop)


def _check_kind(kind: object) -> None:
    if kind not in ("G", "D", "P"):
        raise InputError(f"kind is {kind!r}, want 'G', 'D' or 'P'")


# --------------------------------------------------------------------------- to show it elsewhere


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round that curves are drawn of, by name."""
    kinds = {"G": record.G, "D": record.D, "P": record.P}
    scores = {kind: s for kind, s in kinds.items() if s is not None}
    values = {
        "train/loss": record.loss,
        "bytes/up": record.bytes_up,
        "bytes/down": record.bytes_down,
        "clients/accepted": len(record.accepted),
        "clients/late": len(record.late),
        "clients/rejected": len(record.rejected),
        "time/seconds": record.seconds,
        "privacy/epsilon": record.epsilon,
        "privacy/client epsilon": record.client_epsilon,
        **{f"{s.score.name}/{kind}": s.mean for kind, s in scores.items()},
        **{f"{s.score.name}/{kind} worst client": s.worst for kind, s in scores.items()},
        **({} if record.C is None else {f"{record.C.score.name}/C": record.C.mean}),
    }
    return {name: value for name, value in values.items() if value is not None}


def log_to_tensorboard(folder: str | Path) -> Callback:
    """Write rounds as TensorBoard scalars; needs `pip install 'fedp3[tensorboard]'`.

    Args:
        folder: where to; look at it with `tensorboard --logdir FOLDER`.
    """
    _require("tensorboard", "TensorBoard", "tensorboard")
    writers: list[Any] = []

    def on_begin(start: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writers.append(SummaryWriter(str(folder)))

    def on_round(record: RoundRecord) -> None:
        for name, value in scalars(record).items():
            writers[-1].add_scalar(name, value, record.t + 1)
        writers[-1].flush()

    def on_end(result: Mapping[str, Any] | None) -> None:
        writers[-1].close()

    return Callback(on_begin=on_begin, on_round=on_round, on_end=on_end)


def log_to_mlflow(experiment: str = "fedp3", run_name: str | None = None) -> Callback:
    """Log config, rounds and result to MLflow; needs `pip install 'fedp3[mlflow]'`.

    They go to the tracking server of `mlflow.set_tracking_uri` or `MLFLOW_TRACKING_URI`.

    Args:
        experiment: the experiment of MLflow.
        run_name: the name of the run; by default that of its method.
    """
    _require("mlflow", "MLflow", "mlflow")
    runs: list[str] = []

    def on_begin(start: RunStart) -> None:
        import mlflow

        mlflow.set_experiment(experiment)
        runs.append(mlflow.start_run(run_name=run_name or start.config.method).info.run_id)
        mlflow.log_params(flat(start.config))

    def on_round(record: RoundRecord) -> None:
        import mlflow

        mlflow.log_metrics(scalars(record), step=record.t + 1, run_id=runs[-1])

    def on_end(result: Mapping[str, Any] | None) -> None:
        import mlflow

        mlflow.log_metrics(final_scalars(result), run_id=runs[-1])
        mlflow.end_run("KILLED" if result is None else "FINISHED")

    return Callback(on_begin=on_begin, on_round=on_round, on_end=on_end)


def log_to_wandb(project: str = "fedp3", **options: Any) -> Callback:
    """Log config, rounds and result to Weights & Biases; needs `pip install 'fedp3[wandb]'`.

    Args:
        project: the project.
        **options: further arguments of `wandb.init`, such as `name`, or `mode="offline"`.
    """
    _require("wandb", "Weights & Biases", "wandb")
    runs: list[Any] = []

    def on_begin(start: RunStart) -> None:
        import wandb

        config = options.get("config", flat(start.config))
        runs.append(wandb.init(**{"project": project, **options, "config": config}))

    def on_round(record: RoundRecord) -> None:
        runs[-1].log(scalars(record), step=record.t + 1)

    def on_end(result: Mapping[str, Any] | None) -> None:
        runs[-1].summary.update(final_scalars(result))
        runs[-1].finish(exit_code=1 if result is None else 0)

    return Callback(on_begin=on_begin, on_round=on_round, on_end=on_end)


def flat(config: Config) -> dict[str, Any]:
    """A config as `section.key` -> value."""
    settings: dict[str, Any] = {}
    for section, value in config.as_json().items():
        if isinstance(value, Mapping):
            settings |= {f"{section}.{key}": v for key, v in value.items()}
        else:
            settings[section] = value
    return settings


def final_scalars(result: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers of a result, under names that no round has."""
    numbers = {} if result is None else result
    return {
        f"final/{name}": value
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _require(module: str, name: str, extra: str) -> None:
    """Raise an error if another program is not installed, before anything is trained."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{name} is not installed; add it with: pip install 'fedp3[{extra}]'")
