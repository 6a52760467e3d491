"""A FedP3 run inside a user's Flower app: with their network, their data and their ServerApp.

    server:  run_on_grid(grid, config, net, example, classes)
    node:    app = client_app(own(config, make_net, load_data))

The rounds are those of every other run.  Flower's loop, which sends every node the same arrays, is
not used.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedp3.config import Config
from fedp3.core.errors import InputError
from fedp3.data import Dataset, from_tensors, gather
from fedp3.data.catalogue import POOLED
from fedp3.data.gathering import Data
from fedp3.data.inputs import Inputs, map_tensors
from fedp3.data.partition import split
from fedp3.data.shards import Shard
from fedp3.deploy.flower_app import ServeSettings, serve
from fedp3.engines.flower.client_app import LoadNode, prepared_node
from fedp3.experiment.assemble import assemble_from
from fedp3.node.context import NodeContext
from fedp3.node.folder import client_of
from fedp3.runs.session import Outcome


def run_on_grid(
    grid: Grid,
    config: Config,
    net: nn.Module,
    example: Inputs,
    classes: int,
    out: Path | None = None,
    *,
    target: Tensor | None = None,
    test: Data | None = None,
    resume: bool = False,
    wait: float = 60.0,
) -> Outcome:
    """Train over the nodes of a grid.

    Args:
        grid: Flower's grid, from your ServerApp.
        config: the run; `[partition] clients` is the number of nodes, and its other keys are not
            used.
        net: its weights are W_0; the nodes' networks must have the same layers.
        example: one input of the network, without a batch axis.
        classes: the number of classes; 0 if there are none.
        out: the run folder; with it the run can be resumed and has a report.
        target: one target, without a batch axis, where it is no label; `[local] objective` then
            names the objective.
        test: a test set of no node, on which the server scores its model as C.
        resume: continue the run in `out`.
        wait: seconds to wait for all nodes before the first round.
    """
    x = map_tensors(lambda w: w.unsqueeze(0), example)
    y = torch.zeros(1, dtype=torch.int64) if target is None else target.unsqueeze(0)
    if config.data.test != POOLED:
        raise InputError(
            f"[data] test: {config.data.test!r}, but this server reads no data set by its name; "
            "leave it out, and pass the test set as test="
        )
    data = from_tensors(x, y, classes=classes, labelled=target is None)
    if test is not None:
        central = gather(test, labelled=target is None).data
        data = replace(data, test=replace(central, classes=max(classes, central.classes)))
    experiment = assemble_from(config, net, data, shards=_empty_shards(config))
    return serve(grid, experiment, ServeSettings(out=out, resume=resume, wait=wait))


def own(
    config: Config, net: Callable[[], nn.Module], data: Callable[[Context], Dataset]
) -> LoadNode:
    """What a node trains with, where network and data are the user's.

    Args:
        config: the run, as on the server.
        net: makes the network.
        data: returns the samples of this node.
    """
    return partial(_own, config, net, data)


def _own(
    config: Config,
    net: Callable[[], nn.Module],
    data: Callable[[Context], Dataset],
    context: Context,
) -> NodeContext:
    i, samples = client_of(context.node_config), data(context)
    if i >= config.partition.clients:
        raise InputError(f"partition-id={i}, but [partition] clients = {config.partition.clients}")
    everything = np.arange(len(samples.y))
    # The split is the same in every run.  Otherwise a record that trained under LDP in one run
    # would be scored, without noise, in another.
    train, test = split(everything, seed=0, client=i, share=config.partition.train_share)
    shard = Shard(torch.from_numpy(train), torch.from_numpy(test))
    return prepared_node(config, i, net(), samples, context, shard=shard)


def _empty_shards(config: Config) -> dict[int, Shard]:
    """Shards of clients whose samples are not on this machine."""
    nothing = torch.empty(0, dtype=torch.int64)
    return {i: Shard(nothing, nothing) for i in range(config.partition.clients)}
