"""What a trusted server releases in one round under client-level DP.

    C_t ~ Poisson(q): each client by its own secret coin
    W^l <- W^l + ( sum_{i in C_t} d_i^l min(1, C / ||d_i||) + N(0, z² C² I) ) / (q n_l)

This is DP-FedAvg with a fixed divisor (McMahan et al., 2018) over partial uploads.  d_i is the
change of all that client i uploads, relative to what it was sent.  It has one norm over all layers
and buffers; what the client does not upload is zero in it.  A client that fails, is late or is
rejected has d_i = 0.  So one client moves the sum by at most C, whatever it sends.

n_l, the number of clients whose plan uploads layer l, is public, and never the number of those
that answered.  Noise is on every coordinate of every layer with n_l > 0, in every round, whether
anybody sent it or not; a round without participants is a round like any other.  Layers with
n_l = 0 are personal, or have no uploader in this round: no client can change them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.memo import once_per_plan
from fedp3.core.randomness import Stream
from fedp3.core.types import AcceptedUpdate, ClientPlan, Layer, Params
from fedp3.privacy.mechanism import fill_with_noise, secret_generator
from fedp3.privacy.settings import Mechanism

# The norm of a change is a sum in double precision: this is far more than its rounding.
ROUNDING = 1e-9
VARIANCE = ".running_var"  # how torch names the running variances of its normalisation layers


def poisson_clients(
    eligible: Sequence[int], clients: int, mechanism: Mechanism, seed: int, t: int
) -> list[int]:
    """The participants of round t; there may be none.

    Args:
        eligible: the clients that can take part, in ascending order.
        clients: the number of all clients, each of which has a coin.
        mechanism: the sample rate, and where coins come from.
        seed: the run's seed, for simulations.
        t: the round, from 0.
    """
    rng = secret_generator(mechanism, Stream.SAMPLE, seed, t)
    heads = torch.rand(clients, generator=rng, dtype=torch.float64) < mechanism.sample_rate
    return [i for i in eligible if bool(heads[i])]


def uploaders(plans: Sequence[ClientPlan]) -> dict[Layer, int]:
    """The number n_l of clients whose plan uploads anything of layer l, where there are any."""
    uploaded = once_per_plan(lambda plan: plan.uploaded)
    counts = Counter(l for plan in plans for l in uploaded(plan))
    return {l: counts[l] for l in plans[0].layers if counts[l]}


def divisors(uploaders: Mapping[Layer, int], mechanism: Mechanism) -> dict[Layer, float]:
    """The expected number of uploads of each layer, q n_l: fixed and public."""
    return {l: mechanism.sample_rate * n for l, n in uploaders.items()}


def clipped_change(
    update: AcceptedUpdate, W: Params, spec: RunSpec, clip: float
) -> dict[str, Tensor]:
    """d_i min(1, C / ||d_i||) in double precision, for the tensors that the client uploads.

    Args:
        update: an accepted upload, full-shaped and unpacked.
        W: W_t, of which the client was sent a part.
        spec: the run.
        clip: C.
    """
    change = {}
    for l in update.plan.uploaded:
        for n in spec.layers.layers[l]:
            place = (n, l, update.plan, update.masks, spec.layers, spec.pruning.unfed_columns)
            sent = M.zero_pruned(W[n], M.sent(*place))
            d = update.update.tensors[n].double() - sent
            change[n] = M.zero_pruned(d, M.uploaded(*place))
    norm = math.hypot(*(float(torch.linalg.vector_norm(d)) for d in change.values()))
    bound = clip * (1 - ROUNDING)
    if norm > bound:
        for d in change.values():
            d.mul_(bound / norm)
    return change


def clipped_sum(
    W: Params,
    updates: Iterable[AcceptedUpdate],
    released: Iterable[str],
    spec: RunSpec,
    clip: float,
) -> dict[str, Tensor]:
    """The sum before the noise, which no client moves by more than C over all tensors together."""
    total = {n: torch.zeros(W[n].shape, dtype=torch.float64) for n in released}
    for update in updates:
        for n, d in clipped_change(update, W, spec, clip).items():
            total[n] += d
    return total


def release(
    W: Params,
    updates: Iterable[AcceptedUpdate],
    uploaders: Mapping[Layer, int],
    spec: RunSpec,
    mechanism: Mechanism,
    t: int,
) -> dict[str, Tensor]:
    """The tensors that round t releases; those of layers with n_l = 0 are not among them.

    Args:
        W: W_t.
        updates: the accepted updates of the participants, one at a time.
        uploaders: n_l, of the plans of all clients in round t.
        spec: the run.
        mechanism: clip, noise and sample rate.
        t: the round, from 0.
    """
    by_layer = divisors(uploaders, mechanism)
    # The order of layers is that of the network: a checkpoint may store W in another order.
    divisor = {
        n: by_layer[l] for l, names in spec.layers.layers.items() if l in by_layer for n in names
    }
    total = clipped_sum(W, updates, divisor, spec, mechanism.clip)
    rng = secret_generator(mechanism, Stream.NOISE, spec.seed, t)
    new = {}
    for n in divisor:
        noise = torch.empty(W[n].shape)
        fill_with_noise(noise, mechanism, rng)
        w = W[n].double() + (total[n] + noise) / divisor[n]
        # Noise can make a variance negative.  This only processes what has its noise already.
        w = w.clamp(min=0) if n in spec.layers.buffers and n.endswith(VARIANCE) else w
        new[n] = w.to(W[n].dtype)
    return new
