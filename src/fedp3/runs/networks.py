"""The networks of a run as plain modules: the server's, a client's as dispatched, and its own.

They are what G, D and P are scored on.  A client's network has no pruned units: it is really
smaller where units are pruned.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedp3.client.hooks import ForwardContext, TransformOutputs
from fedp3.client.scoring import present_labels
from fedp3.client.sgd import load_weights, named_tensors
from fedp3.client.update import Job, local_network
from fedp3.core.errors import InputError, type_of
from fedp3.core.files import read_json
from fedp3.core.threads import one_thread
from fedp3.core.types import ClientState, Group, Params
from fedp3.data.inputs import Inputs, call
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.experiment.fingerprint import check_fingerprint
from fedp3.models.frozen import thaw
from fedp3.models.lora import merge
from fedp3.models.skipping import blocks_left_out, without_blocks
from fedp3.runs.checkpoint import Checkpoint, load_checkpoint
from fedp3.runs.existing import SEEDS, reopen
from fedp3.server.context import ServerState
from fedp3.server.scoring import dispatch_tasks, probe_tasks

What = Literal["global", "dispatched", "personal"]
States = Mapping[int, Mapping[int, ClientState]]  # client -> round -> its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run with its trained weights.

    Args:
        experiment: the run.
        state: the server's state, from which its next round would start.
        clients: the states of clients; empty if they are on nodes.
        deployed: the clients are nodes, whose data and states are not here.
    """

    experiment: Experiment
    state: ServerState
    clients: States
    deployed: bool = False


def read_trained(folder: Path, data_dir: Path | None = None) -> Trained:
    """The run in a folder after its last checkpoint; it need not be finished.

    Args:
        folder: the run folder.
        data_dir: where data sets are.
    """
    if (folder / SEEDS).exists():
        raise InputError(f"{folder} holds several seeds; name one of them, as in {folder}/seed-0")
    config = reopen(folder)
    deployed = (folder / "flower.json").exists()
    checkpoint, _ = load_checkpoint(folder, config.digest())
    if checkpoint is None:
        raise InputError(f"{folder} has no intact checkpoint yet; wait for its first round")
    experiment = assemble(config, data_dir)
    check_fingerprint(folder, experiment)
    if deployed:
        experiment = _with_recorded_shares(folder, experiment)
    return _trained(experiment, checkpoint, deployed)


def _trained(experiment: Experiment, checkpoint: Checkpoint, deployed: bool) -> Trained:
    return Trained(
        experiment=experiment,
        state=checkpoint.state,
        clients=checkpoint.clients,
        deployed=deployed,
    )


def _with_recorded_shares(folder: Path, experiment: Experiment) -> Experiment:
    """The experiment with the shares that its nodes can hold, which they reported."""
    rows = read_json(folder / "run.json")["clients"]
    keep = tuple(row["capacity"] for row in sorted(rows, key=lambda row: row["id"]))
    return replace(experiment, server=replace(experiment.server, keep=keep))


# --------------------------------------------------------------------------- the networks


def network(run: Trained, what: str, client: int | str | None = None) -> nn.Module:
    """A network of a run, as a copy on the CPU in evaluation mode.

    Args:
        run: the run.
        what: "global" is the server's model (G), "dispatched" the model that a client is sent (D),
            and "personal" that model after the client's local training (P).
        client: whose network, by number or name; None for the server's model.

    Raises:
        InputError: there is no such client, or the network is not the server's to have.
    """
    number = number_of(run, client)
    _check(run, what, number)
    if what == "global":
        return global_network(run.experiment, run.state.model)
    assert number is not None
    _refuse(run, what, number)
    return _client_network(run, number, trained=what == "personal")


def number_of(run: Trained, client: int | str | None) -> int | None:
    """The number of a client that is named by its number, or by its name in the user's data."""
    if client is None or (isinstance(client, int) and not isinstance(client, bool)):
        return client
    names = run.experiment.client_names
    if client in names:
        return names.index(str(client))
    known = f", or a name, such as {names[0]!r}" if names else ""
    last = run.experiment.server.clients - 1
    raise InputError(f"client {client!r}: want a number from 0 to {last}{known}")


def global_network(experiment: Experiment, W: Params) -> nn.Module:
    """A copy of the network with these weights, in evaluation mode."""
    net = deepcopy(experiment.client.net)
    load_weights(named_tensors(net), W)
    return _finished(net)


