"""A SuperLink and SuperNodes as real processes: same bits, bytes sent, and faults within bounds."""

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedp3 import config
from fedp3.core import files
from fedp3.core.errors import InputError
from fedp3.core.hashing import model_sha256
from fedp3.deploy.app_files import write_app
from fedp3.deploy.certificates import make_certificates, make_node_key
from fedp3.deploy.cluster import Place, cluster, flwr, free_port, start, start_node, stop
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.runs import run_folder
from fedp3.runs.session import run_rounds
from flower.conversion import trained_without_flower, write_converted
from processes import run_fedp3

HERE = Path(__file__).parent
SECONDS = 1800  # for what takes one or two minutes on an idle machine
SETTINGS = [
    "partition.clients=3",
    "run.clients_per_round=0",
    "run.rounds=2",
    "run.eval_every=0",
    "local.steps=2",
]
HARD = [
    "model.width=0.05",
    "plan.head=personal",
    "prune.local_pruner=uniform",
    "aggregate.rule=attention",
]
LARGE = ["model.width=0.6"]  # at least 1 MB per message, both ways


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One cluster of three nodes for every test of this file."""
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(Place(folder=folder), 3) as c:
        yield c
        watched = [c.superlink.pid, *(p.pid for p in c.nodes.values())]
    assert not [pid for pid in watched if Path(f"/proc/{pid}").exists()]


def wait_for(condition, seconds: float = SECONDS, every: float = 0.2):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(every)
    return result


def started(running, app: Path, **keys) -> str:
    """Start a run; returns its number."""
    run_config = " ".join(f"{k}={json.dumps(v)}" for k, v in keys.items())  # also valid TOML
    out = flwr(
        running.place,
        "run",
        str(app),
        "up",
        *(["--run-config", run_config] if run_config else []),
        "--format",
        "json",
    )
    return str(json.loads(out[out.index("{") :])["run-id"])


def about(running, run: str) -> dict:
    out = flwr(running.place, "list", "up", "--run-id", run, "--format", "json")
    return json.loads(out[out.index("{") :])["runs"][0]


def ended(running, run: str) -> dict:
    # Each look is a process of its own that costs a second: not more often than needed.
    return wait_for(
        lambda: (r := about(running, run))["status"].startswith("finished") and r, every=3
    )


def expected_of(settings: config.Config) -> dict:
    """The result of a run in process."""
    experiment = assemble(settings)
    return json.loads(json.dumps(run_rounds(experiment, make_engine(experiment, 1)).result))


@pytest.fixture(scope="module")
def hard():
    """The config of the promise, and the model it gives in process."""
    settings = config.parse({}, [*SETTINGS, *HARD])
    return settings, expected_of(settings)


def test_two_nodes_and_two_rounds_give_the_bits_of_a_run_in_process(tmp_path):
    """Each message starts a process, so that this test has no more nodes than it needs."""
    settings = config.parse({}, [*SETTINGS, *HARD, "partition.clients=2"])
    expected = expected_of(settings)
    write_app(tmp_path / "app", settings, tmp_path / "run", None)
    with cluster(Place(folder=tmp_path / "cluster"), 2) as pair:
        run = ended(pair, started(pair, tmp_path / "app", wait=600.0))
        assert run["status"] == "finished:completed", flwr(
            pair.place, "log", run["run-id"], "up", "--show"
        )
        watched = [pair.superlink.pid, *(p.pid for p in pair.nodes.values())]
    assert not [pid for pid in watched if Path(f"/proc/{pid}").exists()]
    result = files.read_json(tmp_path / "run" / "result.json")
    for key in ("model_sha256", "final", "mb_up", "mb_down", "rejected"):
        assert result[key] == expected[key], key
    assert (tmp_path / "run" / "report.html").exists()


# ------------------------------------------------------------------------- faults: make test-deploy


@pytest.mark.deploy
def test_a_converted_stock_app_gives_the_bits_of_a_run_without_flower(running, tmp_path):
    """Its network starts from random weights, so that evaluate_fn stores them."""
    folder = tmp_path / "app"
    write_converted(folder)
    server = folder / "quickstart" / "server_app.py"
    torch_save = '    if server_round == 0:\n        torch.save(model.state_dict(), "{}")\n'
    body = server.read_text().replace(
        "    loss, accuracy = test(",
        torch_save.format(tmp_path / "0.pt") + "    loss, accuracy = test(",
    )
    server.write_text(body)
    final = {"save-to": str(tmp_path / "final.pt")}
    run = ended(running, started(running, folder, **final))
    assert run["status"] == "finished:completed", flwr(
        running.place, "log", run["run-id"], "up", "--show"
    )
    sys.path.insert(0, str(folder))
    try:
        task = importlib.import_module("quickstart.task")
        initial, trained = (torch.load(tmp_path / f"{name}.pt") for name in ("0", "final"))
        assert model_sha256(trained) == trained_without_flower(task, initial)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
            del sys.modules[name]


@pytest.mark.deploy
def test_a_server_killed_and_resumed_ends_at_the_same_bits(running, hard, tmp_path):
    settings, expected = hard
    write_app(tmp_path / "app", settings, tmp_path / "run", None)
    run = started(running, tmp_path / "app", wait=600.0)
    wait_for(lambda: len(run_folder.read_events(tmp_path / "run")) == 1)
    (server,) = [
        pid
        for pid, line in processes()
        if "flwr-serverapp" in line and str(running.place.port) in line
    ]
    os.kill(server, signal.SIGKILL)
    assert ended(running, run)["status"] != "finished:completed"
    assert not (tmp_path / "run" / "result.json").exists()
    again = ended(running, started(running, tmp_path / "app", wait=600.0, resume=True))
    assert again["status"] == "finished:completed"
    result = files.read_json(tmp_path / "run" / "result.json")
    assert (
        result["model_sha256"] == expected["model_sha256"] and result["final"] == expected["final"]
    )


def processes() -> list[tuple[int, str]]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append((int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode()))
    return lines


def write_faulty(folder: Path, place: Path, deadline: float, *settings: str) -> Path:
    """The app of `faulty.py`."""
    write_app(folder, config.parse({}, [*SETTINGS, *settings]), folder / "run", None)
    package = folder / "fedp3_app"
    shutil.copy(HERE / "faulty.py", package / "faulty.py")
    text = (folder / "pyproject.toml").read_text()
    text = text.replace("fedp3_app.server:app", "fedp3_app.faulty:server")
    text = text.replace("fedp3_app.client:app", "fedp3_app.faulty:app")
    keys = f'place = "{place}"\ndeadline = {deadline}\nscenarios = ""\n'
    (folder / "pyproject.toml").write_text(text.replace("resume = false", f"{keys}resume = false"))
    return folder


def rounds_of(place: Path) -> dict[str, dict]:
    path = place / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["scenario"]: line for line in lines}


@pytest.mark.deploy
def test_the_superlink_reports_our_bytes_and_at_most_8_percent_more(running, tmp_path):
    app = write_faulty(tmp_path / "app", tmp_path, 0.0, *LARGE)
    run = ended(running, started(running, app, scenarios="first second"))
    assert run["status"] == "finished:completed", flwr(
        running.place, "log", run["run-id"], "up", "--show"
    )
    rounds = rounds_of(tmp_path).values()
    down, up = (sum(r[f"bytes_{way}"] for r in rounds) for way in ("down", "up"))
    assert min(down, up) / 6 >= 1e6, "messages of 1 MB and more"
    assert down <= run["network-traffic"]["outbound-bytes"] <= 1.08 * down
    assert up <= run["network-traffic"]["inbound-bytes"] <= 1.08 * up


FAILED = "its training failed"  # a node tells a server no more than this
SCENARIOS = "raises all few dies garbage slow after killed without joins"


@pytest.fixture(scope="module")
def faults(running, tmp_path_factory):
    """One run through every fault; what must happen to processes from outside happens here."""
    place = tmp_path_factory.mktemp("faults")
    deadline = float(os.environ.get("FEDP3_TEST_DEADLINE", "150"))
    # Nodes refuse tasks of rounds that their config does not have.
    rounds = f"run.rounds={len(SCENARIOS.split())}"
    small = ("model.width=0.05", "plan.head=personal")
    app = write_faulty(place / "app", place, deadline, *small, rounds)
    run = started(running, app, scenarios=SCENARIOS)
    wait_for((place / "killed-2-began").exists)
    stop_hard(running.nodes.pop(2))
    wait_for(lambda: "without" in rounds_of(place))
    running.nodes[2] = start_node(running.place, 2, "num-partitions=3")
    finished = ended(running, run)
    assert finished["status"] == "finished:completed", flwr(
        running.place, "log", run, "up", "--show"
    )
    return rounds_of(place), deadline


def stop_hard(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.deploy
@pytest.mark.parametrize(
    ("scenario", "accepted", "reasons"),
    [
        ("raises", [0, 2], {"1": FAILED}),
        ("all", [], {"0": FAILED, "1": FAILED, "2": FAILED}),
        ("few", [2], {"0": FAILED, "1": FAILED}),
        ("dies", [0, 2], {"1": ""}),
        ("garbage", [0, 2], {"1": "does not match its checksum"}),
        ("killed", [0, 1], {"2": ""}),
        ("without", [0, 1], {"2": "no node is this client"}),
        ("joins", [0, 1, 2], {}),
    ],
)
def test_a_fault_costs_the_round_one_client_and_bounded_time(scenario, accepted, reasons, faults):
    rounds, deadline = faults
    r = rounds[scenario]
    assert r["accepted"] == accepted and r["seconds"] < deadline + 60, r
    for client, reason in reasons.items():
        assert int(client) in r["late"] or reason in r["rejected"][client]["text"], r
    assert r["void"] == (len(accepted) < 2)


@pytest.mark.deploy
def test_a_void_round_leaves_the_model_as_it_was(faults):
    rounds, _ = faults
    assert rounds["raises"]["model"] == rounds["all"]["model"] == rounds["few"]["model"]
    assert rounds["dies"]["model"] != rounds["few"]["model"]


@pytest.mark.deploy
def test_a_straggler_is_late_and_its_late_reply_is_not_used(faults):
    rounds, deadline = faults
    assert rounds["slow"]["late"] == [1] and rounds["slow"]["accepted"] == [0, 2]
    assert deadline <= rounds["slow"]["seconds"] < deadline + 60
    assert 0 in rounds["after"]["accepted"] and 2 in rounds["after"]["accepted"]
    assert not rounds["after"]["rejected"]


# --------------------------------------------------------------------------- TLS


@pytest.mark.deploy
def test_with_tls_strangers_and_plain_text_are_refused_and_the_round_is_not_touched(tmp_path):
    settings = config.parse(
        {},
        [*SETTINGS, "partition.clients=1", "model.width=0.02", "run.rounds=1", "plan.layers=full"],
    )
    experiment = assemble(settings)
    expected = run_rounds(experiment, make_engine(experiment, 1)).result
    with cluster(Place(folder=tmp_path / "tls", tls=True), 1) as secure:
        place = secure.place
        make_node_key(tmp_path / "stranger")
        ca = ["--root-certificates", str(place.folder / "tls" / "ca.crt")]
        here = [
            "--superlink",
            place.address,
            "--host",
            "127.0.0.1",
            "--node-config",
            "partition-id=0",
        ]
        keyed = [
            *ca,
            "--auth-supernode-private-key",
            str(tmp_path / "stranger"),
            "--port",
            str(free_port("127.0.0.1")),
        ]
        stranger = start(place, "stranger", ["flower-supernode", *keyed, *here])
        plain = ["--insecure", "--port", str(free_port("127.0.0.1")), "--max-retries", "1"]
        clear = start(place, "clear", ["flower-supernode", *plain, *here])
        unknown = ["--port", str(free_port("127.0.0.1")), "--max-retries", "1"]
        wrong = start(
            place, "wrong", ["flower-supernode", *unknown, *here]
        )  # does not trust our authority
        try:
            write_app(tmp_path / "app", settings, tmp_path / "run", None)
            run = ended(secure, started(secure, tmp_path / "app", wait=600.0))
            assert run["status"] == "finished:completed"
            assert wait_for(lambda: stranger.poll() is not None, 120) and stranger.poll() != 0
            nodes = flwr(place, "supernode", "list", "up", "--format", "json")
            assert nodes.count('"node-id"') == 1, nodes
        finally:
            stop([stranger, clear, wrong])
    assert (
        files.read_json(tmp_path / "run" / "result.json")["model_sha256"]
        == expected["model_sha256"]
    )
    assert oct((tmp_path / "tls" / "tls" / "server.key").stat().st_mode)[-3:] == "600"


# --------------------------------------------------------------------------- the command


def fedp3(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, standard output and standard error."""
    return run_fedp3(*arguments), *capsys.readouterr()


