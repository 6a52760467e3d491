"""Data sets: one pool of labelled samples each, from local files or a checked download.

The paper's protocol pools the published train and test parts and cuts every client's share 70/30 itself
(`fedp3.partition`), so a `Dataset` here has no test part of its own.

    pool.py      Dataset, batch; the way in for a user's own tensors or torch dataset
    sources.py   the table of known data sets: files, shapes, addresses, checksums, normalisation
    catalogue.py where the files lie: find, load, inventory
    download.py  get: download, check, unpack, and only then put in place
    files.py     parsers of the published formats; nothing is ever unpickled
    archives.py  the expected members of a published archive, and no others
"""

from fedp3.data.catalogue import Row, find, inventory, load
from fedp3.data.download import get
from fedp3.data.pool import Dataset, batch, from_tensors, from_torch
from fedp3.data.sources import NAMES

__all__ = ["NAMES", "Dataset", "Row", "batch", "find", "from_tensors", "from_torch", "get", "inventory", "load"]
