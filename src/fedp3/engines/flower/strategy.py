"""FedP3 inside a Flower app of your own: your net, your data, your ServerApp.

Server:  FedP3(config, net, example).start(grid)          Node:  app = client_app(own(config, make_net, load_data))
The rounds are those of every other run; Flower's own loop, which needs the same arrays from every node, is not used.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from logging import INFO
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from torch import Tensor, nn

from fedp3 import record
from fedp3.config import Config
from fedp3.data import Dataset, from_tensors
from fedp3.driver import Outcome
from fedp3.engines.flower import node
from fedp3.engines.flower.app import Settings, serve
from fedp3.engines.flower.client import Held, Hold
from fedp3.errors import InputError
from fedp3.experiment import Experiment, assemble_own
from fedp3.partition import split
from fedp3.recipe import Shard
from fedp3.server import ServerState

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


def own(config: Config, net: Callable[[], nn.Module], data: Callable[[Context], Dataset]) -> Hold:
    """What a node holds where net and data are your own; `config.partition.clients` is the number of nodes."""
    return partial(_own, config, net, data)


def _own(config: Config, net: Callable[[], nn.Module], data: Callable[[Context], Dataset], context: Context) -> Held:
    i, samples = node.client_of(context.node_config), data(context)
    if i >= config.partition.clients:
        raise InputError(f"partition-id={i}, but [partition] clients = {config.partition.clients}")
    everything = np.arange(len(samples.y))
    # The same cut in every run: else a record that trained under LDP would be scored, without noise, in another.
    cut = split(everything, seed=0, client=i, share=config.partition.train_share)
    mine = Shard(*(torch.from_numpy(part) for part in cut))
    experiment = assemble_own(config, net(), samples, shards={**_nobody(config), i: mine})
    return Held(i, experiment.recipe, mine, config.digest())


def _nobody(config: Config) -> dict[int, Shard]:
    """Clients of whose samples nothing is known here."""
    nothing = torch.empty(0, dtype=torch.int64)
    return {i: Shard(nothing, nothing) for i in range(config.partition.clients)}


class FedP3(Strategy):
    """A Strategy whose `start` carries out a FedP3 run.

    Args:
        config: the run; `[partition] clients` is the number of nodes, and its other keys are not used.
        net: W_0 is what it holds; the nodes' nets must have the same layers.
        example: one input of the net, without a batch axis.
        classes: how many classes there are.
        out: run folder; with it the run can be resumed and reported on.
        resume: go on with the run in `out`.
        wait: seconds to wait for all nodes before the first round.
    """

    def __init__(
        self,
        config: Config,
        net: nn.Module,
        example: Tensor,
        classes: int,
        out: Path | None = None,
        *,
        resume: bool = False,
        wait: float = 60.0,
    ) -> None:
        data = from_tensors(example.unsqueeze(0), torch.zeros(1, dtype=torch.int64), classes=classes)
        self.experiment = assemble_own(config, net, data, shards=_nobody(config))
        self.settings = Settings(out, resume, wait)

    def summary(self) -> None:
        """Log what will be run."""
        c = self.experiment.config
        log(INFO, "\t%s: %d clients, %d rounds, seed %d", c.method, c.partition.clients, c.run.rounds, c.run.seed)

    def start(  # type: ignore[override]  # rounds and deadline are the config's: nodes must know them too
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train; `evaluate_fn` is called with the first and the last model."""
        experiment = self.experiment if initial_arrays is None else _from(self.experiment, initial_arrays)
        rounds = experiment.problem.rounds
        if num_rounds not in (None, rounds):
            raise InputError(f"num_rounds={num_rounds}, but [run] rounds = {rounds}; the nodes know the config's only")
        self.summary()
        before = evaluate_fn(0, _arrays(experiment.start)) if evaluate_fn else None
        outcome = serve(grid, experiment, self.settings)
        if outcome is None:
            raise InputError(f"{self.settings.out} is finished; its result is in result.json")
        result = _result(outcome, self.settings.out, rounds)
        after = evaluate_fn(rounds, result.arrays) if evaluate_fn else None
        result.evaluate_metrics_serverapp |= {t: m for t, m in ((0, before), (rounds, after)) if m is not None}
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> NoReturn:
        """Not a step of this run."""
        _only_start()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Not a step of this run."""
        _only_start()

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> NoReturn:
        """Not a step of this run."""
        _only_start()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Not a step of this run."""
        _only_start()


def _only_start() -> NoReturn:
    raise InputError("FedP3 sends every node other arrays, which Flower's loop cannot: call its start()")


def _arrays(state: ServerState) -> ArrayRecord:
    return ArrayRecord({n: Array(w.numpy()) for n, w in state.W.items()})


def _from(experiment: Experiment, arrays: ArrayRecord) -> Experiment:
    """The experiment with another W_0."""
    names = [n for n in experiment.problem.layers.shapes if n in arrays]
    W = {n: torch.from_numpy(arrays[n].numpy().copy()).float() for n in names}
    wrong = [n for n, shape in experiment.problem.layers.shapes.items() if n not in W or W[n].shape != shape]
    if wrong:
        raise InputError(f"initial_arrays do not fit the net: {wrong[0]!r} is missing or has another shape")
    return replace(experiment, start=replace(experiment.start, W=W))


def _result(outcome: Outcome, folder: Path | None, rounds: int) -> Result:
    result = Result(_arrays(outcome.state))
    for event in record.read_events(folder) if folder else []:
        if event["loss"] is not None:
            result.train_metrics_clientapp[event["t"] + 1] = MetricRecord({"loss": event["loss"]})
    scores = {k: outcome.result[f"accuracy_{name}"] for k, name in SCORES.items()}
    said = {k: v for k, v in scores.items() if v is not None}
    result.evaluate_metrics_clientapp[rounds] = MetricRecord(said)
    return result


SCORES = {"G": "global", "D": "dispatched", "P": "personal"}