def test_other_machines_are_let_in_only_with_tls_or_on_purpose(tmp_path, capsys):
    up = ["flower", "up", "--host", "0.0.0.0", "--dir", str(tmp_path / "up")]
    code, _, err = fedp3(capsys, *up)
    assert code == 2 and "add --tls, or --insecure" in err
    assert not (tmp_path / "up").exists()


def test_a_port_that_somebody_listens_on_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place(folder=tmp_path / "c", port=taken.getsockname()[1])
        with pytest.raises(InputError, match="choose another --port"), cluster(place, 1):
            pass
    assert not (tmp_path / "c").exists()


def test_certificates_stay_while_they_are_good(tmp_path, monkeypatch):
    make_certificates(tmp_path, "127.0.0.1")
    first = (tmp_path / "ca.crt").read_bytes()
    make_certificates(tmp_path, "localhost")  # every certificate is for this address as well
    assert (tmp_path / "ca.crt").read_bytes() == first
    for name in ("server.key", "server.pem", "ca.crt"):  # cut short by a crash
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:20])
        make_certificates(tmp_path, "127.0.0.1")
        assert (tmp_path / "ca.crt").read_bytes() != first
        first = (tmp_path / "ca.crt").read_bytes()
    make_certificates(tmp_path, "10.1.2.3")
    other = (tmp_path / "ca.crt").read_bytes()
    assert other != first
    monkeypatch.setattr("fedp3.deploy.certificates.DAYS", 0.5)
    make_certificates(tmp_path, "10.1.2.4")
    short = (tmp_path / "ca.crt").read_bytes()
    make_certificates(tmp_path, "10.1.2.4")
    assert (tmp_path / "ca.crt").read_bytes() != short, "they end within a day"


