"""The ledger of a run: a file that only grows, and is synced to disk before any task is sent.

One line is one client's task: {"client", "t", "steps", "noise_multiplier", "sample_rate", "run"}.
A task that failed, came late or was lost in a crash stays charged, since its noise was drawn and
somebody may have seen the update.  With seeded randomness a repeated round is the identical
release, so it is charged once.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import locked
from fedp3.privacy import accountant
from fedp3.privacy.settings import Budget, Mechanism

FILE = "ledger.jsonl"
LEGACY_KEYS = {"z": "noise_multiplier", "q": "sample_rate"}  # of 0.1.0.dev; devices keep their file


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One client's task of one round."""

    client: int
    t: int
    steps: int
    noise_multiplier: float
    sample_rate: float
    run: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The charges of a run.

    Args:
        budget: what each client may spend.
        run: the name of the run.
        folder: where the ledger's file is; None: it is in memory only.
        charges: the charges of each client, in the order in which they were made.
    """

    budget: Budget
    run: str = ""
    folder: Path | None = None
    charges: dict[int, list[Charge]] = field(default_factory=dict)

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

    def charge(self, clients: Iterable[int], t: int) -> None:
        """Charge one task of round t to each client, on disk before this returns."""
        mechanism, steps = self.budget.mechanism, self.budget.steps_per_task
        new = [_charge(client, t, mechanism, steps, self.run) for client in clients]
        if self.folder is not None:
            append(self.folder, new)
        self.add(new)

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
        return accountant.epsilon(spent, self.budget.delta, self.budget.accountant)

    def _counted(self, client: int) -> Collection[Charge]:
        """The charges that count: all of them, or one for each round of a seeded run."""
        charges = self.charges.get(client, [])
        if self.budget.mechanism.randomness == "os":
            return charges
        return {c.t: c for c in charges}.values()


def _charge(client: int, t: int, mechanism: Mechanism, steps: int, run: str) -> Charge:
    return Charge(
        client=client,
        t=t,
        steps=steps,
        noise_multiplier=mechanism.noise_multiplier,
        sample_rate=mechanism.sample_rate,
        run=run,
    )


def composed(charges: Iterable[Charge]) -> accountant.Spent:
    """Charges in the form that the accountant takes."""
    steps: Counter[tuple[float, float]] = Counter()
    for c in charges:
        steps[c.noise_multiplier, c.sample_rate] += c.steps
    return steps


def open_ledger(budget: Budget, run: str, folder: Path | None) -> Ledger:
    """The ledger of a new or resumed run; raises an error if the noise has changed since."""
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
                f"{then[1]:g}, now they would be {now[0]:g} and {now[1]:g}: another accountant is "
                "installed. Install the one that run.json names, or start a new run with "
                f"noise_multiplier={then[0]:g}"
            )
    ledger.add(charges)
    return ledger


# --------------------------------------------------------------------------- the file


def append(folder: Path, charges: Iterable[Charge]) -> None:
    """Write charges to the end of the ledger's file, and sync it to disk."""
    path = folder / FILE
    lines = "".join(json.dumps(asdict(c)) + "\n" for c in charges).encode()
    try:
        with path.open("a+b") as file:
            file.seek(0)
            content = file.read()
            if not content.endswith(b"\n"):  # a crash left a partial line, before anything was sent
                file.truncate(content.rfind(b"\n") + 1)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"cannot write to the ledger {path}: {error.strerror or error}; nothing was sent"
        ) from error


def read(folder: Path) -> list[Charge]:
    """All charges of the file; a partial last line is left out, because its task was never sent."""
    path = folder / FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    charges = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            fields = json.loads(line).items()
            c = Charge(**{LEGACY_KEYS.get(key, key): value for key, value in fields})
            valid = min(c.client, c.t, c.steps, c.noise_multiplier) >= 0 and 0 < c.sample_rate <= 1
        except (ValueError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise RunError(
                f"{path}, line {number} is not a charge; since it is not known what was spent, "
                "nothing more may be spent"
            )
        charges.append(c)
    return charges


# --------------------------------------------------------------------------- on a device


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of a device allows over all runs together, whatever a server requests."""

    epsilon: float
    delta: float = 1e-5


def permit(
    folder: Path,
    client: int,
    t: int,
    mechanism: Mechanism | None,
    steps: int,
    policy: Policy,
    run: str = "",
) -> str:
    """Charge a task to the ledger of this device before it trains.

    Args:
        folder: where the device's ledger is, over all runs.
        client: the client that the device is.
        t: the round.
        mechanism: the mechanism of the run; None without LDP.
        steps: steps of the task.
        policy: what the owner of the device allows.
        run: the name of the run.

    Returns:
        Why the device must not train, and then nothing is charged; empty if it may.
    """
    if mechanism is None:
        return "this device trains under LDP only, and the run has none"
    if mechanism.randomness != "os":
        return (
            "this device accepts only noise from its own operating system, and the run wants "
            f"{mechanism.randomness} noise"
        )
    new = _charge(client, t, mechanism, steps, run)
    # A device may get two tasks at once, and several nodes may share a folder.
    with locked(folder, ".ledger", wait=True):
        earlier = [c for c in read(folder) if c.client == client]
        after = accountant.epsilon(composed([*earlier, new]), policy.delta)
        if after > policy.epsilon:
            return (
                f"epsilon would be {after:.2f} at delta {policy.delta:g}; this device allows "
                f"{policy.epsilon:g}"
            )
        append(folder, [new])
    return ""


def summary(epsilons: Mapping[int, float]) -> dict[str, float]:
    """The smallest, median and largest epsilon: clients differ, so one number would mislead."""
    ordered = sorted(epsilons.values()) or [0.0]
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
