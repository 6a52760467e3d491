"""Numbers of the paper that arithmetic can check, without data or training.

A client that trains layer l uploads |W^l| + |W^out| parameters, and its model has
|W^l| + |W^out| + r (|W| - |W^l| - |W^out|).  The spread is 100 (max - min) / min over l.
Parameters are counted as the paper counts them: with the biases of convolutions, and without those
of fully connected layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from fedp3.core.types import ClientPlan, LayerMap
from fedp3.costs.traffic import communication_by_layer, deployed_by_layer, reductions, sizes, spread
from fedp3.data.partition import histogram, partition, split
from fedp3.data.sources import SOURCES
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import MODELS, ModelSpec
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.tables import Table, number

NETS: Mapping[str, str] = {
    "cifar10": "cnn",
    "cifar100": "cnn",
    "fashion-mnist": "cnn",
    "emnist-l": "mlp",
}
KEEPS = (0.9, 0.7, 0.5)
CLIENTS = 100
KEEP = 0.9  # of the layers outside L_i, in the tables of communication
Numbers = dict[str, Any]


@cache
def net_of(data: str, model: str = "") -> LayerMap:
    """The layers of the paper's network for a data set; their tensors have no values."""
    source = SOURCES[data]
    architecture = MODELS.pick(model or NETS[data])
    side = architecture.image_side
    shape = (source.shape[0], side, side) if side else source.shape
    with torch.device("meta"):
        return layer_map(architecture.build(ModelSpec(shape, source.classes)))


# --------------------------------------------------------------------------- fig-parameters


def parameters() -> Numbers:
    """The spread between clients that train one hidden layer and the head."""
    numbers = {}
    for data in NETS:
        net = net_of(data)
        numbers[data] = {
            "comm_spread_percent": spread(list(communication_by_layer(net).values())),
            "size_spread_percent": {
                f"{r:g}": spread(list(deployed_by_layer(net, r).values())) for r in KEEPS
            },
        }
    return numbers


def _parameter_tables(numbers: Numbers) -> list[Table]:
    rows = []
    for data, spreads_of in numbers.items():
        ours = [spreads_of["comm_spread_percent"], *spreads_of["size_spread_percent"].values()]
        theirs = [published.COMM_SPREAD[data], *published.SIZE_SPREAD[data].values()]
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        rows.append([data, "published", *map(number, theirs)])
        rows.append([data, "ours", *map(number, ours)])
        rows.append(["", "difference", *(number(d, sign=True) for d in differences)])
    spreads = Table(
        "Spread between trained layers, percent",
        ["data set", "", "upload", *(f"model at keep {r}" for r in KEEPS)],
        rows,
        ("These are percent increases: 10815.25 % is a factor of 109.15, not of 10,815.",),
        words=2,
    )
    by_layer = []
    for data in NETS:
        net = net_of(data)
        for l, up in communication_by_layer(net).items():
            deployed = [deployed_by_layer(net, r)[l] for r in KEEPS]
            by_layer.append([data, l, number(up, 0), *(number(n, 0) for n in deployed)])
    columns = [
        "data set",
        "trained with the head",
        "parameters up",
        *(f"on the device at keep {r}" for r in KEEPS),
    ]
    return [spreads, Table("By trained layer", columns, by_layer, words=2)]


# --------------------------------------------------------------------------- table-communication


def _plans(layers: str, net: LayerMap, clients: int = CLIENTS) -> tuple[ClientPlan, ...]:
    return client_plans(PlanSettings(layers=layers), net, [KEEP] * clients, 0, 0)


def communication() -> Numbers:
    """Communication saved against FedAvg in percent, counted in four ways.

    ResNet18's ablations are also counted as the paper counts them.
    """
    numbers: Numbers = {}
    for data in NETS:
        net = net_of(data)
        numbers[data] = {
            plan: {
                **reductions(_plans(plan, net), net, "paper"),
                "published": None if data == "emnist-l" else printed,
            }
            for plan, printed in published.REDUCTION.items()
        }
    net = net_of("cifar10", "resnet18")
    numbers["resnet18"] = {plan: _resnet_row(plan, net) for plan in published.RESNET_REDUCTION}
    return numbers


def _resnet_row(plan: str, net: LayerMap) -> Numbers:
    plans = _plans(plan, net)
    left_out = len(net.layers) - len(plans[0].full_layers)
    # Of the 16 layers inside blocks, and of one of two directions.
    halved = 100 * left_out / (len(net.layers) - 2) / 2
    return {
        **reductions(plans, net),
        "paper_way": halved,
        "published": published.RESNET_REDUCTION[plan],
        "paper_way_against_fedavg": 100 - KEEP * (100 - halved),
        "published_against_fedavg": published.RESNET_AGAINST_FEDAVG[plan],
    }


