"""Everything docs/flower.md shows works as it stands."""

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedp3.core import files
from fedp3.deploy.cluster import free_port
from flower.conversion import write_converted
from flower.fakes import FakeGrid, in_a_run

from flwr.app import Context, RecordDict  # isort: skip
from flwr.common.config import validate_config  # isort: skip

PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
INSTALL = "pip install 'fedp3[flower]'"  # done: this file was not skipped
SIMULATION = [
    "fedp3 init my.toml",
    "fedp3 run my.toml run.rounds=3 --out runs/here",
    "fedp3 run my.toml run.rounds=3 --out runs/flower --engine flower",
    "fedp3 compare runs/here runs/flower",
    "fedp3 resume runs/flower --engine flower",
]
APP = (
    "fedp3 flower app myapp --config my.toml partition.clients=3 run.clients_per_round=0 "
    "run.rounds=2"
)
UP = "fedp3 flower up --nodes 3"
RUN = ["FLWR_HOME=$PWD/flower/home flwr run myapp up --stream", "fedp3 report myapp/run"]
RESUME = "FLWR_HOME=$PWD/flower/home flwr run myapp up --stream --run-config 'resume=true'"
SECURE_UP = "fedp3 flower up --nodes 0 --tls --host $SERVER --port $PORT"
KEY = "fedp3 flower key node-0"
REGISTER = "FLWR_HOME=$PWD/flower/home flwr supernode register node-0.pub up"
NODE = (
    "flower-supernode --superlink $SERVER:$PORT --root-certificates ca.crt "
    "--auth-supernode-private-key node-0 "
    "--node-config 'partition-id=0 num-partitions=1 capacity=0.5 folder=\"kept\"'"
)
POLICY = [
    "fedp3 node init --client 0 --folder kept",
    "fedp3 node check my.toml privacy.enabled=true --folder kept",
    "fedp3 node status --folder kept",
]
PERMIT = [
    "fedp3 permit key owner.key",
    "fedp3 permit sign my.toml --key owner.key --days 7",
]
SECONDS = 1800


def test_every_command_of_the_page_is_run_by_a_test_of_this_file():
    shown = [
        line
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)
        for line in block.strip().splitlines()
    ]
    here = [INSTALL, *SIMULATION, APP, UP, *RUN, RESUME, SECURE_UP, KEY, REGISTER, NODE]
    assert shown == [*here, *POLICY, *PERMIT]


def test_the_changes_on_the_page_are_those_that_convert_a_stock_app(tmp_path):
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    shown = [line for line in block.splitlines() if not line.startswith("#")]
    assert shown == write_converted(tmp_path / "app")


def test_the_app_on_the_page_runs(tmp_path, monkeypatch, capsys):
    named = re.findall(r"`(\S+)`:\n\n```(?:python|toml)\n(.*?)```", PAGE, re.S)
    assert [name for name, _ in named] == [
        "pyproject.toml",
        *(f"myown/{name}.py" for name in ("task", "client_app", "server_app")),
    ]
    (tmp_path / "myown").mkdir()
    for name, text in named:
        (tmp_path / name).write_text(text)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert not validate_config(project, project_dir=tmp_path)[1], "errors of Flower's own check"
    flower = project["tool"]["flwr"]["app"]
    monkeypatch.syspath_prepend(str(tmp_path))
    nodes = [
        {"partition-id": i, "num-partitions": 3, "folder": str(tmp_path / f"node-{i}")}
        for i in range(3)
    ]
    modules = [part.partition(":")[0] for part in flower["components"].values()]
    try:
        server, client = (importlib.import_module(module).app for module in modules)
        with in_a_run():
            context = Context(7, 1, {}, RecordDict(), flower["config"])
            server(grid=FakeGrid(client, nodes), context=context)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "myown"]:
            del sys.modules[name]
    shown = capsys.readouterr().out
    assert "accuracy_global" in shown and re.search(r"2: \{.*'rejected': '0'", shown), shown


# ----------------------------------------------------------------- with processes: make test-deploy


def shell(folder: Path, **more: str) -> dict:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        "shell": True,
        "cwd": folder,
        "env": {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more},
    }


def run(command: str, folder: Path, **more: str) -> str:
    done = subprocess.run(
        command, **shell(folder, **more), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def background(command: str, folder: Path, **more: str):
    with (folder / "background.log").open("ab") as log:
        process = subprocess.Popen(
            "exec " + command, **shell(folder, **more), stdout=log, stderr=log
        )
    try:
        yield folder / "background.log"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def wait_for(condition) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.5)


@pytest.mark.deploy
def test_the_commands_for_simulation(tmp_path):
    for command in SIMULATION:
        run(command, tmp_path)
    hashes = {
        files.read_json(tmp_path / "runs" / n / "result.json")["model_sha256"]
        for n in ("here", "flower")
    }
    assert len(hashes) == 1


@pytest.mark.deploy
def test_the_commands_for_one_machine(tmp_path):
    run("fedp3 init my.toml", tmp_path)
    run(APP, tmp_path)
    with background(UP, tmp_path) as log:
        wait_for(lambda: "next:" in log.read_text())
        for command in RUN:
            run(command, tmp_path)
        assert files.read_json(tmp_path / "myapp" / "run" / "result.json")["rounds"] == 2
        (tmp_path / "myapp" / "run" / "result.json").unlink()
        run(RESUME, tmp_path)
    assert (tmp_path / "myapp" / "run" / "result.json").exists()


@pytest.mark.deploy
def test_the_commands_for_three_machines_and_for_a_node_that_trusts_no_server(tmp_path):
    """One machine plays all of them: the server in one folder, a node in another."""
    server, node, where = (
        tmp_path / "server",
        tmp_path / "node",
        {"SERVER": "127.0.0.1", "PORT": str(free_port("127.0.0.1"))},
    )
    server.mkdir()
    node.mkdir()
    for folder in (server, node):
        run("fedp3 init my.toml", folder)
    for command in POLICY:
        run(command, node)
    alone = "partition.clients=1 run.clients_per_round=1 run.rounds=1 plan.layers=full"
    alone += " plan.head=personal privacy.enabled=true"
    run(f"fedp3 flower app myapp --config my.toml {alone}", server)
    owner = run(PERMIT[0], server).splitlines()[-1]
    run(PERMIT[1].replace("my.toml", "myapp/fedp3_app/config.toml"), server)
    policy = node / "kept" / "policy.toml"
    policy.write_text(policy.read_text().replace("owners = []", owner))
    with background(SECURE_UP, server, **where) as log:
        wait_for(lambda: "next:" in log.read_text())
        run(KEY, node)
        shutil.copy(node / "node-0.pub", server)
        run(REGISTER, server)
        shutil.copy(server / "flower" / "tls" / "ca.crt", node)
        with background(NODE, node, **where):
            permit = f'permit="{server / "permit.json"}"'
            run(f"{RUN[0]} --run-config '{permit}'", server)
            run(f"{RUN[0]} --run-config 'out=\"{server / 'unsigned'}\"'", server)
    signed = files.read_json(server / "myapp" / "run" / "result.json")
    assert signed["rejected"] == 0 and signed["accuracy_global"] is None, "no scores under LDP"
    unsigned = files.read_json(server / "unsigned" / "result.json")
    assert unsigned["rejected"] == 1 and unsigned["void"] == 1
    assert "carries no permit" in (node / "kept" / "refusals.log").read_text()
    assert list(node.rglob("kept/runs/*/state-*.safetensors")), (
        "personal layers, on the disk of the node"
    )
    assert "in 1 runs under LDP" in run(POLICY[2], node)
