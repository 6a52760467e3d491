"""Cells run, stop, resume and are read again; learning rates; the released code's last round."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedp3.cli.training import Options
from fedp3.cli.training import train as train_run
from fedp3.core import files
from fedp3.core.errors import ConfigError, InputError, RunError
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.runs import existing, session
from fedp3.server.round_plans import plans_for
from fedp3_paper.reproduce import cells, lr, released, runner, summary
from fedp3_paper.reproduce.cells import Bench, Cell, Variant, config_of
from fedp3_paper.reproduce.targets import FEDAVG, Row, Target, layers, pruned

SMALL = {
    "data.name": "digits",
    "model.name": "mlp",
    "model.width": 0.02,
    "local.steps": 2,
    "partition.sizes": 40,
}
BENCH = Bench(
    name="digits-mlp",
    stage="A",
    paper="EMNIST-L",
    settings=SMALL,
    protocols=("desk", "released"),
    splits=("classes",),
)


def target_of(*rows: Row) -> Target:
    return Target(title="t", about="a", rows=rows, rows_are="r", benches=("digits-mlp",))


TARGET = target_of(Row("FedAvg", FEDAVG), Row("OPU2", layers("opu2")))


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.setitem(cells.BENCHES, BENCH.name, BENCH)


def request_in(folder: Path, **changes) -> runner.Request:
    base = runner.Request(
        targets=[TARGET],
        results=folder / "results",
        runs=folder / "runs",
        rounds=3,
        seeds=1,
        rates={BENCH.name: 0.1},
    )
    return replace(base, overrides=["partition.clients=6"], **changes)


def train(config, folder, name):
    options = Options(workers=1, name=name)
    train_run(config, folder, options, resume=existing.holds_run(folder))


def one_worker(experiment, states):
    return make_engine(experiment, 1, states)


def complete(request):
    todo, done = runner.plan(request)
    lines = []
    runner.run_cells(request, todo, train, lines.append)
    return len(todo), done, summary.read_all(request.results, request.protocol)


def test_finished_cells_are_read_and_not_run_again(tmp_path):
    todo, done, found = complete(request_in(tmp_path))
    assert (todo, done) == (2, 0)
    assert set(found) == {"digits-mlp/classes/fedavg", "digits-mlp/classes/opu2"}
    again = complete(request_in(tmp_path))
    assert again[:2] == (0, 2) and again[2] == found
    more = complete(request_in(tmp_path, seeds=2))
    assert more[:2] == (2, 2) and all(set(of) == {0, 1} for of in more[2].values())


def test_a_cell_stopped_half_way_ends_at_the_same_bits(tmp_path):
    uninterrupted = complete(request_in(tmp_path / "a"))[2]
    calls = []

    def stops(config, folder, name):
        def after_one(record):
            raise KeyboardInterrupt

        calls.append(name)
        if len(calls) == 2:
            session.train(assemble(config), folder, one_worker, watch=session.watch_with(after_one))
        train(config, folder, name)

    request = request_in(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        runner.run_cells(request, runner.plan(request)[0], stops, print)
    assert len(runner.plan(request)[0]) == 1, "the first cell is finished"
    found = complete(request)[2]
    hashes = [{c: s[0].model_sha256 for c, s in f.items()} for f in (uninterrupted, found)]
    assert hashes[0] == hashes[1]


def test_two_processes_share_the_work(tmp_path):
    request, alone = request_in(tmp_path), complete(request_in(tmp_path / "alone"))[2]
    todo = runner.plan(request)[0]
    lines = []

    def meanwhile(config, folder, name):
        # The other process begins with the same list while this one trains.
        if not lines:
            lines.append("began")
            runner.run_cells(request, todo, train, lines.append)
        train(config, folder, name)

    runner.run_cells(request, todo, meanwhile, lines.append)
    assert [t.partition(" %")[0].rstrip("0123456789.") for t in lines[1:]] == [
        "digits-mlp/classes/fedavg seed 0: left to another process",
        "digits-mlp/classes/opu2 seed 0: G ",  # the other has done it
        "digits-mlp/classes/fedavg seed 0: G ",
        "digits-mlp/classes/opu2 seed 0: left to another process",
    ]
    found = summary.read_all(request.results, "desk")
    assert {c: s[0].model_sha256 for c, s in found.items()} == {
        c: s[0].model_sha256 for c, s in alone.items()
    }


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    request = request_in(tmp_path)

    def diverges(config, folder, name):
        if config.method == "fedavg":
            raise RunError("nothing finite came back")
        train(config, folder, name)

    failed = runner.run_cells(request, runner.plan(request)[0], diverges, print)
    assert failed == ["digits-mlp/classes/fedavg seed 0: nothing finite came back"]
    assert set(summary.read_all(request.results, "desk")) == {"digits-mlp/classes/opu2"}


def test_results_of_other_settings_are_refused_not_mixed(tmp_path):
    complete(request_in(tmp_path))
    with pytest.raises(InputError, match=r"rounds was 3, is 4.*--out"):
        runner.plan(request_in(tmp_path, rounds=4))


def test_a_half_done_run_of_other_settings_is_refused(tmp_path):
    complete(request_in(tmp_path))
    elsewhere = request_in(tmp_path / "else", rounds=4)
    request = replace(elsewhere, runs=tmp_path / "runs")
    with pytest.raises(InputError, match="was made with other settings"):
        runner.run_cells(request, runner.plan(request)[0], train, print)


def test_wrong_names_are_found_before_any_work(tmp_path):
    with pytest.raises(InputError, match="bench"):
        runner.plan(request_in(tmp_path, benches=["digit-mlp"]))
    with pytest.raises(InputError, match="protocol"):
        runner.plan(request_in(tmp_path, protocol="desks"))
    with pytest.raises(ConfigError):
        runner.plan(replace(request_in(tmp_path), overrides=["partition.client=6"]))
    with pytest.raises(InputError, match="nothing to run on cifar10-cnn"):
        runner.plan(request_in(tmp_path, benches=["cifar10-cnn"]))
    assert not (tmp_path / "runs").exists()


def test_new_settings_of_later_versions_do_not_make_a_result_foreign():
    config = config_of(Cell(BENCH, "classes", FEDAVG), "desk", 0)
    recorded = config.as_json()
    del recorded["run"]["max_void"]
    assert summary.differences(recorded, config) == []
    recorded["local"]["lr"] = 9.0
    assert len(summary.differences(recorded, config)) == 1


def test_results_recorded_with_old_keys_are_compared_in_todays_keys():
    config = config_of(Cell(BENCH, "classes", pruned(0.9)), "desk", 0)
    recorded = config.as_json()
    recorded["prune"]["hold"] = recorded["prune"].pop("freeze_pruned")
    recorded["prune"]["upload"] = "kept"
    del recorded["plan"]["upload"]
    assert summary.differences(recorded, config) == []
    recorded["prune"]["hold"] = False
    assert summary.differences(recorded, config) == ["[prune] freeze_pruned was False, is True"]


def test_zero_noise_recorded_today_is_zero_and_not_the_old_default():
    private = {"privacy.enabled": True, "privacy.epsilon": "inf", "privacy.noise_multiplier": 0}
    variant = layers("opu2", "-ldp", private)
    config = config_of(Cell(BENCH, "classes", variant), "desk", 0)
    assert summary.differences(config.as_json(), config) == []


def test_time_left_counts_by_bench(monkeypatch):
    now = iter([0.0, 60.0, 180.0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(now))
    clock = runner.Clock(["a", "b", "a", "b", "c"])
    assert clock.text() == "1/5"
    clock.done("a")
    assert clock.text() == "2/5, 4 min left"  # nothing is known of b and c: as long as a
    clock.done("b")
    assert clock.text() == "3/5, 4 min left"  # 1 + 2 + their mean, rounded


# --------------------------------------------------------------------------- learning rates


def test_a_bench_without_a_chosen_rate_is_refused(tmp_path):
    with pytest.raises(InputError, match="fedp3 reproduce lr --bench digits-mlp"):
        runner.plan(request_in(tmp_path, rates={}))
    given = replace(
        request_in(tmp_path, rates={}), overrides=["partition.clients=6", "local.lr=0.3"]
    )
    assert {job.config.local.lr for job in runner.plan(given)[0]} == {0.3}
    assert {job.config.local.lr for job in runner.plan(request_in(tmp_path))[0]} == {0.1}


def test_a_search_that_was_stopped_has_chosen_nothing(tmp_path):
    place = tmp_path / "lr.json"
    files.write_json(place, {"a": {"chosen": "0.5", "validation": {"0.5": 0.9}}})
    assert "a" not in lr.chosen(place)
    files.write_json(place, {"a": {"chosen": "0.5", "validation": {r: float(r) for r in lr.GRID}}})
    assert lr.chosen(place)["a"] == 0.5 and lr.chosen(tmp_path / "none.json") == dict(cells.LR)


# ----------------------------------------------------------- released, and the paper's coincidence


def test_the_last_round_of_the_released_code_trains_heads_only(tmp_path):
    smaller = ["partition.clients=6", "local.epochs=1", "model.width=0.02"]
    request = replace(request_in(tmp_path, protocol="released"), overrides=smaller)
    found = complete(request)[2]
    assert all(
        0 <= found[f"digits-mlp/classes/{name}"][0].final["H"] <= 1 for name in ("fedavg", "opu2")
    )
    experiment = assemble(
        config_of(Cell(BENCH, "classes", layers("opu2")), "released", 0, 0, smaller)
    )
    plan = released.head_only(plans_for(experiment.server, 0)[0])
    assert [l for l, p in plan.layers.items() if p.train] == [experiment.server.layers.head]


def test_that_round_takes_a_methods_own_tensors_along(tmp_path):
    fedcr = Row("FedCR", Variant("fedcr", {"method": "fedcr", "plan.head": "personal"}))
    smaller = ["partition.clients=6", "local.epochs=1", "model.width=0.02"]
    request = replace(request_in(tmp_path, protocol="released"), overrides=smaller)
    found = complete(replace(request, targets=[target_of(fedcr)]))[2]
    assert 0 <= found["digits-mlp/classes/fedcr"][0].final["H"] <= 1


def test_on_three_hidden_layers_opu3_is_fedavg_bit_for_bit():
    """As the paper's EMNIST-L columns show, and why the benches with that net leave OPU3 out."""
    ends = []
    for variant in (FEDAVG, layers("opu3")):
        experiment = assemble(
            config_of(Cell(BENCH, "classes", variant), "desk", 0, 2, ["partition.clients=6"])
        )
        ends.append(session.run_rounds(experiment, make_engine(experiment, 1)).state.W)
    assert all(torch.equal(w, ends[1][n]) for n, w in ends[0].items())
