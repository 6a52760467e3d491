"""Predicted costs against published measurements of windows.

CoCoFL (https://github.com/k1l1/CoCoFL, MIT) published time, upload and peak memory of every window
of successive blocks, relative to training all, on an x64 CPU with four threads.  Its tables
`table__CoCoFL_x64_QMobileNet.json` and `table__CoCoFL_x64_QTransformer.json` are read from a folder
that the user names, as `windows-mobilenet-x64.json` and `windows-transformer-x64.json`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from benchmarks.costs import DENSE, fit, rank_correlation
from benchmarks.networks import MobileNet, TextTransformer, by_block
from fedp3.core.types import ClientPlan, LayerPlan
from fedp3.costs.compute import flops, measure, step_bytes, time_flops
from fedp3.models.layer_map import layer_map

BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A published table, and the network that it is about."""

    file: str
    net: Callable[[], nn.Module]
    shape: tuple[int, ...]


TABLES: Mapping[str, Table] = {
    "MobileNet": Table(file="windows-mobilenet-x64.json", net=MobileNet, shape=(3, 32, 32)),
    "text transformer": Table(
        file="windows-transformer-x64.json", net=TextTransformer, shape=(512,)
    ),
}


def compared(table: Table, folder: Path, pairs: int) -> str:
    """Rank correlation, and how far shares of the full network are off after one constant."""
    published = json.loads((folder / table.file).read_text())
    net = table.net()
    layers, known = layer_map(net, by_block(net)), measure(net, table.shape)
    predicted: dict[str, list[float]] = {
        "FLOPs": [],
        "FLOPs and bytes": [],
        "memory": [],
        "upload": [],
    }
    parameters = dict(net.named_parameters())
    for row in published:
        frozen = set(row["freeze"])
        plan = ClientPlan(
            0, {l: LayerPlan(train=i not in frozen) for i, l in enumerate(layers.layers)}
        )
        count = BATCH * flops(known, plan, layers, DENSE)
        memory = step_bytes(known, plan, layers, DENSE, BATCH, slots=0)
        predicted["FLOPs"].append(count)
        predicted["FLOPs and bytes"].append(time_flops(count, memory.moved))
        predicted["memory"].append(memory.peak)
        sent = [n for l, p in plan.layers.items() if p.train for n in layers.layers[l]]
        predicted["upload"].append(sum(parameters[n].nbytes for n in sent if n in parameters))
    column = {"FLOPs": "time", "FLOPs and bytes": "time", "memory": "memory", "upload": "data"}
    parts = []
    for name, values in predicted.items():
        measured = [row[column[name]] for row in published]
        rank, (_, worst) = rank_correlation(measured, values), fit(measured, values)
        parts.append(f"{column[name]} by {name} {rank:.3f} (worst factor {1 + worst:.2f})")
    return "rank correlation of " + ", ".join(parts) + f"; {len(published)} windows"


def rows(folder: Path) -> dict[str, Callable[[int], str]]:
    """A row for each table."""
    return {
        f"C4 published table, {name}": partial(compared, table, folder)
        for name, table in TABLES.items()
    }
