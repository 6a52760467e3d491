"""Noise: every coordinate of every step has its own N(0, z² C²), for every client.

Uploads of steps in which no record is drawn are noise alone.  They come from several clients,
rounds and numbers of steps, and from probes; further uploads come from steps with records, minus
the same upload without noise.  Divided by z C, all of this is one matrix (uploads, coordinates) of
independent standard normal numbers if the code is right, and every check below has an exact or
safely bounded distribution.

Part "noise" looks at the size and the shape of the noise.  Part "independence" looks for anything
that is shared between tensors, rows, coordinates, steps, clients, rounds or uploads:

- values that occur twice, wherever they are;
- correlations at any distance in the list of all coordinates of all uploads;
- uploads that resemble each other, and coordinates that resemble each other over the uploads;
- the covariance over random projections.  Half of the uploads are projected on random signs and on
  the other half, whose directions are those in which the noise really varies: noise that is shared
  in any arrangement has too much energy there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3.core.randomness import Stream, stream
from fedp3.privacy.audit.findings import (
    Finding,
    at_most,
    binomial_two_sided,
    cosine_tail,
    energy_tail,
    improbable,
    kolmogorov_tail,
    least_probable,
    quadratic_exponent,
)
from fedp3.privacy.audit.neighbours import NEVER, Bench, drawing, flat
from fedp3.privacy.settings import Mechanism

NOISE, INDEPENDENCE = "noise", "independence"
UPLOADS = 48  # of one step without records
PREFIX = 1 << 16  # coordinates of a tensor in which correlations are looked for
VALUES = 200_000  # values among which repetitions are looked for
# Share of values that occur twice: 32 bits give less than 0.03 among so many values.
MOST_REPEATED = 0.1
COORDINATES = 1024  # of which all pairs are compared
TAIL = 3.3  # deviations beyond which the draws are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Standardised noise of several uploads.

    Args:
        values: (uploads, coordinates).
        tensors: name, first coordinate and row length of each tensor.
        kinds: where each upload comes from.
    """

    values: Tensor
    tensors: Sequence[tuple[str, int, int]]
    kinds: Sequence[str]

    def columns(self) -> Iterator[tuple[str, Tensor, int]]:
        """Name, values (uploads, coordinates) and row length of each tensor."""
        ends = [begin for _, begin, _ in self.tensors[1:]] + [self.values.shape[1]]
        for (name, begin, row), end in zip(self.tensors, ends, strict=True):
            yield name, self.values[:, begin:end], row


# --------------------------------------------------------------------------- collecting noise


def small_draws(bench: Bench, mechanism: Mechanism, clients: Sequence[int]) -> Draws:
    """Noise of a small network: for every client's number, and in every kind of task."""
    collector = _Collector(bench, mechanism)
    most = max(UPLOADS, len(clients))
    for j in range(most):
        collector.empty("a step without records", client=clients[j % len(clients)])
    if mechanism.randomness == "os":
        # The same task twice: only seeded noise may repeat.
        for _ in range(4):
            collector.empty("a repeated task", client=clients[0], t=1)
    for steps in (2, 3):
        for j in range(8):
            kind = f"a task of {steps} steps"
            collector.empty(kind, client=clients[j % len(clients)], steps=steps)
    for j in range(8):
        collector.empty("a probe", client=clients[-1 - j % len(clients)], probe=True)
    for j in range(12):
        collector.with_records("a step with records", clients[j % len(clients)])
    return collector.draws()


def network_draws(bench: Bench, mechanism: Mechanism, uploads: int) -> Draws:
    """Noise of the run's network under one plan."""
    collector = _Collector(bench, mechanism)
    for _ in range(uploads):
        collector.empty("a step without records")
    return collector.draws()


