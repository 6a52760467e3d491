"""Made-up records of the same kind as a data set's own, on which a network is tried out."""

from typing import Any

import torch
from torch import Tensor

from fedp3.data import Dataset, batch
from fedp3.data.inputs import Inputs, map_tensors

SAMPLED = 1000  # records whose range is looked at; made-up values need not reach the very extremes


def made_up_records(data: Dataset, records: int, rng: torch.Generator) -> Any:
    """Records that every network which computes this data set can compute too.

    Each number is drawn uniformly from the range that it has in the data.  Numbers that are always
    whole there are whole: they may be token ids, and a table has no row for others.  A data set of
    one constant example, such as a Flower server has, says nothing about ranges; it gives normals.

    Args:
        data: the data set; at most `SAMPLED` of its records are read.
        records: how many to make up.
        rng: where they are drawn from.
    """
    step = max(1, len(data.y) // SAMPLED)
    sample: Inputs = batch(data, torch.arange(0, len(data.y), step)[:SAMPLED])
    return map_tensors(lambda values: _drawn_like(values, records, rng), sample)


def _drawn_like(sample: Tensor, records: int, rng: torch.Generator) -> Tensor:
    shape = (records, *sample.shape[1:])
    low, high = sample.amin(0), sample.amax(0)
    if torch.equal(low, high):  # a single example: one range for all of its numbers
        low, high = sample.amin(), sample.amax()
        if torch.equal(low, high):
            if not sample.is_floating_point():
                return sample[:1].expand(shape).clone()
            return torch.randn(shape, generator=rng)
    whole = (sample.float() == sample.float().round()).all(0)
    share = torch.rand(shape, generator=rng)
    drawn = (low + (share * (high - low + 1)).floor()).minimum(high)
    return torch.where(whole, drawn, low * (1 - share) + high * share).to(sample.dtype)
