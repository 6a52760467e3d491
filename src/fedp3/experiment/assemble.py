"""Assemble everything that a run needs, from a config or from a user's network and data.

All checks of an assembled run are called from here, before training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedp3 import data as datasets
from fedp3 import methods
from fedp3.client.batching import AUTO as AUTO_OBJECTIVE
from fedp3.client.context import ClientContext, RunSpec
from fedp3.client.hooks import Hooks
from fedp3.client.objectives import OBJECTIVES, Objective
from fedp3.client.stacked import can_stack
from fedp3.config import Config
from fedp3.config.contradictions import contradictions
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.settings import OWN
from fedp3.core.types import ClientPlan, Layer
from fedp3.costs.compute import ComputeProfile, measure_on
from fedp3.costs.table import ClientCost, client_costs
from fedp3.data import Dataset, first_record
from fedp3.data.inputs import only_tensor, tensors_of
from fedp3.data.partition import BY_LABELS, ROLES, by_roles, histogram, partition, split
from fedp3.data.partition_file import read_partition
from fedp3.data.shards import Shard
from fedp3.experiment.compatibility import (
    check_device,
    check_hooks,
    check_model,
    check_overlap,
    refuse_frozen,
    smallest_batch,
    with_fitting_numbers,
)
from fedp3.experiment.device_plans import on_devices, with_fleet
from fedp3.messages.versions import Published, begin, is_coded
from fedp3.methods.fedcr import coded_tail
from fedp3.models.adapters import with_adapters
from fedp3.models.frozen import tensors_named
from fedp3.models.layer_map import found_layers, layer_map
from fedp3.models.zoo import MODELS, ModelSpec, build, channels_last
from fedp3.planning.capacities import capacities
from fedp3.planning.coverage import check_coverage, check_pruning
from fedp3.planning.layer_sets import AUTO as AUTO_LAYERS
from fedp3.planning.prune_settings import SELECTORS
from fedp3.privacy import accountant, requirements
from fedp3.privacy.budget import Schedule, plan_budget
from fedp3.privacy.client_level import requirements as client_requirements
from fedp3.privacy.client_level.budget import plan_release_budget
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import AUTO, Mechanism
from fedp3.server.aggregation import make_aggregator
from fedp3.server.aggregators import AGGREGATORS
from fedp3.server.client_level import ClientLevel
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.rounds import plans_for


@dataclass(frozen=True)
class Experiment:
    """A run that is ready to start.

    Attributes:
        config: its config.
        server: what the server knows.
        client: what all clients share.
        shards: the samples of each client.
        start: the state before the first round.
        client_names: the names of the clients, if they have any.
    """

    config: Config
    server: ServerContext
    client: ClientContext
    shards: Mapping[int, Shard]
    start: ServerState
    client_names: tuple[str, ...] = ()

    @cached_property
    def first_plans(self) -> tuple[ClientPlan, ...]:
        """The plans of all clients in round 0."""
        return plans_for(self.server, 0)

    @cached_property
    def turn_plans(self) -> tuple[ClientPlan, ...]:
        """The plans of all clients in every round of one turn of the schedule of layers.

        Without a schedule these are the plans of round 0.
        """
        later = (plans_for(self.server, t) for t in range(1, self.server.turn))
        return sum(later, self.first_plans)

    @cached_property
    def profile(self) -> ComputeProfile:
        """FLOPs and memory of the network."""
        if self.server.fleet is not None:
            return self.server.fleet.profile
        return measure_on(self.client.net, first_record(self.client.data), self.client.objective)

    @cached_property
    def costs(self) -> list[ClientCost]:
        """What every client's plan costs in round 0."""
        return self.costs_of(self.first_plans)

    def costs_of(self, plans: Sequence[ClientPlan]) -> list[ClientCost]:
        """What these plans, one for each client, cost in their round."""
        server = self.server
        costs = client_costs(
            self.client,
            self.profile,
            plans,
            server.keep,
            server.examples,
            self.start.extra,
        )
        return costs if server.fleet is None else on_devices(costs, server.fleet)

    @property
    def schedule(self) -> Schedule:
        """Which clients may take part in which round."""
        server, fleet = self.server, self.server.fleet
        if fleet is None:
            return Schedule(server.run, server.examples)
        run = replace(server.run, clients_per_round=fleet.asked(server.participants))
        return Schedule(run, {i: n * (i in fleet.able) for i, n in server.examples.items()})

    @property
    def labels(self) -> np.ndarray:
        """Samples of each class at each client: (clients, classes); one class without labels."""
        data = self.client.data
        parts = [torch.cat([s.train, s.test]).numpy() for _, s in sorted(self.shards.items())]
        if not data.labelled:
            return np.array([[len(part)] for part in parts])
        return histogram(data.y.numpy(), parts, data.classes)


