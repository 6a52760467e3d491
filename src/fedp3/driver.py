"""Drives a run from start or checkpoint to its end: events, checkpoints, final evaluation, result.

A round is recorded before it is checkpointed, and a resumed run cuts the record back to its checkpoint: after any
crash the two agree, and no round is lost or counted twice.
"""

import importlib.util
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save as save_tensors

from fedp3 import __version__, config, inputs, record
from fedp3.config import Config
from fedp3.cost import reductions, traffic
from fedp3.engines.inprocess import Engine, States, sequential
from fedp3.engines.pool import pool
from fedp3.errors import ConfigError, InputError
from fedp3.evaluate import Accuracy
from fedp3.experiment import Experiment, costs
from fedp3.lookup import pick
from fedp3.privacy import rules as ldp
from fedp3.privacy.ledger import Ledger, open_ledger, summary
from fedp3.scribe import scribe
from fedp3.server import Final, RoundRecord, ServerState, finish, plans_for, run
from fedp3.types import ClientPlan, LayerPlan
from fedp3.work import flops, measure

OnRound = Callable[[RoundRecord], None]
SMALL = 3e11  # FLOPs of a whole run below which starting processes costs more than they save


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run: the model, its scores, and the numbers every output shows."""

    state: ServerState
    final: Final | None  # None where it was read from a finished folder
    result: Mapping[str, Any]


def make_engine(
    experiment: Experiment,
    workers: int = 0,
    states: States | None = None,
    engine: str = "inprocess",
    data_dir: Path | None = None,
) -> Engine:
    """An engine by its name, over so many processes; 0 chooses.  No choice changes a bit."""
    return pick(ENGINES, engine, "engine")(experiment, workers, states, data_dir)


def _in_process(experiment: Experiment, workers: int, states: States | None, data_dir: Path | None) -> Engine:
    if workers < 0:
        raise InputError(f"workers={workers}: want a number of processes, or 0 to choose")
    workers = workers or _workers(experiment)
    deadline = experiment.config.run.deadline
    if workers == 1:
        return sequential(experiment.recipe, experiment.shards, states, deadline)
    return pool(experiment.recipe, experiment.shards, workers, states, deadline)


def _on_flower(experiment: Experiment, workers: int, states: States | None, data_dir: Path | None) -> Engine:
    from fedp3.engines.flower.simulation import simulation

    return simulation(experiment, workers or _cores(), data_dir, states)


ENGINES: Mapping[str, Callable[[Experiment, int, States | None, Path | None], Engine]] = {
    "inprocess": _in_process,
    "flower": _on_flower,
}


def check_engine(engine: str) -> None:
    """Refuse an engine that does not exist or is not installed."""
    pick(ENGINES, engine, "engine")
    if engine == "flower" and not all(importlib.util.find_spec(m) for m in ("flwr", "ray")):
        raise InputError("engine 'flower' needs Flower and its simulation: pip install 'fedp3[flower]'")


def _workers(experiment: Experiment) -> int:
    problem, recipe = experiment.problem, experiment.recipe
    if recipe.device != "cpu":
        return 1
    plan = plans_for(problem, 0)[0]
    per_example = flops(measure(recipe.net, tuple(recipe.data.x.shape[1:])), plan, problem.layers, problem.pruning)
    local, samples = recipe.local, max(problem.examples.values())
    examples = local.epochs * samples if local.epochs else local.steps * min(local.batch, samples)
    if per_example * examples * problem.participants * problem.rounds < SMALL:
        return 1
    return max(1, min(problem.participants, _cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


# --------------------------------------------------------------------------- the loop


def drive(
    experiment: Experiment,
    engine: Engine,
    folder: Path | None = None,
    on_round: OnRound | None = None,
    start: ServerState | None = None,
) -> Outcome:
    """Train to the end and evaluate; whatever stops it, short of a kill, the last whole round is on disk."""
    every, digest = experiment.config.run.checkpoint_every, experiment.config.digest()
    state = saved = start or experiment.start
    budget = experiment.problem.budget
    ledger = None if budget is None else open_ledger(budget, digest, folder)
    records: list[dict[str, Any]] = record.read_events(folder) if folder else []
    began, done = time.perf_counter(), None
    # Every round is on disk before the next begins where doing it again would cost privacy, or is not possible: nodes
    # keep what they have of the last round asked for, and not of one further back.
    at_once = ledger is not None or engine.away
    writing = scribe(folder, digest, at_once=at_once) if folder else nullcontext(lambda *_: None)
    with writing as put:
        try:
            for new, done in run(experiment.problem, state, engine.execute, ledger):
                due = at_once or new.t % every == 0 or new.t == experiment.problem.rounds
                put(done, _checkpoint(new, engine) if due else None)
                state, saved = new, new if due else saved  # not before: a checkpoint needs the event before it
                records.append(record.as_event(done))
                if on_round is not None:
                    on_round(done)
            final = finish(experiment.problem, state, engine.execute, ledger, done)
        finally:
            if saved is not state:
                put(None, _checkpoint(state, engine))
    extra = time.perf_counter() - began - sum(r["seconds"] for r in records if r["t"] >= (start.t if start else 0))
    result = _result(experiment, state, final, records, folder, max(0.0, extra)) | _spent(ledger)
    if folder is not None:
        record.write_json(folder / "result.json", result)
    return Outcome(state, final, result)


def _checkpoint(state: ServerState, engine: Engine) -> record.Checkpoint:
    """All of a run as it is now; what clients keep goes on changing in its engine."""
    return record.Checkpoint(state, {i: dict(rounds) for i, rounds in engine.states.of.items()})


def _result(
    experiment: Experiment,
    state: ServerState,
    final: Final,
    records: list[dict[str, Any]],
    folder: Path | None,
    extra_seconds: float,
) -> dict[str, Any]:
    def mean(a: Accuracy | None) -> float | None:
        return a.mean if a else None

    return {
        "out": str(folder) if folder else None,
        "method": experiment.config.method,
        "rounds": state.t,
        "model_sha256": record.model_sha256(state.W),
        "accuracy_global": mean(final.G),
        "accuracy_dispatched": mean(final.D),
        "accuracy_personal": mean(final.P),
        "accuracy_worst_client": final.G.worst if final.G else None,
        "mb_up": sum(r["bytes_up"] for r in records) / 1e6,
        "mb_down": sum(r["bytes_down"] for r in records) / 1e6,
        "seconds": sum(r["seconds"] for r in records) + extra_seconds,
        "rejected": sum(len(r["rejected"]) for r in records),
        "late": sum(len(r["late"]) for r in records),
        "void": sum(bool(r["void"]) for r in records),
        "density": _mean([r["density"] for r in records if r["density"] is not None]),
        "final": {k: asdict(a) if (a := getattr(final, k)) else None for k in ("G", "D", "P")},
    }


def _spent(ledger: Ledger | None) -> dict[str, Any]:
    """What LDP cost each client; with what gives the numbers their meaning."""
    if ledger is None:
        return {"epsilon_max": None}
    each = _finite(ledger.epsilons())
    over = _finite(summary(ledger.epsilons()))
    about = _finite(ldp.described(ledger.budget))
    return {"epsilon_max": over["max"], "epsilon": each, "privacy": about | {"spent": over}}


def _finite(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Where there is no noise epsilon is infinite, for which JSON has no number."""
    return {k: None if v == math.inf else v for k, v in values.items()}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --------------------------------------------------------------------------- run folders


