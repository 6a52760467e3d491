"""The published data sets: their files, where to download them, and how they are normalised.

Normalisation and augmentation are those of the paper's experiments; the md5 sums are the
publishers'.  To add a data set, add a row here, and a parser in formats.py if its format is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedp3.data.archives import Unpack, untar, unzip
from fedp3.data.formats import PIXELS, File, Parser, cifar, digits, idx, letters


@dataclass(frozen=True, slots=True)
class Download:
    """One file as its publisher serves it."""

    name: str  # it follows the URL of the source
    bytes: int
    md5: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data set as published.

    Args:
        parse: reads the files.
        samples: the number of train and test samples together.
        classes: the number of classes.
        shape: the shape of one sample.
        note: its licence and what to cite.
        folder: where its files are below a data folder.
        files: its files; empty if the data set comes with an installed package.
        elsewhere: folders in which a system package installs the files.
        url: what the URLs of the downloads begin with.
        downloads: the files as their publisher serves them.
        unpack: extracts the files from a download; None if the downloads are the files.
        inside: the folder of the files in the archive.
        mean: the mean of each channel; None means that of the train part's pixels.
        std: the standard deviation of each channel.
        crop: the padding of the random crop; 0 means no crop.
        flip: whether images are flipped at random.
    """

    parse: Parser
    samples: int
    classes: int
    shape: tuple[int, ...]
    note: str
    folder: str = ""
    files: tuple[File, ...] = ()
    elsewhere: tuple[str, ...] = ()
    url: str = ""
    downloads: tuple[Download, ...] = ()
    unpack: Unpack | None = None
    inside: str = ""
    mean: tuple[float, ...] | None = ()
    std: tuple[float, ...] = ()
    crop: int = 0
    flip: bool = False


def _idx_files(prefix: str, train: int, test: int, stems: tuple[str, str]) -> tuple[File, ...]:
    """Images and labels of the train part, then those of the test part."""
    files = []
    for stem, n in zip(stems, (train, test), strict=True):
        files.append(File(f"{prefix}{stem}-images-idx3-ubyte.gz", (n, 28, 28)))
        files.append(File(f"{prefix}{stem}-labels-idx1-ubyte.gz", (n,)))
    return tuple(files)


DIGITS = Source(
    parse=digits,
    samples=1_797,
    classes=10,
    shape=(1, 8, 8),
    note="comes with scikit-learn (BSD-3-Clause); cite Alpaydin and Kaynak 1998",
)

MNIST = Source(
    parse=idx,
    samples=70_000,
    classes=10,
    shape=(1, 28, 28),
    note="no licence stated; cite LeCun, Bottou, Bengio and Haffner 1998",
    folder="MNIST/raw",
    files=_idx_files("", 60_000, 10_000, ("train", "t10k")),
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    downloads=(
        Download("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Download("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        Download("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        Download("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    mean=(0.1307,),
    std=(0.3081,),
)

FASHION_MNIST = Source(
    parse=idx,
    samples=70_000,
    classes=10,
    shape=(1, 28, 28),
    note="MIT (Zalando); cite Xiao, Rasul and Vollgraf 2017",
    folder="FashionMNIST/raw",
    files=_idx_files("", 60_000, 10_000, ("train", "t10k")),
    elsewhere=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    downloads=(
        Download("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Download("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        Download("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        Download("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    mean=(0.5,),
    std=(0.5,),
)

EMNIST_L = Source(
    parse=letters,
    samples=56_000,
    classes=10,
    shape=(1, 28, 28),
    note="NIST data, no licence stated; cite Cohen, Afshar, Tapson and van Schaik 2017; "
    "letters A to J",
    folder="EMNIST/raw",
    files=_idx_files("emnist-letters-", 124_800, 20_800, ("train", "test")),
    url="https://biometrics.nist.gov/cs_links/EMNIST/",
    downloads=(Download("gzip.zip", 561_753_746, "58c8d27c78d21e728a6bc7b3cc06412e"),),
    unpack=unzip,
    inside="gzip",
    mean=None,
)

CIFAR10 = Source(
    parse=cifar,
    samples=60_000,
    classes=10,
    shape=(3, 32, 32),
    note="no licence stated; cite Krizhevsky 2009",
    folder="cifar-10-batches-bin",
    files=(
        *(File(f"data_batch_{i}.bin", (10_000, 1 + PIXELS)) for i in range(1, 6)),
        File("test_batch.bin", (10_000, 1 + PIXELS)),
    ),
    url="https://www.cs.toronto.edu/~kriz/",
    downloads=(
        Download("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    unpack=untar,
    inside="cifar-10-batches-bin",
    mean=(0.491, 0.482, 0.447),
    std=(0.247, 0.243, 0.262),
    crop=4,
    flip=True,
)

CIFAR100 = Source(
    parse=cifar,
    samples=60_000,
    classes=100,
    shape=(3, 32, 32),
    note="no licence stated; cite Krizhevsky 2009; fine labels",
    folder="cifar-100-binary",
    files=(File("train.bin", (50_000, 2 + PIXELS)), File("test.bin", (10_000, 2 + PIXELS))),
    url="https://www.cs.toronto.edu/~kriz/",
    downloads=(
        Download("cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
    ),
    unpack=untar,
    inside="cifar-100-binary",
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    crop=4,
    flip=True,
)

SOURCES: Mapping[str, Source] = {
    "digits": DIGITS,
    "mnist": MNIST,
    "fashion-mnist": FASHION_MNIST,
    "emnist-l": EMNIST_L,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}
