"""Partitions: no sample twice, none lost, exact where the paper is exact, and never a hang."""

import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import DataError, InputError
from fedp3.data.partition import PARTITIONS, client_sizes, histogram, partition, split
from fedp3.data.partition_file import read_partition


def balanced(samples, classes):
    return np.random.default_rng(samples).permutation(np.arange(samples) % classes)


# The counts of scikit-learn's digits.
DIGITS = np.repeat(np.arange(10), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
kinds = st.sampled_from(sorted(PARTITIONS))


@st.composite
def pools(draw):
    """Labels of any balance, some classes empty, and a number of clients that can share them."""
    counts = draw(
        st.lists(st.integers(0, 25), min_size=1, max_size=6).filter(
            lambda c: sum(c) > 0 and c[-1] > 0
        )
    )
    y = np.repeat(np.arange(len(counts)), counts)
    return draw(st.permutations(list(y)).map(np.array)), draw(st.integers(1, len(y)))


@st.composite
def wishes(draw, samples, clients):
    """Every way to set the sizes of clients."""
    return draw(
        st.one_of(
            st.sampled_from(["equal", "lognormal"]),
            st.integers(1, samples // clients),
            st.lists(st.integers(1, samples // clients), min_size=clients, max_size=clients),
        )
    )


# Properties of every partition


@given(
    data=st.data(),
    pool=pools(),
    kind=kinds,
    seed=st.integers(0, 2**63),
    alpha=st.sampled_from([1e-9, 0.1, 1, 1e9]),
)
def test_no_sample_is_given_twice_and_sizes_hold(data, pool, kind, seed, alpha):
    y, clients = pool
    sizes = data.draw(wishes(len(y), clients))
    classes = data.draw(st.integers(1, int(y.max()) + 1))
    parts = partition(kind, y, clients, seed=seed, classes=classes, alpha=alpha, sizes=sizes)
    given_out = np.concatenate(parts)
    assert len(parts) == clients
    assert len(set(given_out.tolist())) == len(given_out)
    assert given_out.min() >= 0 and given_out.max() < len(y)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    got = [len(part) for part in parts]
    if isinstance(sizes, str):
        assert sum(got) == len(y)  # nothing is lost
        assert got == client_sizes(sizes, len(y), clients, seed=seed).tolist()
    else:
        assert got == (sizes if isinstance(sizes, list) else [sizes] * clients)
    again = partition(kind, y, clients, seed=seed, classes=classes, alpha=alpha, sizes=sizes)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
def test_another_seed_gives_another_partition(kind):
    y = balanced(1_000, 10)
    a, b = (partition(kind, y, 10, seed=seed) for seed in (0, 1))
    assert not any(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
def test_the_global_generator_is_not_touched(kind):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    partition(kind, balanced(100, 10), 5, seed=0, sizes="lognormal")
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
@pytest.mark.parametrize("clients", [100, 10_000])
@pytest.mark.parametrize("classes", [10, 100])
def test_sixty_thousand_samples_take_no_time(kind, clients, classes):
    y = balanced(60_000, classes)
    start = time.process_time()
    parts = partition(kind, y, clients, seed=0)
    assert time.process_time() - start < 6  # 2 s where this was written, in the slowest case
    assert sum(map(len, parts)) == 60_000


# Sizes


@given(samples=st.integers(1, 500), data=st.data())
def test_equal_sizes_differ_by_one_at_most(samples, data):
    m = client_sizes("equal", samples, data.draw(st.integers(1, samples)), seed=0)
    assert m.sum() == samples
    assert m.max() - m.min() <= 1


@given(samples=st.integers(1, 500), data=st.data(), seed=st.integers(0, 99))
def test_lognormal_sizes_use_all_samples_and_leave_nobody_empty(samples, data, seed):
    clients = data.draw(st.integers(1, samples))
    m = client_sizes("lognormal", samples, clients, seed=seed)
    assert m.sum() == samples
    assert m.min() >= min(2, samples // clients)


def test_lognormal_sizes_spread_as_promised():
    m = client_sizes("lognormal", 10_000_000, 5_000, seed=0)
    log = np.log(m)
    assert log.std() == pytest.approx(0.5, rel=0.05)
    assert abs(np.mean((log - log.mean()) ** 3)) / log.std() ** 3 < 0.15


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ("equall", "did you mean 'equal'"),
        (0, "want one integer >= 1"),
        (True, "want one integer >= 1"),
        (11, "require 110 samples in total, but there are 100"),
        ([10] * 9, "one for each of 10 clients"),
        ([11] * 10, "require 110"),
        ([10] * 9 + [0], "want one integer >= 1"),
        ([1.5] * 10, "want one integer >= 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, text):
    with pytest.raises(InputError, match=text):
        partition("iid", balanced(100, 10), 10, seed=0, sizes=sizes)


# The paper's numbers


@pytest.mark.parametrize(
    ("samples", "C", "c", "each", "train", "test"),
    [
        pytest.param(60_000, 10, 5, 120, 420, 180, id="CIFAR10"),
        pytest.param(70_000, 10, 5, 140, 490, 210, id="FashionMNIST"),
        pytest.param(56_000, 10, 5, 112, 392, 168, id="EMNIST-L"),
        pytest.param(60_000, 100, 15, 40, 420, 180, id="CIFAR100"),
    ],
)
def test_class_wise_counts_are_the_paper_s(samples, C, c, each, train, test):
    y = balanced(samples, C)
    parts = partition("classes", y, 100, seed=0, classes=c)
    counts = histogram(y, parts, C)
    for i in range(100):
        for k in range(C):
            assert counts[i, k] == (each if (k - i) % C < c else 0)
        assert [len(cut) for cut in split(parts[i], seed=0, client=i)] == [train, test]


def test_fewer_clients_of_the_paper_s_size_have_the_paper_s_counts():
    y = balanced(70_000, 10)
    counts = histogram(y, partition("classes", y, 20, seed=0, sizes=700), 10)
    assert set(counts[counts > 0].tolist()) == {140}
    assert (counts > 0).sum(1).tolist() == [5] * 20


# Class-wise


def owned(i, c, C, n):
    first = i if n >= C else i * C // n
    return {(first + j) % C for j in range(c)}


def test_fewer_clients_than_classes_begin_apart_and_leave_no_class_out():
    y = balanced(60_000, 100)
    for c, owners in ((5, 1), (15, 3)):
        counts = histogram(y, partition("classes", y, 20, seed=0, classes=c, sizes=600), 100)
        assert (counts > 0).sum(0).tolist() == [owners] * 100
        assert set(counts[counts > 0].tolist()) == {600 // c}


@given(
    C=st.integers(1, 6),
    data=st.data(),
    class_size=st.integers(20, 60),
    clients=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_while_no_class_runs_out_a_client_has_its_own_classes_evenly(
    C, data, class_size, clients, seed
):
    c = data.draw(st.integers(1, C))
    y = np.repeat(np.arange(C), class_size)
    # At most `clients` owners of a class, so that none can run out.
    most = max(1, (class_size // clients - 1) * c)
    sizes = data.draw(st.lists(st.integers(1, most), min_size=clients, max_size=clients))
    counts = histogram(y, partition("classes", y, clients, seed=seed, classes=c, sizes=sizes), C)
    for i in range(clients):
        per_class = [int(counts[i, k]) for k in owned(i, c, C, clients)]
        assert sum(per_class) == sizes[i]
        assert max(per_class) - min(per_class) <= 1


def fewest_strangers(counts, sizes, c):
    """How many samples must go to clients that do not own their class, whatever one does.

    By the min-cut of the transport from clients to the classes they own: for every set B of
    classes, the clients that own nothing outside B can get no more than B has.
    """
    C = len(counts)
    served = min(
        sum(counts[k] for k in B)
        + sum(m for i, m in enumerate(sizes) if not owned(i, c, C, len(sizes)) <= set(B))
        for r in range(C + 1)
        for B in itertools.combinations(range(C), r)
    )
    return sum(sizes) - served


@settings(max_examples=300)
@given(pool=pools(), data=st.data(), seed=st.integers(0, 9))
def test_as_few_samples_as_possible_go_to_clients_that_do_not_own_their_class(pool, data, seed):
    y, clients = pool
    C = int(y.max()) + 1
    c = data.draw(st.integers(1, C))
    sizes = data.draw(wishes(len(y), clients))
    counts = histogram(y, partition("classes", y, clients, seed=seed, classes=c, sizes=sizes), C)
    strangers = sum(
        int(counts[i, k])
        for i in range(clients)
        for k in range(C)
        if k not in owned(i, c, C, clients)
    )
    assert strangers == fewest_strangers(np.bincount(y).tolist(), counts.sum(1).tolist(), c)


def test_a_chain_of_swaps_is_found():
    # Client 0 owns {0, 1}, 1 owns {1, 2}, 2 owns {2, 3}, 3 owns {3, 0}.
    # Client 0 gets all of class 1, so client 1 must move to class 2 and client 2 to class 3.
    y = np.repeat(np.arange(4), [0, 10, 10, 20])
    counts = histogram(y, partition("classes", y, 4, seed=0, classes=2), 4)
    assert counts.tolist() == [[0, 10, 0, 0], [0, 0, 10, 0], [0, 0, 0, 10], [0, 0, 0, 10]]


def test_digits_lose_nothing_and_stay_with_their_owners():
    counts = histogram(DIGITS, partition("classes", DIGITS, 20, seed=0), 10)
    assert counts.sum() == 1797
    for i in range(20):
        classes = {k for k in range(10) if counts[i, k]}
        assert classes == owned(i, 5, 10, 20)
        # Close to even, although classes differ in size.
        assert max(counts[i]) <= 1.25 * 1797 / 20 / 5


@pytest.mark.parametrize("classes", [0, 11])
def test_owning_no_class_or_more_than_there_are_is_refused(classes):
    with pytest.raises(InputError, match=r"want 1\.\.10"):
        partition("classes", balanced(100, 10), 5, seed=0, classes=classes)


# Dirichlet


def one_by_one(y, clients, size, rng, alpha):
    """S2 by plain loops: a random client that is not full draws a class that is not empty."""
    C = int(y.max()) + 1
    p = rng.dirichlet([alpha] * C, clients)
    stock = [int((y == k).sum()) for k in range(C)]
    counts = np.zeros((clients, C), int)
    while True:
        hungry = [i for i in range(clients) if counts[i].sum() < size]
        if not hungry:
            return counts
        i = hungry[rng.integers(len(hungry))]
        mass = [p[i, k] if stock[k] else 0.0 for k in range(C)]
        if sum(mass) == 0:
            mass = [float(stock[k] > 0) for k in range(C)]
        k = int(rng.choice(C, p=np.array(mass) / sum(mass)))
        stock[k] -= 1
        counts[i, k] += 1


def top(counts, classes):
    """Mean share of a client's samples in its largest classes."""
    return float(np.mean(np.sort(counts, axis=1)[:, -classes:].sum(1) / counts.sum(1)))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5])
def test_dirichlet_has_the_law_of_drawing_one_by_one(alpha):
    y = np.arange(120) % 4
    fast, slow = (np.array(v) for v in zip(*(
        (
            [top(a, 1), top(a, 2), np.mean(np.sort(a[:, 0])[:2])],
            [top(b, 1), top(b, 2), np.mean(np.sort(b[:, 0])[:2])],
        )
        for seed in range(150)
        for a in [histogram(y, partition("dirichlet", y, 6, seed=seed, alpha=alpha), 4)]
        for b in [one_by_one(y, 6, 20, np.random.default_rng(seed), alpha)]
    ), strict=True))  # fmt: skip
    error = np.sqrt((fast.var(0) + slow.var(0)) / 150)
    assert (abs(fast.mean(0) - slow.mean(0)) < 3.5 * error).all()


def test_four_classes_of_ten_hold_what_the_paper_says():
    # E[top 4 of Dir(0.5 1_10)] = 0.837; "about 80 %" in the paper.
    # Leftovers make the realised share a little smaller.
    y = balanced(60_000, 10)
    shares = [
        top(histogram(y, partition("dirichlet", y, 100, seed=seed), 10), 4) for seed in range(20)
    ]
    assert np.mean(shares) == pytest.approx(0.837, abs=0.012)
    # With far more samples than necessary no class runs out, and the share is that of p itself.
    shares = [
        top(histogram(y, partition("dirichlet", y, 100, seed=seed, sizes=300), 10), 4)
        for seed in range(20)
    ]
    assert np.mean(shares) == pytest.approx(0.837, abs=0.008)


def test_leftovers_go_to_all_clients_alike():
    y = balanced(6_000, 10)
    halves = np.array(
        [
            [top(counts[:50], 4), top(counts[50:], 4)]
            for seed in range(40)
            for counts in [histogram(y, partition("dirichlet", y, 100, seed=seed, alpha=0.1), 10)]
        ]
    )
    gap = halves[:, 0] - halves[:, 1]
    assert abs(gap.mean()) < 3.5 * gap.std() / len(gap) ** 0.5


@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e-3])
def test_a_small_alpha_does_not_hang_and_gives_a_client_one_class_while_it_lasts(alpha):
    y = balanced(60_000, 10)
    start = time.process_time()
    counts = histogram(y, partition("dirichlet", y, 100, seed=0, alpha=alpha), 10)
    assert time.process_time() - start < 5
    assert counts.sum() == 60_000
    few = histogram(y, partition("dirichlet", y, 100, seed=0, alpha=alpha, sizes=30), 10)
    assert np.mean(few.max(1) / 30) > 0.98


def test_a_large_alpha_is_uniform():
    y = balanced(60_000, 10)
    counts = histogram(y, partition("dirichlet", y, 10, seed=0, alpha=1e12, sizes=3_000), 10)
    assert abs(counts - 300).max() < 5 * 300**0.5


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_no_concentration_is_refused(alpha):
    with pytest.raises(InputError, match="want a finite number > 0"):
        partition("dirichlet", balanced(100, 10), 5, seed=0, alpha=alpha)


# iid


def test_iid_ignores_the_labels_and_looks_like_the_pool():
    y = balanced(60_000, 10)
    parts = partition("iid", y, 100, seed=0)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(parts, partition("iid", y[::-1], 100, seed=0), strict=True)
    )
    chi2 = ((histogram(y, parts, 10) - 60) ** 2 / 60).sum()
    assert 0.8 < chi2 / (99 * 9) < 1.2


# Input


@pytest.mark.parametrize(
    ("y", "clients", "text"),
    [
        (np.array([0.0, 1.0]), 1, "want a list of integers"),
        (np.array([0, -1]), 1, "want a list of integers"),
        (np.array([[0, 1]]), 1, "want a list of integers"),
        (np.array([0, 1]), 3, r"want 1\.\.2 clients"),
        (np.array([0, 1]), 0, r"want 1\.\.2 clients"),
        (np.array([], int), 1, "cannot share 0 samples"),
    ],
)
def test_labels_or_clients_that_do_not_fit_are_refused(y, clients, text):
    with pytest.raises(InputError, match=text):
        partition("iid", y, clients, seed=0)


def test_an_unknown_partition_gets_the_nearest_one():
    with pytest.raises(InputError, match="did you mean 'dirichlet'"):
        partition("dirichlett", balanced(100, 10), 5, seed=0)


# The cut of one client


@given(
    n=st.integers(0, 60),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
    client=st.integers(0, 9),
)
def test_a_client_s_cut_loses_nothing_and_has_both_kinds_if_it_can(n, share, seed, client):
    samples = np.arange(100, 100 + 3 * n, 3)
    train, test = split(samples, seed=seed, client=client, share=share)
    assert sorted([*train, *test]) == samples.tolist()
    assert (len(train) >= 1) == (n >= 1)
    assert (len(test) >= 1) == (n >= 2)
    if n >= 2:
        assert abs(len(train) - share * n) <= 1


def test_a_whole_share_is_never_one_short():
    # 0.7 * 700 is 489.99999999999994 in floating point.
    for n in range(10, 5_000, 10):
        assert len(split(np.arange(n), seed=0, client=0)[0]) == n * 7 // 10


def test_every_client_cuts_by_its_own_stream():
    samples = np.arange(100)
    cuts = [
        split(samples, seed=seed, client=client)[0].tolist()
        for seed in (0, 1)
        for client in (0, 1, 2)
    ]
    assert len({tuple(cut) for cut in cuts}) == 6
    assert cuts[1] == split(samples, seed=0, client=1)[0].tolist()
    assert cuts[0] != sorted(cuts[0])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_of_nothing_or_all_is_refused(share):
    with pytest.raises(InputError, match="between 0 and 1"):
        split(np.arange(10), seed=0, client=0, share=share)


def test_the_histogram_counts():
    y = np.array([0, 2, 2, 1, 0])
    assert histogram(y, [np.array([0, 1, 2]), np.array([4])], 4).tolist() == [
        [1, 0, 2, 0],
        [1, 0, 0, 0],
    ]


# A user's file


@given(pool=pools(), kind=kinds, header=st.booleans())
def test_a_partition_written_to_a_file_is_read_back(tmp_path_factory, pool, kind, header):
    folder = tmp_path_factory.mktemp("own")
    y, clients = pool
    parts = partition(kind, y, clients, seed=0, classes=1)
    (folder / "p.json").write_text(
        json.dumps({str(i): part.tolist() for i, part in enumerate(parts)})
    )
    lines = ["client,index"] * header + [f"{i}, {j}" for i, part in enumerate(parts) for j in part]
    (folder / "p.csv").write_text("\n".join(lines) + "\n")
    for name in ("p.json", "p.csv"):
        got = read_partition(folder / name, len(y))
        assert all(np.array_equal(a, b) for a, b in zip(parts, got, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("p.csv", "client,index\n0,1\n1,1\n", r"line 3: sample 1 already belongs to client 0"),
        ("p.csv", "0,1\n0,1\n", r"line 2: sample 1 already belongs to client 0"),
        ("p.csv", "0,10\n", r"line 1: the index is '10', want 0\.\.9"),
        ("p.csv", "0,-1\n", r"line 1: the index is '-1'"),
        ("p.csv", "0,1.0\n", r"line 1: the index is '1.0'"),
        ("p.csv", f"0,{'9' * 5000}\n", r"line 1: the index is '999"),
        ("p.csv", "a,1\n", r"line 1: the client is 'a'"),
        ("p.csv", "0,1\n\n0\n", r"line 3: got '0', want client,index"),
        ("p.csv", "0,1\n2,3\n", r"client 1 has no samples"),
        ("p.csv", "1,1\n", r"client 0 has no samples"),
        ("p.csv", f"0,1\n{10**17},3\n", r"client 1 has no samples"),
        ("p.csv", "client,index\n", r"client 0 has no samples"),
        (
            "p.json",
            '{"0": [1], "1": [2, 1]}',
            r"key '1', entry 1: sample 1 already belongs to client 0",
        ),
        ("p.json", '{"0": [10]}', r"key '0', entry 0: the index is 10, want 0\.\.9"),
        ("p.json", '{"0": [-1]}', r"key '0', entry 0: the index is -1"),
        ("p.json", '{"0": [1.5]}', r"key '0', entry 0: the index is 1.5"),
        ("p.json", '{"0": [true]}', r"key '0', entry 0: the index is True"),
        ("p.json", '{"0": [[1]]}', r"key '0', entry 0: the index is \[1\]"),
        ("p.json", '{"x": [1]}', r"key 'x', entry 0: the client is 'x'"),
        ("p.json", '{"0": [1], "0": [2]}', r"key '0': this client is named 2 times"),
        ("p.json", '{"0": 1}', r'want \{"0": \[index'),
        ("p.json", "[[1], [2]]", r'want \{"0": \[index'),
        ("p.json", '{"0": [1]', r"is not JSON: .*line 1"),
        ("p.json", "[" * 100_000, r"is not JSON"),
        ("p.json", "{}", r"client 0 has no samples"),
        ("p.json", '{"0": [1], "1": []}', r"key '1': this client has no samples"),
        ("p.json", " " * 2_000_000, r"longer than"),
    ],
)
def test_a_wrong_file_is_told_with_line_or_key(tmp_path, name, content, text):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=text) as error:
        read_partition(tmp_path / name, 10)
    message = str(error.value)
    assert name in message and "\n" not in message and len(message) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(("name", "raw"), [("p.csv", b"\xff\xfe0,1"), ("p.json", None)])
def test_a_file_that_cannot_be_read_is_reported(tmp_path, name, raw):
    if raw:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match="cannot be read"):
        read_partition(tmp_path / name, 10)


def test_a_file_of_another_type_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"known: \.csv, \.json"):
        read_partition(tmp_path / "p.pickle", 10)
