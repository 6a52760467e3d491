"""`fedp3_client`: a user's ClientApp, whose network and data loading stay, answers FedP3 too."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from fedp3.config import Config
from fedp3.core.errors import InputError, type_of
from fedp3.data.inputs import tensors_of
from fedp3.deploy.node_samples import LoadData, node_samples
from fedp3.deploy.strategy_settings import clients_in, completed, from_text
from fedp3.engines.flower.client_app import answer_strategy, in_simulation, prepared_node
from fedp3.experiment.assemble import assemble_client, objective_of
from fedp3.experiment.compatibility import check_model, smallest_batch
from fedp3.node.context import NodeContext
from fedp3.node.folder import client_of
from fedp3.privacy.trial import uses_ghost

KEPT_BYTES = 256 * 2**20  # of samples that one process of a simulation holds between messages

MakeNet = Callable[[], nn.Module]


def fedp3_client(app: ClientApp, net: MakeNet, load_data: LoadData) -> ClientApp:
    """Let a ClientApp take part in runs of the strategy `FedP3`.

    The app keeps its own train and evaluate functions, which answer other strategies.

    Args:
        app: your ClientApp.
        net: makes your network: the class, or a function without arguments.
        load_data: loads the samples of one node.  Its parameters are filled by name: `context`
            with Flower's Context, any other name from the node's config, then from the run's, as in
            `partition_id` from `partition-id`.  It returns a data set, a DataLoader or a pair
            (x, y), which fedp3 splits, or two of these: samples to train on, and samples to test
            on.  How a DataLoader draws its batches is not used: `[local]` says that.

    Returns:
        The same app.

    Example:
        app = fedp3_client(ClientApp(), Net, load_data)
    """
    if not isinstance(app, ClientApp):
        raise InputError(
            f"fedp3_client got {type_of(app)} as its app; want a flwr.clientapp.ClientApp, "
            "as in fedp3_client(ClientApp(), Net, load_data)"
        )
    if isinstance(net, nn.Module) or not callable(net):
        raise InputError(
            f"fedp3_client got {type_of(net)} as its network; pass what makes it: the "
            "class, or a function without arguments"
        )
    if not callable(load_data):
        raise InputError(
            f"fedp3_client got {type_of(load_data)} as load_data; pass a function that "
            "loads the samples of one node"
        )
    return answer_strategy(app, partial(_node, net, load_data))


# --------------------------------------------------------------------- what the node trains with


def _node(net: MakeNet, load_data: LoadData, context: Context, text: str) -> NodeContext:
    """What this node trains with in the run that a message belongs to."""
    if not in_simulation():
        return _deployed(net, load_data, context, text)
    key = (client_of(context.node_config), text, str(sorted(context.run_config.items())))
    if key not in _HELD:
        _HELD[key] = _simulated(net, load_data, context, text)
        while len(_HELD) > 1 and sum(map(_bytes, _HELD.values())) > KEPT_BYTES:
            _HELD.popitem(last=False)
    _HELD.move_to_end(key)
    return _HELD[key]


# What this process of a simulation played last: it plays many clients, in many rounds.
_HELD: OrderedDict[tuple[int, str, str], NodeContext] = OrderedDict()


def _bytes(node: NodeContext) -> int:
    return sum(w.numel() * w.element_size() for w in tensors_of(node.context.data.x))


def _deployed(net: MakeNet, load_data: LoadData, context: Context, text: str) -> NodeContext:
    """What a deployed node trains with; its folder stores what takes long to prepare."""
    network = _made(net)
    client, config = _settings(network, context, text)
    data, shard = node_samples(load_data, context, network, config)
    return prepared_node(config, client, network, data, context, shard=shard)


def _simulated(net: MakeNet, load_data: LoadData, context: Context, text: str) -> NodeContext:
    """What a simulated node trains with; the server has checked all plans."""
    network = _made(net)
    client, config = _settings(network, context, text)
    data, shard = node_samples(load_data, context, network, config)
    smallest = smallest_batch({client: shard}, config.local.batch)
    check_model(network, data, smallest, config.run.seed, objective_of(config, data))
    shared = assemble_client(config, network, data)
    ghost = config.privacy.enabled and uses_ghost(shared)
    return NodeContext(client=client, config=config, context=shared, shard=shard, ghost=ghost)


def _made(net: MakeNet) -> nn.Module:
    network = net()
    if not isinstance(network, nn.Module):
        raise InputError(f"the network of fedp3_client is {type_of(network)}, want an nn.Module")
    return network


def _settings(network: nn.Module, context: Context, text: str) -> tuple[int, Config]:
    """Which client this node is, and the config of its run."""
    settings, client = from_text(text), client_of(context.node_config)
    clients = clients_in(settings)
    if clients is None:
        told = context.node_config.get("num-partitions")
        if type(told) is not int or told < 1:
            raise InputError(
                "this node does not know how many clients the run has; start it with --node-config "
                f"'partition-id={client} num-partitions=3', or set partition.clients in FedP3"
            )
        clients = told
    if client >= clients:
        raise InputError(f"partition-id={client}, but the run has clients 0 to {clients - 1}")
    return client, completed(settings, network, clients)
