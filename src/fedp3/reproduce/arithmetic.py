"""What the paper prints and arithmetic can check: parameters, bytes and samples; no data and no training.

Upload of a client that trains layer l: |W^l| + |W^out|; model it holds: |W^l| + |W^out| + r (|W| - |W^l| - |W^out|).
Spread: 100 (max - min) / min over l.  Counted as the paper counts: convolutions with bias, fully connected layers
without.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from fedp3.cost import communication_by_layer, deployed_by_layer, reductions, sizes, spread
from fedp3.data.sources import NAMES
from fedp3.layermap import layer_map
from fedp3.models import MODELS, PADS_TO, Spec
from fedp3.partition import histogram, partition, split
from fedp3.plan import PlanRules, client_plans
from fedp3.reproduce import published
from fedp3.reproduce.tables import Table, number
from fedp3.types import ClientPlan, LayerMap

NETS: Mapping[str, str] = {"cifar10": "cnn", "cifar100": "cnn", "fashion-mnist": "cnn", "emnist-l": "mlp"}
KEEPS = (0.9, 0.7, 0.5)
CLIENTS = 100
KEEP = 0.9  # of the layers outside L_i, in the tables of communication
Numbers = dict[str, Any]


@cache
def net_of(data: str, model: str = "") -> LayerMap:
    """The paper's net for a data set; counting needs no values."""
    name, source = model or NETS[data], NAMES[data]
    side = PADS_TO[name]
    shape = (source.shape[0], side, side) if side else source.shape
    with torch.device("meta"):
        return layer_map(MODELS[name](Spec(shape, source.classes)))


# --------------------------------------------------------------------------- fig-parameters


def parameters() -> Numbers:
    """How far clients lie apart that train one hidden layer and the head."""
    out = {}
    for data in NETS:
        net = net_of(data)
        out[data] = {
            "comm_spread_percent": spread(list(communication_by_layer(net).values())),
            "size_spread_percent": {f"{r:g}": spread(list(deployed_by_layer(net, r).values())) for r in KEEPS},
        }
    return out


def _parameter_tables(numbers: Numbers) -> list[Table]:
    rows = []
    for data, found in numbers.items():
        ours = [found["comm_spread_percent"], *found["size_spread_percent"].values()]
        theirs = [published.COMM_SPREAD[data], *published.SIZE_SPREAD[data].values()]
        rows += [[data, name, *map(number, values)] for name, values in (("published", theirs), ("ours", ours))]
        rows += [["", "difference", *(number(a - b, sign=True) for a, b in zip(ours, theirs, strict=True))]]
    spreads = Table(
        "Spread between trained layers, percent",
        ["data set", "", "upload", *(f"model at keep {r}" for r in KEEPS)],
        rows,
        ("These are percent increases: 10815.25 % is a factor of 109.15, not of 10,815.",),
        words=2,
    )
    each = [
        [data, l, number(up, 0), *(number(deployed_by_layer(net_of(data), r)[l], 0) for r in KEEPS)]
        for data in NETS
        for l, up in communication_by_layer(net_of(data)).items()
    ]
    columns = ["data set", "trained with the head", "parameters up", *(f"held at keep {r}" for r in KEEPS)]
    return [spreads, Table("By trained layer", columns, each, words=2)]


# --------------------------------------------------------------------------- table-communication


def _plans(layers: str, net: LayerMap, clients: int = CLIENTS) -> tuple[ClientPlan, ...]:
    return client_plans(PlanRules(layers), net, [KEEP] * clients, 0, 0)


def communication() -> Numbers:
    """Communication saved against FedAvg, four ways, in percent; and ResNet18's ablations as the paper counts them."""
    out: Numbers = {
        data: {
            plan: {
                **reductions(_plans(plan, net_of(data)), net_of(data), "paper"),
                "published": published.REDUCTION[plan] if data != "emnist-l" else None,
            }
            for plan in published.REDUCTION
        }
        for data in NETS
    }
    net = net_of("cifar10", "resnet18")
    out["resnet18"] = {plan: _resnet_row(plan, net) for plan in published.RESNET_REDUCTION}
    return out


def _resnet_row(plan: str, net: LayerMap) -> Numbers:
    plans = _plans(plan, net)
    left_out = len(net.layers) - len(plans[0].whole)
    halved = 100 * left_out / (len(net.layers) - 2) / 2  # of the 16 layers inside blocks, one of two directions
    return {
        **reductions(plans, net),
        "paper_way": halved,
        "published": published.RESNET_REDUCTION[plan],
        "paper_way_against_fedavg": 100 - KEEP * (100 - halved),
        "published_against_fedavg": published.RESNET_AGAINST_FEDAVG[plan],
    }


