"""Data sets: parsers of published formats, the search for files, batches, and a user's data."""

import gzip
import os
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from fedp3 import config
from fedp3.core.errors import DataError, InputError
from fedp3.data import SOURCES, Dataset, batch, find, from_tensors, from_torch, inventory, load
from fedp3.data.formats import File, cifar, idx, letters
from fedp3.experiment.assemble import assemble

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = (file.name for file in SOURCES["mnist"].files)


def idx_bytes(a):
    return struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.astype(np.uint8).tobytes()


def put(path, raw):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)


def shrink(monkeypatch, name, train, test):
    """Let a data set of the IDX family be this small."""
    source = SOURCES[name]
    n = (train, train, test, test)
    files = tuple(
        File(file.name, (m, *file.shape[1:])) for file, m in zip(source.files, n, strict=True)
    )
    monkeypatch.setitem(SOURCES, name, replace(source, files=files))


def random_mnist(folder, train=7, test=3, seed=0, top=10):
    rng = np.random.default_rng(seed)
    arrays = [
        a
        for n in (train, test)
        for a in (
            rng.integers(0, 256, (n, 28, 28)),
            np.concatenate([[top - 1], rng.integers(0, top, n - 1)]),
        )
    ]
    for name, a in zip((IMAGES, LABELS, TEST_IMAGES, TEST_LABELS), arrays, strict=True):
        put(folder / name, idx_bytes(a))
    return arrays


