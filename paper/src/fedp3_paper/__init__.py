"""Experiments of the paper FedP3, run with the library fedp3.

`reproduce` has the paper's tables and figures, `theory` its theorems, and `utility` its privacy.
The package is used from a checkout of the repository, where `pip install -e paper` installs it.
It reads and writes the folders beside its sources: configs, results and pages.
"""

from pathlib import Path

PAPER = Path(__file__).resolve().parents[2]  # the folder paper/ of the checkout