class _Collector:
    """Collects the noise of one client's uploads."""

    def __init__(self, bench: Bench, mechanism: Mechanism) -> None:
        self.bench, self.mechanism = bench, mechanism
        self.active = bench.trained()
        self.rows: list[Tensor] = []
        self.kinds: list[str] = []

    def empty(
        self,
        kind: str,
        steps: int = 1,
        client: int | None = None,
        t: int | None = None,
        probe: bool = False,
    ) -> None:
        """Add the noise of steps in which no record is drawn."""
        z = self.mechanism.noise_multiplier
        never = replace(self.mechanism, sample_rate=NEVER)
        lr = NEVER * len(self.bench.without) / (z * never.clip)
        upload = self.bench.update(never, False, steps, client=client, t=t, probe=probe, lr=lr)
        self._add(kind, self._select(upload), z * math.sqrt(steps))

    def with_records(self, kind: str, client: int) -> None:
        """Add the noise of a step in which all records are drawn."""
        every = replace(self.mechanism, sample_rate=1.0)
        noiseless = replace(every, noise_multiplier=0.0)
        with_noise, without = (
            self._select(self.bench.update(m, False, client=client)) for m in (every, noiseless)
        )
        self._add(kind, with_noise - without, every.noise_multiplier)

    def _select(self, upload: dict[str, Tensor]) -> Tensor:
        # A probe's network has no pruned units, so all of its coordinates train.
        parts = [
            upload[n][active] if upload[n].shape == active.shape else upload[n].flatten()
            for n, active in self.active.items()
        ]
        return torch.cat(parts)

    def _add(self, kind: str, noise: Tensor, deviation: float) -> None:
        self.rows.append(noise.double() / (deviation * self.mechanism.clip))
        self.kinds.append(kind)

    def draws(self) -> Draws:
        """All that was collected."""
        tensors, begin = [], 0
        for n, active in self.active.items():
            row = int(active[active.flatten(1).any(1)][0].sum()) if active.dim() > 1 else 1
            tensors.append((n, begin, max(1, row)))
            begin += int(active.sum())
        return Draws(values=torch.stack(self.rows), tensors=tensors, kinds=self.kinds)


# --------------------------------------------------------------------------- size and shape


def size_and_shape(draws: Draws) -> list[Finding]:
    """Part "noise": variance by tensor, row, upload and kind of task; the normal law."""
    findings = least_probable(
        [
            _variance("variance of the noise of single tensors, worst case", values, name)
            for name, values, _ in draws.columns()
        ]
    )
    kinds = list(dict.fromkeys(draws.kinds))
    for kind in kinds if len(kinds) > 1 else ():
        alike = torch.tensor([k == kind for k in draws.kinds])
        findings.append(_variance(f"variance of the noise of {kind}", draws.values[alike]))
    squares, count = draws.values.square().sum(1), draws.values.shape[1]
    findings.append(_worst("variance of the noise of single uploads, worst case", squares, count))
    rows = [
        _worst("variance of the noise of single rows, worst case", by_row, row * len(values), name)
        for name, values, row in draws.columns()
        if row > 1
        for by_row in [values.square().sum(0).unfold(0, row, row).sum(1)]
    ]
    findings += least_probable(rows)
    silent = float((draws.values == 0).all(0).double().mean())
    findings.append(at_most(NOISE, "share of trained coordinates without noise", silent, 0.0))
    return [*findings, *_normality(draws)]


def _variance(what: str, values: Tensor, note: str = "") -> Finding:
    squares, count = float(values.square().sum()), values.numel()
    return improbable(NOISE, what, squares / count, energy_tail(squares, count), note)


def _worst(what: str, squares: Tensor, count: int, note: str = "") -> Finding:
    """The least probable of several sums of squares."""
    # The farthest from the mean on either side.
    extremes = [float(squares.min()), float(squares.max())]
    p_values = [energy_tail(value, count) for value in extremes]
    p_value = min(p_values)
    measured = extremes[p_values.index(p_value)] / count
    return improbable(NOISE, what, measured, len(squares) * p_value, note)


