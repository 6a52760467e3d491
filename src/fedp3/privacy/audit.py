"""Attacks on the code that runs: `client.local_update` as a black box, on neighbouring data.

From an upload u the adversary knows s = (W - u) b / γ, which one step makes sum_j clip(g_j) + N(0, z² C²):
    A  without noise, the canary moves s by C a step             E  the sampler tosses one coin per record and step
    B  noise is N(0, z² C²) on every coordinate, and fresh       F  many subsampled steps cost no more than claimed
    C  the canary shifts the best projection of s by 1/z         G  the noise in uploads counts the steps of the ledger
    D  no test tells neighbours apart better than epsilon
Limits are six standard errors or error rates of 1e-7: correct code fails once in a million audits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3 import masks as M
from fedp3.privacy import account
from fedp3.privacy.bounds import gaussian_lower
from fedp3.privacy.ledger import Budget, Ledger
from fedp3.privacy.mechanism import local_steps, private_batches
from fedp3.privacy.neighbours import RECORDS, Bench, drawing, flat, tiny
from fedp3.types import Local, Private

FAR = 6.0  # standard errors
DELTA = 1e-5
DRAWS = 16  # in one of ten a Dropout layer makes the canary's label the expected one, which has no gradient
NEVER = 1e-12  # a sample rate at which no record is drawn, so that an upload is noise alone


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was measured and what would have been right."""

    part: str
    what: str
    measured: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the measured value is inside its limits."""
        return self.low <= self.measured <= self.high


# --------------------------------------------------------------------------- A to D: one step


def sensitivity(b: Bench, C: float) -> list[Finding]:
    """A: by the first draw under which the canary saturates, else by the draw that comes nearest."""
    least, most = 0.99 * _all_seen(b), 0.0
    for t in range(DRAWS):
        most = max(most, _moved(b, C, 1, t))
        if most >= least:
            break
    return [Finding("A", "a saturated record moves the sum by C", most, least, 1.0001)]


def drift(b: Bench, C: float) -> list[Finding]:
    """A over two steps: what a record did to layers that stay at home must not come back through the others."""
    return [Finding("A", "over two steps, by little more than 2 C", _moved(b, C, 2), 0, 2.2)]


def _moved(b: Bench, C: float, steps: int, t: int = 0) -> float:
    quiet = Private(C, 0.0, 1.0, "seeded")  # crops and Dropout of the other records are the same in both
    ins, outs = (flat(replace(b, serial=[t]).update(quiet, canary, steps)) for canary in (True, False))
    return float((ins - outs).norm()) / C


def _all_seen(b: Bench) -> bool:
    """Whether all that trains is uploaded; else part of a record's gradient stays at home."""
    return all(p.upload != "none" for p in b.plan.layers.values() if p.train)


def noise(b: Bench, loud: Private, runs: int) -> list[Finding]:
    """B."""
    rest = b.update(replace(loud, noise=0.0), False)
    draws = [b.update(loud, False) for _ in range(runs)]
    unit = loud.noise * loud.clip
    shapes, found, each = b.recipe.layers.shapes, [], []
    for n in rest:
        kept = M.as_bool(M.active(n, b.masks, b.recipe.layers), shapes[n])  # columns of pruned units do not train
        r = torch.stack([(d[n] - rest[n])[kept].double() / unit for d in draws])  # (runs, coordinates)
        spread = FAR * math.sqrt(2 / r.numel())
        found.append(Finding("B", f"variance of the noise on {n}", float(r.square().mean()), 1 - spread, 1 + spread))
        each.append(r)
    on = torch.cat(each, 1)
    silent = float((on == 0).double().mean())
    found.append(Finding("B", "share of trained coordinates without noise", silent, 0, 1e-3))
    found.append(Finding("B", "distance from the normal law (Kolmogorov-Smirnov)", _kolmogorov(on.flatten()), 0, 3.0))
    for what, a, c in (("uploads", on[:-1], on[1:]), ("coordinates", on[:, :-1], on[:, 1:])):
        z = float((a * c).mean()) * math.sqrt(a.numel())
        found.append(Finding("B", f"correlation of the noise of neighbouring {what}", z, -FAR, FAR))
    return found


