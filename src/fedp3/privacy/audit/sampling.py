"""Sampling: in every step a separate coin of probability q decides about every record.

The sampler is not called; uploads without noise show which records entered a step (see
`neighbours.coins`).  Under independent coins all counts below are binomial, so that their
probabilities are exact.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedp3.privacy.audit.findings import Finding, at_most, binomial_two_sided, equal, improbable
from fedp3.privacy.audit.neighbours import Bench, coins
from fedp3.privacy.settings import Mechanism

PART = "sampling"
CLIENTS, ROUNDS = 4, 60
TASKS, STEPS = 30, 10  # tasks of several steps
CLIP = 0.1  # far below the norm of every record's gradient


def sampling(mechanism: Mechanism, clients: Sequence[int]) -> list[Finding]:
    """Whether the records of steps are what independent coins of probability q give."""
    q = mechanism.sample_rate
    records = min(max(50, math.ceil(10 / q)), 1000)
    bench = coins(records)
    noiseless = replace(mechanism, noise_multiplier=0.0, clip=CLIP)
    # Numbers that no client of a small run has do as well: they only address random streams.
    some = list(dict.fromkeys([*clients[-CLIENTS:], *range(CLIENTS)]))[:CLIENTS]
    # (rounds, clients, records): how often a record is in a task of one step
    single = torch.stack(
        [torch.stack([_counts(bench, noiseless, 1, i, t) for i in some]) for t in range(ROUNDS)]
    )
    several = torch.stack(
        [_counts(bench, noiseless, STEPS, some[j % CLIENTS], ROUNDS + j) for j in range(TASKS)]
    )
    findings = [_whole_numbers(single, several)]
    if not findings[0].passed:
        return findings
    single, several = single.round(), several.round()
    if q == 1:
        drawn = float((single.sum() + several.sum()) / (single.numel() + STEPS * several.numel()))
        return [*findings, equal(PART, "share of records in a step", drawn, 1.0)]
    largest = float(single.max())
    findings.append(at_most(PART, "how often a record is in one step, at most", largest, 1.0))
    total = float(single.sum() + several.sum())
    coins_thrown = single.numel() + STEPS * several.numel()
    findings.append(
        improbable(
            PART,
            "share of records in a step, of q",
            total / coins_thrown / q,
            binomial_two_sided(total, coins_thrown, q),
        )
    )
    findings += [
        _dispersion("sizes of steps", single.sum(2).flatten(), records, q),
        _dispersion(
            "how often a record is in a task of several steps", several.flatten(), STEPS, q
        ),
        _dispersion("how often a record is in all tasks", several.sum(0), STEPS * TASKS, q),
        _agreement("two records of a step", single[..., 0:-1:2], single[..., 1::2], q),
        _agreement("two rounds", single[0:-1:2], single[1::2], q),
        _agreement("two clients of a round", single[:, 0::2], single[:, 1::2], q),
    ]
    if mechanism.randomness == "os":
        again = torch.stack([_counts(bench, noiseless, 1, some[0], 0).round() for _ in range(40)])
        findings.append(_agreement("a repeated task", again[0::2], again[1::2], q))
    return findings


def _counts(bench: Bench, mechanism: Mechanism, steps: int, client: int, t: int) -> Tensor:
    """How often each record was drawn in one task."""
    # Small steps, so that the gradient of a record stays above the clip however often it is drawn.
    lr = 1e-3 * mechanism.sample_rate * len(bench.without) / mechanism.clip
    (upload,) = bench.update(mechanism, False, steps, client=client, t=t, lr=lr).values()
    # Clipping adds a millionth to every norm.
    counts: Tensor = upload.double().norm(dim=0) / mechanism.clip * (1 + 1e-5)
    return counts


def _whole_numbers(*counts: Tensor) -> Finding:
    """Every draw adds C to a record's column, so that the sums are whole numbers of C."""
    rest = max(float((c - c.round()).abs().max()) for c in counts)
    return at_most(PART, "distance of the records' sums from whole numbers of C", rest, 0.02)


def _dispersion(what: str, values: Tensor, trials: int, q: float) -> Finding:
    """How many of these binomial counts lie near their mean: neither too many nor too few."""
    mean = trials * q
    radius = 0.7 * math.sqrt(mean * (1 - q))
    low, high = math.ceil(mean - radius), math.floor(mean + radius)
    if high < low:  # no whole number is as near
        low = high = round(mean)
    expected = sum(_binomial(k, trials, q) for k in range(max(0, low), min(trials, high) + 1))
    near = float(((values >= low) & (values <= high)).sum())
    return improbable(
        PART,
        f"{what}: share near the mean, of what coins give",
        near / len(values) / expected,
        binomial_two_sided(near, len(values), expected),
    )


def _binomial(k: int, n: int, p: float) -> float:
    log_choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))


def _agreement(what: str, first: Tensor, second: Tensor, q: float) -> Finding:
    """How often a coin shows the same as its partner."""
    same = float((first == second).sum())
    n, expected = first.numel(), q * q + (1 - q) * (1 - q)
    return improbable(
        PART,
        f"coins that agree between {what}, of what chance gives",
        same / n / expected,
        binomial_two_sided(same, n, expected),
    )
