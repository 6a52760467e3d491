"""The description of a run (run.json) and its result (result.json), as plain data."""

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from fedp3 import __version__, config
from fedp3.core.hashing import model_sha256
from fedp3.core.scores import ACCURACY
from fedp3.core.types import ClientPlan, LayerPlan
from fedp3.costs.traffic import reductions, traffic
from fedp3.devices.run_fleet import RunFleet
from fedp3.devices.settings import row_of
from fedp3.devices.window_draws import possible_trainers
from fedp3.experiment.experiment import Experiment
from fedp3.experiment.fingerprint import fingerprint
from fedp3.experiment.stretches import stretches
from fedp3.models.hf import files_of
from fedp3.planning.coverage import coverage
from fedp3.planning.layer_sets import AUTO
from fedp3.privacy import disclosure
from fedp3.privacy.budget import planned_epsilons
from fedp3.privacy.client_level import disclosure as client_disclosure
from fedp3.privacy.client_level.budget import planned_epsilon
from fedp3.privacy.client_level.mechanism import uploaders
from fedp3.privacy.ledger import Ledger, summary
from fedp3.server.central import CentralScore, missing_layers
from fedp3.server.context import FinalEvaluation, ServerState
from fedp3.server.evaluation import Scores


def describe(experiment: Experiment) -> dict[str, Any]:
    """The description of a run: its config, plan, costs, data and versions."""
    server, plans = experiment.server, experiment.first_plans
    dense = ClientPlan(0, dict.fromkeys(server.layers.layers, LayerPlan()))
    fedavg = traffic(dense, server.layers, server.spec.pruning)
    about = {
        "config": experiment.config.as_json(),
        "digest": experiment.config.digest(),
        "inputs": fingerprint(experiment),
        "layers": list(server.layers.layers),
        "parameters": sum(w.numel() for w in experiment.client.net.parameters()),
        "clients": [asdict(cost) for cost in experiment.costs],
        "coverage": coverage(experiment.turn_plans),
        "labels": experiment.labels.tolist(),
        "score": asdict(server.spec.objective.score),
        "class_names": list(experiment.client.data.class_names),
        "client_names": list(experiment.client_names),
        # the traffic of one FedAvg client in a round
        "dense_bytes": {"down": fedavg.down, "up": fedavg.up},
        "reductions": reductions(plans, server.layers),
        # how clients are computed
        "kernel": "stacked" if experiment.client.stacked else "autograd",
        "versions": versions(),
        "command": " ".join(["fedp3", *sys.argv[1:]]),
        "warnings": warnings_of(experiment),
    }
    if experiment.client.data.class_names:
        about["class_names"] = list(experiment.client.data.class_names)
    files = files_of(experiment.client.net)
    if files:
        about["model_files"] = files
    if server.plan.turn(server.layers) > 1:
        about["schedule"] = [asdict(stretch) for stretch in stretches(experiment)]
    if server.central is not None:
        absent = missing_layers(experiment.turn_plans)
        about["central"] = {"samples": len(server.central.data.y), "absent": absent or None}
    if server.fleet is not None:
        about["devices"] = [asdict(row_of(d)) | {"kind": d.kind} for d in server.fleet.devices]
    if server.budget is not None:
        about["privacy"] = _planned(experiment)
    if server.client_level is not None:
        planned = planned_epsilon(server.client_level.budget, server.run.rounds)
        about["client_privacy"] = _client_privacy(experiment, {"planned": planned})
    return about


def warnings_of(experiment: Experiment) -> dict[str, str]:
    """Warnings to everybody who reads the result of this run: id -> text."""
    warnings = disclosure.warnings(
        experiment.client, experiment.turn_plans, experiment.server.budget
    )
    if experiment.server.client_level is not None:
        warnings |= client_disclosure.warnings(experiment.server.client_level.budget)
    differences = config.overruled(experiment.config)
    if differences:
        method = experiment.config.method
        warnings["M1"] = f"the config differs from the method {method}: {', '.join(differences)}"
    fleet = experiment.server.fleet
    if fleet is not None and fleet.classes:
        warnings |= _unseen_classes(experiment, fleet)
    layers = experiment.config.plan.layers
    full = all(plan.full_layers == tuple(plan.layers) for plan in experiment.first_plans)
    if full and layers not in ("full", AUTO) and len(experiment.server.layers.layers) > 1:
        hidden = len(experiment.server.layers.hidden)
        warnings["M2"] = (
            f"plan.layers={layers!r} gives every client all {hidden} hidden layers of this "
            "network, so everything is trained and uploaded, as with 'full'"
        )
    if experiment.server.central is not None:
        absent = missing_layers(experiment.turn_plans)
        if absent:
            warnings["M5"] = f"the test set of no client gives no C: {absent}"
    turn = experiment.server.turn
    if experiment.server.budget is not None and turn > 1:
        warnings["M4"] = (
            f"plan.schedule={experiment.config.plan.schedule!r} trains some layers once in "
            f"{turn} rounds and needs more rounds than training all of them; every round costs "
            "privacy, so that at the same epsilon each has more noise. Compare with "
            "plan.schedule='always' and fewer rounds at the same privacy.epsilon"
        )
    return warnings


