"""Attacks on the code that runs: `local_update` as a black box, on neighbouring data sets.

From an upload u the adversary computes s = (W - u) q m / γ.  After one step this is
sum_j clip(g_j) + N(0, z² C²).  The parts of an audit are:

    A  without noise, the canary moves s by C in a step
    B  the noise is N(0, z² C²) on every coordinate, and never repeats
    C  the canary shifts the best projection of s by 1/z
    D  no test tells neighbours apart better than epsilon allows
    E  the sampler draws each record of each step independently
    F  many subsampled steps cost no more than claimed
    G  the noise in uploads comes from as many steps as the ledger charges

Limits are six standard errors, or error rates of 1e-7: correct code fails once in a million audits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3.client.batching import LocalSettings
from fedp3.core import masks as M
from fedp3.privacy import accountant
from fedp3.privacy.audit.bounds import gaussian_lower
from fedp3.privacy.audit.neighbours import RECORDS, Bench, drawing, flat, tiny
from fedp3.privacy.ledger import Ledger
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Budget, Mechanism

STANDARD_ERRORS = 6.0  # how far a measured value may be from its expectation
DELTA = 1e-5
# Attempts to give the canary a large gradient.  In one of ten, a Dropout layer makes its label the
# one that the network expects, under which it has none.
DRAWS = 16
NEVER = 1e-12  # a sample rate at which no record is drawn, so that an upload is noise alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: a measured value and its limits."""

    part: str
    what: str
    measured: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the measured value is within its limits."""
        return self.low <= self.measured <= self.high


def _near(part: str, what: str, measured: float, expected: float, error: float) -> Finding:
    """A value that must be within six standard errors of its expectation."""
    margin = STANDARD_ERRORS * error
    low, high = expected - margin, expected + margin
    return Finding(part=part, what=what, measured=measured, low=low, high=high)


def _at_most(part: str, what: str, measured: float, high: float) -> Finding:
    """A value from 0 to a limit."""
    return Finding(part=part, what=what, measured=measured, low=0.0, high=high)


# --------------------------------------------------------------------------- A to D: one step


def sensitivity(bench: Bench, clip: float) -> list[Finding]:
    """A: a record with a huge gradient moves the sum by exactly C.

    Of several draws, the first one counts under which the canary reaches C, or else the one that
    comes nearest.
    """
    low = 0.99 if _uploads_all_trained(bench) else 0.0
    largest = 0.0
    for t in range(DRAWS):
        largest = max(largest, _influence(bench, clip, steps=1, t=t))
        if largest >= low:
            break
    what = "a saturated record moves the sum by C"
    return [Finding(part="A", what=what, measured=largest, low=low, high=1.0001)]


def drift(bench: Bench, clip: float) -> list[Finding]:
    """A over two steps: layers that are not uploaded must not pass a record's influence on."""
    influence = _influence(bench, clip, steps=2)
    return [_at_most("A", "over two steps, by little more than 2 C", influence, 2.2)]


def _influence(bench: Bench, clip: float, steps: int, t: int = 0) -> float:
    """How far the canary moves an upload without noise, in units of the clip."""
    # Seeded: crops and Dropout of the other records are the same with and without the canary.
    noiseless = Mechanism(clip=clip, noise_multiplier=0.0, sample_rate=1.0, randomness="seeded")
    with_canary, without = (
        flat(replace(bench, serial=[t]).update(noiseless, canary, steps))
        for canary in (True, False)
    )
    return float((with_canary - without).norm()) / clip


def _uploads_all_trained(bench: Bench) -> bool:
    """Whether all trained layers are uploaded; else part of a record's gradient stays hidden."""
    return all(p.upload != "none" for p in bench.plan.layers.values() if p.train)


def noise(bench: Bench, noisy: Mechanism, runs: int) -> list[Finding]:
    """B: the noise has the right variance and shape on every coordinate, and no correlations."""
    noiseless = bench.update(replace(noisy, noise_multiplier=0.0), False)
    uploads = [bench.update(noisy, False) for _ in range(runs)]
    unit = noisy.noise_multiplier * noisy.clip
    layers = bench.context.layers
    findings, by_tensor = [], []
    for n in noiseless:
        # Columns of pruned units do not train.
        active = M.as_bool(M.active(n, bench.masks, layers), layers.shapes[n])
        residuals = [(upload[n] - noiseless[n])[active].double() / unit for upload in uploads]
        draws = torch.stack(residuals)  # (runs, coordinates)
        variance = float(draws.square().mean())
        error = math.sqrt(2 / draws.numel())
        findings.append(_near("B", f"variance of the noise on {n}", variance, 1.0, error))
        by_tensor.append(draws)
    draws = torch.cat(by_tensor, 1)
    silent = float((draws == 0).double().mean())
    findings.append(_at_most("B", "share of trained coordinates without noise", silent, 1e-3))
    distance = _kolmogorov_smirnov(draws.flatten())
    findings.append(
        _at_most("B", "distance from the normal law (Kolmogorov-Smirnov)", distance, 3.0)
    )
    neighbours = {
        "uploads": (draws[:-1], draws[1:]),
        "coordinates": (draws[:, :-1], draws[:, 1:]),
    }
    for what, (first, second) in neighbours.items():
        correlation = float((first * second).mean()) * math.sqrt(first.numel())
        text = f"correlation of the noise of neighbouring {what}"
        findings.append(_near("B", text, correlation, 0.0, 1.0))
    return findings


