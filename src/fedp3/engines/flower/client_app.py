"""The node's side: a ClientApp that answers tasks with updates (Alg. 1, ll. 8-12).

A function of Flower's Context returns what a node trains with, so that one app serves a config
file, a simulation, and a user's own network and data.  `fedp3.node` decides what the node does for
a message.  A message that it does not act on is answered with a code, never with an exception.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedp3 import config as configs
from fedp3.client.context import ClientContext
from fedp3.client.objectives import Objective
from fedp3.config import Config
from fedp3.config.plugins import Plugin, load_plugin, load_plugins
from fedp3.core.errors import CodecError, FedP3Error, InputError
from fedp3.core.types import ClientUpdate, Failure, Params, Task
from fedp3.data import Dataset
from fedp3.data.sample_spec import sample_spec
from fedp3.data.shards import NO_SAMPLES, Shard
from fedp3.engines.base import attempt
from fedp3.engines.flower.records import (
    INITIAL,
    STATE,
    Identity,
    failure,
    frame_of,
    identity_record,
    put_frame,
    refusal,
    request_of,
    settings_text,
    state_bytes,
    state_of,
)
from fedp3.experiment.assemble import assemble, assemble_client, assemble_from, load_parts
from fedp3.experiment.experiment import Experiment
from fedp3.messages.codec import Copy, FindCopy, decode_task, encode_update, room_for
from fedp3.messages.copies import copy_in, copy_tensors, initial_copy, with_copy
from fedp3.models.frozen import frozen_sha256
from fedp3.node.account import noisy_scores
from fedp3.node.admission import admit, check_config, check_message, shard_of
from fedp3.node.context import NodeContext
from fedp3.node.folder import (
    NodeSettings,
    capacity_of,
    client_of,
    device_of_node,
    folder_of,
    keep_refused_task,
    log_refusal,
)
from fedp3.node.folder import node_settings as settings_of
from fedp3.node.prepared import Preparation, preparation_key, prepare_once
from fedp3.node.records import read_marks
from fedp3.node.refusal import RefusalCode, Refused, code_of
from fedp3.node.states import StateKey, load_state, read_state, save_state
from fedp3.privacy.mechanism import PrivateSteps, mechanism_of
from fedp3.privacy.trial import uses_ghost

LoadNode = Callable[[Context], NodeContext]
LoadFor = Callable[[Context, str], NodeContext]  # with the settings of the message, as JSON
Work = Callable[[Message, Context], RecordDict]
ACTION = "fedp3"  # of messages to apps that answer other strategies as well
log = logging.getLogger("flwr").log  # what a SuperNode shows


def client_app(load_node: LoadNode, state_in_message: bool = False) -> ClientApp:
    """The ClientApp of a node.

    Args:
        load_node: returns what the node trains with.
        state_in_message: for simulation, where a client's state travels with its tasks and updates,
            and where there is no node with a policy.
    """
    app = ClientApp()
    answer = _simulate_task if state_in_message else _answer_task
    app.query()(partial(_answer, partial(_introduce, load_node, state_in_message)))
    app.train()(partial(_answer, partial(answer, load_node)))
    app.evaluate()(partial(_answer, partial(answer, load_node)))
    return app


def answer_strategy(app: ClientApp, load_node: LoadFor) -> ClientApp:
    """Let a ClientApp answer the strategy FedP3 besides those that it answers already.

    Args:
        app: any ClientApp; its own functions stay as they are.
        load_node: returns what the node trains with, given the settings that a message brings.
    """

    def introduce(message: Message, context: Context) -> RecordDict:
        load = partial(_load_for, load_node, message)
        return _introduce(load, in_simulation(), message, context)

    def work(message: Message, context: Context) -> RecordDict:
        load = partial(_load_for, load_node, message)
        answer = _simulate_task if in_simulation() else _answer_task
        return answer(load, message, context)

    app.query(ACTION)(partial(_answer, introduce))
    app.train(ACTION)(partial(_answer, work))
    app.evaluate(ACTION)(partial(_answer, work))
    return app


def _load_for(load_node: LoadFor, message: Message, context: Context) -> NodeContext:
    return load_node(context, settings_text(message.content))


def in_simulation() -> bool:
    """Whether this process plays clients in Flower's simulation: it is one of Ray's actors.

    A node that is deployed never is, even if its owner's code uses Ray.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


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
    mechanism = mechanism_of(experiment.client)
    return NodeContext(
        client=client,
        config=experiment.config,
        context=experiment.client,
        shard=experiment.shards[client],
        ghost=mechanism is not None and mechanism.ghost,
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
    return prepared_node(config, client, net, data, context, plugins=plugins)


def prepared_node(
    config: Config,
    client: int,
    net: nn.Module,
    data: Dataset,
    context: Context,
    *,
    shard: Shard | None = None,
    plugins: Sequence[Plugin] = (),
) -> NodeContext:
    """What a node trains with, prepared by its first message and read by all later ones.

    Args:
        config: the run.
        client: which client the node is.
        net: the network with its initial weights.
        data: the data set.
        context: of the node.
        shard: the client's samples, where the data set is this node's alone; None partitions it.
        plugins: files that the run uses.
    """
    assembled: list[ClientContext] = []

    def prepare() -> Preparation:
        nothing = NO_SAMPLES
        shards = None
        if shard is not None:
            shards = dict.fromkeys(range(config.partition.clients), nothing) | {client: shard}
        experiment = assemble_from(config, net, data, shards=shards, resolve_noise=False)
        assembled.append(experiment.client)
        ghost = config.privacy.enabled and uses_ghost(experiment.client)
        return Preparation(experiment.shards[client], ghost)

    prepared = prepare_once(
        folder_of(context.node_config),
        preparation_key(config, client, net, data, plugins),
        prepare,
        samples=len(data.y),
    )
    return NodeContext(
        client=client,
        config=config,
        context=assembled[0] if assembled else assemble_client(config, net, data),
        shard=prepared.shard,
        ghost=prepared.ghost,
    )


def _client_of(context: Context, config: Config) -> int:
    client, clients = client_of(context.node_config), config.partition.clients
    if client >= clients:
        raise InputError(f"partition-id={client}, but the config has clients 0 to {clients - 1}")
    return client


def _data_dir(context: Context) -> Path | None:
    """Where the data set is: the node's setting wins over the run's."""
    folder = context.node_config.get("data-dir") or context.run_config.get("data-dir")
    return Path(str(folder)) if folder else None


# --------------------------------------------------------------------------- messages


def _answer(work: Work, message: Message, context: Context) -> Message:
    """Answer a message with what `work` returns, or with why there is nothing to return."""
    try:
        content = work(message, context)
    except Exception as error:  # an exception would reach the server with its text
        content = _refuse(error, context)
    return Message(content, reply_to=message)


def _refuse(error: Exception, context: Context) -> RecordDict:
    """Log the text of an error on this node, and send its code."""
    code, text = code_of(error), str(error)
    if not isinstance(error, FedP3Error):
        text = f"{type(error).__name__}: {error}"
    if in_simulation():  # there is no owner whose data a text could reveal
        return failure(text, code)
    log(logging.WARNING, "refused (%s): %s", code, text)
    try:
        log_refusal(folder_of(context.node_config), code, text)
        reveal = settings_of(context.node_config).policy.errors.reveal
    except Exception:  # the settings themselves are what is wrong, or the folder
        reveal = False
    return failure(text, code) if reveal else refusal(code)


def _introduce(
    load_node: LoadNode, state_in_message: bool, message: Message, context: Context
) -> RecordDict:
    """Answer a query with the node's client number, number of samples, capacity and config."""
    holding = load_node(context)
    shard = holding.shard
    if not state_in_message:
        node = settings_of(context.node_config)
        check_config(node.policy, holding.config)
        shard = shard_of(node, holding)
    return identity_record(
        Identity(
            client=holding.client,
            examples=len(shard.train),
            capacity=capacity_of(context.node_config),
            device=device_of_node(context.node_config),
            digest=holding.config.digest(),
            clients=holding.config.partition.clients,
            sample=sample_spec(holding.context.data),
            simulated=state_in_message,
            frozen=frozen_sha256(holding.context.net),
        )
    )


def _simulate_task(load_node: LoadNode, message: Message, context: Context) -> RecordDict:
    """Answer a task in a simulation, whose server has the texts of all errors."""
    holding, request = _with_initial(load_node(context), message.content), message.content
    state = state_of(frame_of(request, STATE)) if STATE in request else None
    task = _read_task(request, holding.context, lambda t: copy_in(state))
    client_context = holding.context
    mechanism = request_of(request).mechanism
    if mechanism is not None:
        client_context = replace(client_context, steps=PrivateSteps(mechanism))
    reply, new_state = attempt(client_context, holding.shard, task, state)
    if isinstance(reply, Failure):
        return failure(reply.reason)
    content = _update_record(reply, task, client_context)
    new_state = with_copy(new_state, task.t, _copy_of(task, client_context))
    if new_state is not None and new_state.tensors:
        put_frame(content, state_bytes(new_state), STATE)
    return content


def _answer_task(load_node: LoadNode, message: Message, context: Context) -> RecordDict:
    """Answer a task on a node: check it, charge it, train, and store the new state."""
    node = settings_of(context.node_config)
    holding = _with_initial(load_node(context), message.content)
    request = request_of(message.content)
    key = StateKey(
        run=request.run, config=holding.config.digest(), ldp=holding.config.privacy.enabled
    )
    try:
        check_message(node, holding.config, request)
        stored = partial(read_state, node.folder, key)
        task = _read_task(message.content, holding.context, lambda t: copy_in(stored(t)))
        admitted = admit(node, holding, request, task)
    except FedP3Error:
        keep_refused_task(node.folder, frame_of(message.content))
        raise
    state = load_state(node.folder, key, task)
    reply, new_state = attempt(admitted.context, admitted.shard, admitted.task, state)
    if isinstance(reply, Failure):
        raise Refused(RefusalCode.TRAINING, reply.reason)
    new_state = with_copy(new_state, task.t, _copy_of(task, holding.context))
    save_state(node.folder, key, new_state, read_marks(node.folder).anchor)
    released = _released(reply, node, admitted.context.objective)
    return _update_record(released, admitted.task, admitted.context)


def _with_initial(holding: NodeContext, content: RecordDict) -> NodeContext:
    """What the node trains with, where a message brings the values that it starts from."""
    if INITIAL not in content:
        return holding
    shared, sent = holding.context, state_of(frame_of(content, INITIAL)).tensors
    for n, w in sent.items():
        known = shared.initial.get(n)
        if known is None or (w.shape, w.dtype) != (known.shape, known.dtype):
            raise CodecError(f"the message starts {n[:100]!r} from what this network does not have")
    return replace(holding, context=replace(shared, initial={**shared.initial, **sent}))


def _released(update: ClientUpdate, node: NodeSettings, objective: Objective) -> ClientUpdate:
    """The update as it leaves the node, with noise on its scores if the policy requires it."""
    noise = node.policy.scores.noise_multiplier
    metrics = noisy_scores(update.metrics, noise, objective.shares)
    return replace(update, metrics=metrics)


def _read_task(request: RecordDict, shared: ClientContext, stored_copy: FindCopy) -> Task:
    """The task in a message.

    Args:
        request: the message.
        shared: what all clients share.
        stored_copy: from a round to the copy that is stored with the state of that round.
    """
    exchange, spec = shared.hooks.exchange, shared.spec
    room = 0
    if exchange is not None:
        room = room_for(exchange.begin(shared.layers, shared.data.classes))

    def find_copy(t: int) -> Copy | None:
        if t >= 0:
            return stored_copy(t)
        return initial_copy(shared.initial, spec.layers, spec.download)

    frame = frame_of(request)
    return decode_task(frame, spec.layers, spec.pruning, spec.seed, room, spec.download, find_copy)


def _copy_of(task: Task, shared: ClientContext) -> Params:
    """What the client stores of the weights that a task brought."""
    spec = shared.spec
    return copy_tensors(task, spec.layers, spec.pruning.unfed_columns, spec.download)


def _update_record(update: ClientUpdate, task: Task, context: ClientContext) -> RecordDict:
    spec = context.spec
    frame = encode_update(update, task, spec.layers, spec.pruning.unfed_columns, spec.compression)
    return put_frame(RecordDict(), frame)
