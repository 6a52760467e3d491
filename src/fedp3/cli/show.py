"""What a run looks like on a terminal: a live bar, or plain lines where there is none; closing tables."""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from fedp3.driver import OnRound
    from fedp3.server import RoundRecord

SIMULATED = {"seeded": ", simulation only: whoever knows run.seed can take the noise away"}
WIDE = 200  # columns where nobody looks at a terminal: nothing is cut
out = Console() if sys.stdout.isatty() else Console(width=WIDE)
err = Console(stderr=True)


def share(value: float | None, digits: int = 1) -> str:
    """An accuracy, or another share, for people."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def say(text: str) -> None:
    """A line about what is going on; never on standard output, where results are."""
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """A line of the result."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table; columns say how they align."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in columns.items():
        shown.add_column(name, justify=side, no_wrap=side == "right")  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*map(escape, row))  # a folder may be called runs/x[1]
    out.print(shown)


def as_json(value: Mapping[str, Any]) -> None:
    """One object on the last line of standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class _Tally:
    """Sums over the rounds seen."""

    def __init__(self) -> None:
        self.ok = self.late = self.rejected = self.up = self.down = 0
        self.G: float | None = None
        self.epsilon: float | None = None

    def add(self, e: Mapping[str, Any]) -> None:
        """A round, as it is recorded."""
        self.ok += len(e["accepted"])
        self.late += len(e["late"])
        self.rejected += len(e["rejected"])
        self.up += e["bytes_up"]
        self.down += e["bytes_down"]
        self.G = e["G"]["mean"] if e["G"] else self.G
        self.epsilon = e["epsilon"]

    def text(self) -> str:
        spent = "" if self.epsilon is None else f"  epsilon {self.epsilon:.2f}"
        return (
            f"G {share(self.G)}  ok {self.ok} late {self.late} rejected {self.rejected}  "
            f"MB up {self.up / 1e6:.1f} down {self.down / 1e6:.1f}{spent}"
        )


@contextmanager
def rounds(name: str, total: int, before: Sequence[Mapping[str, Any]] = ()) -> Iterator["OnRound"]:
    """Show the rounds of one run as they end; `before` are the events of those that ended earlier."""
    from fedp3.record import as_event

    tally, done = _Tally(), len(before)
    for e in before:
        tally.add(e)
    if not err.is_terminal:
        began = time.monotonic()

        def line(r: "RoundRecord") -> None:
            tally.add(as_event(r))
            left = (time.monotonic() - began) / max(1, r.t + 1 - done) * (total - r.t - 1)
            loss = "-" if r.loss is None else f"{r.loss:.3f}"
            void = "  VOID" if r.void else ""
            say(f"{name} round {r.t + 1}/{total}  loss {loss}  {tally.text()}  {left:.0f} s left{void}")

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=err
    ) as bar:
        task = bar.add_task(name, total=total, completed=done, text="")

        def advance(r: "RoundRecord") -> None:
            tally.add(as_event(r))
            bar.update(task, advance=1, text=tally.text())

        yield advance


def results(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, float] | None = None) -> None:
    """The closing table: accuracies, bytes (against a dense run if there is one), time."""
    names = ("G", "D", "P", "worst", "MB up", "MB down", "rejected", "seconds")
    table(
        {"run": "left", **dict.fromkeys(names, "right")},
        [
            (
                str(r.get("name") or r["method"]),
                share(r["accuracy_global"]),
                share(r["accuracy_dispatched"]),
                share(r["accuracy_personal"]),
                share(r["accuracy_worst_client"]),
                _against(r["mb_up"], dense["mb_up"] if dense else None),
                _against(r["mb_down"], dense["mb_down"] if dense else None),
                str(r["rejected"]),
                f"{r['seconds']:.1f}",
            )
            for r in rows
        ],
    )


def command(*words: object) -> str:
    """A command to type next, quoted as a shell wants it."""
    return shlex.join(["fedp3", *map(str, words)])


def guarantee(p: Mapping[str, Any]) -> str:
    """What LDP promises, with all that gives an epsilon its meaning, in one sentence."""
    shown = {k: "unbounded" if v is None else f"{v:.2f}" for k, v in p.get("spent", {"<=": p["epsilon"]}).items()}
    so_far = "epsilon " + ", ".join(f"{k} {v}" for k, v in shown.items())
    return (
        f"LDP per training record of a client: {so_far} at delta {p['delta']:g} ({p['adjacency']}, {p['sampling']} "
        f"sampling at rate {p['sample_rate']:g}, noise multiplier {p['noise_multiplier']:g}, clip {p['clip']:g}; "
        f"accountant {p['accountant']}; randomness {p['randomness']}{SIMULATED.get(p['randomness'], '')})"
    )


def _against(value: float, whole: float | None) -> str:
    return f"{value:.1f} ({100 * value / whole:.0f} %)" if whole else f"{value:.1f}"