def begin(experiment: Experiment, folder: Path, *, own_net: bool = False) -> None:
    """Make the run folder of a new run; W_0 goes into it where the config could not make it again."""
    W, about = experiment.start.W, describe(experiment)
    files = {inputs.INITIAL: save_tensors(dict(W))} if own_net else {}
    record.create(folder, config.to_toml(experiment.config), about | {"initial_sha256": record.model_sha256(W)}, files)


def describe(experiment: Experiment) -> dict[str, Any]:
    """What a report needs to know about a run besides its rounds."""
    clients, covered = costs(experiment)
    problem = experiment.problem
    dense = ClientPlan(0, dict.fromkeys(problem.layers.layers, LayerPlan()))
    whole = traffic(dense, problem.layers, problem.pruning)
    return (
        {
            "config": experiment.config.model_dump(mode="json"),
            "digest": experiment.config.digest(),
            "inputs": inputs.hashes(experiment),
            "layers": list(problem.layers.layers),
            "parameters": sum(w.numel() for w in experiment.recipe.net.parameters()),
            "clients": [asdict(c) for c in clients],
            "coverage": covered,
            "labels": experiment.labels.tolist(),
            "dense_bytes": {"down": whole.down, "up": whole.up},  # what one FedAvg client moves per round
            "reductions": reductions(plans_for(problem, 0), problem.layers),
            "kernel": "stacked" if experiment.recipe.chain else "autograd",  # how clients were computed
            "versions": versions(),
            "command": " ".join(["fedp3", *sys.argv[1:]]),
            "warnings": warned(experiment),
        }
        | ({} if problem.budget is None else {"privacy": _planned(experiment)})
    )


