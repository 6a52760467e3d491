"""Selectors: what P_i retains of a layer outside L_i (Alg. 1, l. 6).

Unstructured selectors retain floor(r d) of the d weights of each tensor; they never touch biases
or normalisation.  Structured selectors retain ceil(r u) of the u output units of a layer, with all
weights of those units and the columns of later layers that they feed.
"""

import math

import torch
from torch import Tensor

from fedp3.planning.prune_settings import SELECTORS, Selector


def retained_weights(keep: float, n: int) -> int:
    """How many of n weights an unstructured selector retains."""
    return max(1, math.floor(keep * n + 1e-9))


def retained_units(keep: float, units: int, granule: int = 1) -> int:
    """How many units a structured selector retains, in multiples of the granule."""
    return granule * max(1, math.ceil(keep * (units // granule) - 1e-9))


def magnitude(w: Tensor, k: int, rng: torch.Generator | None) -> Tensor:
    """The k largest |w| of the tensor; among equal values the first."""
    sizes = w.abs().flatten()
    threshold = sizes.kthvalue(sizes.numel() - k + 1).values
    mask = sizes > threshold
    ties = (sizes == threshold).nonzero().flatten()
    mask[ties[: k - int(mask.sum())]] = True
    return mask.view_as(w)


def random_weights(w: Tensor, k: int, rng: torch.Generator | None) -> Tensor:
    """Any k coordinates, at random: the biased sketch of Definition 1."""
    mask = torch.zeros(w.numel(), dtype=torch.bool)
    mask[torch.randperm(w.numel(), generator=rng)[:k]] = True
    return mask.view_as(w)


def neuron(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """Any k units, at random."""
    return torch.randperm(len(norms), generator=rng)[:k].sort().values


def neuron_norm(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """The k units with the largest incoming weights; among equal norms the first."""
    return norms.argsort(descending=True, stable=True)[:k].sort().values


def ordered(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """The first k units."""
    return torch.arange(k)


def rolling(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """A window of k units that moves by one unit each round."""
    return ((t + torch.arange(k)) % len(norms)).sort().values


def dealt(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """All units in a random order for the round; each client of the round gets one slice."""
    return torch.randperm(len(norms), generator=rng)


SELECTORS.add("magnitude", Selector(weights=magnitude, derivable=False))
SELECTORS.add("random", Selector(weights=random_weights, draws=True))
SELECTORS.add("neuron", Selector(units=neuron, draws=True))
SELECTORS.add("neuron_norm", Selector(units=neuron_norm, derivable=False))
SELECTORS.add("ordered", Selector(units=ordered, static=True))
SELECTORS.add("rolling", Selector(units=rolling))
SELECTORS.add("magnitude_all", Selector(weights=magnitude, across_tensors=True, derivable=False))
SELECTORS.add("dealt", Selector(units=dealt, deals=True))
