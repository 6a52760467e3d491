"""The commands that this package adds to `fedp3`, and the configs that lie beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedp3 import cli, config
from fedp3_paper import PAPER
from fedp3_paper.utility import command as utility

SMALL = """
[model]
width = 0.01
[partition]
clients = 3
[run]
rounds = 1
clients_per_round = 2
[privacy]
enabled = true
randomness = "seeded"
"""


def test_every_command_stands_in_the_help_with_an_example(fedp3, commands):
    assert [entry.name for entry in commands] == list(cli.IN_A_CHECKOUT)
    listed = fedp3("--help")[1]
    for name in cli.IN_A_CHECKOUT:
        assert f" {name} " in listed
        code, out, err = fedp3(name, "--help")
        assert code == 0 and not err
        assert f"Example: fedp3 {name}" in " ".join(out.split())


def test_help_answers_without_importing_torch(commands):
    values = {entry.name: entry.value for entry in commands}
    code = (
        "import atexit, sys; from importlib.metadata import EntryPoint; from fedp3 import cli\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"cli.main(['--help'], [EntryPoint(k, v, cli.GROUP) for k, v in {values}.items()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "reproduce" in done.stdout and done.stdout.strip().endswith("False"), done.stderr


def test_theory_is_reached(fedp3):
    code, out, _ = fedp3("theory")
    assert code == 0 and "ldp-table" in out
    sizes = ["--n", "100", "--m", "1000", "--d", "5000", "--epsilon", "1", "--delta", "1e-5"]
    code, out, _ = fedp3("theory", "ldp-table", *sizes, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["LDP-FedP3"] > 0
    assert fedp3("theory", "no-such-theorem")[0] == 2


def test_utility_runs_its_cells_once_and_ends_in_a_table_and_a_figure(fedp3, monkeypatch):
    Path("c.toml").write_text(SMALL)
    monkeypatch.setitem(utility.TABLES, "mlp", ("epsilon", utility._by_epsilon(("inf",))))
    asked = ("utility", "mlp", "--config", "c.toml", "--out", "u", "--json")
    code, out, err = fedp3(*asked)
    first = json.loads(out.splitlines()[-1])
    assert code == 0, err
    assert [c["layers"] for c in first["cells"]] == ["full", "opu2", "lowerb"]
    assert Path("u/utility.svg").exists() and "| OPU2 |" in Path("u/table.md").read_text()
    result = Path("u/opu2-inf/seed-0/result.json")
    before = result.stat().st_mtime_ns
    assert json.loads(fedp3(*asked)[1].splitlines()[-1]) == first
    assert result.stat().st_mtime_ns == before, "finished cells are read"


def test_utility_takes_the_configs_of_the_checkout_wherever_it_is_called(fedp3):
    code, _, err = fedp3("utility", "mlp", "--out", "u", "--data-dir", "nowhere")
    assert code == 2 and "fedp3 data get fashion-mnist" in err, "the config is found"
    code, _, err = fedp3("utility", "mpl", "--out", "u")
    assert code == 2 and "did you mean 'mlp'" in err


@pytest.mark.parametrize("path", sorted(PAPER.glob("configs/**/*.toml")), ids=lambda p: p.name)
def test_every_config_can_be_run(path):
    assert config.load(path).run.rounds > 0


def test_the_header_of_a_comparison_names_its_commands():
    files = sorted(PAPER.glob("configs/compare-*.toml"))
    assert len(files) == 3
    for path in files:
        assert f"fedp3 run paper/configs/{path.name}" in path.read_text()