def one_sentence(text):
    """A failure is reported as one sentence on one line."""
    assert "\n" not in text
    assert not re.search(r"[.!?]\s", text)
    return text


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No test sees the data sets of the machine it runs on."""
    monkeypatch.delenv("FEDP3_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], elsewhere=()))


# Parsers


@given(
    n=st.integers(1, 4),
    h=st.integers(1, 5),
    w=st.integers(1, 5),
    seed=st.integers(0, 99),
    zipped=st.booleans(),
)
def test_idx_is_read_as_a_loop_over_its_bytes_would(tmp_path_factory, n, h, w, seed, zipped):
    folder = tmp_path_factory.mktemp("idx")
    rng = np.random.default_rng(seed)
    images, labels = rng.integers(0, 256, (n, h, w)), rng.integers(0, 10, n)
    ending = ".gz" if zipped else ""
    put(folder / f"x{ending}", idx_bytes(images))
    put(folder / f"y{ending}", idx_bytes(labels))
    [(x, y)] = idx(folder, (File("x.gz", (n, h, w)), File("y.gz", (n,))), 10)
    raw = idx_bytes(images)
    for i in range(n):
        assert y[i] == idx_bytes(labels)[8 + i]
        for r in range(h):
            for c in range(w):
                assert x[i, 0, r, c] == raw[16 + i * h * w + r * w + c]


@pytest.mark.parametrize(("label_bytes", "finest"), [(1, 0), (2, 1)])
def test_cifar_rows_hold_labels_then_red_green_and_blue_planes(tmp_path, label_bytes, finest):
    rows = np.random.default_rng(0).integers(0, 256, (4, label_bytes + 3072)).astype(np.uint8)
    rows[:, :label_bytes] = [
        [3, 7][:label_bytes],
        [1, 9][:label_bytes],
        [0, 0][:label_bytes],
        [2, 4][:label_bytes],
    ]
    (tmp_path / "a.bin").write_bytes(rows.tobytes())
    [(x, y)] = cifar(tmp_path, (File("a.bin", rows.shape),), 10)
    for i in range(4):
        assert y[i] == rows[i, finest]
        for channel, r, c in ((0, 0, 0), (0, 31, 5), (1, 2, 30), (2, 31, 31)):
            assert x[i, channel, r, c] == rows[i, label_bytes + 1024 * channel + 32 * r + c]


def test_emnist_letters_are_a_to_j_and_upright(tmp_path):
    upright = np.zeros((28, 28), np.uint8)
    upright[4:24, 8] = upright[23, 8:20] = 255  # the letter L: a stem, and a foot to the right
    y = np.array([12, 1, 26, 10, 11, 2])
    put(tmp_path / "x.gz", idx_bytes(np.stack([np.roll(upright, i, axis=1).T for i in range(6)])))
    put(tmp_path / "y.gz", idx_bytes(y))
    [(x, labels)] = letters(tmp_path, (File("x.gz", (6, 28, 28)), File("y.gz", (6,))), 10)
    assert labels.tolist() == [0, 9, 1]
    assert [
        np.array_equal(x[j, 0], np.roll(upright, i, axis=1)) for j, i in enumerate((1, 3, 5))
    ] == [True] * 3


def test_emnist_is_normalised_by_the_pixels_of_its_train_part(tmp_path, monkeypatch):
    shrink(monkeypatch, "emnist-l", 6, 3)
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (6, 28, 28)), np.array([1, 20, 2, 3, 26, 10])
    x[[1, 4]] = 255  # letters beyond J must not count
    arrays = (x, y, np.full((3, 28, 28), 9), np.array([4, 5, 6]))
    for file, a in zip(SOURCES["emnist-l"].files, arrays, strict=True):
        put(tmp_path / "EMNIST/raw" / file.name, idx_bytes(a))
    pool = load("emnist-l", tmp_path)
    chosen = x[[0, 2, 3, 5]] / 255
    assert pool.mean == pytest.approx((chosen.mean(),))
    assert pool.std == pytest.approx((chosen.std(),))
    assert pool.y.tolist() == [0, 1, 2, 9, 3, 4, 5]
    train = batch(pool, torch.arange(4))
    assert (float(train.mean()), float(train.std(correction=0))) == pytest.approx((0, 1), abs=1e-5)


def test_train_and_test_parts_are_pooled_in_this_order(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    x, y, x_test, y_test = random_mnist(tmp_path / "MNIST/raw")
    pool = load("mnist", tmp_path)
    assert np.array_equal(pool.x[:, 0], np.concatenate([x, x_test]))
    assert np.array_equal(pool.y, np.concatenate([y, y_test]))
    assert (pool.x.dtype, pool.y.dtype, pool.classes) == (torch.uint8, torch.int64, 10)


def test_an_official_test_part_is_kept_from_the_clients(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 70, 30)
    _, y, x_test, y_test = random_mnist(tmp_path / "MNIST/raw", 70, 30)
    data = load("mnist", tmp_path, pad_to=32, test="official")
    assert data.x.shape[2:] == data.test.x.shape[2:] == (32, 32)
    assert np.array_equal(data.y, y) and np.array_equal(data.test.y, y_test)
    assert np.array_equal(data.test.x[:, 0, 2:30, 2:30], x_test)
    small = ["model.width=0.02", "partition.clients=3", "run.clients_per_round=2"]
    for test, samples, central in (("official", 70, True), ("pooled", 100, False)):
        settings = config.parse({}, ["data.name=mnist", f"data.test={test}", *small])
        experiment = assemble(settings, tmp_path)
        held = [torch.cat([s.train, s.test]) for s in experiment.shards.values()]
        assert sorted(torch.cat(held).tolist()) == list(range(samples))
        assert len(experiment.client.data.y) == samples and experiment.client.data.test is None
        assert (experiment.server.central is not None) == central
    with pytest.raises(DataError, match="'digits' has no test part of its own"):
        load("digits", test="official")
    with pytest.raises(InputError, match="did you mean 'official'"):
        load("mnist", tmp_path, test="offical")


def sparse(path, head, size, tail=b""):
    """A file of published size that takes no room on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.write(head)
        f.truncate(size)
        f.seek(size - len(tail))
        f.write(tail)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist-l"])
