"""The Python interface: `run`, `resume` and `plan`, and `register` for parts that users add.

`run` trains any network on any data.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from fedp3 import config as configs
from fedp3 import data as datasets
from fedp3.client.batching import AUTO as AUTO_OBJECTIVE
from fedp3.client.objectives import OBJECTIVES, Objective
from fedp3.config import Config
from fedp3.config.plugins import load_plugins
from fedp3.core.errors import InputError
from fedp3.core.types import ClientPlan, Layer
from fedp3.costs.table import ClientCost
from fedp3.data import DATASETS, Dataset
from fedp3.data.catalogue import POOLED
from fedp3.data.gathering import Data
from fedp3.data.partition import PARTITIONS
from fedp3.engines.catalogue import check_engine, make_engine
from fedp3.experiment.assemble import assemble, assemble_from
from fedp3.experiment.client_samples import split_parts
from fedp3.experiment.experiment import Experiment
from fedp3.experiment.own_settings import (
    check_arguments,
    chosen_objective,
    with_fitting_defaults,
    with_own_parts,
)
from fedp3.messages.compressors import COMPRESSORS
from fedp3.methods import METHODS
from fedp3.models.zoo import MODELS
from fedp3.planning.coverage import coverage
from fedp3.planning.layer_sets import LAYER_SETS
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS
from fedp3.planning.schedules import SCHEDULES
from fedp3.report.result import Result
from fedp3.runs import existing, session
from fedp3.runs.callbacks import Callback, check_callbacks, check_score
from fedp3.runs.extension import extended
from fedp3.runs.history import History
from fedp3.runs.progress import maybe_rounds
from fedp3.runs.round_warnings import OnRound
from fedp3.runs.run_folder import as_event, read_events
from fedp3.server.aggregators import AGGREGATORS
from fedp3.server.context import RoundRecord

LOG = logging.getLogger("fedp3")

# Decorators with which users add parts: `@fedp3.register.aggregator("median")`.
register = SimpleNamespace(
    objective=OBJECTIVES.register,
    aggregator=AGGREGATORS.register,
    selector=SELECTORS.register,
    layer_set=LAYER_SETS.register,
    layer_schedule=SCHEDULES.register,
    local_pruner=LOCAL_PRUNERS.register,
    method=METHODS.register,
    model=MODELS.register,
    dataset=DATASETS.register,
    partition=PARTITIONS.register,
    compressor=COMPRESSORS.register,
)


@dataclass(frozen=True)
class Plan:
    """The plan of a run, before anything is trained.

    Attributes:
        clients: the plan of each client in the first round.
        costs: the cost of each client's plan: parameters, FLOPs, memory, MB.
        coverage: for each layer the clients that train and upload it, in the first round or,
            where layers follow a schedule, in some round of it.
    """

    clients: tuple[ClientPlan, ...]
    costs: list[ClientCost]
    coverage: Mapping[Layer, Sequence[int]]

    def __repr__(self) -> str:
        up = sum(cost.mb_up for cost in self.costs) / len(self.costs)
        return f"<Plan of {len(self.clients)} clients: {up:.3g} MB up per client and round>"


def run(
    model: nn.Module,
    data: Data,
    /,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    layers: Mapping[Layer, Sequence[str]] | None = None,
    workers: int = 1,
    engine: str = "inprocess",
    use: str | Path | Sequence[str | Path] = (),
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    objective: str | Objective = AUTO_OBJECTIVE,
    test: Data | None = None,
    lazy: bool = False,
    **settings: Any,
) -> Result:
    """Train a network on a data set.

    Args:
        model: the network; its values are W_0.  The run computes with it, and leaves other values
            in it: the trained network is `Result.model`.
        data: tensors (x, y), any map-style data set of (x, y) or DataLoader of one, or a `Dataset`;
            a list of these, or a dict by name, has the data of each client.  x is a tensor, or a
            tuple or dict of tensors; y has integers from 0 or texts.  A pair (train, test) of two
            of these is the same as `test`.
        out: the run folder, with which the run can be resumed and reported on.
        resume: continue the run in `out`, if there is one.  It uses the W_0 that it began with,
            whatever values the model has now.  With a larger `run=dict(rounds=...)` than it began
            with, the run is extended.
        layers: layer name -> tensor names; by default the layers are found by tracing.
        workers: processes; more than one needs `if __name__ == "__main__"` around the call.
        engine: "inprocess", or "debug" to raise a client's exception where it happens.
        use: Python file, or several, that register parts, which worker processes import too.
        on_round: called with the record of every finished round.
        callbacks: further functions to call, which may stop the run early: `fedp3.stop_at`,
            `fedp3.stop_early`, `fedp3.stop_after`, `fedp3.log_to_mlflow`, ...
        progress: show a progress bar; by default where standard error is a terminal or a notebook.
        objective: what clients minimise, and what models are scored by: the name of an objective or
            one of your own; by default classification, or what a `Dataset` names.
        test: a test set of no client, on which the server's model is scored as C.  Clients still
            test on a part of their own samples.
        lazy: read samples of a map-style data set when a batch needs them, so that it need not fit
            into memory and random transforms are drawn anew in every step; see `from_torch`.
        **settings: the settings of the config file, section by section: `method="fedp3"`,
            `prune=dict(keep=0.5)`, `run=dict(rounds=50)`, ...

    Raises:
        InputError: if something cannot work, before training; if `out` holds a run already and
            `resume` is not set.

    Example:
        >>> import fedp3, torch
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> result = fedp3.run(
        ...     net, (x, y), partition=dict(kind="iid", clients=3),
        ...     plan=dict(layers="full"), run=dict(rounds=2, clients_per_round=0),
        ... )
        >>> len(result.history)
        2
    """
    plugins = load_plugins([use] if isinstance(use, str | Path) else use)
    check_engine(engine)
    check_arguments(model, on_round, settings)
    if resume and out is None:
        raise InputError("resume=True needs the folder of the run; pass it as out='some/folder'")
    check_callbacks(callbacks)
    if engine == "flower":
        raise InputError(
            "engine 'flower' reads data sets by name; use `fedp3 run`, or the strategy "
            "fedp3.flower.FedP3 in a Flower app"
        )
    chosen = chosen_objective(objective, settings)
    labelled = chosen is None or chosen.labelled
    gathered = datasets.gather(data, test, labelled=labelled, lazy=lazy)
    dataset, parts = gathered.data, gathered.parts
    settings = with_own_parts(settings, objective, gathered)
    settings = with_fitting_defaults(settings, model, dataset, layers)
    config = configs.parse(settings, where="fedp3.run")
    if out is not None and resume and existing.holds_run(Path(out)):
        config = extended(Path(out), config)
    shards = None if parts is None else split_parts([part.numpy() for part in parts], config)
    experiment = assemble_from(config, model, dataset, layers, shards, objective=chosen)
    experiment = replace(experiment, client_names=gathered.names)
    make = partial(_engine, workers=workers, engine=engine, plugins=plugins)
    return _train(
        experiment,
        out,
        make,
        resume=resume,
        own_model=True,
        plugins=plugins,
        callbacks=[*callbacks, Callback(on_round=on_round)],
        progress=progress,
    )


def resume(
    folder: str | Path,
    *overrides: str,
    workers: int = 0,
    data_dir: str | Path | None = None,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Continue a run of `fedp3 run`, or read it if it is finished.

    A run of `fedp3.run` is continued by calling that again with `resume=True`: its model and data
    are not in the folder.

    Args:
        folder: the run folder.
        *overrides: `run.rounds=300` to extend the run; under differential privacy also
            `privacy.epsilon=...` or `client_privacy.epsilon=...`, the new total.
        workers: processes; 0 chooses.
        data_dir: where data sets are.
        on_round: called with the record of every finished round.
        callbacks: see `run`.
        progress: see `run`.
    """
    check_callbacks(callbacks)
    folder = Path(folder)
    config = existing.reopen(folder)
    if overrides:
        config = extended(folder, configs.load(folder / "config.toml", overrides))
    plugins = existing.plugins_of(folder)
    directory = Path(data_dir) if data_dir is not None else None
    experiment = assemble(config, directory)
    make = partial(_engine, workers=workers, data_dir=directory, plugins=plugins)
    return _train(
        experiment,
        folder,
        make,
        resume=True,
        own_model=False,
        plugins=plugins,
        callbacks=[*callbacks, Callback(on_round=on_round)],
        progress=progress,
    )


