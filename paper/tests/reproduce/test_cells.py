"""Cells as data: configs that run, pairs that share their streams, files with the same content."""

import numpy as np
import pytest

from fedp3 import config
from fedp3.core import files
from fedp3.core.errors import ConfigError
from fedp3_paper import PAPER
from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.cells import (
    BENCHES,
    LR,
    PROTOCOLS,
    SCORED,
    Bench,
    Cell,
    Variant,
    config_of,
    settings_of,
)
from fedp3_paper.reproduce.files import toml
from fedp3_paper.reproduce.lr import GRID, cases
from fedp3_paper.reproduce.summary import differences, read_all
from fedp3_paper.reproduce.targets import TARGETS, cells_of, queue
from fedp3_paper.reproduce.weights import counted, head, uneven

CELLS = {p: {c.name: c for t in TARGETS.values() for c in cells_of(t, p)} for p in PROTOCOLS}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_cell_is_a_config_and_its_file_has_the_same_content(protocol, tmp_path):
    assert CELLS[protocol]
    for cell in CELLS[protocol].values():
        path = tmp_path / "cell.toml"
        path.write_text(toml(cell, protocol))
        assert config.load(path) == config_of(cell, protocol, 0), cell.name


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_name_is_one_cell(protocol):
    seen = {}
    for target in TARGETS.values():
        for cell in cells_of(target, protocol):
            digest = config_of(cell, protocol, 0).digest()
            assert seen.setdefault(cell.name, digest) == digest, cell.name
    assert len(set(seen.values())) == len(seen), "two names for the same run"


def test_variants_of_a_bench_split_and_seed_share_every_stream():
    """Data, split, network, length and seed do not depend on the variant, nor do random draws."""
    shared = {}
    for cell in CELLS["desk"].values():
        c = config_of(cell, "desk", 1)
        mine = (c.data, c.partition, c.model, c.local, c.run)
        assert shared.setdefault((cell.bench.name, cell.split), mine) == mine, cell.name


@pytest.mark.parametrize("rounds", [1, 10, 30, 40, 50, 500])
def test_ten_evaluations_fall_into_the_last_part_of_a_run(rounds):
    c = config_of(next(iter(CELLS["desk"].values())), "desk", 0, rounds).run
    scored = [t for t in range(1, rounds + 1) if t % c.eval_every == 0 or t == rounds]
    assert len(scored) >= min(SCORED, rounds)
    if rounds >= 25:
        assert scored[-SCORED] > rounds / 2


def test_protocols_set_fleets_and_lengths():
    cell = CELLS["paper"]["cifar10-cnn/classes/opu3"]
    paper, desk, released = (config_of(cell, p, 0) for p in ("paper", "desk", "released"))
    assert (paper.partition.clients, paper.local.epochs, paper.run.rounds, paper.model.width) == (
        100,
        10,
        500,
        1.0,
    )
    assert (desk.partition.clients, desk.local.steps, desk.model.width) == (20, 10, 0.25)
    assert (desk.partition.sizes, paper.partition.sizes) == (600, 600), (
        "the paper's data per client"
    )
    assert (released.plan.head, released.prune.freeze_pruned) == ("personal_uploaded", False)
    assert all(c.run.clients_per_round == 0 for c in (paper, desk, released)), "all participate"


def test_fedavg_keeps_a_shared_head_under_the_released_protocol():
    assert (
        config_of(CELLS["released"]["cifar10-cnn/classes/fedavg"], "released", 0).plan.head
        == "shared"
    )


def test_the_queue_gives_every_claim_a_seed_before_a_second_one_and_scans_come_last():
    jobs = queue(list(TARGETS.values()), "desk", ["mnist-mlp", "fashion-mlp"])
    order = [(c.variant.scan, k) for c, k in jobs]
    assert order == sorted(order) and {scan for scan, _ in order} == {False, True}
    assert len({(c.name, k) for c, k in jobs}) == len(jobs)
    assert {k for c, k in jobs if c.variant.name == "prune-0.9"} == set(range(5))
    assert {k for c, k in jobs if c.variant.name == "prune-0.5"} == set(range(3))


