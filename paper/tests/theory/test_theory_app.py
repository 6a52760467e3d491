"""`fedp3 theory`: its list, help, JSON, figures and exit codes."""

import json
import re
from functools import partial

import pytest
from typer.testing import CliRunner

from fedp3_paper import PAPER
from fedp3_paper.theory import fixed_layers, gain, pruning, theorem1, theorem2
from fedp3_paper.theory.app import app
from fedp3_paper.theory.stats import Check

COMMANDS = ("sketches", "theorem1", "gain", "fixed-layers", "theorem2", "ldp-table", "theorem3")
TABLE = ("ldp-table", "--n", "20", "--m", "100", "--d", "1000", "--epsilon", "2", "--delta", "1e-5")
PAGES = PAPER / "pages"


def run(*args: str):
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def small(monkeypatch):
    """The same experiments with short horizons."""
    monkeypatch.setattr(theorem1, "grid", partial(theorem1.grid, horizons=(5,)))
    monkeypatch.setattr(theorem1, "network", lambda *a: theorem1.logistic(0, 10, 1.0))
    for name in ("sharpness", "literal_reading"):
        monkeypatch.setattr(theorem1, name, partial(getattr(theorem1, name), horizons=(100,)))
    monkeypatch.setattr(theorem1, "printed_count", partial(theorem1.printed_count, steps=100))
    compare, survey, measure = gain.compare, fixed_layers.survey, theorem2.measure
    monkeypatch.setattr(gain, "compare", lambda n, s, e, **k: compare(n, s, e, **{**k, "K": 20}))
    monkeypatch.setattr(
        fixed_layers, "survey", lambda spreads, **k: survey((0.1, 1.0), **{**k, "K": 20})
    )
    monkeypatch.setattr(
        theorem2, "measure", lambda problem, p, **k: measure(problem, coarse(p), **k)
    )
    monkeypatch.setattr(pruning, "bounds", partial(pruning.bounds, horizons=(5,)))


def coarse(p: theorem2.Privacy) -> theorem2.Privacy:
    return theorem2.Privacy(p.epsilon, p.delta, 20, p.c)


def test_no_name_lists_every_experiment():
    result = run()
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Example: fedp3 theory {name}" in " ".join(result.output.split())
    assert "--json" in result.output


def test_ldp_table_is_one_number_per_algorithm():
    result = run(*TABLE, "--json")
    assert result.exit_code == 0
    table = json.loads(result.output.splitlines()[-1])
    assert list(table) == ["Q-DPSGD-1", "LDP SVRG/SPIDER", "SDM-DSGD", "CDP-SGD", "LDP-FedP3"]
    assert all(isinstance(v, float) for v in table.values())
    assert table["CDP-SGD"] == pytest.approx(table["LDP-FedP3"])  # omega = n - 1 if unset
    other = json.loads(
        run(*TABLE, "--omega", "0", "--sigma2", "0.5", "--json").output.splitlines()[-1]
    )
    assert other["CDP-SGD"] > table["CDP-SGD"] and other["Q-DPSGD-1"] > table["Q-DPSGD-1"]
    assert other["LDP-FedP3"] == table["LDP-FedP3"]


def test_ldp_table_in_text_notes_where_the_unit_differs():
    assert "looks like rounds" in run(*TABLE).output


@pytest.mark.parametrize(
    "wrong", [("--delta", "2"), ("--epsilon", "0"), ("--n", "0"), ("--omega", "-1")]
)
def test_bad_input_is_exit_code_2(wrong):
    result = run(*TABLE, *wrong)
    assert result.exit_code == 2
    assert "want" in result.output


def test_a_file_in_place_of_the_folder_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "taken").write_text("")
    assert run("theorem1", "--out", str(tmp_path / "taken")).exit_code == 2


def test_figures_leave_the_readers_style_alone(tmp_path):
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 23.0}):
        run(*TABLE, "--out", str(tmp_path))
        assert mpl.rcParams["font.size"] == 23.0


def test_too_few_runs_are_exit_code_2():
    assert run("theorem3", "--runs", "5").exit_code == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [c for c in COMMANDS if c != "sketches"])
def test_figures_are_written_and_named(name, tmp_path):
    args = TABLE if name == "ldp-table" else (name,)
    result = run(*args, "--out", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    figure = tmp_path / "new" / f"{name}.svg"
    assert result.output.splitlines()[-1] == f"open next: {figure}"
    assert figure.read_text().lstrip().startswith("<?xml")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [c for c in COMMANDS if c != "ldp-table"])
def test_json_is_one_object_on_the_last_line(name):
    result = run(name, "--json")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.output.splitlines()[-1], parse_constant=pytest.fail)
    assert isinstance(numbers, dict) and numbers


def test_the_same_numbers_give_the_same_figure(tmp_path):
    for name in ("a", "b"):
        run(*TABLE, "--out", str(tmp_path / name))
    assert (tmp_path / "a/ldp-table.svg").read_bytes() == (
        tmp_path / "b/ldp-table.svg"
    ).read_bytes()


def test_a_violated_bound_is_exit_code_1(monkeypatch):
    broken = Check("planted", 5, 2.0, 1.9, 2.1, 1.0, "violated")
    monkeypatch.setattr(pruning, "bounds", lambda **k: ([], [broken]))
    result = run("theorem3", "--runs", "20")
    assert result.exit_code == 1
    assert "planted (K=5)" in result.output


def test_table_of_the_page_is_what_its_command_prints():
    page = (PAGES / "theory.md").read_text()
    command = re.search(r"`fedp3 theory (ldp-table [^`]+)`", page).group(1)
    printed = json.loads(run(*command.split(), "--json").output)
    for name, value in printed.items():
        assert re.search(
            rf"^\| {re.escape(name)}[^|]*\| {re.escape(f'{value:.3g}')} \|", page, re.MULTILINE
        ), name


def test_page_names_only_commands_that_exist_and_figures_that_are_there():
    page = (PAGES / "theory.md").read_text()
    assert set(re.findall(r"fedp3 theory ([a-z0-9-]+)", page)) == set(COMMANDS)
    figures = re.findall(r"\]\((theory/[\w.-]+)\)", page)
    assert len(figures) == len(COMMANDS) - 1
    assert all((PAGES / name).is_file() for name in figures)
