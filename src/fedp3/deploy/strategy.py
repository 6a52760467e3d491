"""`FedP3`: a strategy for a user's Flower app.

It takes the place of one of Flower's strategies where an app calls `start`.  The rounds are those
of every other run of fedp3: Flower's loop sends all nodes the same arrays, and averages arrays that
all nodes return.
"""

import copy
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from fedp3.config import Config
from fedp3.core.errors import InputError, RunError, type_of
from fedp3.core.types import Params
from fedp3.data.sample_spec import placeholder
from fedp3.data.shards import NO_SAMPLES, Shard
from fedp3.deploy.flower_app import Introduced, ServeSettings, check_deployable, read_permit_file
from fedp3.deploy.flower_app import serve as serve_run
from fedp3.deploy.strategy_settings import clients_in, completed, given_settings
from fedp3.engines.flower.client_app import ACTION
from fedp3.engines.flower.grid import Introduction, Roster
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.runs.callbacks import Callback
from fedp3.runs.session import Outcome
from fedp3.server.context import RoundRecord

FALLBACK_CLIENTS = 1000  # with which settings are checked before the nodes tell how many they are
COUNTED = 100_000  # records of a node beyond which their number changes nothing; nodes may lie
FIRST_ANSWER_SECONDS = 600.0  # besides `wait`, if nodes are online
SIMULATED_REST, DEPLOYED_REST = 0.02, 1.0  # seconds between two looks for replies
KINDS = {"G": "global", "D": "dispatched", "P": "personal"}
log = logging.getLogger("flwr").log  # what `flwr run --stream` shows

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class FedP3:
    """FedP3 as a strategy of a Flower app, whose nodes have `fedp3_client`.

    Args:
        net: your network; its layers are what matters, its weights come with `start`.
        config: the run, as a `fedp3.Config` or the path of a TOML file; data and network in it must
            be left out.
        out: the run folder on the machine of the server, with report and checkpoints.
        resume: continue the run in `out`, if there is one.
        wait: seconds to wait for all nodes before the first round.
        permit: the path of a permit, for nodes whose policy needs one.
        **settings: the config section by section, instead of `config`: `method="fedp3"`,
            `prune=dict(keep=0.5)`, ...  Without `partition.clients`, the nodes say how many they
            are (`num-partitions` of their node config).

    Example:
        strategy = FedP3(Net(), prune={"keep": 0.5}, local={"epochs": 1})
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3)
    """

    def __init__(
        self,
        net: nn.Module,
        config: Config | str | Path | None = None,
        /,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        wait: float = 60.0,
        permit: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise InputError(
                f"FedP3 got {type_of(net)} as its network, want an nn.Module; as in "
                "FedP3(Net(), prune={'keep': 0.5})"
            )
        if resume and out is None:
            raise InputError("resume=True needs the folder of the run; pass it as out='FOLDER'")
        self._net = net
        self._settings = given_settings(config, settings)
        self._serving = ServeSettings(
            out=None if out is None else Path(out),
            resume=resume,
            wait=wait,
            permit=read_permit_file(str(permit or "")),
        )
        self._checked(self._settings)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train over the nodes of a grid; arguments and result are those of Flower's strategies.

        Args:
            grid: Flower's grid, from your ServerApp.
            initial_arrays: W_0, as `ArrayRecord(net.state_dict())`.
            num_rounds: the number of rounds; by default `[run] rounds`.
            timeout: seconds to wait for the nodes of a round; by default `[run] deadline`.
            train_config: settings of `[local]`, such as `lr`; they take precedence.
            evaluate_config: must be empty: nodes evaluate as the config says.
            evaluate_fn: called with the number of rounds so far, first 0, and the server's model.
        """
        net = _with_arrays(self._net, initial_arrays)
        settings = _started(self._settings, num_rounds, timeout, train_config, evaluate_config)
        config = self._checked(settings)
        given = ", ".join(f"{k} = {v!r}" for k, v in dict(train_config or {}).items())
        log(INFO, "FedP3: %s rounds%s", config.run.rounds, f", [local] {given}" if given else "")
        met = _introduce(grid, settings, self._serving.wait)
        experiment = _assembled(settings, net, met.roster)
        result = Result(arrays=initial_arrays)
        callbacks = [Callback(on_round=partial(_note_round, result))]
        if evaluate_fn is not None:
            evaluate = partial(_note_evaluation, result, initial_arrays, evaluate_fn)
            evaluate(0, {})
            callbacks.append(Callback(on_model=evaluate))
        outcome = serve_run(grid, experiment, self._serving, met, callbacks)
        _note_end(result, initial_arrays, outcome)
        return result

    def summary(self) -> None:
        """Log the settings that differ from the defaults."""
        for section, keys in self._settings.items():
            log(INFO, "\t%s: %s", section, keys)

    def _checked(self, settings: Mapping[str, Any]) -> Config:
        """The config, with every mistake found that does not depend on the nodes."""
        config = completed(settings, self._net, clients_in(settings) or FALLBACK_CLIENTS)
        check_deployable(config)
        return config


# --------------------------------------------------------------------------- before the first round


def _with_arrays(net: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """A copy of the network with these weights."""
    if not isinstance(arrays, ArrayRecord) or not arrays:
        raise InputError("initial_arrays has no arrays; pass ArrayRecord(net.state_dict())")
    network = copy.deepcopy(net)
    try:
        network.load_state_dict(arrays.to_torch_state_dict())
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise InputError(
            f"initial_arrays are not those of the network that FedP3 was made with: {what}"
        ) from None
    return network


def _started(
    settings: Mapping[str, Any],
    rounds: int | None,
    timeout: float | None,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
) -> dict[str, Any]:
    """The settings with the arguments of `start`, which take precedence."""
    if evaluate_config:
        raise InputError(
            f"evaluate_config has {', '.join(map(repr, evaluate_config))}, and nodes evaluate as "
            "the config says ([run] eval_every); leave it out"
        )
    run = {"rounds": rounds, "deadline": timeout}
    added: dict[str, dict[str, Any]] = {
        "run": {key: value for key, value in run.items() if value is not None},
        "local": dict(train_config or {}),
    }
    merged = dict(settings)
    for section, keys in added.items():
        before = merged.get(section, {})
        if keys and isinstance(before, dict):
            merged[section] = before | keys
    return merged


def _introduce(grid: Grid, settings: Mapping[str, Any], wait: float) -> Introduced:
    """Ask the nodes who they are, until all clients of the run are online or time is up."""
    roster, text = Roster(), json.dumps(settings)
    asking = Introduction(settings=text, action=ACTION, rest=partial(time.sleep, 0.1))
    end = time.monotonic() + wait
    while True:
        roster.refresh(grid, asking)
        simulated = all(identity.simulated for identity in roster.met.values())
        answered = set(grid.get_node_ids()) <= roster.met.keys() | roster.refused.keys()
        hopeless = answered and simulated and bool(roster.refused)
        complete = bool(roster.met) and _complete(roster)
        if complete or hopeless or (end < time.monotonic() and not _first_answer_due(roster, end)):
            break
        asking.rest()
    if not roster.met or (simulated and roster.refused):
        raise RunError(_nobody(roster, wait))
    rest = partial(time.sleep, SIMULATED_REST if simulated else DEPLOYED_REST)
    return Introduced(roster=roster, settings=text, action=ACTION, rest=rest, simulated=simulated)


def _complete(roster: Roster) -> bool:
    """Whether every client is online; a node may claim any number of clients."""
    clients = _clients(roster)
    return clients <= len(roster.nodes) and all(i in roster.nodes for i in range(clients))


def _first_answer_due(roster: Roster, end: float) -> bool:
    """Whether no node has answered yet and one may: its process may start on a busy machine."""
    waiting = bool(roster.queries) and not roster.met and not roster.refused
    return waiting and time.monotonic() < end + FIRST_ANSWER_SECONDS


def _clients(roster: Roster) -> int:
    """The number of clients that most nodes know of."""
    ((clients, _),) = Counter(node.clients for node in roster.met.values()).most_common(1)
    return clients


def _nobody(roster: Roster, wait: float) -> str:
    """Why a run cannot begin."""
    if not roster.refused:
        return (
            f"no node answered within {wait:g} s; start SuperNodes, and call fedp3_client in the "
            "app's ClientApp"
        )
    reasons = Counter(roster.refused.values())
    texts = (f"{count} node{'s' * (count > 1)}: {reason}" for reason, count in reasons.items())
    return f"the run cannot begin; {'; '.join(texts)}"


def _assembled(settings: Mapping[str, Any], net: nn.Module, roster: Roster) -> Experiment:
    """The run over these nodes; a node that differs from most others gets no tasks."""
    config = completed(settings, net, _clients(roster))
    _refuse_others(roster, config)
    sample = next(iter(roster.met.values())).sample
    assert sample is not None
    examples = {i: roster.met[n].examples for i, n in roster.nodes.items()}
    # Under LDP, the noise is found for the numbers of records that nodes report.
    counted = {i: _counted(examples.get(i, 0)) for i in range(config.partition.clients)}
    experiment = assemble_from(config, net, placeholder(sample), shards=counted)
    return replace(experiment, shards=dict.fromkeys(counted, NO_SAMPLES))


def _counted(examples: int) -> Shard:
    """A shard of this many train samples, of which the server knows nothing but their number."""
    return Shard(torch.arange(min(examples, COUNTED)), NO_SAMPLES.test)


def _refuse_others(roster: Roster, config: Config) -> None:
    """Refuse nodes with other settings, or with other samples than most of the others have."""
    digest = config.digest()
    others = {n: node for n, node in roster.met.items() if node.digest != digest}
    for n, node in others.items():
        _refuse(roster, n, f"it counts {node.clients} clients, others {config.partition.clients}")
    if not roster.met:
        raise RunError(_nobody(roster, 0))
    ((common, _),) = Counter(node.sample for node in roster.met.values()).most_common(1)
    for n in [n for n, node in roster.met.items() if node.sample != common]:
        _refuse(roster, n, f"its samples are {roster.met[n].sample}, those of others {common}")


def _refuse(roster: Roster, n: int, reason: str) -> None:
    log(WARNING, "client %d gets no tasks: %s", roster.met.pop(n).client, reason)
    roster.refused[n] = reason


# --------------------------------------------------------------------------- Flower's result


def _note_round(result: Result, record: RoundRecord) -> None:
    """Add the metrics of a round."""
    metrics = MetricRecord(
        {
            "clients": len(record.accepted),
            "late": len(record.late),
            "rejected": len(record.rejected),
            "bytes_up": record.bytes_up,
            "bytes_down": record.bytes_down,
        }
    )
    if record.loss is not None:
        metrics["train_loss"] = record.loss
    result.train_metrics_clientapp[record.t + 1] = metrics
    scores = {kind: getattr(record, kind) for kind in KINDS}
    _note_scores(
        result, record.t + 1, {kind: (s.score.name, s.mean) for kind, s in scores.items() if s}
    )


def _note_scores(result: Result, rounds: int, scores: Mapping[str, tuple[str, float]]) -> None:
    """Add scores by their kind, such as G, under names such as accuracy_global."""
    if not scores:
        return
    named = {f"{name.lower()}_{KINDS[kind]}": mean for kind, (name, mean) in scores.items()}
    before = result.evaluate_metrics_clientapp.get(rounds, MetricRecord())
    result.evaluate_metrics_clientapp[rounds] = MetricRecord({**before, **named})


def _note_evaluation(
    result: Result, initial: ArrayRecord, evaluate: Evaluate, rounds: int, W: Params
) -> None:
    """Call the user's own evaluation of the server's model, and add what it returns."""
    metrics = evaluate(rounds, _with_values(initial, W))
    log(INFO, "evaluate_fn after round %d: %s", rounds, metrics)
    if metrics is not None:
        result.evaluate_metrics_serverapp[rounds] = metrics


def _note_end(result: Result, initial: ArrayRecord, outcome: Outcome) -> None:
    """Add the trained model and its final scores."""
    result.arrays = _with_values(initial, outcome.state.W)
    name = outcome.result["score"]["name"]
    final = {k: (name, s["mean"]) for k, s in outcome.result["final"].items() if s is not None}
    _note_scores(result, outcome.state.t, final)


def _with_values(arrays: ArrayRecord, W: Params) -> ArrayRecord:
    """The arrays with new values; those that are not exchanged stay, as num_batches_tracked."""
    return ArrayRecord({**arrays.to_torch_state_dict(), **W})