def fresh(private: Private) -> list[Finding]:
    """B: what records draw for themselves goes by their place in the batch, so it must be secret, never the same."""
    if private.randomness != "os":
        return []  # a simulation: its noise repeats as well
    quiet, found = replace(private, noise=0.0, rate=1.0), []
    for what, b in (("crops", drawing(crop=1)), ("Dropout", drawing(dropout=0.5))):
        first, second = (flat(replace(b, serial=[0]).update(quiet, False)) for _ in range(2))
        repeated = float((first == second).double().mean())
        found.append(Finding("B", f"share of an upload that repeats, by {what}", repeated, 0, 0.5))
    return found


def _kolmogorov(x: Tensor) -> float:
    x = x[torch.linspace(0, len(x) - 1, min(len(x), 20_000)).long()].sort().values
    steps = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    return float((torch.special.ndtr(x) - steps).abs().max()) * math.sqrt(len(x))


def _projections(b: Bench, private: Private, runs: int) -> tuple[Tensor, Tensor]:
    """The canary's direction, read off uploads without and with it."""
    quiet = replace(private, noise=0.0)
    v = flat(b.update(quiet, True)) - flat(b.update(quiet, False))
    v = v / v.norm() / private.clip
    ins, outs = ([float(flat(b.update(private, c)) @ v) for _ in range(runs)] for c in (True, False))
    return torch.tensor(outs, dtype=torch.float64), torch.tensor(ins, dtype=torch.float64)


def _shift(outs: Tensor, ins: Tensor) -> tuple[float, float]:
    """Distance of two samples in deviations, and its standard error."""
    mu = float((ins.mean() - outs.mean()) / ((outs.var() + ins.var()) / 2).sqrt())
    return mu, math.sqrt(2 / len(ins) + mu * mu / (4 * len(ins)))


def game(b: Bench, private: Private, runs: int) -> list[Finding]:
    """C and D: tell neighbours apart by the projection on the canary."""
    one = replace(private, noise=1.0, rate=1.0)
    outs, ins = _projections(b, one, runs)
    mu, se = _shift(outs, ins)
    claimed = account.epsilon({(1.0, 1.0): 1}, DELTA)
    lower = gaussian_lower(outs.tolist(), ins.tolist(), DELTA)
    least = (1 - FAR * se) * _all_seen(b)
    return [
        Finding("C", "shift by the canary after one step, z = 1", mu, least, 1 + FAR * se),
        Finding("D", "epsilon that a test proves, one step, z = 1", lower, 0, claimed),
    ]


# --------------------------------------------------------------------------- E to G: many steps


def sampler(private: Private, local: Local) -> list[Finding]:
    """E."""
    m, T, q = 200, 2000, private.rate
    long = replace(local, steps=T, epochs=0)
    drawn = list(private_batches(private, long, m, 0, 0, 0))
    sizes = torch.tensor([len(rows) for rows in drawn], dtype=torch.float64)
    counts = torch.bincount(torch.cat(drawn), minlength=m).double() if sizes.sum() else torch.zeros(m).double()
    if q == 1:
        return [Finding("E", "records in a step", float(sizes.min()), m, m)]
    rate = FAR * math.sqrt(q * (1 - q) / (m * T))
    found = [Finding("E", "share of records in a step", float(sizes.mean()) / m, q - rate, q + rate)]
    for what, values, want in (
        ("a step's size", sizes, m * q * (1 - q)),
        ("how often a record is drawn", counts, T * q * (1 - q)),
    ):
        kurtosis = max(0.0, (1 - 6 * q * (1 - q)) / want)  # binomials of small mean have heavier tails
        spread = FAR * math.sqrt((2 + kurtosis) / len(values))
        found.append(Finding("E", f"variance of {what}", float(values.var()) / want, 1 - spread, 1 + spread))
    return found