def _communication_tables(numbers: Numbers) -> list[Table]:
    ways = ("layers_up", "layers_up_down", "parameters_up", "parameters_up_down")
    columns = ["", "plan", "published", *(w.replace("_", " ").replace("up down", "up+down") for w in ways)]
    rows = [
        [data, plan, number(found["published"]), *(number(found[w]) for w in ways)]
        for data, plans in numbers.items()
        for plan, found in plans.items()
    ]
    keys = ("published", "paper_way", "published_against_fedavg", "paper_way_against_fedavg")
    extra = [[plan, *(number(found[k], 3) for k in keys)] for plan, found in numbers["resnet18"].items()]
    names = ["plan", "published", "half the block layers", "published, against FedAvg", "0.9 (100 - x) against FedAvg"]
    return [
        Table(
            "Communication saved, percent", columns, rows, ("The published 20/40/60 % are layers going up.",), words=2
        ),
        Table("ResNet18 as the paper counts", names, extra, ("16.63 is a misprint of 15.63.",)),
    ]


# --------------------------------------------------------------------------- table-datasets


def datasets() -> Numbers:
    """Samples per client, and how many of them lie in a client's four largest classes under the Dirichlet split."""
    out = {}
    for data in published.DATASETS:
        source = NAMES[data]
        y = np.arange(source.samples) % source.classes  # all four pools are balanced
        alpha = 0.3 if data == "cifar100" else 0.5
        parts = partition("dirichlet", y, CLIENTS, seed=0, alpha=alpha)
        train, test = split(parts[0], seed=0, client=0)
        counts = np.sort(histogram(y, parts, source.classes), axis=1)[:, ::-1]
        whole, pool, per_train, per_test = published.DATASETS[data]
        out[data] = {
            "samples": source.samples,
            "train_per_client": len(train),
            "test_per_client": len(test),
            "dirichlet_top4_percent": float(100 * (counts[:, :4].sum(1) / counts.sum(1)).mean()),
            "published": {"samples": whole + pool, "train_per_client": per_train, "test_per_client": per_test},
        }
    return out


def _dataset_tables(numbers: Numbers) -> list[Table]:
    keys = ("samples", "train_per_client", "test_per_client")
    rows = []
    for data, found in numbers.items():
        pairs = (f"{number(found['published'][k], 0)} / {number(found[k], 0)}" for k in keys)
        rows.append([data, *pairs, number(found["dirichlet_top4_percent"], 1)])
    columns = ["data set", *(f"{k.replace('_', ' ')}: published / ours" for k in keys), "Dirichlet: % in 4 classes"]
    note = "The paper says about 80 % in four classes, for the three data sets of ten classes."
    return [Table(f"{CLIENTS} clients", columns, rows, (note,))]


# --------------------------------------------------------------------------- table-architectures


def architectures() -> Numbers:
    """Parameters of every layer, as the paper counts and as they are."""
    out = {}
    for data in NETS:
        paper, true = sizes(net_of(data), "paper"), sizes(net_of(data), "true")
        out[data] = {
            "layers": paper,
            "total": sum(paper.values()),
            "total_with_all_biases": sum(true.values()),
            "published": dict(published.ARCHITECTURES[data]),
        }
    return out


def _architecture_tables(numbers: Numbers) -> list[Table]:
    return [
        Table(
            data,
            ["layer", "published", "ours", "difference"],
            [
                [l, number(found["published"][l], 0), number(n, 0), number(n - found["published"][l], 0)]
                for l, n in found["layers"].items()
            ],
            (f"Together {found['total']:,}; with all biases {found['total_with_all_biases']:,}.",),
        )
        for data, found in numbers.items()
    ]


# --------------------------------------------------------------------------- all of them


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A target that needs no training."""

    title: str
    numbers: Callable[[], Numbers]
    tables: Callable[[Numbers], Sequence[Table]]


ARITHMETIC: Mapping[str, Arithmetic] = {
    "fig-parameters": Arithmetic("Model size and communication by trained layer", parameters, _parameter_tables),
    "table-communication": Arithmetic("Communication saved", communication, _communication_tables),
    "table-datasets": Arithmetic("Data sets", datasets, _dataset_tables),
    "table-architectures": Arithmetic("Architectures", architectures, _architecture_tables),
}


def upload_by_fleet(fleets: Sequence[int] = (20, 100, 1000)) -> dict[int, float]:
    """Parameters a LowerB client of the CIFAR10 net uploads on average, by the number of clients."""
    net = net_of("cifar10")
    size = sizes(net, "paper")
    return {n: sum(size[l] for plan in _plans("lowerb", net, n) for l in plan.whole) / n for n in fleets}
