"""`fedp3 compare` and `fedp3 report` of runs with devices, as a user types them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from device_runs import add_devices, events_of
from processes import run_fedp3

TINY = [
    "model.width=0.03",
    "partition.clients=8",
    "run.clients_per_round=4",
    "run.rounds=4",
    "run.eval_every=1",
    "local.steps=2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two runs with devices, a and b, and one without, c."""
    folder = tmp_path_factory.mktemp("runs")
    config = str(folder / "my.toml")
    assert run_fedp3("init", config) == 0
    for name in "abc":
        assert run_fedp3("run", config, *TINY, "--out", str(folder / name)) == 0
    add_devices(folder / "a", "boards")
    add_devices(folder / "b", "phones", slower=2.0)
    return folder


@pytest.fixture
def runs(fedp3, trained, tmp_path):
    """A copy of them in the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def last(out):
    return json.loads(out.strip().splitlines()[-1])


def plain(out):
    return re.sub(r"\s+", " ", out.replace("\u00a0", " "))


def test_time_to_a_target_is_in_a_table_of_its_own(fedp3, runs):
    best = max(e["G"]["mean"] for e in events_of(Path("a")))
    code, out, _ = fedp3("compare", "a", "b", "c", "--target", f"{best:.4f}"[:-1])
    assert code == 0 and f"To reach a G of {100 * best:.1f}"[:-2] in plain(out)
    assert re.search(r"rounds MB virtual (s|min|h)", plain(out))
    assert "…" not in out
    code, out, _ = fedp3("compare", "a", "b", "c", "--target", "1", "--json")
    rows = last(out)["runs"]
    assert code == 0 and [row["target"] for row in rows] == [1.0] * 3
    assert all(row["seconds_to_target"] is None for row in rows)
    assert rows[0]["joules"] > 0 and rows[1]["joules"] is None and rows[2]["joules"] is None
    code, out, _ = fedp3("compare", "a", "b", "c", "--target", "1", "--markdown")
    assert (
        code == 0
        and "| a | never |" in plain(out)
        and "| c | never | never | – | – |" in plain(out)
    )
    code, out, _ = fedp3("compare", "a", "c")
    assert code == 0 and "98 % of the final G of" in plain(out)


def test_each_device_has_a_line_for_each_run(fedp3, runs):
    code, out, _ = fedp3("compare", "a", "b", "c", "--by-device")
    assert code == 0 and "By device" in out and "trains round s limit used" in plain(out)
    about = json.loads(Path("a/run.json").read_text())
    assert all(device["name"] in plain(out) for device in about["devices"])
    code, out, _ = fedp3("compare", "a", "b", "c", "--by-device", "--json")
    devices = last(out)["devices"]
    assert {d["run"] for d in devices} == {"a", "b"}
    assert sum(d["clients"] for d in devices if d["run"] == "a") == 8
    assert all(0 <= d["P"] <= 1 and sum(d["limits"].values()) == pytest.approx(1) for d in devices)
    code, out, _ = fedp3("compare", "a", "--by-device", "--markdown")
    assert code == 0 and "| device | run |" in plain(out)


def test_without_devices_nothing_of_them_is_shown_and_their_options_are_refused(fedp3, runs):
    code, out, _ = fedp3("compare", "c")
    assert code == 0 and "irtual" not in out and "device" not in out
    assert "devices" not in last(fedp3("compare", "c", "--json")[1])
    code, _, err = fedp3("compare", "c", "--by-device")
    assert code == 2 and "--by-device needs" in plain(err)
    code, _, err = fedp3("compare", "c", "--at-seconds", "5")
    assert code == 2 and "runs cannot be compared by virtual time: no run has devices" in plain(err)
    code, out, _ = fedp3("compare", "c", "--target", "0.01")
    assert code == 0 and "To reach a G of 1.0 %" in plain(out)
    assert fedp3("compare", "a", "--target", "80")[0] == 2  # a percentage is not a share


def test_the_report_takes_the_target(fedp3, runs):
    code, out, _ = fedp3("report", "a", "--out", "page.html", "--target", "0.25")
    assert code == 0 and "figures in" in out
    assert "To reach a G of 25.0" in Path("page.html").read_text()
    assert Path("figures/timeline.svg").exists() and Path("figures/fleet.png").exists()