def test_an_app_is_written_once_and_only_from_a_good_config(tmp_path, capsys):
    (tmp_path / "my.toml").write_text("[run]\nrounds = 2\n")
    app = ["flower", "app", str(tmp_path / "app"), "--config", str(tmp_path / "my.toml")]
    code, _, err = fedp3(capsys, *app, "run.round=3")
    assert code == 2 and "did you mean" in err and not (tmp_path / "app").exists()
    code, out, err = fedp3(capsys, *app, "run.seed=4")
    assert code == 0 and "next: flwr run" in out, err
    assert config.load(tmp_path / "app" / "fedp3_app" / "config.toml").run.seed == 4
    code, _, err = fedp3(capsys, *app)
    assert code == 2 and "not empty" in err


@pytest.mark.deploy
def test_up_starts_a_cluster_and_stops_it_on_a_signal(tmp_path):
    place = Place(folder=tmp_path / "up")
    up = [sys.executable, "-m", "fedp3", "flower", "up", "--nodes", "1", "--dir", str(place.folder)]
    with subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert re.match(r"1 node on 127\.0\.0\.1:\d+", process.stdout.readline())
            assert f"FLWR_HOME={place.home} flwr run" in process.stdout.readline()
            wait_for(lambda: "online" in flwr(place, "supernode", "list", "up"), 300, every=2)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
    assert process.returncode == 0
    wait_for(lambda: not [line for _, line in processes() if str(tmp_path / "up") in line], 30)