def warned(experiment: Experiment) -> dict[str, str]:
    """What a reader of this run must know, by its id."""
    found = ldp.warnings(experiment.recipe, plans_for(experiment.problem, 0), experiment.problem.budget)
    other = config.overruled(experiment.config)
    if other:
        found["M1"] = f"the config decides otherwise than {experiment.config.method} does: {', '.join(other)}"
    return found


def _planned(experiment: Experiment) -> dict[str, Any]:
    """The mechanism, and what every client will have spent in the end if nothing is redone."""
    problem = experiment.problem
    assert problem.budget is not None
    return _finite(ldp.described(problem.budget)) | {"planned": _finite(ldp.planned(problem))}


def versions() -> dict[str, str]:
    """What this run was made with."""
    return {
        "fedp3": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def pick_up(folder: Path, digest: str) -> tuple[record.Checkpoint | None, list[str]]:
    """Where a run folder can go on, its record cut back to that round, and what was wrong with newer checkpoints."""
    (folder / "checkpoint").mkdir(exist_ok=True)
    checkpoint, broken = record.load_checkpoint(folder, digest)
    record.cut_events(folder, checkpoint.state.t if checkpoint else 0)
    return checkpoint, broken


def states_of(checkpoint: record.Checkpoint | None) -> States | None:
    """What the clients of a checkpoint keep, for an engine to go on with."""
    return States({i: dict(rounds) for i, rounds in checkpoint.clients.items()}) if checkpoint else None


def reopen(folder: Path, like: Config | None = None) -> Config:
    """The config of a run folder; refused if it was changed since the run began, or is not `like` what is asked for."""
    if not (folder / "config.toml").exists():
        raise InputError(f"{folder} is not a run folder: it has no config.toml")
    now = config.load(folder / "config.toml")
    about = record.read_json(folder / "run.json")
    if not {"config", "versions"} <= about.keys():
        raise InputError(f"{folder}/run.json is not the description of a run; start a new one in another folder")
    then, keys = about["config"], _keys(now.model_dump(mode="json"))
    new = [f"{s}.{k}" for s, k in keys if k not in then.get(s, {})]
    if new:
        raise InputError(
            f"{folder} was begun with fedp3 {about['versions']['fedp3']}, which did not know {', '.join(new)}; go on "
            "with that version, or start a new run with: fedp3 run CONFIG --out NEW_FOLDER"
        )
    changed = [f"  [{s}] {k}: was {then[s][k]!r}, is {v!r}" for (s, k), v in keys.items() if then[s][k] != v]
    if changed:
        raise ConfigError(
            f"{folder}/config.toml was changed after the run began:\n" + "\n".join(changed) + "\nput it back, or start "
            "a new run with: fedp3 run CONFIG --out NEW_FOLDER"
        )
    if like is not None and like.digest() != now.digest():
        asked = _keys(like.model_dump(mode="json"))
        differs = [f"  [{s}] {k}: there {v!r}, here {asked[s, k]!r}" for (s, k), v in keys.items() if asked[s, k] != v]
        differs += [f"  method: there {now.method!r}, here {like.method!r}"] if like.method != now.method else []
        raise InputError(f"{folder} was begun with other settings:\n" + "\n".join(differs) + "\nchoose another folder")
    return now


def _keys(settings: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """(section, key) -> value."""
    return {(s, k): v for s, keys in settings.items() if isinstance(keys, Mapping) for k, v in keys.items()}
