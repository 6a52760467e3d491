"""Cells as data: configs that run, pairs that share their streams, files that say the same."""

from pathlib import Path

import pytest

from fedp3 import config, record
from fedp3.reproduce import published
from fedp3.reproduce.cells import BENCHES, LR, PROTOCOLS, SCORED, Cell, Variant, config_of, settings_of
from fedp3.reproduce.files import toml
from fedp3.reproduce.lr import GRID
from fedp3.reproduce.targets import TARGETS, cells_of, queue

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CELLS = {p: {c.name: c for t in TARGETS.values() for c in cells_of(t, p)} for p in PROTOCOLS}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_cell_is_a_config_and_its_file_says_the_same(protocol, tmp_path):
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
    """Data, split, net, length and seed do not depend on the variant, so neither does what is drawn."""
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
    assert (paper.partition.clients, paper.local.epochs, paper.run.rounds, paper.model.width) == (100, 10, 500, 1.0)
    assert (desk.partition.clients, desk.local.steps, desk.model.width) == (20, 10, 0.25)
    assert (desk.partition.sizes, paper.partition.sizes) == (600, 600), "the paper's data per client"
    assert (released.plan.head, released.prune.hold) == ("personal_uploaded", False)
    assert all(c.run.clients_per_round == 0 for c in (paper, desk, released)), "all participate"


def test_fedavg_keeps_a_shared_head_under_the_released_protocol():
    assert config_of(CELLS["released"]["cifar10-cnn/classes/fedavg"], "released", 0).plan.head == "shared"


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
    asked = queue(list(TARGETS.values()), "desk", ["fashion-mlp"], 1, names=["*/classes/lowerb-*", "*/opu2-ldp-8"])
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
    assert released == desk | {"plan.head": "personal_uploaded", "prune.hold": False}


def test_stages_run_one_after_another():
    stages = [c.bench.stage for c, _ in queue(list(TARGETS.values()), "desk", ())]
    assert stages == sorted(stages)


def test_rows_name_published_rows():
    known = {*published.SCORES, *published.RESNET, ""}
    assert {row.published for t in TARGETS.values() for row in t.rows} <= known


def test_a_setting_that_does_not_exist_is_refused():
    wrong = Cell(BENCHES["mnist-mlp"], "classes", Variant("x", {"plan.layer": "opu2"}))
    with pytest.raises(config.files.ConfigError, match="did you mean 'layers'"):
        config_of(wrong, "desk", 0)


def test_learning_rates_are_the_recorded_ones():
    recorded = record.read_json(EXPERIMENTS / "lr.json")
    assert {name: float(found["chosen"]) for name, found in recorded.items()} == dict(LR)
    for found in recorded.values():
        scores = found["validation"]
        assert set(scores) == set(GRID)
        assert scores[found["chosen"]] == max(scores.values())
