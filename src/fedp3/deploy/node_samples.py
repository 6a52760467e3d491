"""The samples of a node, as a user's `load_data` returns them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedp3.client.batching import AUTO
from fedp3.client.objectives import OBJECTIVES, logits_of
from fedp3.config import Config
from fedp3.core.errors import DataError, InputError
from fedp3.data import Dataset, first_record, from_torch, gather
from fedp3.data.inputs import call, tensors_of
from fedp3.data.partition import split
from fedp3.data.shards import Shard
from fedp3.data.user_data import pool
from fedp3.models.buffers import restored_buffers
from fedp3.node.folder import client_of

WANTED = "a data set, a DataLoader, a pair (x, y), or two of these: to train on and to test on"

LoadData = Callable[..., Any]


def node_samples(
    load_data: LoadData, context: Context, net: nn.Module, config: Config
) -> tuple[Dataset, Shard]:
    """All samples of a node, and which of them it trains and tests on.

    Args:
        load_data: the user's function.
        context: of the node.
        net: the user's network.
        config: the run.
    """
    objective = config.local.objective
    labelled = objective == AUTO or OBJECTIVES.pick(objective).labelled
    loaded = load_data(**_arguments(load_data, context))
    if isinstance(loaded, Sequence) and len(loaded) == 2 and all(map(_is_set, loaded)):
        train, test = (_dataset(part, net, labelled=labelled) for part in loaded)
        _refuse_other_shapes(train, test)
        data, (to_train, to_test) = pool([train, test])
        shard = Shard(to_train, to_test)
    else:
        data = _dataset(loaded, net, labelled=labelled)
        # The split is the same in every run.  Otherwise a record that trained under LDP in one run
        # would be scored, without noise, in another.
        everything, client = np.arange(len(data.y)), client_of(context.node_config)
        parts = split(everything, seed=0, client=client, share=config.partition.train_share)
        shard = Shard(*map(torch.from_numpy, parts))
    if labelled and not isinstance(loaded, Dataset):
        data = _with_all_classes(data, net)
    return data, shard


def _arguments(load_data: LoadData, context: Context) -> dict[str, object]:
    """The arguments of the user's function, by name."""
    known: dict[str, object] = {
        str(key).replace("-", "_"): value
        for settings in (context.run_config, context.node_config)
        for key, value in settings.items()
    }
    known["context"] = context
    arguments = {}
    for name, parameter in inspect.signature(load_data).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in known:
            arguments[name] = known[name]
        elif parameter.default is parameter.empty:
            key = name.replace("_", "-")
            raise InputError(
                f"load_data has a parameter {name!r}, and neither the node's config nor the run's "
                f"has {key!r}; start the node with --node-config '{key}=...', add {key!r} to "
                "[tool.flwr.app.config] in pyproject.toml, or give the parameter a default"
            )
    return arguments


def _is_set(part: object) -> bool:
    """Whether this is a data set by itself, and not one of x and y."""
    if _is_rows(part):
        return True
    if isinstance(part, tuple | list):
        return len(part) == 2 and all(isinstance(w, torch.Tensor | np.ndarray) for w in part)
    if isinstance(part, torch.Tensor | np.ndarray | str | Mapping):
        return False
    return isinstance(part, Dataset | TorchDataset | DataLoader) or hasattr(part, "__getitem__")


def _is_rows(part: object) -> bool:
    """Whether this is a list of rows with named columns."""
    return isinstance(part, list) and bool(part) and isinstance(part[0], Mapping)


def _dataset(part: Any, net: nn.Module, *, labelled: bool) -> Dataset:
    """A data set of all samples in what the user loaded."""
    if part is None:
        raise DataError(f"load_data returned None, want {WANTED}")
    if isinstance(part, DataLoader):
        part = part.dataset
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors  # which are read at once, and not sample by sample
    if _is_rows(part):
        data = from_torch(part, labelled=labelled)
    else:
        gathered = gather(part, labelled=labelled)
        data, parts = gathered.data, gathered.parts
        if parts is not None:
            raise DataError(f"load_data returned a list of {len(parts)} data sets, want {WANTED}")
    return replace(data, x=_as_argument(data.x, net))


def _as_argument(x: Any, net: nn.Module) -> Any:
    """Inputs as the network takes them: a single column of a row need not have its name."""
    if not isinstance(x, Mapping) or len(x) != 1:
        return x
    ((name, values),) = x.items()
    return x if name in inspect.signature(net.forward).parameters else values


def _refuse_other_shapes(train: Dataset, test: Dataset) -> None:
    shapes = [[tuple(w.shape[1:]) for w in (*tensors_of(d.x), d.y)] for d in (train, test)]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"load_data returned samples of shapes {shapes[0]} to train on, and {shapes[1]} to "
            "test on; bring both to one shape"
        )


def _with_all_classes(data: Dataset, net: nn.Module) -> Dataset:
    """The data set with the classes of the network's outputs, of which a node may see fewer."""
    before = net.training
    try:
        with torch.no_grad(), restored_buffers(net):
            logits = logits_of(call(net.eval(), first_record(data).x))
        outputs = logits.shape[1]
    except Exception:  # what is wrong with the network is said by the check of all networks
        return data
    finally:
        net.train(before)
    largest = int(data.y.max())
    if largest >= outputs:
        raise DataError(
            f"the labels of this node reach {largest}, and the head of the network has {outputs} "
            f"outputs, for labels 0 to {outputs - 1}: give it {largest + 1} outputs, or number "
            "the labels from 0"
        )
    return replace(data, classes=outputs)