def assemble(config: Config, data_dir: Path | None = None) -> Experiment:
    """The experiment that a config describes.

    Args:
        config: the run.
        data_dir: where data sets are; None looks in the usual places.
    """
    net, data = load_parts(config, data_dir)
    return assemble_from(config, net, data)


def load_parts(config: Config, data_dir: Path | None = None) -> tuple[nn.Module, Dataset]:
    """The network with its initial weights, and the data set, that a config names."""
    if OWN in (config.data.name, config.model.name):
        raise InputError(
            "this config is of a run by fedp3.run, whose model and data are not in it: call "
            "fedp3.run again in your program, with the same out=FOLDER and resume=True to continue"
        )
    architecture = MODELS.pick(config.model.name)
    tokenizer = architecture.tokenizer(config.model) if architecture.tokenizer else None
    data = datasets.load_as(config.data, data_dir, architecture.image_side, tokenizer)
    x = tensors_of(data.x)[0]
    if not architecture.several_inputs:
        x = only_tensor(data.x, f"the network {config.model.name!r}")
    spec = ModelSpec(
        shape=tuple(x.shape[1:]),
        classes=data.outputs,
        settings=config.model,
        tail=coded_tail(config.hooks.code, config.model),
        labelled=data.labelled,
        vocabulary=data.vocabulary,
    )
    return build(spec, config.run.seed), data


def assemble_from(
    config: Config,
    net: nn.Module,
    data: Dataset,
    layers: Mapping[Layer, Sequence[str]] | None = None,
    shards: Mapping[int, Shard] | None = None,
    *,
    resolve_noise: bool = True,
    objective: Objective | None = None,
) -> Experiment:
    """The experiment of a user's network and data.

    Args:
        config: the run.
        net: the network; its values are W_0.
        data: all samples.
        layers: layer name -> tensor names; None finds the layers by tracing.
        shards: the samples of each client; None partitions the data as the config describes.
        resolve_noise: under LDP, find the noise and the budget; a node leaves this to the server,
            whose tasks name the noise.
        objective: what clients minimise; None means what the config names.
    """
    check_device(config.run.device)
    net = prepared_network(config, net)
    data = with_fitting_numbers(net, data)
    objective = objective or objective_of(config, data)
    shards = _shards(config, data) if shards is None else shards
    smallest = smallest_batch(shards, config.local.batch)
    check_model(net, data, smallest, config.run.seed, objective)
    test = _fitting_test(net, data, config.run.seed, objective)
    spec = replace(_run_spec(config, net, layers), objective=objective)
    check_hooks(spec)
    refuse_frozen(net)
    client = _client_context(config, spec, net, data)
    central = None if test is None else replace(client, data=test)
    if config.privacy.enabled and not config.client_privacy.enabled:
        requirements.check(client, shards, config.privacy.delta)
    exchange = spec.hooks.exchange
    extra = exchange.begin(spec.layers, data.classes) if exchange else {}
    server = with_fleet(_server_context(config, spec, shards), config, client, extra)
    awaits_devices = config.plan.layers == AUTO_LAYERS and server.fleet is None
    if not awaits_devices:
        check_plans(server)
    server = replace(server, central=central)
    start = ServerState(
        t=0,
        W=client.initial,
        aggregator=server.aggregator.init(),
        extra=extra,
        published=published_at_start(config, client),
    )
    experiment = Experiment(config, server, client, shards, start)
    if config.client_privacy.enabled:
        return _with_client_privacy(experiment)
    if not config.privacy.enabled or not resolve_noise:
        return experiment
    return _with_budget(experiment, config.privacy.noise_multiplier)


def _fitting_test(net: nn.Module, data: Dataset, seed: int, objective: Objective) -> Dataset | None:
    """The central test set, with the numbers that the network computes with; None without one."""
    if data.test is None:
        return None
    test = with_fitting_numbers(net, data.test)
    try:
        check_model(net, test, 2, seed, objective)
    except InputError as error:
        raise InputError(f"the central test set does not fit: {error}") from None
    return test