def _unseen_classes(experiment: Experiment, fleet: RunFleet) -> dict[str, str]:
    """Layers that only clients without some classes can train, because of their devices."""
    labels = experiment.labels > 0  # (clients, classes)
    present = labels.any(axis=0)
    narrow = []
    for l, clients in possible_trainers(fleet.classes, fleet.settings.windows).items():
        seen = labels[clients].any(axis=0) if clients else ~present
        if (seen < present).any():
            narrow.append(f"{l} ({len(clients)} clients with {int(seen.sum())} classes)")
    if not narrow or not present.any():
        return {}
    return {
        "M3": f"of {int(present.sum())} classes, some layers see fewer, as few devices can train "
        f"them: {', '.join(narrow)}; raise devices.round_seconds or devices.memory_share"
    }


def _planned(experiment: Experiment) -> dict[str, Any]:
    """The mechanism, and what every client will have spent at the end if no round is repeated."""
    budget = experiment.server.budget
    assert budget is not None
    planned = planned_epsilons(budget, experiment.schedule)
    return _without_infinity(disclosure.described(budget)) | {"planned": _without_infinity(planned)}


def _client_privacy(experiment: Experiment, epsilons: Mapping[str, float]) -> dict[str, Any]:
    """The statement of client-level DP, with what was planned or spent."""
    mode = experiment.server.client_level
    assert mode is not None
    described = client_disclosure.described(mode.budget, uploaders(experiment.first_plans))
    return _without_infinity(described | dict(epsilons))


def versions() -> dict[str, str]:
    """The versions of what computes this run."""
    return {
        "fedp3": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def result_of(
    experiment: Experiment,
    state: ServerState,
    final: FinalEvaluation,
    events: Sequence[Mapping[str, Any]],
    folder: Path | None,
    extra_seconds: float,
) -> dict[str, Any]:
    """The numbers of a finished run.

    Args:
        experiment: the run.
        state: the state after the last round.
        final: the scores of the finished model.
        events: the record of every round.
        folder: the run folder, if it has one.
        extra_seconds: the time that was not spent in rounds.
    """

    def mean(scores: Scores | CentralScore | None) -> float | None:
        return scores.mean if scores else None

    kind = experiment.server.spec.objective.score
    scores = {
        "global": mean(final.G),
        "dispatched": mean(final.D),
        "personal": mean(final.P),
        "worst_client": final.G.worst if final.G else None,
        "central": mean(final.C),
    }
    densities = [e["density"] for e in events if e["density"] is not None]
    kinds = {of: getattr(final, of) for of in ("G", "D", "P", "C")}
    clocks = [e["clock"] for e in events if e.get("clock") is not None]
    energies = [clock["joules"] for clock in clocks]
    return {
        "out": str(folder) if folder else None,
        "method": experiment.config.method,
        "rounds": state.t,
        "model_sha256": model_sha256(state.model),
        "score": asdict(kind),
        **{f"score_{name}": value for name, value in scores.items()},
        # the same numbers, if they are accuracies
        **{f"accuracy_{k}": v if kind == ACCURACY else None for k, v in scores.items()},
        "mb_up": sum(e["bytes_up"] for e in events) / 1e6,
        "mb_down": sum(e["bytes_down"] for e in events) / 1e6,
        "seconds": sum(e["seconds"] for e in events) + extra_seconds,
        "rejected": sum(len(e["rejected"]) for e in events),
        "late": sum(len(e["late"]) for e in events),
        "void": sum(bool(e["void"]) for e in events),
        "density": sum(densities) / len(densities) if densities else None,
        "virtual_seconds": clocks[-1]["ended"] if clocks else None,
        "joules": None if not clocks or None in energies else math.fsum(energies),
        "final": {of: asdict(a) if a is not None else None for of, a in kinds.items()},
    }


def spent_of(ledger: Ledger | None) -> dict[str, Any]:
    """What LDP cost each client, and the mechanism that these numbers are about."""
    if ledger is None:
        return {"epsilon_max": None}
    spent = _without_infinity(summary(ledger.epsilons()))
    return {
        "epsilon_max": spent["max"],
        "epsilon": _without_infinity(ledger.epsilons()),
        "privacy": _without_infinity(disclosure.described(ledger.budget)) | {"spent": spent},
    }


def client_spent_of(experiment: Experiment, releases: Ledger | None) -> dict[str, Any]:
    """The client-level epsilon of all releases, and the statement that gives it its meaning."""
    if releases is None:
        return {"client_epsilon": None}
    spent = releases.epsilon_max()
    about = _client_privacy(experiment, {"spent": spent})
    return {"client_epsilon": about["spent"], "client_privacy": about}


def _without_infinity(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """JSON has no number for the infinite epsilon of a run without noise."""
    return {k: None if v == math.inf else v for k, v in values.items()}
