"""The ledger: what was released of each client's records, and what that cost.

It is a file that only grows, and it is synced to disk before any task is sent.  One line is one
task of one client:

    {"client", "t", "steps", "noise_multiplier", "sample_rate", "run",
     "released", "account", "time", "epsilon", "previous"}

`epsilon` is what the client's records have spent after this task.  `previous` is the SHA-256 of the
line before, so that no line can be changed or left out unnoticed; an `Anchor`, stored elsewhere,
reveals that lines are missing at the end.
A task that failed, came late or was lost in a crash stays charged, since its noise was drawn and
somebody may have seen the update.  With seeded randomness a repeated round is the identical
release, so it is charged once.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import finite_or_none
from fedp3.privacy import accountant
from fedp3.privacy.settings import Budget, Mechanism

FILE = "ledger.jsonl"
NO_LINE = "0" * 64  # what the first line has as `previous`
LEGACY_KEYS = {"z": "noise_multiplier", "q": "sample_rate"}  # of 0.1.0.dev; devices keep their file
TRAINING, TEST = "training", "test"  # the two disjoint accounts of a device's records


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One task of one client.

    Args:
        client: the client.
        t: the round.
        steps: the number of noisy releases; each is a sum over records with Gaussian noise.
        noise_multiplier: the standard deviation of the noise that is really drawn, in units of the
            largest influence of one record; 0 means none, so that no epsilon holds.
        sample_rate: the probability with which each record is in a step.
        run: the run.
        released: what leaves the client: "update", "probe" or "scores".
        account: the records that pay: those that train, or those that are only scored.
        time: when the charge was made, in UTC.
        epsilon: what these records have spent after this task; None means that no epsilon holds.
    """

    client: int
    t: int
    steps: int
    noise_multiplier: float
    sample_rate: float
    run: str = ""
    released: str = "update"
    account: str = TRAINING
    time: str = ""
    epsilon: float | None = None


@dataclass(frozen=True, slots=True)
class Anchor:
    """How far a ledger had grown, for what is stored beside it and relies on it."""

    entries: int = 0
    last: str = NO_LINE  # SHA-256 of the last line


@dataclass(frozen=True, slots=True)
class Ledger:
    """The charges of a run.

    Args:
        budget: what each client may spend.
        run: the name of the run.
        folder: where the ledger's file is; None: it is in memory only.
        charges: the charges of each client, in the order in which they were made.
        also: is called with new charges, before their tasks are sent.
    """

    budget: Budget
    run: str = ""
    folder: Path | None = None
    charges: dict[int, list[Charge]] = field(default_factory=dict)
    also: Callable[[Sequence[Charge]], None] = lambda charges: None

    def spent(self, client: int, t: int) -> int:
        """The steps that count against a client before round t.

        A seeded run that repeats round t decides as it did the first time, so its charges of
        round t and later do not count.
        """
        charges = self._counted(client)
        if self.budget.mechanism.randomness != "os":
            charges = [c for c in charges if c.t < t]
        return sum(c.steps for c in charges)

    def can_pay(self, client: int, t: int) -> bool:
        """Whether one more task fits into the client's budget."""
        return self.spent(client, t) + self.budget.steps_per_task <= self.budget.allowed_steps

    def charge(self, clients: Iterable[int], t: int, released: str = "update") -> None:
        """Charge one task of round t to each client, on disk before this returns."""
        mechanism, steps = self.budget.mechanism, self.budget.steps_per_task
        new = [
            new_charge(mechanism, client=i, t=t, steps=steps, run=self.run, released=released)
            for i in clients
        ]
        self.add(new)
        if self.folder is not None:
            append(
                self.folder,
                [replace(c, epsilon=finite_or_none(self._epsilon(c.client))) for c in new],
            )
        self.also(new)

    def add(self, charges: Iterable[Charge]) -> None:
        """Take over charges that are on disk already."""
        for c in charges:
            self.charges.setdefault(c.client, []).append(c)

    def epsilons(self) -> dict[int, float]:
        """The epsilon spent by each client that was charged at least once."""
        return {client: self._epsilon(client) for client in sorted(self.charges)}

    def epsilon_max(self) -> float:
        """The largest epsilon that any client has spent."""
        if not self.charges:
            return 0.0
        steps = {i: sum(c.steps for c in self._counted(i)) for i in self.charges}
        return self._epsilon(max(steps, key=steps.__getitem__))

    def _epsilon(self, client: int) -> float:
        spent = composed(self._counted(client))
        return accountant.epsilon(spent, self.budget.delta)

    def _counted(self, client: int) -> Collection[Charge]:
        """The charges that count: all of them, or one for each round of a seeded run."""
        charges = self.charges.get(client, [])
        if self.budget.mechanism.randomness == "os":
            return charges
        return {c.t: c for c in charges}.values()


