"""The arithmetic behind `paper/pages/errata.md`, from published numbers and sizes of layers alone.

Accuracies are in percent.  S1 is the class-wise split, S2 the Dirichlet one.  ACCURACY was read off
the paper's vector figures, the other tables are printed.
"""

import re
from statistics import mean

import numpy as np
import pytest

from fedp3_paper import PAPER

PAGE = PAPER / "pages" / "errata.md"

DATASETS = ("CIFAR10", "CIFAR100", "EMNIST-L", "FMNIST")
ACCURACY = {  # method: (S1, S2) for every data set
    "FedAvg": ((70.57, 67.82), (69.59, 64.73), (94.24, 91.40), (89.91, 87.86)),
    "OPU3": ((67.76, 61.51), (68.82, 63.79), (94.24, 91.40), (88.73, 85.59)),
    "OPU2": ((65.11, 57.33), (64.04, 61.35), (91.72, 89.44), (85.29, 85.01)),
    "LowerB": ((59.27, 51.32), (60.97, 60.31), (86.65, 81.39), (83.25, 84.75)),
    "FedCR": ((84.74, 84.26), (78.49, 67.17), (97.47, 96.98), (93.78, 93.00)),
    "FedCR-OPU3": ((82.05, 79.22), (73.31, 62.15), (97.47, 96.98), (91.41, 90.28)),
    "r=0.9": ((67.65, 61.17), (65.41, 57.38), (88.75, 86.33), (81.75, 84.27)),
    "r=0.7": ((60.05, 52.73), (55.96, 50.14), (82.85, 77.78), (78.44, 75.31)),
    "r=0.5": ((42.39, 37.21), (47.25, 33.11), (68.47, 59.52), (64.96, 61.15)),
}
LOCAL = {  # Table 2, printed
    "Fixed": ((67.65, 61.17), (65.41, 57.38), (88.75, 86.33), (81.75, 84.27)),
    "Uniform 0.9": ((65.51, 60.10), (64.33, 58.20), (85.14, 84.29), (78.81, 77.24)),
    "Ordered 0.9": ((61.73, 58.82), (61.11, 53.28), (82.54, 80.18), (75.45, 73.27)),
    "Uniform 0.7": ((60.78, 56.41), (60.35, 54.88), (77.39, 75.82), (72.66, 70.37)),
    "Ordered 0.7": ((58.90, 53.38), (59.72, 50.03), (72.19, 70.30), (70.21, 67.58)),
}
RESNET = {
    "Full": (73.25, 63.33),
    "-B2-B3": (65.68, 58.26),
    "-B2": (72.09, 61.11),
    "-B3": (73.47, 62.39),
}
AGGREGATION = {  # CIFAR10 S1, S2, CIFAR100 S1, S2
    "S123": (63.19, 59.37, 62.18, 61.49),
    "W123": (65.29, 57.75, 63.21, 62.02),
    "S23": (65.03, 60.33, 65.35, 62.48),
    "W23": (66.29, 61.05, 66.11, 62.99),
}


def flat(rows) -> list[float]:
    return [v for row in rows for v in row]


def conv(cin: int, cout: int, k: int, bias: bool = True) -> int:
    return cin * cout * k * k + bias * cout