def _finished(net: nn.Module) -> nn.Module:
    """The plain network in evaluation mode: what was frozen is not, and adapters are merged."""
    thaw(net)
    merge(net)
    return net.cpu().requires_grad_().eval()


def _check(run: Trained, what: str, client: int | None) -> None:
    if what not in get_args(What):
        raise InputError(f"what is {what!r}, want one of: {', '.join(get_args(What))}")
    clients = run.experiment.server.clients
    if what == "global" and client is not None:
        raise InputError(
            f"the global network is not that of client {client}; leave the client out, or ask for "
            "'dispatched' or 'personal'"
        )
    if what != "global" and client is None:
        raise InputError(f"a {what} network is that of one client; name one of 0..{clients - 1}")
    if client is not None and not 0 <= client < clients:
        raise InputError(f"there is no client {client}; the run has clients 0..{clients - 1}")


def _refuse(run: Trained, what: str, client: int) -> None:
    """Refuse networks that contain what only a client may have."""
    config = run.experiment.config
    private = config.privacy.enabled or config.client_privacy.enabled
    stays = personal_layers(run.experiment)
    whole = f"the personal network of client {client}" if what == "personal" else ""
    part = f"layers of client {client} that never leave it ({', '.join(stays)})" if stays else ""
    contained = whole or part
    if not contained:
        return
    if run.deployed:
        raise InputError(
            f"{contained} is on its node, and not the server's to have; export 'global', or "
            "'dispatched' if all layers are sent"
        )
    if private:
        raise InputError(
            f"{contained} is trained on its records, and outside what epsilon covers: a file of it "
            "would be one more release; export 'global' or 'dispatched'"
        )


def personal_layers(experiment: Experiment) -> tuple[str, ...]:
    """The layers that stay on clients: the server's model has them as they were at the start."""
    plan = experiment.first_plans[0]
    return tuple(l for l, p in plan.layers.items() if p.send == "none")


def _client_network(run: Trained, client: int, *, trained: bool) -> nn.Module:
    context = run.experiment.client
    tasks = probe_tasks if trained else dispatch_tasks
    (task,) = tasks(run.experiment.server, run.state, [client])
    shard = run.experiment.shards[client]
    job = Job(shard, task, run.clients.get(client, {}).get(task.state_from))
    with one_thread():  # as engines compute clients
        net, _ = local_network(context, job)
    skipped = blocks_left_out(task.plan, context.layers)
    copy = without_blocks(_finished(deepcopy(net)), skipped)
    context.net.requires_grad_()
    hooks, groups = context.hooks, context.layers.groups
    if hooks.forward is not None:
        shares = {g: len(indices) / groups[g].units for g, indices in task.masks.units.items()}
        copy = WithForward(copy, hooks.forward, shares).eval()
    if trained and hooks.transform_outputs is not None:
        labels = present_labels(context, shard).cpu()
        copy = WithOutputs(copy, hooks.transform_outputs, labels).eval()
    return copy


class WithForward(nn.Module):
    """A network that runs in a context of the method, such as a scaler for pruned layers."""

    def __init__(
        self, net: nn.Module, context: ForwardContext, shares: Mapping[Group, float]
    ) -> None:
        super().__init__()
        self.net, self.context, self.shares = net, context, shares

    def forward(self, x: Tensor) -> Tensor:
        """The outputs in that context."""
        with self.context(self.net, self.shares):
            outputs: Tensor = self.net(x)
            return outputs


class WithOutputs(nn.Module):
    """A network whose outputs a method transforms, such as by the labels that a client has."""

    def __init__(self, net: nn.Module, transform: TransformOutputs, labels: Tensor) -> None:
        super().__init__()
        self.net, self.transform = net, transform
        self.register_buffer("labels", labels)

    def forward(self, x: Tensor) -> Tensor:
        """The transformed outputs."""
        assert isinstance(self.labels, Tensor)
        return self.transform(self.net(x), self.labels)


def is_plain(net: nn.Module) -> bool:
    """Whether a network computes from its tensors alone, without what a method added to it."""
    return not isinstance(net, WithForward | WithOutputs)


@torch.no_grad()
def outputs_of(net: nn.Module, x: Inputs) -> Tensor:
    """What a network computes, without gradients."""
    outputs = call(net, x)
    if not isinstance(outputs, Tensor):
        raise InputError(f"the network returns {type_of(outputs)}, want a tensor")
    return outputs