def _normality(draws: Draws) -> list[Finding]:
    values = _spread(draws.values.flatten(), VALUES).sort().values
    n = len(values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    law = torch.special.ndtr(values)
    distance = float(torch.maximum((law - steps[:-1]).abs(), (law - steps[1:]).abs()).max())
    beyond = int((values.abs() > TAIL).sum())
    rate = math.erfc(TAIL / math.sqrt(2))
    return [
        improbable(
            NOISE,
            "distance of the noise from the normal law",
            distance,
            kolmogorov_tail(distance, n),
        ),
        improbable(
            NOISE,
            f"share of the noise beyond {TAIL:g} deviations, of what the normal law has",
            beyond / n / rate,
            binomial_two_sided(beyond, n, rate),
        ),
    ]


def _spread(values: Tensor, most: int) -> Tensor:
    """At most so many values, from everywhere."""
    if len(values) <= most:
        return values
    return values[torch.linspace(0, len(values) - 1, most).long()]


# --------------------------------------------------------------------------- independence


def independence(draws: Draws, seed: int) -> list[Finding]:
    """Part "independence": nothing of the noise is shared, in whatever arrangement."""
    short = torch.cat([values[:, :PREFIX] for _, values, _ in draws.columns()], 1)
    findings = [_repeated(short), _lags(short)]
    if len(short) > 1:
        findings.append(_alike("resemblance of two uploads", short))
    if len(short) >= 16:
        rng = stream(seed, Stream.AUDIT, 1)
        some = torch.randperm(short.shape[1], generator=rng)[:COORDINATES]
        findings += [
            _alike("resemblance of two coordinates over the uploads", short[:, some].T),
            *_projections(short, rng),
        ]
    return findings


def _repeated(values: Tensor) -> Finding:
    """Values that occur more than once, up to their sign, in the leading coordinates."""
    width = max(1, VALUES // len(values))
    magnitudes = values[:, :width].abs().float().flatten().sort().values
    same = magnitudes[1:] == magnitudes[:-1]
    close = (magnitudes[1:] - magnitudes[:-1]) <= 1e-7 * magnitudes[1:]
    share = float((same | close).double().mean()) if len(magnitudes) > 1 else 0.0
    what = "share of noise values that occur twice"
    return at_most(INDEPENDENCE, what, share, MOST_REPEATED)


def _lags(values: Tensor) -> Finding:
    """The largest correlation at any distance in the list of all values."""
    x = values.flatten()
    n = len(x)
    spectrum = torch.fft.rfft(x, 2 * n)
    sums = torch.fft.irfft(spectrum.abs().square(), 2 * n)[1:n]
    pairs = torch.arange(n - 1, 0, -1, dtype=torch.float64)
    worst = int((sums.abs() / pairs.sqrt()).nan_to_num(math.inf).argmax())
    total, count = float(sums[worst]), float(pairs[worst])
    # The quadratic form of a shift has eigenvalues in [-1, 1].
    exponent = quadratic_exponent(abs(total), math.sqrt(count / 2), 1.0)
    p_value = 2 * n * math.exp(-exponent)
    what = "correlation of the noise at any distance, worst case"
    return improbable(INDEPENDENCE, what, total / count, p_value, f"distance {worst + 1}")


def _alike(what: str, vectors: Tensor, note: str = "") -> Finding:
    """The largest cosine between two of these vectors."""
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T).triu(1)
    largest = float(cosines.abs().max()) if not bool(cosines.isnan().any()) else math.nan
    count, dimension = vectors.shape
    p_value = cosine_tail(largest, dimension, count * (count - 1) // 2)
    return improbable(INDEPENDENCE, f"{what}, worst case", largest, p_value, note)


def _projections(values: Tensor, rng: torch.Generator) -> list[Finding]:
    """Energy of uploads in random directions and in the directions of other uploads."""
    order = torch.randperm(len(values), generator=rng)
    first, second = values[order[: len(order) // 2]], values[order[len(order) // 2 :]]
    count = values.shape[1]
    random = torch.randint(0, 2, (min(32, count), count), generator=rng).double() * 2 - 1
    findings = []
    for what, directions, projected in (
        ("random directions", random, values),
        ("the directions of other uploads", first[: count // 2], second),
    ):
        # Orthonormal, so that projections of white noise are independent.
        basis = torch.linalg.qr(directions.T.nan_to_num())[0]
        squares = float((projected @ basis).square().sum())
        number = len(projected) * basis.shape[1]
        text = f"energy of the noise in {what}"
        findings.append(
            improbable(INDEPENDENCE, text, squares / number, energy_tail(squares, number))
        )
    return findings


def across_clients(by_client: Sequence[Mapping[str, Tensor]]) -> list[Finding]:
    """Noise of different clients on the same tensor of the run's network.

    Args:
        by_client: the noise of each client on each tensor that it trains in full.
    """
    by_tensor: dict[str, list[Tensor]] = {}
    for tensors in by_client:
        for n, w in tensors.items():
            by_tensor.setdefault(n, []).append(w.flatten()[:PREFIX])
    what = "resemblance of two clients' noise on a tensor"
    pairs = [
        _alike(what, torch.stack(rows), n)
        for n, rows in by_tensor.items()
        if len(rows) > 1 and rows[0].numel() > 1
    ]
    return least_probable(pairs)


def fresh(mechanism: Mechanism) -> list[Finding]:
    """Crops and Dropout are drawn by position in the batch, so their draws must not repeat."""
    if mechanism.randomness != "os":
        return []  # a simulation: its noise repeats as well
    noiseless = replace(mechanism, noise_multiplier=0.0, sample_rate=1.0)
    findings = []
    for what, bench in (("crops", drawing(crop=1)), ("Dropout", drawing(dropout=0.5))):
        first, second = (flat(bench.update(noiseless, False, t=1)) for _ in range(2))
        repeated = float((first == second).double().mean())
        text = f"share of an upload that repeats, by {what}"
        findings.append(at_most(INDEPENDENCE, text, repeated, 0.5))
    return findings
