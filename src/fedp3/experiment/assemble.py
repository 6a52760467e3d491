"""Assemble everything that a run needs, from a config or from a user's network and data.

All checks of an assembled run are called from here, before training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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
from fedp3.core.errors import InputError
from fedp3.core.settings import OWN
from fedp3.core.types import Layer
from fedp3.data import Dataset
from fedp3.data.inputs import only_tensor, tensors_of
from fedp3.data.shards import Shard
from fedp3.experiment.budgets import with_budget, with_client_privacy
from fedp3.experiment.client_samples import names_of_roles, shards_of
from fedp3.experiment.compatibility import (
    check_device,
    check_hooks,
    check_model,
    check_overlap,
    refuse_frozen,
    smallest_batch,
    with_fitting_numbers,
)
from fedp3.experiment.device_plans import with_fleet
from fedp3.experiment.experiment import Experiment
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
from fedp3.privacy import requirements
from fedp3.server.aggregation import make_aggregator
from fedp3.server.aggregators import AGGREGATORS
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.round_plans import plans_for


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
    shards = shards_of(config, data) if shards is None else shards
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
    names = names_of_roles(config, data, shards)
    experiment = Experiment(config, server, client, shards, start, client_names=names)
    if config.client_privacy.enabled:
        return with_client_privacy(experiment)
    if not config.privacy.enabled or not resolve_noise:
        return experiment
    return with_budget(experiment, config.privacy.noise_multiplier)


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