def _communication_tables(numbers: Numbers) -> list[Table]:
    ways = ("layers_up", "layers_up_down", "parameters_up", "parameters_up_down")
    columns = [
        "",
        "plan",
        "published",
        *(w.replace("_", " ").replace("up down", "up+down") for w in ways),
    ]
    rows = [
        [data, plan, number(saved["published"]), *(number(saved[w]) for w in ways)]
        for data, plans in numbers.items()
        for plan, saved in plans.items()
    ]
    keys = ("published", "paper_way", "published_against_fedavg", "paper_way_against_fedavg")
    extra = [
        [plan, *(number(saved[k], 3) for k in keys)] for plan, saved in numbers["resnet18"].items()
    ]
    names = [
        "plan",
        "published",
        "half the block layers",
        "published, against FedAvg",
        "0.9 (100 - x) against FedAvg",
    ]
    return [
        Table(
            "Communication saved, percent",
            columns,
            rows,
            ("The published 20/40/60 % are layers going up.",),
            words=2,
        ),
        Table("ResNet18 as the paper counts", names, extra, ("16.63 is a misprint of 15.63.",)),
    ]


# --------------------------------------------------------------------------- table-datasets


def datasets() -> Numbers:
    """Samples per client, and the share of a client's four largest classes (Dirichlet split)."""
    numbers = {}
    for data in published.DATASETS:
        source = SOURCES[data]
        y = np.arange(source.samples) % source.classes  # all four pools are balanced
        alpha = 0.3 if data == "cifar100" else 0.5
        parts = partition("dirichlet", y, CLIENTS, seed=0, alpha=alpha)
        train, test = split(parts[0], seed=0, client=0)
        counts = np.sort(histogram(y, parts, source.classes), axis=1)[:, ::-1]
        train_pool, test_pool, per_train, per_test = published.DATASETS[data]
        numbers[data] = {
            "samples": source.samples,
            "train_per_client": len(train),
            "test_per_client": len(test),
            "dirichlet_top4_percent": float(100 * (counts[:, :4].sum(1) / counts.sum(1)).mean()),
            "published": {
                "samples": train_pool + test_pool,
                "train_per_client": per_train,
                "test_per_client": per_test,
            },
        }
    return numbers


def _dataset_tables(numbers: Numbers) -> list[Table]:
    keys = ("samples", "train_per_client", "test_per_client")
    rows = []
    for data, ours in numbers.items():
        theirs = ours["published"]
        pairs = (f"{number(theirs[k], 0)} / {number(ours[k], 0)}" for k in keys)
        rows.append([data, *pairs, number(ours["dirichlet_top4_percent"], 1)])
    columns = [
        "data set",
        *(f"{k.replace('_', ' ')}: published / ours" for k in keys),
        "Dirichlet: % in 4 classes",
    ]
    note = "The paper says about 80 % in four classes, for the three data sets of ten classes."
    return [Table(f"{CLIENTS} clients", columns, rows, (note,))]


# --------------------------------------------------------------------------- table-architectures


def architectures() -> Numbers:
    """The number of parameters of every layer, with and without the biases the paper omits."""
    numbers = {}
    for data in NETS:
        paper, true = sizes(net_of(data), "paper"), sizes(net_of(data), "true")
        numbers[data] = {
            "layers": paper,
            "total": sum(paper.values()),
            "total_with_all_biases": sum(true.values()),
            "published": dict(published.ARCHITECTURES[data]),
        }
    return numbers


def _architecture_tables(numbers: Numbers) -> list[Table]:
    tables = []
    for data, ours in numbers.items():
        rows = []
        for l, n in ours["layers"].items():
            theirs = ours["published"][l]
            rows.append([l, number(theirs, 0), number(n, 0), number(n - theirs, 0)])
        note = f"Together {ours['total']:,}; with all biases {ours['total_with_all_biases']:,}."
        tables.append(Table(data, ["layer", "published", "ours", "difference"], rows, (note,)))
    return tables


# --------------------------------------------------------------------------- all of them


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A target that needs no training."""

    title: str
    numbers: Callable[[], Numbers]
    tables: Callable[[Numbers], Sequence[Table]]


ARITHMETIC: Mapping[str, Arithmetic] = {
    "fig-parameters": Arithmetic(
        "Model size and communication by trained layer", parameters, _parameter_tables
    ),
    "table-communication": Arithmetic("Communication saved", communication, _communication_tables),
    "table-datasets": Arithmetic("Data sets", datasets, _dataset_tables),
    "table-architectures": Arithmetic("Architectures", architectures, _architecture_tables),
}


def upload_by_fleet(fleets: Sequence[int] = (20, 100, 1000)) -> dict[int, float]:
    """Number of clients -> mean upload of a LowerB client of the CIFAR10 network, in parameters."""
    net = net_of("cifar10")
    size = sizes(net, "paper")
    uploads = {}
    for n in fleets:
        plans = _plans("lowerb", net, n)
        uploads[n] = sum(size[l] for plan in plans for l in plan.full_layers) / n
    return uploads
