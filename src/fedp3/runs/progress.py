"""The rounds of a run on a screen: a live bar in a terminal or a notebook, else a line each."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fedp3.core.scores import score_of
from fedp3.runs.run_folder import as_event
from fedp3.server.context import RoundRecord

Show = Callable[[RoundRecord], None]


class _Tally:
    """Totals over the rounds so far."""

    def __init__(self) -> None:
        self.ok = self.late = self.rejected = self.up = self.down = 0
        self.G = "-"
        self.C = ""
        self.epsilon: float | None = None
        self.client_epsilon: float | None = None
        self.virtual_seconds: float | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Count the event of one round."""
        self.ok += len(event["accepted"])
        self.late += len(event["late"])
        self.rejected += len(event["rejected"])
        self.up += event["bytes_up"]
        self.down += event["bytes_down"]
        self.G = score_of(event["G"]).text(event["G"]["mean"]) if event["G"] else self.G
        if event.get("C"):
            self.C = f"  C {score_of(event['C']).text(event['C']['mean'])}"
        self.epsilon = event["epsilon"]
        self.client_epsilon = event["client_epsilon"]
        if event.get("clock"):
            self.virtual_seconds = event["clock"]["ended"]

    def text(self) -> str:
        """The totals as one line."""
        spent = "" if self.epsilon is None else f"  epsilon {self.epsilon:.2f}"
        if self.client_epsilon is not None:
            spent += f"  client-level epsilon {self.client_epsilon:.2f}"
        virtual = "" if self.virtual_seconds is None else f"  virtual {self.virtual_seconds:,.0f} s"
        return (
            f"G {self.G}{self.C}  ok {self.ok} late {self.late} rejected {self.rejected}  "
            f"MB up {self.up / 1e6:.1f} down {self.down / 1e6:.1f}{spent}{virtual}"
        )


def can_show_a_bar(console: Console) -> bool:
    """Whether this is a terminal or a notebook, in which a line can be drawn again."""
    return console.is_terminal or console.is_jupyter


@contextmanager
def rounds(
    console: Console, name: str, total: int, before: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Show]:
    """Show the rounds of one run as they end.

    Args:
        console: where to.
        name: the name of the run.
        total: its number of rounds.
        before: events of the rounds before it was resumed.
    """
    tally = _Tally()
    for event in before:
        tally.add(event)
    show = _bar if can_show_a_bar(console) else _lines
    with show(console, name, total, len(before), tally) as on_round:
        yield on_round


@contextmanager
def _lines(console: Console, name: str, total: int, done: int, tally: _Tally) -> Iterator[Show]:
    """One line for each round."""
    began = time.monotonic()

    def on_round(record: RoundRecord) -> None:
        tally.add(as_event(record))
        per_round = (time.monotonic() - began) / max(1, record.t + 1 - done)
        left = per_round * (total - record.t - 1)
        loss = "-" if record.loss is None else f"{record.loss:.3f}"
        void = "  VOID" if record.void else ""
        progress = f"{name} round {record.t + 1}/{total}  loss {loss}"
        text = f"{progress}  {tally.text()}  {left:.0f} s left{void}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    yield on_round


@contextmanager
def _bar(console: Console, name: str, total: int, done: int, tally: _Tally) -> Iterator[Show]:
    """A live bar.  The totals come last, so that a narrow screen shortens them and nothing else."""
    last = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", table_column=last),
        console=console,
        expand=True,
    ) as bar:
        task = bar.add_task(name, total=total, completed=done, text="")

        def on_round(record: RoundRecord) -> None:
            tally.add(as_event(record))
            bar.update(task, advance=1, text=tally.text())

        yield on_round


def maybe_rounds(
    wanted: bool | None, name: str, total: int, before: Sequence[Mapping[str, Any]]
) -> AbstractContextManager[Show]:
    """Show rounds on standard error as Python code wants it.

    Args:
        wanted: None shows a bar where one can be drawn, and nothing elsewhere.
        name: the name of the run.
        total: its number of rounds.
        before: events of the rounds before it was resumed.
    """
    console = Console(stderr=True)
    if wanted or (wanted is None and can_show_a_bar(console)):
        return rounds(console, name, total, before)
    return _nothing()


@contextmanager
def _nothing() -> Iterator[Show]:
    yield lambda record: None
