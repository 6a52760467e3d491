"""Which samples of a data set belong to one client."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One client's train and test samples, as indices into the data set."""

    train: Tensor
    test: Tensor


NO_SAMPLES = Shard(torch.arange(0), torch.arange(0))
