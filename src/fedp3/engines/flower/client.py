"""The node's side: a ClientApp that answers tasks with updates (Alg. 1, ll. 8-12).

What a node trains with is found by a function of its Context, so that the same app serves a config file, a simulation,
and a user's own net and data.  A task that cannot be done is answered with the reason, never with an exception.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedp3 import config as configs
from fedp3.codec import decode_task, encode_update, room_for
from fedp3.config import Config
from fedp3.engines.flower import node
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
from fedp3.engines.inprocess import attempt
from fedp3.errors import CodecError, FedP3Error, InputError
from fedp3.experiment import Experiment, assemble
from fedp3.recipe import Recipe, Shard
from fedp3.types import ClientState, Failure, Task


@dataclass(frozen=True, slots=True)
class Held:
    """What a node trains with."""

    client: int
    recipe: Recipe
    shard: Shard
    digest: str  # of the config; the server's must be the same


Hold = Callable[[Context], Held]


def client_app(hold: Hold, carried: bool = False) -> ClientApp:
    """The ClientApp of a node that holds this; `carried` is for simulation, where states travel with the tasks."""
    app = ClientApp()
    app.query()(partial(_introduce, hold))
    app.train()(partial(_answer, hold, carried))
    app.evaluate()(partial(_answer, hold, carried))
    return app


def configured(config: Config, data_dir: Path | None = None) -> Hold:
    """A node's part of the data set a config names: client i is partition i."""
    return partial(_part, config.model_dump_json(), data_dir)


def _part(config_json: str, data_dir: Path | None, context: Context) -> Held:
    own = context.node_config.get("data-dir") or context.run_config.get("data-dir")
    experiment = _assembled(config_json, Path(str(own)) if own else data_dir)
    i = node.client_of(context.node_config)
    if i not in experiment.shards:
        raise InputError(f"partition-id={i}, but the config has clients 0 to {len(experiment.shards) - 1}")
    return Held(i, experiment.recipe, experiment.shards[i], experiment.config.digest())


@lru_cache(maxsize=1)
def _assembled(config_json: str, data_dir: Path | None) -> Experiment:
    """Once per process: a simulated client is one of many that its process plays."""
    return assemble(configs.Config.model_validate_json(config_json), data_dir)


# --------------------------------------------------------------------------- what it is asked


def _introduce(hold: Hold, message: Message, context: Context) -> Message:
    try:
        held = hold(context)
        capacity = node.capacity_of(context.node_config)
        said = identity_record(Identity(held.client, len(held.shard.train), capacity, held.digest))
    except FedP3Error as error:
        said = failure(str(error))
    return Message(said, reply_to=message)


def _answer(hold: Hold, carried: bool, message: Message, context: Context) -> Message:
    try:
        content = _work(hold(context), carried, message.content, context)
    except FedP3Error as error:
        content = failure(str(error))
    return Message(content, reply_to=message)


def _work(held: Held, carried: bool, asked: RecordDict, context: Context) -> RecordDict:
    recipe = held.recipe
    exchange = recipe.hooks.exchange
    room = room_for(exchange.begin(recipe.layers, recipe.data.classes)) if exchange else 0
    task = decode_task(frame_of(asked), recipe.layers, recipe.pruning, recipe.seed, room)
    if task.plan.client != held.client:
        raise CodecError(f"a task for client {task.plan.client} reached client {held.client}")
    if carried:
        return _reply(held, task, state_of(frame_of(asked, STATE)) if STATE in asked else None, _carry)
    home = node.home_of(context.node_config, run_of(asked))
    node.admit(task, recipe, context.node_config, home)
    task = node.as_scored(task, context.node_config)
    held = replace(held, shard=node.not_yet_trained(held.shard, task, recipe, home))
    return _reply(held, task, node.load_state(home, task), lambda _, state: node.keep_state(home, state))


def _reply(
    held: Held, task: Task, state: ClientState | None, keep: Callable[[RecordDict, ClientState | None], None]
) -> RecordDict:
    reply, left = attempt(held.recipe, held.shard, task, state)
    if isinstance(reply, Failure):
        return failure(reply.reason)
    recipe = held.recipe
    frame = encode_update(reply, task, recipe.layers, recipe.pruning.stale, recipe.compression)
    content = put_frame(RecordDict(), frame)
    keep(content, left)
    return content


def _carry(content: RecordDict, state: ClientState | None) -> None:
    if state is not None and state.tensors:
        put_frame(content, state_bytes(state), STATE)