def fresh(mechanism: Mechanism) -> list[Finding]:
    """B: crops and Dropout are drawn by position in the batch, so their draws must not repeat."""
    if mechanism.randomness != "os":
        return []  # a simulation: its noise repeats as well
    noiseless = replace(mechanism, noise_multiplier=0.0, sample_rate=1.0)
    findings = []
    for what, bench in (("crops", drawing(crop=1)), ("Dropout", drawing(dropout=0.5))):
        first, second = (
            flat(replace(bench, serial=[0]).update(noiseless, False)) for _ in range(2)
        )
        repeated = float((first == second).double().mean())
        findings.append(_at_most("B", f"share of an upload that repeats, by {what}", repeated, 0.5))
    return findings


def _kolmogorov_smirnov(x: Tensor) -> float:
    """The distance of a sample from the standard normal law, times the root of its size."""
    x = x[torch.linspace(0, len(x) - 1, min(len(x), 20_000)).long()].sort().values
    steps = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    return float((torch.special.ndtr(x) - steps).abs().max()) * math.sqrt(len(x))


def _canary_direction(bench: Bench, noiseless: Mechanism) -> Tensor:
    """The direction in which the canary moves an upload, scaled so that C has length 1."""
    moved = flat(bench.update(noiseless, True)) - flat(bench.update(noiseless, False))
    direction: Tensor = moved / moved.norm() / noiseless.clip
    return direction


def _projections(bench: Bench, mechanism: Mechanism, runs: int) -> tuple[Tensor, Tensor]:
    """Uploads without and with the canary, projected on its direction."""
    direction = _canary_direction(bench, replace(mechanism, noise_multiplier=0.0))

    def project(canary: bool) -> Tensor:
        scores = [float(flat(bench.update(mechanism, canary)) @ direction) for _ in range(runs)]
        return torch.tensor(scores, dtype=torch.float64)

    with_canary = project(True)
    return project(False), with_canary


def _shift(without: Tensor, with_canary: Tensor) -> tuple[float, float]:
    """The distance of two samples in standard deviations, and its standard error."""
    deviation = ((without.var() + with_canary.var()) / 2).sqrt()
    shift = float((with_canary.mean() - without.mean()) / deviation)
    runs = len(with_canary)
    return shift, math.sqrt(2 / runs + shift * shift / (4 * runs))


def game(bench: Bench, mechanism: Mechanism, runs: int) -> list[Finding]:
    """C and D: tell neighbours apart by the projection on the canary's direction."""
    one_step = replace(mechanism, noise_multiplier=1.0, sample_rate=1.0)
    without, with_canary = _projections(bench, one_step, runs)
    shift, error = _shift(without, with_canary)
    expected_shift = _near("C", "shift by the canary after one step, z = 1", shift, 1.0, error)
    if not _uploads_all_trained(bench):
        expected_shift = replace(expected_shift, low=0.0)
    proven = gaussian_lower(without.tolist(), with_canary.tolist(), DELTA)
    claimed = accountant.epsilon({(1.0, 1.0): 1}, DELTA)
    return [
        expected_shift,
        _at_most("D", "epsilon that a test proves, one step, z = 1", proven, claimed),
    ]


# --------------------------------------------------------------------------- E to G: many steps


def sampler(mechanism: Mechanism, local: LocalSettings) -> list[Finding]:
    """E: sizes of steps, and how often each record is drawn, vary as independent draws do."""
    records, steps, q = 200, 2000, mechanism.sample_rate
    many_steps = replace(local, steps=steps, epochs=0)
    batches = list(PrivateSteps(mechanism).batches(many_steps, records, 0, 0, 0))
    sizes = torch.tensor([len(rows) for rows in batches], dtype=torch.float64)
    if q == 1:
        smallest = float(sizes.min())
        return [_near("E", "records in a step", smallest, records, 0.0)]
    counts = torch.bincount(torch.cat(batches), minlength=records).double()
    share = float(sizes.mean()) / records
    error = math.sqrt(q * (1 - q) / (records * steps))
    findings = [_near("E", "share of records in a step", share, q, error)]
    for what, values, draws in (
        ("a step's size", sizes, records),
        ("how often a record is drawn", counts, steps),
    ):
        expected = draws * q * (1 - q)
        # Binomials of small mean have heavier tails than the normal law.
        kurtosis = max(0.0, (1 - 6 * q * (1 - q)) / expected)
        error = math.sqrt((2 + kurtosis) / len(values))
        measured = float(values.var()) / expected
        findings.append(_near("E", f"variance of {what}", measured, 1.0, error))
    return findings