def prepared_network(config: Config, net: nn.Module) -> nn.Module:
    """The network as clients train it: a copy with a frozen part, and perhaps with adapters.

    It is `net` itself where the config freezes nothing.
    """
    frozen: list[str] = []
    if config.model.frozen:
        frozen = tensors_named(net, found_layers(net), config.model.frozen, "[model] frozen")
    prepared = with_adapters(net, config.adapter, frozen, config.run.seed)
    if next(prepared.parameters(), None) is None and next(net.parameters(), None) is not None:
        raise InputError("[model] frozen: it names all layers, and nothing is left to train")
    return prepared


def published_at_start(config: Config, client: ClientContext) -> Published | None:
    """What clients hold before the first round, where changes of weights are sent down."""
    if not is_coded(config.download):
        return None
    known = config.model.name != OWN  # then the seed determines W_0
    return begin(client.initial, client.layers, config.download, known=known)


def assemble_client(config: Config, net: nn.Module, data: Dataset) -> ClientContext:
    """The clients' half of an experiment that was assembled, and thereby checked, before.

    It needs no partition and no plans, which take most of the time.

    Args:
        config: the run.
        net: the network with its initial weights.
        data: all samples.
    """
    check_device(config.run.device)
    net = prepared_network(config, net)
    data = with_fitting_numbers(net, data)
    spec = replace(_run_spec(config, net), objective=objective_of(config, data))
    return _client_context(config, spec, net, data)


def objective_of(config: Config, data: Dataset) -> Objective:
    """The objective that a config names, or the one that fits the data set.

    Raises:
        InputError: if it needs labels, and the data set has none.
    """
    name = config.local.objective
    if name == OWN:
        raise InputError(
            "this config is of a run by fedp3.run with an objective that is not registered: call "
            "fedp3.run again in your program, with the same out=FOLDER and resume=True to continue"
        )
    if name == AUTO_OBJECTIVE and not data.objective:
        raise InputError(
            f"data set {data.name!r} has targets other than labels: say what clients minimise, "
            "with objective=... in fedp3.run or [local] objective"
        )
    objective = OBJECTIVES.pick(data.objective if name == AUTO_OBJECTIVE else name)
    if objective.labelled and not data.labelled:
        raise InputError(
            f"[local] objective: {name!r} needs one label per sample, and data set {data.name!r} "
            "has other targets"
        )
    return objective


def _run_spec(
    config: Config, net: nn.Module, layers: Mapping[Layer, Sequence[str]] | None = None
) -> RunSpec:
    return RunSpec(
        layers=layer_map(
            net,
            layers,
            sublayers=config.model.layers == "sublayers",
            heads=config.prune.heads,
        ),
        pruning=config.prune,
        compression=config.upload,
        download=config.download,
        hooks=_hooks(config),
        seed=config.run.seed,
        rounds=config.run.rounds,
        continues=config.aggregate.interval > 1,
        adapter=config.adapter,
    )


def _hooks(config: Config) -> Hooks:
    make = methods.METHODS.pick(config.method).hooks or methods.make_hooks
    return make(config.hooks)


def _server_context(config: Config, spec: RunSpec, shards: Mapping[int, Shard]) -> ServerContext:
    if config.client_privacy.enabled:  # there the optimizer steps on the noised release
        aggregator = AGGREGATORS.pick(config.aggregate.rule)(config.aggregate, spec)
    else:
        aggregator = make_aggregator(config.aggregate, spec)
    check_overlap(config.devices, config.aggregate.rule, aggregator)
    # What is chosen for devices follows; a keep file was read together with the config.
    share = 1.0 if isinstance(config.prune.keep, str) else config.prune.keep
    return ServerContext(
        spec=spec,
        plan=config.plan,
        run=config.run,
        aggregator=aggregator,
        keep=capacities(share, len(shards), spec.seed),
        examples={i: len(s.train) for i, s in shards.items()},
    )


def check_plans(server: ServerContext) -> None:
    """Refuse plans under which some layer is never trained, and pruning that does not work.

    Of pruning, only the plans of round 0 are checked, unless the selector is static and plans are
    redrawn: then the plans of all rounds are.
    """
    spec = server.spec
    if server.fleet is None or not server.fleet.classes:
        check_coverage(server.plan, spec.layers, server.keep, spec.seed, spec.rounds)
    static = SELECTORS.pick(spec.pruning.selector).static
    rounds = server.spec.rounds if server.plan.changes and static else 1
    plans = [plan for t in range(rounds) for plan in plans_for(server, t)]
    check_pruning(server.spec.pruning, server.layers, plans)


