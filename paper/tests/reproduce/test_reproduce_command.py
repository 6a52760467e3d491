"""`fedp3 reproduce` as a user types it, and the pages this repository ships."""

import json
from functools import partial

import pytest

from fedp3 import config
from fedp3_paper import PAPER
from fedp3_paper.reproduce import command, pages, verdicts
from fedp3_paper.reproduce.cells import BENCHES, Bench, Cell, config_of
from fedp3_paper.reproduce.summary import read_all
from fedp3_paper.reproduce.targets import FEDAVG, TARGETS, Row, Target, layers


@pytest.fixture
def fedp3(fedp3):
    """The command of this file, away from the results that are shipped."""
    return partial(fedp3, "reproduce", "--out", ".")


def test_help_has_an_example_and_no_name_lists_all(fedp3):
    code, out, _ = fedp3("--help")
    assert code == 0 and "Example: fedp3 reproduce" in out
    code, out, _ = fedp3()
    assert code == 0 and {"fig-parameters", "fig-overlap", "claims", "lr"} <= {
        x.split()[0] for x in out.splitlines()
    }


def test_fig_parameters_prints_one_object_and_writes_nothing(fedp3, tmp_path):
    code, out, _ = fedp3("fig-parameters", "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and set(found) == {"cifar10", "cifar100", "fashion-mnist", "emnist-l"}
    assert round(found["cifar10"]["comm_spread_percent"], 2) == 10815.25
    assert round(found["cifar10"]["size_spread_percent"]["0.5"], 2) == 57.93
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["fig-parameters", "table-communication", "table-datasets", "table-architectures"]
)
def test_a_target_without_training_ends_at_its_page(fedp3, tmp_path, name):
    code, out, _ = fedp3(name)
    assert code == 0 and out.splitlines()[-1] == f"open pages/{name}.md"
    assert (tmp_path / f"pages/{name}.md").stat().st_size > 300


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
        (["lr", "local.lr=1"], "under the settings of each bench: 'local.lr=1' cannot change it"),
        (["fig-overlap", "--cell", "lowerb"], "named lowerb (as in 'fashion-mlp/*/lowerb*')"),
        (["fig-overlap", "--bench", "mnist-mlp", "--data-dir", "nowhere"], "fedp3 data get mnist"),
        (["claims", "--write-configs", "cells"], "claims has no cells"),
        (
            ["fig-overlap", "--write-configs", "cells", "local.lr=1"],
            "give 'local.lr=1' to `fedp3 run`",
        ),
        (
            ["fig-overlap", "--write-configs", "cells", "--bench", "cifar10-resnet18"],
            "nothing to run",
        ),
        (["claims", "--from", "nowhere"], "no results/desk.jsonl"),
    ],
)
def test_wrong_input_is_refused_before_any_work(fedp3, tmp_path, arguments, text):
    code, _, err = fedp3(*arguments)
    assert code == 2 and text in err
    assert not list(tmp_path.iterdir())


def test_claims_are_judged_from_results_of_another_place(fedp3, tmp_path):
    code, out, _ = fedp3("claims", "--from", str(PAPER), "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and len(found["claims"]) > 15
    assert not (tmp_path / "pages").exists(), "for programs: pages are left alone"
    assert fedp3("claims")[0] == 0
    assert (tmp_path / "pages/README.md").exists()
    assert (tmp_path / "results/desk.jsonl").read_bytes() == (
        PAPER / "results/desk.jsonl"
    ).read_bytes()


def test_the_shipped_pages_are_made_from_the_shipped_results(tmp_path):
    shipped, results = PAPER / "pages", PAPER / "results"
    found = read_all(results, "released-desk")
    page = pages.training_page("fig-overlap", found, "released-desk", tmp_path / "released-desk")
    theirs = shipped / "released-desk" / "fig-overlap.md"
    assert page.read_text() == theirs.read_text(), (
        "run: fedp3 reproduce fig-overlap --protocol released-desk"
    )
    found = read_all(results, "desk")
    assert found, "no results are shipped"
    page = verdicts.claims_page(found, "desk", tmp_path)
    assert page.read_text() == (shipped / "README.md").read_text(), "run: fedp3 reproduce claims"


# --------------------------------------------------------------------------- where things lie


@pytest.fixture
def here(fedp3, tmp_path, monkeypatch):
    """The command without --out, in an empty checkout, with a target that trains in a moment."""
    small = {
        "data.name": "digits",
        "model.name": "mlp",
        "model.width": 0.02,
        "local.steps": 2,
        "partition.sizes": 40,
    }
    monkeypatch.setitem(
        BENCHES,
        "digits-mlp",
        Bench(name="digits-mlp", stage="A", paper="EMNIST-L", settings=small, splits=("classes",)),
    )
    rows = (Row("FedAvg", FEDAVG), Row("OPU2", layers("opu2")))
    target = Target(
        title="Small", about="a small one", rows=rows, rows_are="Rows.", benches=("digits-mlp",)
    )
    monkeypatch.setitem(TARGETS, "small", target)
    monkeypatch.setattr(command, "PAPER", tmp_path / "paper")
    return partial(fedp3.func, "reproduce")


def test_results_and_pages_go_to_the_checkout_and_runs_to_the_folder_of_the_caller(here, tmp_path):
    code, out, err = here(
        "small", "--rounds", "2", "--seeds", "1", "local.lr=0.1", "partition.clients=4"
    )
    assert code == 0, err
    assert "results go to paper/results/desk.jsonl" in err and out.endswith(
        "open paper/pages/small.md\n"
    )
    found = read_all(tmp_path / "paper/results", "desk")
    assert set(found) == {"digits-mlp/classes/fedavg", "digits-mlp/classes/opu2"}
    assert (tmp_path / "runs/reproduce/desk/digits-mlp/classes/opu2/seed-0/result.json").exists()


def test_the_config_of_a_cell_is_written_on_demand(here, tmp_path):
    code, out, _ = here("small", "--write-configs", "cells", "--cell", "*/opu2", "--rounds", "3")
    path = tmp_path / "cells/desk/digits-mlp/classes/opu2.toml"
    assert (
        code == 0
        and out == "wrote 1 configs; next: fedp3 run cells/desk/digits-mlp/classes/opu2.toml\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["cells"], "nothing is trained"
    assert "# fedp3 run cells/desk/digits-mlp/classes/opu2.toml --seeds 3\n" in path.read_text()
    cell = Cell(BENCHES["digits-mlp"], "classes", layers("opu2"))
    assert config.load(path) == config_of(cell, "desk", 0, 3)
    listed = json.loads(here("small", "--write-configs", "cells", "--json")[1])["configs"]
    assert listed == [f"cells/desk/digits-mlp/classes/{name}.toml" for name in ("fedavg", "opu2")]


def test_the_header_of_a_shipped_cell_has_claim_published_value_and_ours(fedp3, tmp_path):
    fedp3("claims", "--from", str(PAPER), "--json")
    fedp3("fig-overlap", "--write-configs", "cells", "--cell", "fashion-cnn/classes/opu2")
    text = (tmp_path / "cells/desk/fashion-cnn/classes/opu2.toml").read_text()
    assert text.startswith("# fig-overlap: FedAvg against three, two and one trained layers")
    assert "\n# claim: OPU2 loses against FedAvg\n" in text
    assert "\n# published: 85.29 % (FMNIST)\n# ours: 83." in text
