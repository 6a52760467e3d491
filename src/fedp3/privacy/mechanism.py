"""One local step of LDP-FedP3 (Algorithm 5 as its proof has it: noise on the mean gradient, not on the weights).

    S ~ Poisson(q) of the m records;    g = (sum_{j in S} g_j min(1, C / ||g_j||) + N(0, z² C² I)) / (q m)
One norm over all trained coordinates, noise on every one of them, a public denominator, and an empty S is a step like
any other.  Momentum, weight decay and everything the server does afterwards are post-processing.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fedp3.lookup import pick
from fedp3.privacy.clip import add_clipped
from fedp3.rng import Use, os_stream, stream
from fedp3.types import Local, Params, Private

PART = 1 << 16  # noise is added in parts of so many numbers, which stay in the cache
# (net, x, y, trained tensors, masks that hold) -> (loss, gradient)
Gradient = Callable[[nn.Module, Tensor, Tensor, Params, Params], tuple[float, list[Tensor]]]

RANDOMNESS: Mapping[str, Callable[..., torch.Generator]] = {
    "os": lambda *at: os_stream(),
    "seeded": stream,  # simulation only: whoever knows the seed can take the noise away
}


def local_steps(local: Local, private: Private) -> int:
    """Steps of one task; an epoch is as many as see each record once on average."""
    return math.ceil(local.epochs / private.rate) if local.epochs else local.steps


def poisson(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Positions of each step's records: every record by its own coin."""
    for _ in range(steps):
        yield (torch.rand(samples, generator=rng, dtype=torch.float64) < rate).nonzero().flatten()  # Alg. 5, l. 5


def private_batches(private: Private, local: Local, samples: int, *at: int) -> Iterator[Tensor]:
    """The records of every step of one task; `at` is (seed, round, client)."""
    return poisson(samples, private.rate, local_steps(local, private), draws(private, Use.BATCHES, *at))


def private_gradient(private: Private, local: Local, samples: int, *at: int) -> Gradient:
    """The gradient of one task's steps: clipped by record, summed, noised, divided by q m."""
    rng = draws(private, Use.NOISE, *at)
    b = private.rate * samples  # public; the size of S is not
    sums: dict[str, Tensor] = {}  # kept from step to step: fresh memory costs as much as the noise that fills it

    def gradient(net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params) -> tuple[float, list[Tensor]]:
        for n, w in W.items():
            if n not in sums or sums[n].shape != w.shape:
                sums[n] = torch.empty(w.shape, device=w.device)
            fill_with_noise(sums[n], private, rng)  # Alg. 5, l. 8; differs: before the step, not after it
        for part in range(0, len(x), local.batch):  # memory is bounded by taking S in parts, never by cutting it
            few = slice(part, part + local.batch)
            add_clipped(sums, net, x[few], y[few], W, masks, private)  # Alg. 5, l. 6
        total = [sums[n] for n in W]
        torch._foreach_div_(total, b)
        return math.nan, total  # the loss of private records is nobody's business

    return gradient


def fill_with_noise(out: Tensor, private: Private, rng: torch.Generator) -> None:
    """N(0, z² C²) on every coordinate; z = 0 is no noise, also where C is infinite.

    Each is the sum of two draws: one 32-bit draw never leaves ±5.77 deviations, and what only a record could have put
    beyond would give it away.  Two reach to 8.16, and their rounding is harder to read.
    """
    if not private.noise:
        out.zero_()
        return
    here = out if out.device == rng.device else torch.empty(out.shape)
    share = private.noise * private.clip / math.sqrt(2)
    here.normal_(0, share, generator=rng)
    flat, more = here.view(-1), torch.empty(min(PART, here.numel()))
    for k in range(0, len(flat), PART):
        part = flat[k : k + PART]
        part.add_(more[: len(part)].normal_(0, share, generator=rng))
    out.copy_(here)


def draws(private: Private | None, use: Use, seed: int, *at: int) -> torch.Generator:
    """What a task draws from.  Under LDP that is secret for all that meets a record: batches, noise, crops, Dropout.

    Draws known from a seed go to places in the batch, so that one record more would shift those of all after it.
    """
    return (stream if private is None else pick(RANDOMNESS, private.randomness, "randomness"))(seed, use, *at)