def _client_context(config: Config, spec: RunSpec, net: nn.Module, data: Dataset) -> ClientContext:
    values = net.state_dict()
    initial = {
        n: values[n].detach().cpu().clone(memory_format=torch.contiguous_format)
        for n in spec.layers.shapes
    }
    return ClientContext(
        spec=spec,
        net=channels_last(net.to(config.run.device)),
        data=replace(data, test=None),  # the central test set is the server's
        local=config.local,
        initial=initial,
        device=config.run.device,
        stacked=can_stack(spec, data, config.local, config.run.device),
    )


def _with_budget(experiment: Experiment, noise: float | str) -> Experiment:
    """The experiment with its mechanism and budget.

    Args:
        experiment: the run, whose requirements were checked.
        noise: the noise multiplier, or "auto" to find it.
    """
    accountant.require()
    settings = experiment.config.privacy
    mechanism = Mechanism(
        clip=settings.clip,
        noise_multiplier=0.0 if noise == AUTO else float(noise),
        sample_rate=settings.sample_rate,
        randomness=settings.randomness,
        ghost=requirements.uses_ghost(experiment.client),
    )
    budget = plan_budget(
        experiment.schedule,
        experiment.client.local,
        mechanism,
        settings.epsilon,
        settings.delta,
        find_noise=noise == AUTO,
    )
    client = replace(experiment.client, stacked=False, steps=PrivateSteps(budget.mechanism))
    return replace(experiment, server=replace(experiment.server, budget=budget), client=client)


def with_noise(experiment: Experiment, noise: float | None) -> Experiment:
    """The experiment under this noise multiplier, which its run was begun with."""
    budget = experiment.server.budget
    if budget is None or noise is None or noise == budget.mechanism.noise_multiplier:
        return experiment
    return _with_budget(experiment, noise)


def _with_client_privacy(experiment: Experiment) -> Experiment:
    """The experiment under client-level DP; refused if the guarantee would not hold."""
    config, server = experiment.config, experiment.server
    mistakes = contradictions(config)  # a `Config` that was built in Python is not checked yet
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    budget = plan_release_budget(config.client_privacy, config.run.rounds)
    client_requirements.check(server.spec, experiment.first_plans, budget)
    mode = ClientLevel(budget=budget, optimizer=config.aggregate)
    return replace(experiment, server=replace(server, client_level=mode))


def _shards(config: Config, data: Dataset) -> dict[int, Shard]:
    return split_parts(_parts(config, data), config)


def _parts(config: Config, data: Dataset) -> Sequence[np.ndarray]:
    """Which samples each client has."""
    p, seed, y = config.partition, config.run.seed, data.y
    if p.file:
        parts = read_partition(Path(p.file), len(y))
        if len(parts) != p.clients:
            raise InputError(
                f"{p.file} has {len(parts)} clients, but [partition] clients is {p.clients}"
            )
        return parts
    if p.kind == ROLES:
        if data.roles is None:
            raise InputError(
                f"[partition] kind: data set {data.name!r} has no roles; in a text, a speaker's "
                "name stands on a line of its own and ends with a colon; use 'iid'"
            )
        return by_roles(data.roles.numpy(), p.clients)
    if not data.labelled and p.kind in BY_LABELS:
        raise InputError(
            f"[partition] kind: {p.kind!r} divides samples by their labels, and data set "
            f"{data.name!r} has none; use 'iid'" + ("" if data.roles is None else f" or {ROLES!r}")
        )
    return partition(
        p.kind,
        y.numpy() if data.labelled else np.zeros(len(y), np.int64),
        p.clients,
        seed=seed,
        classes=p.classes,
        alpha=p.alpha,
        sizes=p.sizes,
    )


def split_parts(parts: Sequence[np.ndarray], config: Config) -> dict[int, Shard]:
    """The train and test samples of each client, whose samples these are."""
    shards = {}
    for i, part in enumerate(parts):
        share = config.partition.train_share
        train, test = split(part, seed=config.run.seed, client=i, share=share)
        shards[i] = Shard(torch.from_numpy(train), torch.from_numpy(test))
    return shards