def cnn(channels: int, classes: int, side: int = 32, fc_bias: bool = False) -> dict[str, int]:
    """Layer sizes of the paper's CNN: two 5x5 convolutions with 2x2 pools, then three FC layers."""
    left = ((side - 4) // 2 - 4) // 2
    widths = (64 * left * left, 1024, 1024, classes)
    sizes = {"Conv1": conv(channels, 64, 5), "Conv2": conv(64, 64, 5)}
    for name, a, b in zip(("FC1", "FC2", "FFC"), widths[:-1], widths[1:], strict=True):
        sizes[name] = a * b + fc_bias * b
    return sizes


def mlp(fc_bias: bool = False) -> dict[str, int]:
    widths = (784, 1024, 1024, 1024, 10)
    names = ("FC1", "FC2", "FC3", "FFC")
    return {n: a * b + fc_bias * b for n, a, b in zip(names, widths[:-1], widths[1:], strict=True)}


NETS = {"CIFAR10": cnn(3, 10), "CIFAR100": cnn(3, 100), "EMNIST-L": mlp(), "FMNIST": cnn(1, 10)}


def hidden(net: dict[str, int]) -> list[str]:
    return [name for name in net if name != "FFC"]


def upload(net: dict[str, int]) -> dict[str, int]:
    """Parameters sent by a client that trains one hidden layer and FFC."""
    return {name: net[name] + net["FFC"] for name in hidden(net)}


def deployed(net: dict[str, int], r: float) -> dict[str, float]:
    """Parameters held by such a client when the other layers are pruned to the share r."""
    return {
        k: net[k] + net["FFC"] + r * sum(net[j] for j in hidden(net) if j != k) for k in hidden(net)
    }


def spread(sizes) -> float:
    """The figure's value, (largest - smallest) / smallest, in per cent."""
    return 100 * (max(sizes) - min(sizes)) / min(sizes)


def window_sets(layers: int, width: int) -> list[set[int]]:
    return [{(g + j) % layers for j in range(width)} for g in range(layers)]


def layers_saved(hidden_layers: int, width: int) -> float:
    return 100 * (1 - (width + 1) / (hidden_layers + 1))


def parameters_saved(net: dict[str, int], width: int) -> float:
    names = hidden(net)
    sent = mean(
        sum(net[names[j]] for j in held) + net["FFC"] for held in window_sets(len(names), width)
    )
    return 100 * (1 - sent / sum(net.values()))


# Numbers -----------------------------------------------------------------------------------------


def test_layer_counts_leave_out_fc_biases():
    assert list(NETS["CIFAR10"].values()) == [4864, 102464, 1638400, 1048576, 10240]
    assert NETS["FMNIST"]["Conv1"] == 1664 and NETS["CIFAR100"]["FFC"] == 102400
    assert list(NETS["EMNIST-L"].values()) == [802816, 1048576, 1048576, 10240]
    assert sum(NETS["CIFAR10"].values()) == 2804544
    assert sum(cnn(3, 10, fc_bias=True).values()) == 2806602
    assert sum(mlp(fc_bias=True).values()) == 2913290


def test_fashion_mnist_column_needs_images_of_32_by_32():
    assert cnn(1, 10, side=32)["FC1"] == 1600 * 1024
    assert cnn(1, 10, side=28)["FC1"] == 1024 * 1024


def test_communication_spread_is_a_percentage_not_a_ratio():
    printed = {"CIFAR10": 10815.25, "CIFAR100": 1522.91, "FMNIST": 13749.46, "EMNIST-L": 30.23}
    for name, value in printed.items():
        sent = upload(NETS[name]).values()
        assert spread(sent) == pytest.approx(value, abs=0.005)
        assert max(sent) / min(sent) == pytest.approx(1 + value / 100, abs=1e-4)
    sent = upload(NETS["CIFAR10"]).values()
    assert max(sent) / min(sent) == pytest.approx(109.15, abs=0.005)
    assert spread(upload(cnn(3, 10, fc_bias=True)).values()) != pytest.approx(10815.25, abs=0.1)


def test_largest_layer_is_the_first_fc_layer_not_the_second():
    for name in ("CIFAR10", "CIFAR100", "FMNIST"):
        assert max(upload(NETS[name]), key=upload(NETS[name]).get) == "FC1"
    assert max(upload(NETS["EMNIST-L"]), key=upload(NETS["EMNIST-L"]).get) == "FC2"


def test_deployed_sizes_differ_as_in_the_figure():
    printed = {
        "CIFAR10": (6.47, 24.91, 57.93),
        "CIFAR100": (6.24, 23.79, 54.38),
        "FMNIST": (6.49, 24.99, 58.18),
        "EMNIST-L": (0.91, 3.23, 6.60),
    }
    for name, values in printed.items():
        got = [spread(deployed(NETS[name], r).values()) for r in (0.9, 0.7, 0.5)]
        assert got == pytest.approx(values, abs=0.006)


def test_57_93_per_cent_is_larger_and_36_68_is_smaller():
    sizes = deployed(NETS["CIFAR10"], 0.5)
    assert 100 * (sizes["FC1"] / sizes["Conv1"] - 1) == pytest.approx(57.93, abs=0.005)
    assert 100 * (1 - sizes["Conv1"] / sizes["FC1"]) == pytest.approx(36.68, abs=0.005)


def test_higher_ratio_means_larger_deployed_model():
    for net in NETS.values():
        for layer in hidden(net):
            at = [deployed(net, r)[layer] for r in (0.5, 0.7, 0.9)]
            assert at[0] < at[1] < at[2]


def test_20_40_60_per_cent_count_layers_sent_up():
    assert [layers_saved(4, width) for width in (3, 2, 1)] == pytest.approx([20, 40, 60])
    saved = [parameters_saved(NETS["CIFAR10"], width) for width in (3, 2, 1)]
    assert saved == pytest.approx([24.91, 49.82, 74.73], abs=0.005)


def test_opu3_sends_75_per_cent_of_the_parameters_not_80():
    assert 100 - parameters_saved(NETS["CIFAR10"], 3) == pytest.approx(75.09, abs=0.005)


def test_four_fc_layers_would_not_give_20_40_60():
    assert [layers_saved(5, width) for width in (3, 2, 1)] == pytest.approx(
        [33.3, 50, 66.7], abs=0.05
    )


def test_both_directions_save_less():
    """Up plus down, others sent at keep 0.9: what LowerB, OPU2 and OPU3 save on CIFAR10."""
    net = NETS["CIFAR10"]
    names, total = hidden(net), sum(net.values())
    saved = []
    for width in (1, 2, 3):
        costs = []
        for held in window_sets(4, width):
            whole = sum(net[names[j]] for j in held) + net["FFC"]
            costs.append(whole + whole + 0.9 * (total - whole))
        saved.append(100 * (1 - mean(costs) / (2 * total)))
    assert saved == pytest.approx([41.10, 27.40, 13.70], abs=0.005)


def test_emnist_saves_50_25_and_nothing():
    assert [layers_saved(3, width) for width in (1, 2, 3)] == pytest.approx([50, 25, 0])


def test_lower_bound_clients_upload_very_different_shares():
    net = NETS["CIFAR10"]
    shares = [100 * v / sum(net.values()) for v in upload(net).values()]
    assert shares == pytest.approx([0.54, 4.02, 58.8, 37.8], abs=0.05)


def resnet_blocks() -> list[int]:
    """Parameters of the four stages of ResNet18: convolutions without bias, BatchNorm with scale
    and shift.
    """
    stages, cin = [], 64
    for cout in (64, 128, 256, 512):
        first = conv(cin, cout, 3, False) + conv(cout, cout, 3, False) + 4 * cout
        shortcut = (conv(cin, cout, 1, False) + 2 * cout) if cin != cout else 0
        stages.append(first + shortcut + 2 * conv(cout, cout, 3, False) + 4 * cout)
        cin = cout
    return stages


def resnet_halves(stage: int) -> tuple[int, int]:
    cout = 64 * 2**stage
    second = 2 * conv(cout, cout, 3, False) + 4 * cout
    return resnet_blocks()[stage] - second, second


def test_resnet18_counts():
    assert resnet_blocks() == [147968, 525568, 2099712, 8393728]
    stem, head = conv(3, 64, 3, False) + 128, 512 * 10 + 10
    assert stem + sum(resnet_blocks()) + head == 11173962


def test_resnet_reduction_against_fedavg_is_15_63_not_16_63():
    """Two or four of 16 block layers left out, halved (uplink only), and the rest pruned to 0.9."""
    for dropped, printed, against_fedavg in ((4, 12.5, 21.25), (2, 6.25, 15.625)):
        reduction = 0.5 * dropped / 16
        assert 100 * reduction == printed
        assert 100 * (1 - 0.9 * (1 - reduction)) == pytest.approx(against_fedavg)


def test_resnet_reductions_by_parameters_are_other_numbers():
    total = 11173962
    for stage, printed in ((1, (2.06, 2.64)), (2, (8.22, 10.57))):
        shares = [100 * v / total for v in resnet_halves(stage)]
        assert shares == pytest.approx(printed, abs=0.006)
    whole = [100 * resnet_blocks()[s] / total for s in (1, 2)]
    assert [*whole, mean(whole)] == pytest.approx([4.70, 18.79, 11.75], abs=0.006)


def resnet_macs(stem: int, side: int) -> int:
    """Multiply-adds of ResNet18's convolutions on 32 x 32 images, first stage on side x side."""
    total = stem
    cin = 64
    for cout in (64, 128, 256, 512):
        down = 2 if cin != cout else 1
        side //= down
        shortcut = cin * cout if cin != cout else 0
        total += (9 * cin * cout + 3 * 9 * cout * cout + shortcut) * side * side
        cin = cout
    return total


def test_7x7_stem_is_15_times_cheaper():
    """A8b: 7 x 7 with stride 2 and a pool leaves 8 x 8 for the first stage, 3 x 3 32 x 32."""
    imagenet = resnet_macs(3 * 64 * 49 * 16 * 16, side=8)
    cifar = resnet_macs(3 * 64 * 9 * 32 * 32, side=32)
    assert (2 * imagenet / 1e6, 2 * cifar / 1e9) == pytest.approx((74, 1.1), rel=0.02)
    assert cifar / imagenet == pytest.approx(15, abs=0.1)


def test_resnet_has_20_convolutions():
    shortcuts = sum(a != b for a, b in zip((64, 64, 128, 256), (64, 128, 256, 512), strict=True))
    assert (1 + 16 + shortcuts, 1 + 16 + 1) == (20, 18)


def test_resnet_drops_are_those_of_the_table_and_b3_wins_only_on_cifar10():
    parts = [RESNET["Full"][j] - RESNET[m][j] for m in ("-B2", "-B3") for j in range(2)]
    assert mean(parts) == pytest.approx(1.025)
    assert mean(RESNET["Full"][j] - RESNET["-B2-B3"][j] for j in range(2)) == pytest.approx(6.32)
    assert RESNET["-B3"][0] > RESNET["Full"][0] and RESNET["-B3"][1] < RESNET["Full"][1]


def test_pruning_to_0_9_costs_5_43_points_not_5_32():
    base = flat(ACCURACY["FedAvg"])
    drops = [mean(base) - mean(flat(ACCURACY[f"r={r}"])) for r in (0.9, 0.7, 0.5)]
    assert drops == pytest.approx([5.43, 12.86, 27.76], abs=0.006)
    assert LOCAL["Fixed"] == ACCURACY["r=0.9"]


def test_other_drops_are_as_printed_in_points():
    s1, s2 = (
        [a[j] - b[j] for a, b in zip(ACCURACY["FedCR"], ACCURACY["FedCR-OPU3"], strict=True)]
        for j in (0, 1)
    )
    assert (mean(s1), mean(s2)) == pytest.approx((2.56, 3.195), abs=0.001)
    gaps = [a - b for m in ("LowerB", "OPU2", "OPU3") for a, b in ACCURACY[m]]
    assert mean(gaps) == pytest.approx(3.55, abs=0.006)


def test_emnist_opu3_is_fedavg_to_the_digit():
    assert ACCURACY["OPU3"][2] == ACCURACY["FedAvg"][2]
    assert ACCURACY["FedCR-OPU3"][2] == ACCURACY["FedCR"][2]


def test_weighted_over_simple_is_about_one_per_cent_and_not_always_a_gain():
    gains = {}
    for name, cells in (("CIFAR10", (0, 1)), ("CIFAR100", (2, 3))):
        simple = [AGGREGATION[f"S{k}"][j] for k in ("123", "23") for j in cells]
        weighted = [AGGREGATION[f"W{k}"][j] for k in ("123", "23") for j in cells]
        gains[name] = 100 * (mean(weighted) / mean(simple) - 1)
    assert gains["CIFAR10"] == pytest.approx(0.99, abs=0.006)
    assert gains["CIFAR100"] == pytest.approx(1.13, abs=0.006)
    worse = [
        j
        for k in ("123", "23")
        for j in range(4)
        if AGGREGATION[f"W{k}"][j] < AGGREGATION[f"S{k}"][j]
    ]
    assert len(worse) == 1


def test_opu23_beats_opu123_everywhere_by_1_89_on_average():
    gains = [AGGREGATION[f"{a}23"][j] - AGGREGATION[f"{a}123"][j] for a in "SW" for j in range(4)]
    assert min(gains) > 0 and mean(gains) == pytest.approx(1.89, abs=0.006)


def test_uniform_ordered_gap_does_not_shrink():
    """T22."""
    gap = {}
    for p in ("0.9", "0.7"):
        uniform, ordered = flat(LOCAL[f"Uniform {p}"]), flat(LOCAL[f"Ordered {p}"])
        gap[p] = [u - o for u, o in zip(uniform, ordered, strict=True)]
    assert (mean(gap["0.9"]), mean(gap["0.7"])) == pytest.approx((3.41, 3.29), abs=0.006)
    grew = [b > a for a, b in zip(gap["0.9"], gap["0.7"], strict=True)]
    assert sum(grew) == 3
    difference = np.array(gap["0.9"]) - np.array(gap["0.7"])
    assert abs(difference.mean()) < difference.std(ddof=1) / np.sqrt(8)  # far within its own spread


def test_client_splits_pool_train_and_test():
    """Published shares are 70/30 of train plus test together, so the standard split is not kept."""
    for pool, train, test in (
        (48_000 + 8_000, 392, 168),
        (60_000 + 10_000, 490, 210),
        (50_000 + 10_000, 420, 180),
    ):
        assert (pool // 100 * 7 // 10, pool // 100 * 3 // 10) == (train, test)
    assert 50_000 // 100 != 420


def test_a_fivefold_grid_from_1e_5_misses_0_1():
    grid = [1e-5 * 5**k for k in range(8)]
    assert not any(
        v == pytest.approx(0.1, rel=0.05) or v == pytest.approx(0.01, rel=0.05) for v in grid
    )


# Algorithms --------------------------------------------------------------------------------------


def printed_sums(widths: list[int]) -> list[float]:
    """Per hidden layer, the sum of the printed weights N_i / sum_j N_j (N_i with FFC) over who
    trains it.
    """
    clients = [(g, w) for w in widths for g in range(4)]
    total = sum(w + 1 for _, w in clients)
    return [sum(w + 1 for g, w in clients if (l - g) % 4 < w) / total for l in range(4)]


def test_printed_weighted_rule_lets_weights_decay():
    """A9: the weights of a hidden layer sum to less than one, so that it shrinks every round."""
    for widths, share in (
        ([1], 0.25),
        ([2], 0.50),
        ([3], 0.75),
        ([2, 3], 0.643),
        ([1, 2, 3], 0.556),
    ):
        assert printed_sums(widths) == pytest.approx([share] * 4, abs=0.0005)
    assert printed_sums([2, 3])[0] ** 10 == pytest.approx(0.012, abs=0.0005)


def test_weighted_equals_simple_when_all_train_equally_many():
    for width in (1, 2, 3):
        senders = [held for held in window_sets(4, width) if 0 in held]
        weights = np.array([len(held) + 1.0 for held in senders])
        np.testing.assert_allclose(weights / weights.sum(), 1 / len(senders))


@pytest.mark.parametrize("q", [0.2, 0.5, 0.9])
def test_leading_block_keeps_the_square_of_the_share(q):
    """A8c."""
    d1, d2 = 100, 60
    block = np.zeros((d1, d2))
    block[: round(q * d1), : round(q * d2)] = 1
    bernoulli = np.random.Generator(np.random.PCG64(0)).random((d1, d2)) < q
    assert block.mean() == pytest.approx(q * q)
    assert bernoulli.mean() == pytest.approx(q, abs=0.02)


def test_relu_on_the_output_keeps_the_loss_from_falling():
    """A15: clipped logits cannot push the wrong classes below 0, and a negative right logit has no
    gradient.
    """
    logits = np.array([3.0, -3.0, -3.0])
    loss = [float(np.log(np.exp(z).sum()) - z[0]) for z in (logits, np.maximum(logits, 0))]
    assert loss[1] > 10 * loss[0]
    wrong = np.array([-2.0, 1.0, 0.5])
    nudged = wrong + np.array([0.1, 0, 0])
    a, b = (float(np.log(np.exp(np.maximum(z, 0)).sum()) - max(z[0], 0)) for z in (wrong, nudged))
    assert a == b


def test_ten_local_epochs_are_ninety_steps():
    """A8: ten local epochs of batch 48 on 420 samples are 90 steps, not 10."""
    assert -(-420 // 48) * 10 == 90


# The page ----------------------------------------------------------------------------------------


def rows_of_page() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_test_named_in_the_page_exists():
    named = re.findall(r"`(paper/tests/theory/test_\w+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) > 30
    for path, name in named:
        source = (PAPER.parent / path).read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), (
            f"{path}::{name} is named in errata.md but not there"
        )


def test_every_row_of_the_page_says_how_it_was_checked():
    body = [row for row in rows_of_page() if row[0] not in ("#",) and not set(row[0]) <= set("-: ")]
    assert len(body) > 60
    for row in body:
        assert len(row) == 6, row
        assert row[5] == "–" if row[4] == "by reading" else row[5].startswith("`paper/tests/"), row


def test_every_erratum_has_its_row_once():
    ids = [row[0] for row in rows_of_page() if re.fullmatch(r"[NAT]\d+[a-c]?", row[0])]
    assert len(set(ids)) == len(ids)
    wanted = (
        {f"T{k}" for k in range(1, 23)} | {f"A{k}" for k in range(1, 22)} | {"A8a", "A8b", "A8c"}
    )
    assert wanted <= set(ids), sorted(wanted - set(ids))
