"""What a run looks like on a terminal: a live bar, or plain lines where there is none; closing tables."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from fedp3.driver import OnRound
    from fedp3.server import RoundRecord

out = Console()
err = Console(stderr=True)


def share(value: float | None) -> str:
    """An accuracy for people."""
    return "-" if value is None else f"{100 * value:.1f} %"


def say(text: str) -> None:
    """A line about what is going on; never on standard output, where results are."""
    err.print(text, highlight=False)


def as_json(value: Mapping[str, Any]) -> None:
    """One object on the last line of standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class _Tally:
    """Sums over the rounds seen."""

    def __init__(self) -> None:
        self.ok = self.late = self.rejected = self.up = self.down = 0
        self.G: float | None = None

    def add(self, r: "RoundRecord") -> None:
        self.ok += len(r.accepted)
        self.late += len(r.late)
        self.rejected += len(r.rejected)
        self.up += r.bytes_up
        self.down += r.bytes_down
        self.G = r.G.mean if r.G else self.G

    def text(self) -> str:
        return (
            f"G {share(self.G)}  ok {self.ok} late {self.late} rejected {self.rejected}  "
            f"MB up {self.up / 1e6:.1f} down {self.down / 1e6:.1f}"
        )


@contextmanager
def rounds(name: str, total: int, done: int = 0) -> Iterator["OnRound"]:
    """Show the rounds of one run as they end."""
    tally = _Tally()
    if not err.is_terminal:
        began = time.monotonic()

        def line(r: "RoundRecord") -> None:
            tally.add(r)
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
            tally.add(r)
            bar.update(task, advance=1, text=tally.text())

        yield advance


def results(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, float] | None = None) -> None:
    """The closing table: accuracies, bytes (against the first row if told), time."""
    table = Table(title=None)
    for name in ("run", "G", "D", "P", "worst client", "MB up", "MB down", "rejected", "time"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for r in rows:
        table.add_row(
            str(r.get("name") or r["method"]),
            share(r["accuracy_global"]),
            share(r["accuracy_dispatched"]),
            share(r["accuracy_personal"]),
            share(r["accuracy_worst_client"]),
            _against(r["mb_up"], dense and dense["mb_up"]),
            _against(r["mb_down"], dense and dense["mb_down"]),
            str(r["rejected"]),
            f"{r['seconds']:.1f} s",
        )
    out.print(table)


def _against(value: float, whole: float | None) -> str:
    return f"{value:.1f} ({100 * value / whole:.0f} %)" if whole else f"{value:.1f}"
