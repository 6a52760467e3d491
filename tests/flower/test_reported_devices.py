"""Nodes report their devices, the server plans for them, and each node checks what it is asked."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedp3 import config
from fedp3.config import Config
from fedp3.core.errors import CodecError, InputError
from fedp3.core.files import read_json
from fedp3.core.types import ClientPlan, Layer, LayerPlan, Task
from fedp3.deploy.flower_app import ServeSettings, serve
from fedp3.devices.fleet_file import write_fleet
from fedp3.devices.settings import row_of
from fedp3.devices.table import DEVICES, Device
from fedp3.engines.flower.client_app import client_app, configured_node
from fedp3.engines.flower.records import NODE, Identity, identity_of, identity_record
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.node.admission import _impossible
from fedp3.runs.session import run_rounds
from flower.fakes import FakeGrid, in_a_run

from flwr.app import ConfigRecord, RecordDict  # isort: skip

CLIENTS = 4
SMALL = [
    "model.width=0.1",
    f"partition.clients={CLIENTS}",
    "run.clients_per_round=0",
    "run.rounds=3",
    "local.steps=2",
    "devices.round_seconds=0.3",
]
NAMES = ("Galaxy Fold", "Pixel 3", "Galaxy Note", "raspberry-pi-4")


@pytest.fixture(autouse=True)
def _in_a_run() -> Any:
    with in_a_run():
        yield


def settings(*overrides: str) -> Config:
    return config.parse({}, [*SMALL, "devices.fleet=nodes", *overrides])


def devices(*names: str) -> list[Device]:
    return [DEVICES.pick(name) for name in names]


def grid_of(experiment: Experiment, folder: Path, fleet: list[Device]) -> FakeGrid:
    folder.mkdir(exist_ok=True)
    write_fleet(folder / "devices.csv", fleet)
    nodes: list[dict[str, Any]] = [
        {"partition-id": i, "folder": str(folder / f"client-{i}")} for i in range(CLIENTS)
    ]
    for node in nodes[: len(fleet)]:
        node["device"] = str(folder / "devices.csv")
    return FakeGrid(client_app(configured_node(experiment.config)), nodes)


def in_process(*rows: str) -> dict[str, Any]:
    """The same run over devices that its config names."""
    named = config.parse({}, [*SMALL, "devices.fleet=phones"])
    recorded = tuple(row_of(DEVICES.pick(name)) for name in rows)
    e = assemble(replace(named, devices=replace(named.devices, fleet=recorded)))
    return dict(run_rounds(e, sequential(e.client, e.shards)).result)


def test_a_run_over_reported_devices_has_the_bits_of_one_over_named_devices(tmp_path: Path) -> None:
    e = assemble(settings())
    grid = grid_of(e, tmp_path / "nodes", devices(*NAMES))
    done = serve(grid, e, ServeSettings(out=tmp_path / "run", wait=5))
    recorded = read_json(tmp_path / "run" / "run.json")["devices"]
    assert [row["name"] for row in recorded] == list(NAMES)
    expected = in_process(*NAMES)
    assert done.result["model_sha256"] == expected["model_sha256"]
    assert done.result["virtual_seconds"] == expected["virtual_seconds"]
    assert done.result["rejected"] == 0


def test_a_resumed_run_plans_for_the_devices_that_it_began_with(tmp_path: Path) -> None:
    e = assemble(settings())
    out = ServeSettings(out=tmp_path / "run", wait=5)
    first = serve(grid_of(e, tmp_path / "nodes", devices(*NAMES)), e, out)
    (tmp_path / "run" / "result.json").unlink()
    others = grid_of(e, tmp_path / "nodes", devices(*reversed(NAMES)))
    again = serve(others, e, replace(out, resume=True))
    assert again.result["model_sha256"] == first.result["model_sha256"]
    recorded = read_json(tmp_path / "run" / "run.json")["devices"]
    assert [row["name"] for row in recorded] == list(NAMES)


def test_a_node_that_reports_no_device_gets_no_tasks(tmp_path: Path) -> None:
    e = assemble(settings())
    grid = grid_of(e, tmp_path / "nodes", devices(*NAMES[:3]))
    serve(grid, e, ServeSettings(out=tmp_path / "run", wait=5))
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert all(json.loads(line)["sampled"] == [0, 1, 2] for line in events)


def test_without_any_device_the_run_says_how_to_report_one(tmp_path: Path) -> None:
    e = assemble(settings())
    grid = grid_of(e, tmp_path / "nodes", [])
    with pytest.raises(InputError, match="fedp3 devices measure"):
        serve(grid, e, ServeSettings(wait=5))


# --------------------------------------------------------------------------- what is reported


def test_a_device_comes_back_as_it_was() -> None:
    row = row_of(DEVICES.pick("raspberry-pi-4"))
    identity = Identity(client=0, examples=5, capacity=1.0, digest="0" * 64, device=row)
    assert identity_of(identity_record(identity)) == identity


@pytest.mark.parametrize("memory", [-5.0, 0.0, "much", None])
def test_a_wrong_device_is_refused(memory: object) -> None:
    row = asdict(row_of(DEVICES.pick("Pixel 3"))) | {"memory_mb": memory}
    said = {"client": 0, "examples": 5, "capacity": 1.0, "digest": "0" * 64}
    record = RecordDict({NODE: ConfigRecord(said | {"device": json.dumps(row)})})
    with pytest.raises(CodecError, match="its device is not readable"):
        identity_of(record)


# --------------------------------------------------------------------------- what a node accepts


def task_of(e: Experiment, full: set[Layer], **fields: Any) -> Task:
    rest = LayerPlan(send="pruned", keep=0.5, train=False, upload="none")
    layers = e.server.layers
    plans = {l: LayerPlan() if l in full | {layers.head} else rest for l in layers.layers}
    return Task(t=0, plan=ClientPlan(0, plans, **fields), weights={})


@pytest.mark.parametrize(
    ("full", "fields", "reason"),
    [
        ({"fc1"}, {}, ""),
        ({"fc1", "fc2"}, {"steps": 1, "split": 4}, ""),
        (set(), {}, ""),
        ({"fc1", "fc3"}, {}, "are not adjacent"),
        ({"fc1"}, {"steps": 2}, "it has 2 steps, and this config has 2"),
        ({"fc1"}, {"steps": 50}, "it has 50 steps"),
        ({"fc1"}, {"split": 10**6}, "in 1000000 parts"),
        ({"fc1"}, {"code": "ternary"}, ""),
        ({"fc1"}, {"code": "fp16"}, "it asks for uploads in fp16, and this config has int8 or"),
    ],
)
def test_a_node_accepts_windows_of_layers_and_nothing_else(
    full: set[Layer], fields: dict[str, Any], reason: str
) -> None:
    e = assemble(settings())
    found = list(_impossible(e.config, 0, e.server.layers, task_of(e, full, **fields)))
    assert (reason in " ".join(found)) if reason else not found, found


def test_a_node_refuses_a_code_where_no_devices_are_planned_for() -> None:
    e = assemble(config.parse({}, [*SMALL[:-1], "plan.layers=lowerb"]))
    plan = replace(e.first_plans[0], code="int8")
    (reason,) = _impossible(e.config, 0, e.server.layers, Task(t=0, plan=plan, weights={}))
    assert reason == "it asks for uploads in int8, and this config has none for every device"


def test_a_node_refuses_steps_and_parts_where_no_devices_are_planned_for() -> None:
    e = assemble(config.parse({}, [*SMALL[:-1], "plan.layers=lowerb"]))
    plan = replace(e.first_plans[0], steps=1)
    (reason,) = _impossible(e.config, 0, e.server.layers, Task(t=0, plan=plan, weights={}))
    assert "only plans for [devices] differ" in reason
