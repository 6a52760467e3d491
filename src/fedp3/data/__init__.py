"""Data sets: each is one pool of labelled samples, from local files or a verified download.

The paper pools the published train and test parts and splits every client's samples 70/30 itself
(`fedp3.data.partition`).  A `Dataset` may also have a test set of no client, which is scored as C.

    dataset.py         Dataset and its batches
    inputs.py          the inputs of a network: a tensor, a tuple or a dict of tensors
    rows.py            rows of map-style data sets, read now or when a batch needs them
    labels.py          class labels from numbers or texts
    user_data.py       data sets from a user's tensors or data sets, or from one for each client
    gathering.py       what users pass as data: which kind it is
    text.py            a text file as sequences of characters or tokens, by speaker
    tsv.py             a file of texts with labels
    tokens.py          from texts to tokens, by a tokenizer file
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

from fedp3.data.catalogue import DATASETS, DataSettings, Row, find, inventory, load, load_as
from fedp3.data.dataset import Dataset, batch, first_record, records
from fedp3.data.download import get
from fedp3.data.gathering import gather
from fedp3.data.inputs import Batch
from fedp3.data.sources import SOURCES
from fedp3.data.user_data import from_tensors, from_torch

__all__ = [
    "DATASETS",
    "SOURCES",
    "Batch",
    "DataSettings",
    "Dataset",
    "Row",
    "batch",
    "find",
    "first_record",
    "from_tensors",
    "from_torch",
    "gather",
    "get",
    "inventory",
    "load",
    "load_as",
    "records",
]
