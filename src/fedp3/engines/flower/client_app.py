"""The node's side: a ClientApp that answers tasks with updates (Alg. 1, ll. 8-12).

A function of Flower's Context returns what a node trains with, so that one app serves a config
file, a simulation, and a user's own network and data.  A task that cannot be done is answered with
the reason, never with an exception.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedp3 import config as configs
from fedp3.client.context import ClientContext
from fedp3.config import Config
from fedp3.config.plugins import Plugin, load_plugin, load_plugins
from fedp3.core.errors import CodecError, FedP3Error, InputError
from fedp3.core.types import ClientState, Failure, Task
from fedp3.data.shards import Shard
from fedp3.engines.base import attempt
from fedp3.engines.flower import node
from fedp3.engines.flower.prepared import Preparation, preparation_key, prepare_once
from fedp3.engines.flower.records import (
    STATE,
    Identity,
    failure,
    frame_of,
    identity_record,
    put_frame,
    run_of,
    state_bytes,
    state_of,
)
from fedp3.experiment.assemble import (
    Experiment,
    assemble,
    assemble_client,
    assemble_from,
    load_parts,
)
from fedp3.messages.codec import decode_task, encode_update, room_for
from fedp3.privacy.mechanism import mechanism_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What a node trains with."""

    client: int
    context: ClientContext
    shard: Shard
    digest: str  # of the config; the server's must be the same


LoadNode = Callable[[Context], NodeContext]


def client_app(hold: LoadNode, carried: bool = False) -> ClientApp:
    """The ClientApp of a node.

    Args:
        hold: returns what the node trains with.
        carried: for simulation, where the states of clients are sent with their tasks.
    """
    app = ClientApp()
    app.query()(partial(_introduce, hold))
    app.train()(partial(_answer, hold, carried))
    app.evaluate()(partial(_answer, hold, carried))
    return app


# ------------------------------------------------------------------- what a node trains with


def configured(
    config: Config, data_dir: Path | None = None, plugins: Sequence[Plugin] = ()
) -> LoadNode:
    """Any client of a simulation, from a config: client i is partition i.

    The experiment is assembled once per process, which plays many clients.
    """
    recorded = tuple((plugin.path, plugin.sha256) for plugin in plugins)
    return partial(_simulated_client, json.dumps(config.as_json()), data_dir, recorded)


def configured_node(config: Config) -> LoadNode:
    """One client on a node, from a config: client i is partition i.

    What takes long is prepared once and read from the node's folder for every later message.
    """
    return partial(_deployed_client, config, ())


def configured_file(path: Path) -> LoadNode:
    """One client on a node, from a config file.

    `--node-config use=FILE` of a node names files that register further parts, separated by spaces.
    """
    return partial(_deployed_from_file, path)


def _simulated_client(
    config_json: str, data_dir: Path | None, plugins: Sequence[tuple[str, str]], context: Context
) -> NodeContext:
    for path, sha256 in plugins:
        load_plugin(path, sha256)
    experiment = _assembled(config_json, _data_dir(context) or data_dir)
    client = _client_of(context, experiment.config)
    return NodeContext(
        client=client,
        context=experiment.client,
        shard=experiment.shards[client],
        digest=experiment.config.digest(),
    )


@lru_cache(maxsize=1)
def _assembled(config_json: str, data_dir: Path | None) -> Experiment:
    return assemble(configs.parse(json.loads(config_json)), data_dir)


def _deployed_from_file(path: Path, context: Context) -> NodeContext:
    plugins = load_plugins(str(context.node_config.get("use") or "").split())
    return _deployed_client(configs.load(path), plugins, context)


def _deployed_client(config: Config, plugins: Sequence[Plugin], context: Context) -> NodeContext:
    client = _client_of(context, config)
    net, data = load_parts(config, _data_dir(context))
    experiment: Experiment | None = None

    def prepare() -> Preparation:
        nonlocal experiment
        experiment = assemble_from(config, net, data)
        return Preparation(experiment.shards[client], mechanism_of(experiment.client))

    prepared = prepare_once(
        node.folder_of(context.node_config),
        preparation_key(config, client, data, plugins),
        prepare,
        samples=len(data.y),
        privacy=config.privacy,
    )
    if experiment is None:
        client_context = assemble_client(config, net, data, prepared.mechanism)
    else:
        client_context = experiment.client
    return NodeContext(
        client=client, context=client_context, shard=prepared.shard, digest=config.digest()
    )


def _client_of(context: Context, config: Config) -> int:
    client, clients = node.client_of(context.node_config), config.partition.clients
    if client >= clients:
        raise InputError(f"partition-id={client}, but the config has clients 0 to {clients - 1}")
    return client


def _data_dir(context: Context) -> Path | None:
    """Where the data set is: the node's setting wins over the run's."""
    folder = context.node_config.get("data-dir") or context.run_config.get("data-dir")
    return Path(str(folder)) if folder else None


# --------------------------------------------------------------------------- messages


def _introduce(hold: LoadNode, message: Message, context: Context) -> Message:
    """Answer a query: who this node is."""
    try:
        holding = hold(context)
        identity = Identity(
            client=holding.client,
            examples=len(holding.shard.train),
            capacity=node.capacity_of(context.node_config),
            digest=holding.digest,
        )
        content = identity_record(identity)
    except FedP3Error as error:
        content = failure(str(error))
    return Message(content, reply_to=message)


def _answer(hold: LoadNode, carried: bool, message: Message, context: Context) -> Message:
    """Answer a task: an update, or the reason why there is none."""
    try:
        content = _work(hold(context), carried, message.content, context)
    except FedP3Error as error:
        content = failure(str(error))
    return Message(content, reply_to=message)


def _work(holding: NodeContext, carried: bool, request: RecordDict, context: Context) -> RecordDict:
    shared = holding.context
    task = _read_task(request, shared)
    if task.plan.client != holding.client:
        raise CodecError(f"a task for client {task.plan.client} reached client {holding.client}")
    if carried:
        state = state_of(frame_of(request, STATE)) if STATE in request else None
        content, new_state = _update(holding, task, state)
        if new_state is not None and new_state.tensors:
            put_frame(content, state_bytes(new_state), STATE)
        return content
    home = node.home_of(context.node_config, run_of(request))
    node.admit(task, shared, context.node_config, home)
    task = node.as_scored(task, context.node_config)
    holding = replace(holding, shard=node.not_yet_trained(holding.shard, task, shared, home))
    content, new_state = _update(holding, task, node.load_state(home, task))
    node.keep_state(home, new_state)
    return content


def _read_task(request: RecordDict, shared: ClientContext) -> Task:
    exchange = shared.hooks.exchange
    room = 0
    if exchange is not None:
        room = room_for(exchange.begin(shared.layers, shared.data.classes))
    return decode_task(frame_of(request), shared.layers, shared.pruning, shared.seed, room)


def _update(
    holding: NodeContext, task: Task, state: ClientState | None
) -> tuple[RecordDict, ClientState | None]:
    """The reply to a task, and the client's new state."""
    reply, new_state = attempt(holding.context, holding.shard, task, state)
    if isinstance(reply, Failure):
        return failure(reply.reason), None
    spec = holding.context.spec
    frame = encode_update(reply, task, spec.layers, spec.pruning.unfed_columns, spec.compression)
    return put_frame(RecordDict(), frame), new_state
