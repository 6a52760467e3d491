"""`fedp3 devices` as a user types it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from fedp3.cli import terminal
from fedp3.devices import measurement
from fedp3.devices.fleet_file import read_fleet
from fedp3.devices.fleets import make_fleet
from fedp3.devices.table import DEVICES

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
LINK = ["--mbps-down", "50", "--mbps-up", "10"]
QUICK = ["--seconds", "0.01"]


def last(out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "command",
    [["ls"], ["fleet", "phones", "--clients", "300"], ["fleet", "boards", "--clients", "9"]],
)
def test_tables_can_be_read_at_80_columns(command, fedp3, monkeypatch):
    monkeypatch.setattr(terminal, "out", Console(width=80))
    code, out, _ = fedp3("devices", *command)
    assert code == 0
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    rows = [line for line in out.splitlines() if re.search(r" \d\.\d\d *$", line)]
    shown = [name for name in DEVICES if any(f" {name} " in f" {row} " for row in rows)]
    assert len(shown) == len(rows), "no name is broken over lines"


def test_ls_has_every_device(fedp3):
    devices = last(fedp3("devices", "ls", "--json")[1])["devices"]
    assert [d["name"] for d in devices] == list(DEVICES)
    assert all(d["source"] for d in devices)


def test_show_has_the_source(fedp3):
    code, out, _ = fedp3("devices", "show", "pixel 3")
    assert code == 0 and "23 GFLOP/s" in out and "ai-benchmark.com" in out
    assert last(fedp3("devices", "show", "jetson-nano", "--json")[1])["watts"] == 10


def test_score_states_how_uncertain_it_is(fedp3):
    assert fedp3("devices", "score", "2000")[1].startswith("20 GFLOP/s, assumed; 10 to 40")
    assert last(fedp3("devices", "score", "2000", "--json")[1])["high"] == 40


def test_a_drawn_fleet_is_written_as_a_file_and_read_again(fedp3, tmp_path):
    code, _, err = fedp3(
        "devices", "fleet", "phones", "--clients", "9", "--seed", "4", "--out", "f.csv"
    )
    assert code == 0 and "wrote f.csv" in err
    assert read_fleet(tmp_path / "f.csv") == make_fleet("phones", 9, 4)
    rows = last(fedp3("devices", "fleet", "f.csv", "--json")[1])["clients"]
    assert [row["name"] for row in rows] == [d.name for d in make_fleet("phones", 9, 4)]


def test_a_fleet_of_shares(fedp3):
    spec = "Pixel 3=0.3, raspberry-pi-4=0.7"
    rows = last(fedp3("devices", "fleet", spec, "--clients", "10", "--json")[1])["clients"]
    assert sorted(row["name"] for row in rows) == ["Pixel 3"] * 3 + ["raspberry-pi-4"] * 7


def test_a_trace_is_summed_up_and_timed(fedp3, tmp_path):
    Path("t.csv").write_text("0,8\n4,0\n")
    code, out, _ = fedp3("devices", "trace", "t.csv", "--mb", "2")
    assert code == 0 and "2 intervals in 8.0 s" in out and "mean 4.00, min 0.00, max 8.00" in out
    transfers = last(fedp3("devices", "trace", "t.csv", "--mb", "2", "--json")[1])["transfers"]
    assert [t["start"] for t in transfers] == list(range(8))
    assert [t["seconds"] for t in transfers] == [2, 2, 2, 6, 6, 5, 4, 3]


def test_transfers_wait_for_the_device(fedp3, tmp_path):
    Path("t.csv").write_text("0,8\n4,8\n")
    Path("a.csv").write_text("0,off\n5,on\n")
    arguments = ["devices", "trace", "t.csv", "--mb", "1", "--available"]
    state = last(fedp3(*arguments, "a.csv", "--json")[1])
    assert state["available"] == 0.5
    assert [t["waits"] for t in state["transfers"]] == [5, 4, 3, 2, 1, 0, 0, 0]
    assert {t["seconds"] for t in state["transfers"]} == {1}
    code, out, _ = fedp3(*arguments, "0.25")
    assert code == 0 and "available 25.0 % of the time" in out


def test_measured_lines_are_read_back(fedp3, tmp_path):
    arguments = ["devices", "measure", "--out", "f.csv", *LINK, *QUICK]
    code, out, err = fedp3(*arguments, "--name", "one")
    assert code == 0 and "GFLOP/s, float32, one thread" in out and "wrote client 0" in err
    assert "not measured; name one with --server" in out
    state = last(fedp3(*arguments, "--name", "two", "--available", "0.5", "--json")[1])
    one, two = read_fleet(tmp_path / "f.csv", 2)
    assert (one.name, two.name, two.available) == ("one", "two", 0.5)
    assert (two.gflops, two.memory_mb) == (state["gflops"], state["memory_mb"])
    assert (two.mbps_down, two.mbps_up) == (50, 10)
    assert fedp3("devices", "fleet", "f.csv")[0] == 0


def test_measuring_without_a_file_writes_nothing(fedp3, tmp_path):
    code, out, _ = fedp3("devices", "measure", *QUICK, "--server", "127.0.0.1:1")
    assert code == 0 and "not measured: 127.0.0.1:1 cannot be reached" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["show", "Pixel 33"], "did you mean 'Pixel 3'"),
        (["score", "0"], "above 0"),
        (["fleet", "phones"], "needs --clients"),
        (["fleet", "phone", "--clients", "3"], "unknown fleet"),
        (["fleet", "bad.csv"], "has 2 mistakes"),
        (["fleet", "good.csv", "--clients", "2"], "no line for client 1"),
        (["fleet", "Pixel 3=x,=0.5,a=2", "--clients", "3"], "'Pixel 3=x', '=0.5', 'a=2'"),
        (["fleet", "Pixel 3=0.5,Pixel 3=0.5", "--clients", "4"], "each device once"),
        (["fleet", "phones", "--clients", "3", "--out", "good.csv"], "exists already"),
        (["fleet", "phones", "--clients", "3", "--out", "x.txt"], "ends in .csv"),
        (["fleet", "phones", "--clients", "3", "--out", "no/x.csv"], "no folder"),
        (["trace", "none.csv"], "cannot be read"),
        (["trace", "bad.csv"], "mistakes"),
        (["trace", "link.csv", "--mb", "0"], "--mb 0"),
        (["trace", "link.csv", "--mb", "nan"], "--mb nan"),
        (["trace", "link.csv", "--available", "2"], "share of time"),
        (["trace", "link.csv", "--available", "link.csv"], "want seconds,on"),
        (["measure", "--out", "x.csv"], "mbps_down is not measured; state it; mbps_up is not"),
        (["measure", "--out", "x.csv", "--mbps-down", "-1", "--mbps-up", "0"], "mbps_up is 0"),
        (["measure", "--out", "x.csv", *LINK, "--available", "3"], "share of time"),
        (["measure", "--out", "x.csv", *LINK, "--name", " "], "not a line of text"),
        (["measure", "--out", "good.csv", *LINK, "--client", "0"], "line for client 0 already"),
        (["measure", "--out", "bad.csv", *LINK], "has 2 mistakes"),
        (["measure", "--out", "no/x.csv", *LINK], "no folder"),
        (["measure", "--server", "nowhere"], "HOST:PORT"),
    ],
)
def test_wrong_input_exits_2_before_anything_is_measured_or_written(
    arguments, text, fedp3, tmp_path, monkeypatch
):
    def never(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(measurement, "training_gflops", never)
    monkeypatch.setattr(measurement, "disk_mb_per_second", never)
    header = "client,name,memory_mb,gflops,mbps_down,mbps_up,available\n"
    contents = {
        "good.csv": header + "0,Pixel 3,,,,,\n",
        "bad.csv": header + "0,Pixel 33,,,,,\n1,Pixel 3,-4,,,,\n",
        "link.csv": "0,1\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    code, out, err = fedp3("devices", *arguments)
    assert code == 2, (out, err)
    assert text in err
    assert "Traceback" not in err
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == contents


def test_the_files_and_commands_on_the_page_of_devices_work(fedp3, tmp_path):
    page = PAGE.read_text()
    files = re.findall(r"`(\w+\.csv)`:\n\n```text\n(.*?)```", page, re.S)
    assert {name for name, _ in files} == {"fleet.csv", "bus.csv", "presence.csv"}
    for name, content in files:
        (tmp_path / name).write_text(content)
    commands = re.findall(r"^fedp3 (devices .*)$", page, re.M)
    assert len(commands) >= 7
    for command in commands:
        code, _, err = fedp3(*shlex.split(command, comments=True))
        assert code == 0, f"{command}: {err}"
    overruled = read_fleet(tmp_path / "fleet.csv")
    assert overruled[1].gflops == 10 != DEVICES["Pixel 3"].gflops
    assert overruled[1].memory_mb == DEVICES["Pixel 3"].memory_mb


def test_plan_shows_what_each_device_does_and_which_limit_binds(tmp_path, fedp3):
    assert fedp3("init", str(tmp_path / "my.toml"))[0] == 0
    phones = ("devices.fleet=phones", "devices.round_seconds=0.3")
    code, out, _ = fedp3("plan", str(tmp_path / "my.toml"), *phones)
    assert code == 0
    assert "trains and uploads" in out and "Nexus S" in out and "upload" in out
    assert "limits: 25 % of a device's memory, 0.3 seconds of a round" in out
    code, out, _ = fedp3("plan", str(tmp_path / "my.toml"), *phones, "--json")
    described = json.loads(out)
    assert {"name", "memory_mb", "gflops", "mbps_up"} <= described["devices"][0].keys()
    assert {client["binding"] for client in described["clients"]} > {"upload"}
    assert {client["code"] for client in described["clients"]} <= {"int8", "int4", "ternary"}