def plan(config: Config | str | Path, *, data_dir: str | Path | None = None) -> Plan:
    """The plan of every client under a config, without training.

    Args:
        config: a `Config`, or the path of a TOML file.
        data_dir: where data sets are.

    Example:
        >>> import fedp3
        >>> p = fedp3.plan(fedp3.make_config("plan.layers=opu3"))
        >>> len(p.clients)
        20
    """
    if not isinstance(config, Config):
        config = configs.load(Path(config))
    experiment = assemble(config, Path(data_dir) if data_dir is not None else None)
    return Plan(experiment.first_plans, experiment.costs, coverage(experiment.turn_plans))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file.

    Args:
        path: a TOML file, as `fedp3 init` writes it.
        overrides: `section.key=value`, as on the command line.

    Raises:
        ConfigError: lists all mistakes at once.
    """
    return configs.load(Path(path), overrides)


def load_dataset(name: str, data_dir: str | Path | None = None, test: str = POOLED) -> Dataset:
    """Load a registered data set.

    Args:
        name: its name, as in `data.name` of a config.
        data_dir: the data folder to search first.
        test: as in `data.test` of a config: "pooled" makes one pool of the published train and test
            parts, "official" keeps the test part from the clients, to score C.

    Example:
        >>> import fedp3
        >>> fedp3.load_dataset("digits").classes
        10
    """
    return datasets.load(name, None if data_dir is None else Path(data_dir), test=test)


def make_config(*overrides: str, **sections: Any) -> Config:
    """Build a config from sections and overrides.

    Overrides win over sections, sections over the method's settings, and these over the defaults.
    A ConfigError lists all mistakes.

    Args:
        *overrides: `section.key=value`, as on the command line.
        **sections: `method="fedavg"`, `run=dict(rounds=5)`, ...

    Example:
        >>> import fedp3
        >>> fedp3.make_config("run.rounds=5", method="fedavg").aggregate.rule
        'examples'
    """
    return configs.parse(sections, overrides, where="fedp3.make_config")


def _engine(experiment: Experiment, states: Any, **options: Any) -> Any:
    return make_engine(experiment, states=states, **options)


def _train(
    experiment: Experiment,
    out: str | Path | None,
    make: session.StartEngine,
    *,
    resume: bool,
    own_model: bool,
    plugins: Sequence[Any],
    callbacks: Sequence[Callback],
    progress: bool | None,
) -> Result:
    check_score(callbacks, experiment.server.spec.objective.score)
    folder = Path(out) if out is not None else None
    events: list[dict[str, Any]] = []

    def note(record: RoundRecord) -> None:
        if folder is None:
            events.append(as_event(record) | {"round": record.t + 1})

    method, rounds = experiment.config.method, experiment.config.run.rounds
    try:
        outcome = session.train(
            experiment,
            folder,
            make,
            resume=resume,
            own_model=own_model,
            plugins=plugins,
            watch=lambda _, before: maybe_rounds(progress, method, rounds, before),
            callbacks=[Callback(on_round=note), *callbacks],
            tell=LOG.info,
            warn=lambda text: warnings.warn(text, stacklevel=4),
            how_to_resume="fedp3.run(..., resume=True)" if own_model else "",
        )
    finally:
        experiment.client.net.requires_grad_()  # as before, so that it can be passed in again
    return Result(experiment, outcome, History(read_events(folder) if folder else events), folder)
