"""Data sets: each is one pool of labelled samples, from local files or a verified download.

The paper pools the published train and test parts and splits every client's samples 70/30 itself
(`fedp3.data.partition`).  A `Dataset` here therefore has no separate test part.

    dataset.py         Dataset and its batches; data sets from a user's tensors or torch dataset
    sources.py         the published data sets: files, shapes, addresses, checksums, normalisation
    catalogue.py       where the files are on this machine: find, load, inventory
    download.py        get: download, verify, unpack, and only then move into place
    formats.py         parsers of the published formats; nothing is ever unpickled
    archives.py        extract the expected members of a published archive, and no others
    partition.py       which samples belong to which client
    partition_file.py  a user's partition from a file
    shards.py          the train and test samples of one client
    record_ids.py      the identity of a record, in every run and under every preprocessing
"""

from fedp3.data.catalogue import DATASETS, DataSettings, Row, find, inventory, load
from fedp3.data.dataset import Dataset, batch, from_tensors, from_torch
from fedp3.data.download import get
from fedp3.data.sources import SOURCES

__all__ = [
    "DATASETS",
    "SOURCES",
    "DataSettings",
    "Dataset",
    "Row",
    "batch",
    "find",
    "from_tensors",
    "from_torch",
    "get",
    "inventory",
    "load",
]
