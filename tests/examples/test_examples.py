"""The programs in examples/ run as they stand, and do what their first lines promise."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedp3

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def selectors(monkeypatch):
    """The table of selectors, restored after a test that adds to it."""
    table = fedp3.register.selector.__self__
    monkeypatch.setattr(table, "_table", dict(table))
    return table


def test_quickstart_learns_the_task_and_evaluates_every_five_rounds(capsys):
    result = load("quickstart").main()
    assert len(result.history) == 15
    assert [row["round"] for row in result.history if row["G"] is not None] == [5, 10, 15]
    assert result.accuracy["G"] > 0.9
    assert {row["keep"] for row in result.per_client} == {0.9, 0.7, 0.5}
    for row in result.per_client:
        assert len(row["layers"]) == 2, "one hidden layer and the head"
    assert "round 15: G " in capsys.readouterr().out


def test_own_selector_halves_every_pruned_layer_and_sends_its_masks(selectors):
    plan = load("own_selector").main()
    assert "smallest" in selectors
    assert len(plan.clients) == 20
    assert all(cost.capacity == 0.5 for cost in plan.costs)
    neuron = fedp3.plan(
        fedp3.make_config("prune.selector=neuron", "prune.keep=0.5", "model.width=0.05")
    )
    for cost, other in zip(plan.costs, neuron.costs, strict=True):
        assert cost.parameters == other.parameters
        assert cost.mb_down > other.mb_down  # a mask that depends on the weights must be sent


def test_own_selector_retains_the_units_with_the_smallest_norms(selectors):
    units = load("own_selector").smallest_norm
    assert units(torch.tensor([3.0, 1.0, 2.0, 0.5]), 2, 0, None).tolist() == [1, 3]


def test_private_stays_within_its_budget_and_still_learns(capsys):
    result = load("private").main()
    spent = result.outcome.result["privacy"]["spent"]
    assert 0 < spent["max"] <= 8.0
    assert result.outcome.result["privacy"]["noise_multiplier"] > 0
    assert result.accuracy["G"] > 0.8
    assert all(row["loss"] is None for row in result.history)  # LDP sends no training loss
    assert "largest epsilon" in capsys.readouterr().out


def test_every_example_is_listed_with_what_it_shows():
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in page, path.name


def test_own_objective_covers_most_targets_and_is_registered(monkeypatch, capsys):
    table = fedp3.register.objective.__self__
    monkeypatch.setattr(table, "_table", dict(table))
    result = load("own_objective").main()
    assert "interval" in table
    assert result.score.name == "coverage" and 0.7 < result.scores["G"] < 0.9
    assert result.accuracy["G"] is None
    assert "coverage" in capsys.readouterr().out