def test_idx_files_of_published_size_give_the_published_counts(tmp_path, name):
    source = SOURCES[name]
    low, high = (1, 26) if name == "emnist-l" else (0, 9)
    for file in source.files:
        path = tmp_path / source.folder / file.name.removesuffix(".gz")
        n = file.shape[0]
        head = struct.pack(f">HBB{len(file.shape)}I", 0, 8, len(file.shape), *file.shape)
        if len(file.shape) == 1:
            put(path, head + bytes(low + i % (high - low + 1) for i in range(n)))
        else:
            sparse(path, head + b"\xff", len(head) + n * 784)
    pool = load(name, tmp_path)
    assert pool.x.shape == (source.samples, *source.shape)
    assert set(pool.y.bincount().tolist()) == {source.samples // 10}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_files_of_published_size_give_the_published_counts(tmp_path, name):
    source = SOURCES[name]
    for file in source.files:
        n, row = file.shape
        last = bytes([*[5] * (row - 3073), source.classes - 1]) + bytes([7]) * 3072
        sparse(tmp_path / source.folder / file.name, b"", n * row, last)
    pool = load(name, tmp_path)
    assert pool.x.shape == (60_000, 3, 32, 32)
    assert int((pool.y == source.classes - 1).sum()) == len(source.files)
    assert int(pool.x[-1].min()) == int(pool.x[-1].max()) == 7
    assert (pool.crop, pool.flip, len(pool.mean)) == (4, True, 3)


# Broken files


def cut_zip(raw):
    return gzip.compress(raw)[:-9]


def flip_zip(raw):
    zipped = bytearray(gzip.compress(raw, 0))
    zipped[len(zipped) // 2] ^= 1
    return bytes(zipped)


BREAKS = {
    "empty": lambda raw: b"",
    "plain and truncated": lambda raw: raw[:-1],
    "plain and too long": lambda raw: raw + b"\0",
    "gzip truncated": cut_zip,
    "gzip with a flipped bit": flip_zip,
    "gzip of half": lambda raw: gzip.compress(raw[: len(raw) // 2]),
    "gzip of more": lambda raw: gzip.compress(raw + b"\0"),
    "not IDX": lambda raw: b"\1" + raw[1:],
    "of another type": lambda raw: raw[:2] + b"\x0d" + raw[3:],
    "with other counts": lambda raw: raw[:4] + struct.pack(">III", 14, 14, 28) + raw[16:],
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_file_is_named_in_one_sentence(tmp_path, monkeypatch, how):
    shrink(monkeypatch, "mnist", 7, 3)
    x, *_ = random_mnist(tmp_path / "MNIST/raw")
    path = tmp_path / "MNIST/raw" / IMAGES
    path.write_bytes(BREAKS[how](idx_bytes(x)))
    with pytest.raises(DataError) as error:
        load("mnist", tmp_path)
    text = one_sentence(str(error.value))
    assert str(path) in text
    assert "replace it with the published file" in text


def test_a_label_out_of_range_is_named(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    random_mnist(tmp_path / "MNIST/raw", top=12)
    with pytest.raises(DataError, match=r"train-labels.*labels 0\.\.11, want 0\.\.9") as error:
        load("mnist", tmp_path)
    one_sentence(str(error.value))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    random_mnist(tmp_path / "MNIST/raw")
    path = tmp_path / "MNIST/raw" / IMAGES
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="cannot be read") as error:
        load("mnist", tmp_path)
    assert str(path) in one_sentence(str(error.value))


def test_a_gzip_bomb_is_refused_without_unpacking_it(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    x, *_ = random_mnist(tmp_path / "MNIST/raw")
    with gzip.open(tmp_path / "MNIST/raw" / IMAGES, "wb", 1) as f:
        f.write(idx_bytes(x))
        for _ in range(100):
            f.write(bytes(1_000_000))
    tracemalloc.start()
    with pytest.raises(DataError, match="more than"):
        load("mnist", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(tmp_path):
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(Trap(marker)))
    assert marker.exists()  # the trap works
    marker.unlink()
    for file in SOURCES["cifar100"].files:
        put(tmp_path / "cifar-100-binary" / file.name, pickle.dumps(Trap(marker)))
    with pytest.raises(DataError, match=r"train\.bin has"):
        load("cifar100", tmp_path)
    assert not marker.exists()


# Where files are looked for


def test_folders_are_searched_in_the_order_promised(tmp_path, monkeypatch):
    shrink(monkeypatch, "fashion-mnist", 7, 3)
    system = tmp_path / "system"
    monkeypatch.setitem(
        SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], elsewhere=(str(system),))
    )
    monkeypatch.setenv("FEDP3_DATA", str(tmp_path / "variable"))
    folders = [
        tmp_path / at / "FashionMNIST/raw" for at in ("named", "variable", "cache/fedp3")
    ] + [system]
    for folder in folders:
        random_mnist(folder)
    for folder in folders:
        assert find("fashion-mnist", tmp_path / "named") == folder
        (folder / TEST_LABELS).unlink()  # no longer complete: the next one has its turn
    assert find("fashion-mnist", tmp_path / "named") is None


def test_the_cache_folder_is_in_the_home_by_default(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    random_mnist(tmp_path / ".cache/fedp3/MNIST/raw")
    assert find("mnist") == tmp_path / ".cache/fedp3/MNIST/raw"


def test_debian_s_fashion_mnist_is_looked_for_where_its_package_puts_it():
    from fedp3.data.sources import FASHION_MNIST

    assert FASHION_MNIST.elsewhere == ("/usr/share/datasets/fashion-mnist",)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])
def test_what_is_missing_is_told_with_every_file_and_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FEDP3_DATA", str(tmp_path / "variable"))
    with pytest.raises(DataError) as error:
        load(name, tmp_path / "named")
    text = one_sentence(str(error.value))
    for file in SOURCES[name].files:
        assert file.name in text
    for part in ("named", "variable", "cache/fedp3", f"named/{SOURCES[name].folder}"):
        assert str(tmp_path / part) in text
    assert f"fedp3 data get {name}" in text


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(InputError, match="did you mean 'fashion-mnist'"):
        load("fashionmnist")


def test_digits_need_no_file():
    pool = load("digits")
    assert pool.x.shape == (1797, 1, 8, 8)
    assert (pool.x.dtype, float(pool.x.min()), float(pool.x.max())) == (torch.float32, 0.0, 1.0)
    assert (pool.y.bincount() >= 174).all()
    assert find("digits") is not None
    assert torch.equal(batch(pool, torch.tensor([5, 0])), pool.x[[5, 0]])


def test_the_inventory_lists_what_is_on_this_machine(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    random_mnist(tmp_path / "MNIST/raw")
    rows = {row.name: row for row in inventory(tmp_path)}
    assert list(rows) == list(SOURCES)
    assert [name for name, row in rows.items() if row.path] == ["digits", "mnist"]
    assert rows["mnist"].bytes == sum(
        path.stat().st_size for path in (tmp_path / "MNIST/raw").iterdir()
    )
    assert (rows["cifar10"].bytes, rows["cifar10"].download) == (0, 170_052_171)
    assert all(row.note and row.samples and row.classes and row.shape for row in rows.values())


def test_the_table_agrees_with_itself():
    for source in SOURCES.values():
        assert all(re.fullmatch("[0-9a-f]{32}", download.md5) for download in source.downloads)
        assert len({file.name for file in source.files}) == len(source.files)
        assert (
            bool(source.files) == bool(source.downloads) == bool(source.url) == bool(source.folder)
        )
    for name in ("mnist", "fashion-mnist", "cifar10", "cifar100"):
        images = [file.shape[0] for file in SOURCES[name].files if len(file.shape) > 1]
        assert sum(images) == SOURCES[name].samples


def test_importing_data_loads_nothing_that_only_one_function_needs():
    code = (
        "import sys, fedp3.data; "
        "print([m for m in ('sklearn', 'pooch', 'requests') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert out.stdout.strip() == "[]"


# Padding and batches


@pytest.mark.parametrize(("side", "before"), [(28, 0), (31, 1), (32, 2)])
def test_raw_pixels_are_padded_with_black(tmp_path, monkeypatch, side, before):
    shrink(monkeypatch, "fashion-mnist", 7, 3)
    x, *_ = random_mnist(tmp_path / "FashionMNIST/raw")
    padded = load("fashion-mnist", tmp_path, pad_to=side).x
    want = np.zeros((7, side, side), np.uint8)
    want[:, before : before + 28, before : before + 28] = x
    assert np.array_equal(padded[:7, 0], want)


def test_a_padded_pixel_is_normalised_as_black(tmp_path, monkeypatch):
    shrink(monkeypatch, "fashion-mnist", 7, 3)
    random_mnist(tmp_path / "FashionMNIST/raw")
    x = batch(load("fashion-mnist", tmp_path, pad_to=32), torch.arange(10))
    assert x[:, :, :2].unique().tolist() == [-1.0]  # (0 - 0.5) / 0.5


def test_images_are_never_cut_to_a_smaller_size(tmp_path, monkeypatch):
    shrink(monkeypatch, "mnist", 7, 3)
    random_mnist(tmp_path / "MNIST/raw")
    with pytest.raises(DataError, match="28x28: cannot pad them to 24"):
        load("mnist", tmp_path, pad_to=24)


def pictures(n=12, crop=4, flip=True, side=8):
    """Random images without black, so that padding shows."""
    x = torch.randint(
        1, 256, (n, 3, side, side), generator=torch.Generator().manual_seed(n), dtype=torch.uint8
    )
    y = torch.arange(n) % 3
    return Dataset(
        name="pictures",
        x=x,
        y=y,
        classes=3,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.3),
        crop=crop,
        flip=flip,
    )


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_batch_is_normalised_per_channel():
    pool = pictures()
    got = batch(pool, torch.tensor([3, 0, 3]))
    assert got.dtype == torch.float32
    for j, i in enumerate((3, 0, 3)):
        for c in range(3):
            want = (pool.x[i, c].double() / 255 - pool.mean[c]) / pool.std[c]
            assert torch.allclose(got[j, c].double(), want, atol=1e-6)


def windows(image, crop, flip):
    """Every image that cropping (and flipping) can give, by plain loops."""
    _, h, w = image.shape
    for dy in range(-crop, crop + 1):
        for dx in range(-crop, crop + 1):
            cut = torch.zeros_like(image)
            for r in range(max(0, -dy), min(h, h - dy)):
                for c in range(max(0, -dx), min(w, w - dx)):
                    cut[:, r, c] = image[:, r + dy, c + dx]
            for turned in (False, True)[: 1 + flip]:
                yield (dy, dx, turned), cut.flip(2) if turned else cut


@pytest.mark.parametrize(("crop", "flip"), [(2, True), (2, False), (0, True), (0, False)])
def test_augmented_images_are_windows_of_the_padded_image_and_every_window_comes(crop, flip):
    pool = replace(pictures(1, crop, flip), mean=(), std=())
    known = dict(windows(pool.x[0], crop, flip))
    at = torch.zeros(1_000, dtype=torch.int64)
    seen = {}
    for image in (batch(pool, at, rng()) * 255).round().to(torch.uint8):
        hits = [key for key, window in known.items() if torch.equal(window, image)]
        assert len(hits) == 1
        seen[hits[0]] = seen.get(hits[0], 0) + 1
    assert seen.keys() == known.keys()
    # Each of the (at most 50) windows is equally likely: 20 of 1,000, give or take.
    assert max(seen.values()) < 1_000 / len(known) + 5 * (1_000 / len(known)) ** 0.5


def test_augmentation_is_a_function_of_its_generator_alone():
    pool, at = pictures(), torch.arange(12)
    before = torch.random.get_rng_state()
    x = batch(pool, at, rng(1))
    assert torch.equal(x, batch(pool, at, rng(1)))
    assert not torch.equal(x, batch(pool, at, rng(2)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_a_generator_or_with_both_switched_off_nothing_is_augmented():
    pool, at = pictures(), torch.arange(12)
    plain = batch(pool, at)
    assert torch.equal(plain, batch(replace(pool, crop=0, flip=False), at, rng()))
    assert not torch.equal(plain, batch(pool, at, rng()))


def test_normalisation_can_be_switched_off():
    pool = replace(pictures(), mean=(), std=())
    assert torch.equal(batch(pool, torch.tensor([1])), pool.x[[1]] / 255)


def test_a_batch_leaves_the_pool_as_it_was():
    pool = from_tensors(torch.rand(5, 1, 4, 4), torch.zeros(5, dtype=torch.int64))
    pool = replace(pool, mean=(0.5,), std=(0.5,), crop=1, flip=True)
    before = pool.x.clone()
    batch(pool, torch.arange(5), rng()).zero_()
    assert torch.equal(pool.x, before)


# A user's data


def test_tensors_and_arrays_of_any_shape_are_accepted():
    y = torch.tensor([0, 2, 1], dtype=torch.int32)
    for x in (torch.rand(3, 4), np.random.default_rng(0).random((3, 4)), torch.rand(3, 4).half()):
        pool = from_tensors(x, y, name="mine")
        assert (pool.name, pool.classes, pool.x.dtype, pool.y.dtype) == (
            "mine",
            3,
            torch.float32,
            torch.int64,
        )
        assert torch.equal(batch(pool, torch.tensor([2])), torch.as_tensor(x)[2:].float())


def test_bytes_of_a_user_are_raw_pixels():
    pool = from_tensors(
        torch.full((2, 1, 3, 3), 255, dtype=torch.uint8), torch.tensor([0, 1]), classes=7
    )
    assert (pool.classes, batch(pool, torch.tensor([0])).unique().tolist()) == (7, [1.0])


@pytest.mark.parametrize(
    ("x", "y", "classes", "text"),
    [
        (torch.rand(3, 2), torch.tensor([0, 1]), None, "3 samples but labels of shape"),
        (torch.rand(0, 2), torch.zeros(0, dtype=torch.int64), None, "no samples"),
        (
            torch.rand(2, 2),
            torch.tensor([0.0, 1.0]),
            None,
            "labels of torch.float32, want integers",
        ),
        (torch.rand(2, 2), torch.tensor([0, -1]), None, r"labels -1\.\.0"),
        (torch.rand(2, 2), torch.tensor([0, 5]), 5, r"labels 0\.\.5, want 0\.\.4"),
        (
            torch.tensor([[0.0], [float("nan")]]),
            torch.tensor([0, 1]),
            None,
            "not finite in sample 1",
        ),
        (torch.rand(2, 2) * 1j, torch.tensor([0, 1]), None, "want real numbers"),
    ],
)
def test_tensors_that_cannot_be_learned_from_are_refused(x, y, classes, text):
    with pytest.raises(DataError, match=text) as error:
        from_tensors(x, y, classes=classes)
    one_sentence(str(error.value))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mean": (0.5,)}, "1 means but 3"),
        ({"std": (0.1, 0.0, 0.1)}, "std > 0"),
        ({"crop": -1}, "crop >= 0"),
        ({"mean": (0.5, 0.5), "std": (1.0, 1.0)}, "2 means for samples of shape"),
        ({"x": torch.rand(12, 5)}, r"needs images \(N, channels, height, width\)"),
        ({"x": torch.zeros(12, 3, 8, 8, dtype=torch.float64)}, "float64, want uint8 or float32"),
        ({"y": torch.zeros(12, dtype=torch.int32)}, "labels of torch.int32"),
    ],
)
def test_a_pool_that_contradicts_itself_is_refused(change, text):
    with pytest.raises(DataError, match=text):
        replace(pictures(), **change)


def test_a_torch_dataset_is_the_pool_of_its_pairs():
    x, y = torch.rand(9, 2, 3), torch.arange(9) % 4
    pool = from_torch(TensorDataset(x, y), name="mine", classes=6)
    assert torch.equal(pool.x, x) and torch.equal(pool.y, y)
    assert (pool.name, pool.classes) == ("mine", 6)


class Items(torch.utils.data.Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.rand(2), 0


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Endless(), "Endless without a length"),
        (Items(), "no samples"),
        (Items((torch.rand(2), 0), torch.rand(2)), "sample 1 is a Tensor, want a pair"),
        (Items((torch.rand(2), 0), (torch.rand(3), 0)), r"sample 1 has shape \(3,\)"),
        (Items(("cat.png", 0)), "sample 0 is of type str, want a tensor"),
        (Items((torch.rand(2), 0.7)), "label of sample 0 is 0.7, want an integer"),
    ],
)
def test_a_torch_dataset_that_does_not_fit_is_refused(dataset, text):
    with pytest.raises(DataError, match=text) as error:
        from_torch(dataset)
    one_sentence(str(error.value))