def composition(bench: Bench, mechanism: Mechanism, runs: int) -> list[Finding]:
    """F: subsampled steps, all of which the adversary sees, against the epsilon they claim."""
    steps, q, delta = 20, 0.1, 1e-3
    mechanism = replace(mechanism, noise_multiplier=1.0, sample_rate=q)
    noiseless = replace(mechanism, noise_multiplier=0.0, sample_rate=1.0)
    direction = _canary_direction(bench, noiseless)
    others = torch.stack([flat(_alone(bench, noiseless, j)) for j in range(RECORDS - 1)])
    # What the other records add on average.
    center = float((others @ direction).mean()) * q * (RECORDS - 1)

    def statistic(canary: bool) -> float:
        """The log likelihood ratio; the best statistic if the other records added nothing."""
        uploads = torch.stack([flat(bench.update(mechanism, canary)) for _ in range(steps)])
        seen = uploads @ direction - center
        return float(torch.log1p(q * torch.expm1(seen - 0.5)).sum())

    without = [statistic(False) for _ in range(runs)]
    with_canary = [statistic(True) for _ in range(runs)]
    proven = gaussian_lower(without, with_canary, delta)
    claimed = accountant.epsilon({(1.0, q): steps}, delta)
    what = f"epsilon that a test proves, {steps} steps at rate {q:g}, z = 1"
    return [_at_most("F", what, proven, claimed)]


def _alone(bench: Bench, noiseless: Mechanism, j: int) -> dict[str, Tensor]:
    """What record j adds to an upload by itself."""
    alone = torch.full_like(bench.without, math.nan)
    alone[j] = bench.without[j]
    return replace(bench, without=alone).update(noiseless, False)


def charged_steps(bench: Bench, budget: Budget, local: LocalSettings) -> list[Finding]:
    """G: where no record is ever drawn, the energy of an upload's noise counts its steps."""
    tasks = 12
    ledger = Ledger(budget)
    steps = budget.mechanism.steps_per_task(local)
    mechanism = replace(budget.mechanism, noise_multiplier=1.0, sample_rate=NEVER)
    energy, coordinates = 0.0, 0
    for t in range(tasks):
        ledger.charge([0], t)
        upload = flat(bench.update(mechanism, False, steps)) / mechanism.clip
        energy += float(upload.square().sum())
        coordinates = int((upload != 0).sum())
    ratio = energy / coordinates / max(ledger.spent(0, tasks), 1)
    error = math.sqrt(2 / (coordinates * tasks))
    return [_near("G", "noisy steps seen in uploads, per step charged", ratio, 1.0, error)]


# --------------------------------------------------------------------------- the audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is audited.

    Args:
        budget: the run's mechanism and limit.
        local: how a client trains.
        others: what happens to layers outside L_i (`plan.others`).
        own: the run's network and one of its plans; a tiny network is always attacked.
    """

    budget: Budget
    local: LocalSettings
    others: str
    own: Bench | None = None


def attack_network(bench: Bench, noisy: Mechanism) -> list[Finding]:
    """A and B on the network of a run."""
    # In B without local pruning: where a step leaves a unit out, its noise is missing rightly.
    without_pruning = bench.without_local_pruning()
    findings = [
        *sensitivity(bench, noisy.clip),
        *noise(without_pruning, replace(noisy, sample_rate=NEVER), 2),
    ]
    return [replace(f, what=f"{f.what}, in the run's network") for f in findings]


def audit(subject: Subject, parts: str = "ABCDEFG", runs: int = 300) -> list[Finding]:
    """Run these parts of the audit; every finding must pass."""
    mechanism, local = subject.budget.mechanism, subject.local
    noisy = replace(mechanism, noise_multiplier=mechanism.noise_multiplier or 1.0)
    bench = tiny(subject.others)
    # Where layers outside L_i are noised, they are uploaded in B, so that their noise is seen.
    visible = tiny(subject.others, "retained") if subject.others == "noise" else bench
    attacks: Mapping[str, Callable[[], Sequence[Finding]]] = {
        "A": lambda: [*sensitivity(bench, mechanism.clip), *drift(bench, mechanism.clip)],
        "B": lambda: [*noise(visible, replace(noisy, sample_rate=1.0), 60), *fresh(mechanism)],
        "CD": lambda: game(bench, mechanism, runs),
        "E": lambda: sampler(mechanism, local),
        "F": lambda: composition(bench, mechanism, runs // 2),
        "G": lambda: charged_steps(bench, subject.budget, local),
    }
    findings: list[Finding] = []
    for names, attack in attacks.items():
        if set(names) & set(parts):
            findings += attack()
    if subject.own is not None:
        findings += attack_network(subject.own, noisy)
    return sorted((f for f in findings if f.part in parts), key=lambda f: f.part)
