"""Who has spent what: a file that only grows, written and synced before anything leaves.

One line is one client's task: {"client", "t", "steps", "z", "q", "run"}.  A task that failed, came late or was lost in
a crash stays charged, since its noise was drawn and somebody may have seen the answer.  With seeded randomness a
replayed round is the identical release: it is charged once.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedp3.errors import InputError, RunError
from fedp3.locks import locked
from fedp3.privacy import account
from fedp3.types import Private

FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class Budget:
    """What one run may cost each of its clients."""

    private: Private
    steps: int  # of one task
    epsilon: float
    delta: float
    accountant: str
    allowed: int  # steps a client may take in all: found once, compared every round


@dataclass(frozen=True, slots=True)
class Charge:
    """One client's task of one round."""

    client: int
    t: int
    steps: int
    z: float
    q: float
    run: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The charges of a run; on disk too, if it has a folder."""

    budget: Budget
    run: str = ""
    folder: Path | None = None
    charges: dict[int, list[Charge]] = field(default_factory=dict)  # client -> in the order they were made

    def spent(self, client: int, t: int) -> int:
        """Steps that count against a client before round t; a seeded replay decides as the first time did."""
        return sum(c.steps for c in self._counted(client) if c.t < t or self.budget.private.randomness == "os")

    def can_pay(self, client: int, t: int) -> bool:
        """Whether one more task fits into the client's budget."""
        return self.spent(client, t) + self.budget.steps <= self.budget.allowed

    def charge(self, clients: Iterable[int], t: int) -> None:
        """Charge one task of round t to each, on disk before this returns."""
        p = self.budget.private
        new = [Charge(i, t, self.budget.steps, p.noise, p.rate, self.run) for i in clients]
        if self.folder is not None:
            append(self.folder, new)
        for c in new:
            self.charges.setdefault(c.client, []).append(c)

    def epsilons(self) -> dict[int, float]:
        """What each client that was ever asked has spent."""
        return {i: self._epsilon(self._counted(i)) for i in sorted(self.charges)}

    def epsilon_max(self) -> float:
        """The largest of them."""
        most = max(self.charges, key=lambda i: sum(c.steps for c in self._counted(i)), default=None)
        return 0.0 if most is None else self._epsilon(self._counted(most))

    def _epsilon(self, charges: Iterable[Charge]) -> float:
        return account.epsilon(composed(charges), self.budget.delta, self.budget.accountant)

    def _counted(self, client: int) -> Iterable[Charge]:
        mine = self.charges.get(client, [])
        return mine if self.budget.private.randomness == "os" else {c.t: c for c in mine}.values()


def composed(charges: Iterable[Charge]) -> account.Spent:
    """Charges as the accountant takes them."""
    total: Counter[tuple[float, float]] = Counter()
    for c in charges:
        total[c.z, c.q] += c.steps
    return total


def open_ledger(budget: Budget, run: str, folder: Path | None) -> Ledger:
    """The ledger of a new run, or of one that goes on; refused if the noise is not what it was."""
    ledger = Ledger(budget, run, folder)
    for c in read(folder) if folder is not None else []:
        if (c.z, c.q) != (budget.private.noise, budget.private.rate):
            raise InputError(
                f"{folder} was begun with noise multiplier {c.z:g} and sample rate {c.q:g}, now they would be "
                f"{budget.private.noise:g} and {budget.private.rate:g}: another accountant is installed. Install what "
                f"run.json names, or begin anew with privacy.noise_multiplier={c.z:g}"
            )
        ledger.charges.setdefault(c.client, []).append(c)
    return ledger


# --------------------------------------------------------------------------- the file


def append(folder: Path, charges: Iterable[Charge]) -> None:
    """Write charges to the end of the ledger and to the disk."""
    path = folder / FILE
    lines = "".join(json.dumps(asdict(c)) + "\n" for c in charges).encode()
    try:
        with path.open("a+b") as file:
            file.seek(0)
            whole = file.read()
            if not whole.endswith(b"\n"):  # a crash cut the last line short, before anything left
                file.truncate(whole.rfind(b"\n") + 1)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"cannot write to the ledger {path}: {error.strerror or error}; nothing was sent") from error


def read(folder: Path) -> list[Charge]:
    """All charges so far, but for a last line that a crash cut short: its task never left."""
    path = folder / FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    charges = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            c = Charge(**json.loads(line))
            whole = min(c.client, c.t, c.steps, c.z) >= 0 and 0 < c.q <= 1
        except (ValueError, TypeError):
            whole = False
        if not whole:
            raise RunError(f"{path}, line {number} is not a charge; what was spent is not known, so nothing can be")
        charges.append(c)
    return charges


# --------------------------------------------------------------------------- on a device


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of a device allows, whatever a server asks: over all runs together."""

    epsilon: float
    delta: float = 1e-5


def permit(
    folder: Path, client: int, t: int, private: Private | None, steps: int, policy: Policy, run: str = ""
) -> str:
    """Charge a task to this device's own ledger before it trains; otherwise why it must not, and nothing is charged."""
    if private is None:
        return "this device trains under LDP only, and the run has none"
    if private.randomness != "os":
        return f"this device draws its own noise, and the run asks for {private.randomness} noise"
    new = Charge(client, t, steps, private.noise, private.rate, run)
    with locked(folder, ".ledger", wait=True):  # a device may be asked twice at once, and nodes may share a folder
        mine = [c for c in read(folder) if c.client == client]
        after = account.epsilon(composed([*mine, new]), policy.delta)
        if after > policy.epsilon:
            return f"epsilon would be {after:.2f} at delta {policy.delta:g}; this device allows {policy.epsilon:g}"
        append(folder, [new])
    return ""


def summary(epsilons: Mapping[int, float]) -> dict[str, float]:
    """Smallest, middle and largest: clients differ, so one number would not do."""
    ordered = sorted(epsilons.values()) or [0.0]
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