def new_charge(mechanism: Mechanism, **fields: Any) -> Charge:
    """A charge of now, under this mechanism."""
    return Charge(
        noise_multiplier=mechanism.noise_multiplier,
        sample_rate=mechanism.sample_rate,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        **fields,
    )


def composed(charges: Iterable[Charge]) -> accountant.Spent:
    """Charges in the form that the accountant takes."""
    steps: Counter[tuple[float, float]] = Counter()
    for c in charges:
        steps[c.noise_multiplier, c.sample_rate] += c.steps
    return steps


def open_ledger(budget: Budget, run: str, folder: Path | None, rounds: int = 0) -> Ledger:
    """The ledger of a new or resumed run.

    Args:
        budget: what each client may spend.
        run: the name of the run.
        folder: its run folder, if it has one.
        rounds: the number of rounds that the run has finished.

    Raises:
        InputError: the noise has changed since.
        RunError: the ledger lacks rounds that the run has finished.
    """
    ledger = Ledger(budget, run, folder)
    if folder is None:
        return ledger
    mechanism = budget.mechanism
    now = (mechanism.noise_multiplier, mechanism.sample_rate)
    charges = read(folder)
    for c in charges:
        then = (c.noise_multiplier, c.sample_rate)
        if then != now:
            raise InputError(
                f"{folder} was started with noise multiplier {then[0]:g} and sample rate "
                f"{then[1]:g}, now they would be {now[0]:g} and {now[1]:g}; start a new run"
            )
    if max((c.t for c in charges), default=-1) < rounds - 1:
        raise RunError(
            f"{folder / FILE} is missing or incomplete: the run has finished {rounds} rounds, and "
            "their charges are not there. Restore the file; without it nothing more may be spent"
        )
    ledger.add(charges)
    return ledger


# --------------------------------------------------------------------------- the file


def append(folder: Path, charges: Iterable[Charge]) -> Anchor:
    """Write charges to the end of the ledger's file, and sync it to disk.

    Returns:
        How far the ledger has grown.
    """
    path = folder / FILE
    try:
        with path.open("a+b") as file:
            file.seek(0)
            content = file.read()
            complete = content.rfind(b"\n") + 1
            if complete < len(content):  # a crash left a partial line, before anything was sent
                file.truncate(complete)
            lines = content[:complete].splitlines()
            entries, last = len(lines), _sha256(lines[-1]) if lines else NO_LINE
            new = []
            for c in charges:
                line = json.dumps(asdict(c) | {"previous": last}).encode()
                entries, last = entries + 1, _sha256(line)
                new.append(line + b"\n")
            file.write(b"".join(new))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"cannot write to the ledger {path}: {error.strerror or error}; nothing was sent"
        ) from error
    return Anchor(entries, last)


def read(folder: Path, anchor: Anchor | None = None) -> list[Charge]:
    """All charges of the file; a partial last line is left out, because its task was never sent.

    Args:
        folder: where the file is.
        anchor: how far the ledger must have grown at least.

    Raises:
        RunError: a line is no charge, or was changed, or lines are missing.
    """
    path = folder / FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    charges = []
    previous, chained = NO_LINE, False
    for number, line in enumerate(lines, 1):
        c, claimed = _parse(line)
        if c is None:
            raise RunError(
                f"{path}, line {number} is not a charge; since it is not known what was spent, "
                "nothing more may be spent"
            )
        chained = chained or claimed is not None
        if chained and claimed != previous:
            raise RunError(
                f"{path} was changed before line {number}: the line does not follow the one before "
                "it. Restore the file; until then nothing more may be spent"
            )
        charges.append(c)
        previous = _sha256(line)
    if anchor is not None and anchor.entries:
        there = lines[anchor.entries - 1] if anchor.entries <= len(lines) else b""
        if _sha256(there) != anchor.last:
            raise RunError(
                f"{path} has {len(lines)} lines, and what is stored beside it was written after "
                f"line {anchor.entries}: the ledger was deleted, cut or replaced. Restore it; "
                "until then nothing more may be spent"
            )
    return charges


def anchor_of(folder: Path) -> Anchor:
    """How far the ledger in this folder has grown."""
    path = folder / FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return Anchor(len(lines), _sha256(lines[-1])) if lines else Anchor()


def _parse(line: bytes) -> tuple[Charge | None, str | None]:
    """A charge and its link to the line before; ledgers of 0.1.0.dev have no such chain."""
    try:
        fields = json.loads(line)
        previous = fields.pop("previous", None)
        c = Charge(**{LEGACY_KEYS.get(key, key): value for key, value in fields.items()})
        valid = min(c.client, c.t, c.steps, c.noise_multiplier) >= 0 and 0 < c.sample_rate <= 1
    except (ValueError, TypeError, AttributeError):
        return None, None
    return (c if valid else None), previous


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def summary(epsilons: Mapping[int, float]) -> dict[str, float]:
    """The smallest, median and largest epsilon: clients differ, so one number would mislead."""
    ordered = sorted(epsilons.values()) or [0.0]
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