def test_scans_can_be_left_out():
    asked = [list(TARGETS.values()), "desk", ["fashion-mlp"]]
    assert queue(*asked, scans=False) == [job for job in queue(*asked) if not job[0].variant.scan]


def test_single_cells_can_be_named_by_pattern():
    asked = queue(
        list(TARGETS.values()),
        "desk",
        ["fashion-mlp"],
        1,
        names=["*/classes/lowerb-*", "*/opu2-ldp-8"],
    )
    assert {c.name.partition("/")[2] for c, _ in asked} == {
        "classes/lowerb-frozen", "classes/lowerb-redrawn", "classes/lowerb-keep-1.0",
        "classes/opu2-ldp-8", "dirichlet/opu2-ldp-8",
    }  # fmt: skip


def test_a_bench_that_takes_anothers_rate_has_its_data_and_kind_of_net():
    for bench in BENCHES.values():
        of = BENCHES[bench.rate]
        assert all(
            bench.settings[key] == of.settings[key]
            for key in ("data.name", "model.name", "local.clip_norm")
            if key in of.settings
        )
        assert not of.tuned_on


def test_the_released_code_at_the_desks_size_differs_from_the_desk_in_head_and_masks_only():
    cell = CELLS["desk"]["cifar100-cnn/classes/opu2"]
    desk, released = (settings_of(cell, p, 0) for p in ("desk", "released-desk"))
    assert released == desk | {"plan.head": "personal_uploaded", "prune.freeze_pruned": False}


def test_stages_run_one_after_another():
    stages = [c.bench.stage for c, _ in queue(list(TARGETS.values()), "desk", ())]
    assert stages == sorted(stages)


def test_rows_name_published_rows():
    known = {*published.SCORES, *published.RESNET, ""}
    assert {row.published for t in TARGETS.values() for row in t.rows} <= known


def test_a_setting_that_does_not_exist_is_refused():
    wrong = Cell(BENCHES["mnist-mlp"], "classes", Variant("x", {"plan.layer": "opu2"}))
    with pytest.raises(ConfigError, match="did you mean 'layers'"):
        config_of(wrong, "desk", 0)


def test_weights_by_layers_count_as_many_clients_as_are_equal():
    assert counted(np.ones(20)) == 20 and counted(np.array([1.0, 0.0])) == 1
    classes = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert uneven(np.array([1.0, 1.0]), classes) == 0
    assert uneven(np.array([3.0, 1.0]), classes) == pytest.approx(25)


def test_the_heads_of_unequal_clients_weigh_by_their_layers(monkeypatch, tmp_path):
    small = {"data.name": "digits", "model.name": "mlp", "model.width": 0.02, "partition.sizes": 40}
    monkeypatch.setitem(
        BENCHES, "digits-mlp", Bench(name="digits-mlp", stage="A", paper="EMNIST-L", settings=small)
    )
    layers, shares = head("digits-mlp", "classes", "opu2-3", 0, tmp_path)
    assert set(layers) == {3.0, 4.0}, "two or three hidden layers, and the head"
    assert shares.shape == (20, 10) and shares.sum(1) == pytest.approx(1)


def test_learning_rates_are_the_recorded_ones():
    recorded = files.read_json(PAPER / "results" / "lr.json")
    assert {name: float(found["chosen"]) for name, found in recorded.items()} == dict(LR)
    for found in recorded.values():
        scores = found["validation"]
        assert set(scores) == set(GRID)
        assert scores[found["chosen"]] == max(scores.values())


def test_recorded_scores_of_rates_belong_to_the_configs_that_would_be_scored_today():
    for name, recorded in files.read_json(PAPER / "results" / "lr.json").items():
        scored_today = cases(BENCHES[name], recorded["rounds"])
        for rate, digest in recorded["configs"].items():
            assert scored_today[rate].digest() == digest, (name, rate)


@pytest.mark.parametrize("protocol", ["desk", "released-desk"])
def test_shipped_results_were_made_with_the_settings_of_their_cells(protocol):
    """Most were recorded before config keys were renamed; they are results of the same runs."""
    results = read_all(PAPER / "results", protocol)
    assert results
    for name, runs in results.items():
        for seed, result in runs.items():
            config = config_of(CELLS[protocol][name], protocol, seed)
            assert differences(result.config, config) == [], (name, seed)
