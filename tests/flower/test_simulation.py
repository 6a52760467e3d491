"""`--engine flower`: the same bits as in process, also after a kill; no process is left behind."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from fedp3 import cli
from fedp3.core import files
from fedp3.engines.flower import orphan_reaper
from fedp3.runs import run_folder
from processes import run_fedp3

CONFIG = """
method = "fedp3"
[partition]
clients = 4
[model]
width = 0.02
[plan]
head = "personal"
[prune]
keep = [0.9, 0.5]
local_pruner = "uniform"
[aggregate]
rule = "attention"
[local]
steps = 2
lr = 0.1
[run]
rounds = 40
clients_per_round = 3
eval_every = 20
"""
SECONDS = 600  # a machine may be busy


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fedp3", *arguments]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("simulation")
    (folder / "my.toml").write_text(CONFIG)
    assert run_fedp3("run", str(folder / "my.toml"), "--out", str(folder / "inprocess")) == 0
    return folder


def left(session: int) -> list[str]:
    """Command lines of a session's processes; zombies have none and are left out."""
    lines = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone
            if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if line]


def wait_for(condition, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def test_killed_and_resumed_in_simulation_it_ends_at_the_bits_of_a_run_in_process(place):
    folder = place / "flower"
    quiet = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    begun = subprocess.Popen(
        command(
            "run",
            str(place / "my.toml"),
            "--out",
            str(folder),
            "--engine",
            "flower",
            "--workers",
            "2",
        ),
        **quiet,
    )
    wait_for(lambda: len(run_folder.read_events(folder)) >= 2 or begun.poll() is not None)
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    assert begun.returncode == -signal.SIGKILL and not (folder / "result.json").exists()
    wait_for(lambda: not left(begun.pid), 60)

    again = subprocess.Popen(
        command("resume", str(folder), "--engine", "flower", "--workers", "2", "--json"), **quiet
    )
    out, err = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, err
    assert "resuming after round" in err and "resuming after round 0" not in err
    assert len(out.strip().splitlines()) == 1, "Flower and Ray say nothing on standard output"
    assert not left(again.pid), "no process is left"
    expected, flower = (
        files.read_json(place / name / "result.json") for name in ("inprocess", "flower")
    )
    assert json.loads(out)["model_sha256"] == flower["model_sha256"] == expected["model_sha256"]
    for key in ("final", "mb_up", "mb_down", "rejected", "rounds"):
        assert flower[key] == expected[key], key
    assert [e["t"] for e in run_folder.read_events(folder)] == list(range(40))


def test_an_unknown_engine_or_one_that_is_not_installed_is_refused_before_any_folder(
    place, capsys, monkeypatch
):
    for engine, hint in (
        ("flowers", "did you mean 'flower'"),
        ("flower", "pip install 'fedp3[flower]'"),
    ):
        if engine == "flower":
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(SystemExit) as stopped:
            cli.main(
                ["run", str(place / "my.toml"), "--out", str(place / "none"), "--engine", engine]
            )
        assert stopped.value.code == 2 and hint in capsys.readouterr().err
        assert not (place / "none").exists()


@pytest.mark.deploy
def test_a_simulation_needs_no_network(place, tmp_path):
    """In a network namespace of its own, where only loopback exists."""
    lo = "import fcntl, socket, struct; s = socket.socket(); n = b'lo'.ljust(16, b'\\0')"
    up = f"{lo}; fcntl.ioctl(s, 0x8914, n + struct.pack('<H22x', 0x49))"
    fedp3 = " ".join(
        command("run", str(place / "my.toml"), "run.rounds=2", "--out", str(tmp_path / "alone"))
    )
    inside = f'{sys.executable} -c "{up}" && {fedp3} --engine flower --json'
    probe = subprocess.run(["unshare", "-rn", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this machine does not let the test make a network namespace")
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", inside], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rejected"] == 0


def test_whoever_holds_a_file_of_the_folder_is_ended_and_nobody_else(tmp_path):
    script = (
        "import sys, time; f = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(600)"
    )
    places = {"inside": tmp_path / "ray", "outside": tmp_path / "other"}
    holders = {}
    for name, folder in places.items():
        folder.mkdir()
        run = [sys.executable, "-c", script, str(folder / "log")]
        holders[name] = subprocess.Popen(run, stdout=subprocess.PIPE)
        holders[name].stdout.readline()
    with (tmp_path / "ray" / "own").open("w"):
        watch = subprocess.Popen(
            [sys.executable, "-I", orphan_reaper.__file__, str(tmp_path / "ray")],
            stdin=subprocess.PIPE,
        )
        assert holders["inside"].poll() is None
        watch.communicate()  # as when this process ends
    assert holders["inside"].wait(30) == -signal.SIGKILL and not (tmp_path / "ray").exists()
    assert holders["outside"].poll() is None
    holders["outside"].kill()
    for process in holders.values():
        process.wait()
        process.stdout.close()
