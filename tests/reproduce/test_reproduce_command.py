"""`fedp3 reproduce` as a user types it, and the pages this repository ships."""

import json
from functools import partial
from pathlib import Path

import pytest

from fedp3.reproduce import pages, verdicts
from fedp3.reproduce.summary import read_all

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fedp3(fedp3):
    """The command of this file."""
    return partial(fedp3, "reproduce")


def test_help_has_an_example_and_no_name_lists_all(fedp3):
    code, out, _ = fedp3("--help")
    assert code == 0 and "Example: fedp3 reproduce" in out
    code, out, _ = fedp3()
    assert code == 0 and {"fig-parameters", "fig-overlap", "claims", "lr"} <= {x.split()[0] for x in out.splitlines()}


def test_fig_parameters_prints_one_object_and_writes_nothing(fedp3, tmp_path):
    code, out, _ = fedp3("fig-parameters", "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and set(found) == {"cifar10", "cifar100", "fashion-mnist", "emnist-l"}
    assert round(found["cifar10"]["comm_spread_percent"], 2) == 10815.25
    assert round(found["cifar10"]["size_spread_percent"]["0.5"], 2) == 57.93
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fig-parameters", "table-communication", "table-datasets", "table-architectures"])
def test_a_target_without_training_ends_at_its_page(fedp3, tmp_path, name):
    code, out, _ = fedp3(name)
    assert code == 0 and out.splitlines()[-1] == f"open docs/reproduce/{name}.md"
    assert (tmp_path / f"docs/reproduce/{name}.md").stat().st_size > 300


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fig-overlaps"], "did you mean 'fig-overlap'"),
        (["fig-overlap", "--protocol", "disk"], "did you mean 'desk'"),
        (["fig-overlap", "--bench", "mnist-mpl"], "did you mean 'mnist-mlp'"),
        (["fig-overlap", "--bench", "mnist-mlp", "local.lrr=1"], "did you mean 'lr'"),
        (["claims", "--protocol", "disk"], "did you mean 'desk'"),
        (["fig-parameters", "--bench", "mnist-mpl"], "did you mean 'mnist-mlp'"),
        (["fig-parameters", "local.lr=1"], "trains nothing: 'local.lr=1' cannot change it"),
        (["lr", "local.lr=1"], "under each bench's own settings: 'local.lr=1' cannot change it"),
        (["fig-overlap", "--cell", "lowerb"], "named lowerb (as in 'fashion-mlp/*/lowerb*')"),
        (["fig-overlap", "--bench", "mnist-mlp", "--data-dir", "nowhere"], "fedp3 data get mnist"),
        (["claims", "--from", "nowhere"], "no experiments/results"),
    ],
)
def test_wrong_input_is_said_before_any_work(fedp3, tmp_path, arguments, text):
    code, _, err = fedp3(*arguments)
    assert code == 2 and text in err
    assert not list(tmp_path.iterdir())


def test_claims_are_judged_from_results_of_another_place(fedp3, tmp_path):
    code, out, _ = fedp3("claims", "--from", str(ROOT), "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and len(found["claims"]) > 15
    assert not (tmp_path / "docs").exists(), "for programs: pages are left alone"
    assert fedp3("claims")[0] == 0
    assert (tmp_path / "experiments/desk/mnist-mlp/classes/opu2.toml").read_text().startswith("# fig-overlap")
    assert (tmp_path / "docs/reproduce/README.md").exists()


def test_the_shipped_pages_are_made_from_the_shipped_results(tmp_path):
    shipped, results = ROOT / "docs" / "reproduce", ROOT / "experiments" / "results"
    found = read_all(results, "released-desk")
    page = pages.training_page("fig-overlap", found, "released-desk", tmp_path / "released-desk")
    theirs = shipped / "released-desk" / "fig-overlap.md"
    assert page.read_text() == theirs.read_text(), "run: fedp3 reproduce fig-overlap --protocol released-desk"
    found = read_all(results, "desk")
    assert found, "no results are shipped"
    page = verdicts.claims_page(found, "desk", tmp_path)
    assert page.read_text() == (shipped / "README.md").read_text(), "run: fedp3 reproduce claims"