def composition(b: Bench, private: Private, runs: int) -> list[Finding]:
    """F: T subsampled steps, each seen by the adversary, against what they are said to cost."""
    T, q, delta = 20, 0.1, 1e-3
    private = replace(private, noise=1.0, rate=q)
    quiet = replace(private, noise=0.0, rate=1.0)
    v = flat(b.update(quiet, True)) - flat(b.update(quiet, False))
    v = v / v.norm() / private.clip
    records = torch.stack([flat(_alone(b, quiet, j)) for j in range(RECORDS - 1)]) @ v  # what others add, if drawn
    center = float(records.mean()) * q * (RECORDS - 1)

    def statistic(canary: bool) -> float:
        seen = torch.stack([flat(b.update(private, canary)) for _ in range(T)]) @ v - center
        return float(torch.log1p(q * torch.expm1(seen - 0.5)).sum())  # the best one if others added nothing

    outs, ins = ([statistic(c) for _ in range(runs)] for c in (False, True))
    claimed = account.epsilon({(1.0, q): T}, delta)
    lower = gaussian_lower(outs, ins, delta)
    return [Finding("F", f"epsilon that a test proves, {T} steps at rate {q:g}, z = 1", lower, 0, claimed)]


def _alone(b: Bench, quiet: Private, j: int) -> dict[str, Tensor]:
    """What record j adds by itself."""
    alone = torch.full_like(b.without, math.nan)
    alone[j] = b.without[j]
    return replace(b, without=alone).update(quiet, False)


def counted(b: Bench, budget: Budget, local: Local) -> list[Finding]:
    """G: with no record ever drawn an upload is noise alone, and its energy counts the steps behind it."""
    ledger, tasks = Ledger(budget), 12
    steps = local_steps(local, budget.private)
    private = replace(budget.private, noise=1.0, rate=NEVER)
    energy, numbers = 0.0, 0
    for t in range(tasks):
        ledger.charge([0], t)
        s = flat(b.update(private, False, steps)) / private.clip
        energy += float(s.square().sum())
        numbers = int((s != 0).sum())
    charged = ledger.spent(0, tasks)
    ratio, spread = energy / numbers / max(charged, 1), FAR * math.sqrt(2 / (numbers * tasks))
    return [Finding("G", "noisy steps seen in uploads, per step charged", ratio, 1 - spread, 1 + spread)]


# --------------------------------------------------------------------------- all of it


@dataclass(frozen=True, slots=True)
class Subject:
    """What is audited: a run's mechanism, and the net and plan it is for."""

    budget: Budget
    local: Local
    others: str
    own: Bench | None = None  # the run's own net; the tiny one is always attacked


def at_home(own: Bench, loud: Private) -> list[Finding]:
    """A and B in the run's own net."""
    whole = own.without_q()  # where a step leaves a unit out, its noise is missing and should be
    found = [*sensitivity(own, loud.clip), *noise(whole, replace(loud, rate=NEVER), 2)]
    return [replace(f, what=f"{f.what}, in the run's own net") for f in found]


def audit(subject: Subject, parts: str = "ABCDEFG", runs: int = 300) -> list[Finding]:
    """Run these parts; every finding must pass."""
    p, small = subject.budget.private, tiny(subject.others)
    loud = replace(p, noise=p.noise or 1.0)
    all_seen = tiny(subject.others, "kept") if subject.others == "noise" else small
    work: Mapping[str, Callable[[], Sequence[Finding]]] = {
        "A": lambda: [*sensitivity(small, p.clip), *drift(small, p.clip)],
        "B": lambda: [*noise(all_seen, replace(loud, rate=1.0), 60), *fresh(p)],
        "CD": lambda: game(small, p, runs),
        "E": lambda: sampler(p, subject.local),
        "F": lambda: composition(small, p, runs // 2),
        "G": lambda: counted(small, subject.budget, subject.local),
    }
    found = [f for part, attack in work.items() if set(part) & set(parts) for f in attack()]
    if subject.own is not None:
        found += at_home(subject.own, loud)
    return sorted((f for f in found if f.part in parts), key=lambda f: f.part)
