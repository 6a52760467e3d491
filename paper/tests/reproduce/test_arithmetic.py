"""Every number that the paper prints and arithmetic can check."""

from statistics import fmean

import pytest

from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.arithmetic import (
    ARITHMETIC,
    architectures,
    communication,
    datasets,
    parameters,
    upload_by_fleet,
)
from fedp3_paper.reproduce.published import SCORES

KEPT = ("keep 0.9", "keep 0.7", "keep 0.5")


def mean(row: str) -> float:
    """Over all data sets and both splits."""
    return fmean(x for pair in SCORES[row].values() for x in pair)


def mean_of(split: int, *rows: str) -> float:
    return fmean(pair[split] for row in rows for pair in SCORES[row].values())


def test_spreads_are_the_papers_to_the_digit():
    ours = parameters()
    assert list(ours) == ["cifar10", "cifar100", "fashion-mnist", "emnist-l"]
    for data, found in ours.items():
        assert round(found["comm_spread_percent"], 2) == published.COMM_SPREAD[data]
        assert {
            k: round(v, 2) for k, v in found["size_spread_percent"].items()
        } == published.SIZE_SPREAD[data]


def test_communication_saved_is_the_papers_by_layers_going_up():
    ours = communication()
    for data in ("cifar10", "cifar100", "fashion-mnist"):
        for plan, percent in published.REDUCTION.items():
            assert ours[data][plan]["layers_up"] == pytest.approx(percent)
            assert ours[data][plan]["parameters_up"] > percent + 4, "by parameters it saves more"
    assert [round(ours["emnist-l"][p]["layers_up"]) for p in ("opu3", "opu2", "lowerb")] == [
        0,
        25,
        50,
    ]


def test_resnet_ablations_save_the_papers_share_counted_its_way():
    for plan, found in communication()["resnet18"].items():
        assert found["paper_way"] == published.RESNET_REDUCTION[plan]
        printed = published.RESNET_AGAINST_FEDAVG[plan]
        misprint = 1.0 if printed == 16.63 else 0.0
        assert found["paper_way_against_fedavg"] == pytest.approx(printed - misprint, abs=0.006)


def test_clients_have_the_papers_samples():
    for found in datasets().values():
        assert {k: found[k] for k in found["published"]} == found["published"]


def test_four_classes_hold_about_four_fifths_of_a_dirichlet_client():
    found = datasets()
    assert all(
        78 < found[d]["dirichlet_top4_percent"] < 88
        for d in ("emnist-l", "fashion-mnist", "cifar10")
    )
    assert found["cifar100"]["dirichlet_top4_percent"] < 50


def test_layers_have_the_papers_parameters():
    for found in architectures().values():
        assert found["layers"] == found["published"]
    totals = [found["total_with_all_biases"] for found in architectures().values()]
    assert totals == [2_806_602, 2_898_852, 2_803_402, 2_913_290]


def test_uploads_of_a_client_do_not_depend_on_the_fleet():
    assert len(set(upload_by_fleet().values())) == 1


@pytest.mark.parametrize("name", ARITHMETIC)
def test_tables_are_rectangular(name):
    target = ARITHMETIC[name]
    for table in target.tables(target.numbers()):
        assert table.rows and {len(row) for row in table.rows} == {len(table.columns)}


# -------------------------------------------------------------------- the text against the figures


def test_drops_of_global_pruning_are_the_texts_but_for_one_misprint():
    drops = [mean("FedAvg") - mean(row) for row in KEPT]
    assert [round(d, 2) for d in drops[1:]] == pytest.approx([12.86, 27.76], abs=0.011)
    assert round(drops[0], 2) == pytest.approx(5.43, abs=0.011), "the text says 5.32"


def test_drop_of_fedcr_is_the_texts():
    drops = [mean_of(s, "FedCR") - mean_of(s, "FedCR-OPU3") for s in (0, 1)]
    assert drops == pytest.approx([2.56, 3.20], abs=0.011)


def test_gap_between_the_splits_is_the_texts():
    rows = ("LowerB", "OPU2", "OPU3")
    assert mean_of(0, *rows) - mean_of(1, *rows) == pytest.approx(3.55, abs=0.011)


def test_gap_between_plans_of_unequal_clients_is_the_texts():
    rules = ("simple", "weighted")
    gap = fmean(mean(f"OPU2-3 {r}") for r in rules) - fmean(mean(f"OPU1-2-3 {r}") for r in rules)
    assert gap == pytest.approx(1.89, abs=0.011)


def test_weighted_gains_about_one_percent_and_loses_in_one_cell():
    losses = 0
    for column, said in (("CIFAR10", 1.01), ("CIFAR100", 1.05)):
        simple = [x for plan in ("OPU1-2-3", "OPU2-3") for x in SCORES[f"{plan} simple"][column]]
        weighted = [
            x for plan in ("OPU1-2-3", "OPU2-3") for x in SCORES[f"{plan} weighted"][column]
        ]
        assert 100 * (sum(weighted) / sum(simple) - 1) == pytest.approx(said, abs=0.1)
        losses += sum(w < s for w, s in zip(weighted, simple, strict=True))
    assert losses == 1


def test_the_gap_of_local_prunings_hardly_shrinks():
    gaps = [mean(f"Uniform {p}") - mean(f"Ordered {p}") for p in (0.9, 0.7)]
    assert gaps == pytest.approx([3.41, 3.29], abs=0.011)
    pairs = [
        [
            SCORES[f"Uniform {p}"][c][s] - SCORES[f"Ordered {p}"][c][s]
            for c in published.COLUMNS
            for s in (0, 1)
        ]
        for p in (0.9, 0.7)
    ]
    assert sum(late > early for early, late in zip(*pairs, strict=True)) == 3, (
        "and grows in three of eight cells"
    )


def test_resnet_drops_are_the_texts():
    full = published.RESNET["Full"]
    drops = {
        row: fmean(full[c] - v for c, v in cells.items()) for row, cells in published.RESNET.items()
    }
    assert fmean([drops["-B2 (part)"], drops["-B3 (part)"]]) == pytest.approx(1.03, abs=0.01)
    assert drops["-B2-B3 (full)"] == pytest.approx(6.32, abs=0.01)
    above = [c for c in full if published.RESNET["-B3 (part)"][c] > full[c]]
    assert above == ["CIFAR10"], "-B3 (part) surpasses Full on one data set of two"
