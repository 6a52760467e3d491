"""Output of commands: progress as a live bar or as plain lines, tables, and lines of text."""

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

from fedp3.core.scores import score_of

if TYPE_CHECKING:
    from fedp3.runs.session import OnRound
    from fedp3.server.context import RoundRecord

SIMULATED = {"seeded": ", simulation only: whoever knows run.seed can remove the noise"}
WIDE = 200  # columns of output that does not go to a terminal, so that nothing is shortened
out = Console() if sys.stdout.isatty() else Console(width=WIDE)
err = Console(stderr=True)


def share(value: float | None, digits: int = 1) -> str:
    """An accuracy, or another share of 1, in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def note(text: str) -> None:
    """Print a line about progress to standard error; standard output has the results."""
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def line(text: str) -> None:
    """Print a line of the result."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def table(
    columns: Mapping[str, str], rows: Sequence[Sequence[str]], title: str | None = None
) -> None:
    """Print a table.

    Args:
        columns: from the name of each column to its alignment, "left" or "right".
        rows: the cells.
        title: is printed above the table.
    """
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in columns.items():
        shown.add_column(name, justify=side, no_wrap=side == "right")  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*map(escape, row))  # a folder may be called runs/x[1]
    out.print(shown)


def as_json(value: Mapping[str, Any]) -> None:
    """Print a JSON object on one line of standard output; commands call this last."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class _Tally:
    """Totals over the rounds so far."""

    def __init__(self) -> None:
        self.ok = self.late = self.rejected = self.up = self.down = 0
        self.G = score_of({}).text(None)
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
            f"G {self.G}  ok {self.ok} late {self.late} rejected {self.rejected}  "
            f"MB up {self.up / 1e6:.1f} down {self.down / 1e6:.1f}{spent}{virtual}"
        )


@contextmanager
def rounds(name: str, total: int, before: Sequence[Mapping[str, Any]] = ()) -> Iterator["OnRound"]:
    """Show the rounds of one run as they end.

    Args:
        name: the name of the run.
        total: its number of rounds.
        before: events of the rounds before it was resumed.
    """
    tally = _Tally()
    for event in before:
        tally.add(event)
    show = _bar if err.is_terminal else _lines
    with show(name, total, len(before), tally) as on_round:
        yield on_round


@contextmanager
def _lines(name: str, total: int, done: int, tally: _Tally) -> Iterator["OnRound"]:
    """One line for each round."""
    from fedp3.runs.run_folder import as_event

    began = time.monotonic()

    def on_round(record: "RoundRecord") -> None:
        tally.add(as_event(record))
        per_round = (time.monotonic() - began) / max(1, record.t + 1 - done)
        left = per_round * (total - record.t - 1)
        loss = "-" if record.loss is None else f"{record.loss:.3f}"
        void = "  VOID" if record.void else ""
        progress = f"{name} round {record.t + 1}/{total}  loss {loss}"
        note(f"{progress}  {tally.text()}  {left:.0f} s left{void}")

    yield on_round


@contextmanager
def _bar(name: str, total: int, done: int, tally: _Tally) -> Iterator["OnRound"]:
    """A live bar."""
    from fedp3.runs.run_folder import as_event

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
    ) as bar:
        task = bar.add_task(name, total=total, completed=done, text="")

        def on_round(record: "RoundRecord") -> None:
            tally.add(as_event(record))
            bar.update(task, advance=1, text=tally.text())

        yield on_round


SCORED = ("global", "dispatched", "personal", "worst_client")


def results(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, float] | None = None) -> None:
    """Print the closing table: scores, traffic and time.

    Args:
        rows: the results of runs.
        dense: the result of a dense run, to show traffic as a share of its traffic.
    """
    numbers = ["G", "D", "P", "worst", "MB up", "MB down", "rejected", "seconds"]
    clock = {"virtual s": "virtual_seconds", "joules": "joules"}
    shown = [name for name, key in clock.items() if any(row.get(key) is not None for row in rows)]
    numbers += shown
    columns = {"run": "left", **dict.fromkeys(numbers, "right")}
    cells = [
        (
            str(row.get("name") or row["method"]),
            *(score_of(row).text(row[f"score_{kind}"]) for kind in SCORED),
            _relative(row["mb_up"], dense["mb_up"] if dense else None),
            _relative(row["mb_down"], dense["mb_down"] if dense else None),
            str(row["rejected"]),
            f"{row['seconds']:.1f}",
            *(_whole(row.get(clock[name])) for name in shown),
        )
        for row in rows
    ]
    table(columns, cells)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _relative(value: float, reference: float | None) -> str:
    if not reference:
        return f"{value:.1f}"
    return f"{value:.1f} ({100 * value / reference:.0f} %)"


def command(*words: object) -> str:
    """A fedp3 command, quoted for a shell."""
    return shlex.join(["fedp3", *map(str, words)])


def guarantee(p: Mapping[str, Any]) -> str:
    """The guarantee of LDP in one sentence, with everything that its epsilon depends on."""
    spent = p.get("spent", {"<=": p["epsilon"]})
    epsilons = [
        f"{name} unbounded" if value is None else f"{name} {value:.2f}"
        for name, value in spent.items()
    ]
    return (
        f"LDP per training record of a client: epsilon {', '.join(epsilons)} "
        f"at delta {p['delta']:g} "
        f"({p['adjacency']}, {p['sampling']} sampling at rate {p['sample_rate']:g}, "
        f"noise multiplier {p['noise_multiplier']:g}, clip {p['clip']:g}; "
        f"accountant {p['accountant']}; "
        f"randomness {p['randomness']}{SIMULATED.get(p['randomness'], '')})"
    )


def client_guarantee(p: Mapping[str, Any]) -> str:
    """The guarantee of client-level DP in one sentence, with all that its epsilon depends on."""
    epsilon = p["spent"] if "spent" in p else p["planned"]
    shown = "unbounded" if epsilon is None else f"{epsilon:.2f}"
    return (
        "client-level DP for all data of a client, against all who see the models but not against "
        f"the server, which is trusted: client-level epsilon {shown} at delta {p['delta']:g} "
        f"({p['adjacency']}; {p['sampling']} sampling of clients at rate {p['sample_rate']:g}, "
        f"noise multiplier {p['noise_multiplier']:g}, clip {p['clip']:g} of a client's entire "
        f"upload; accountant {p['accountant']}; "
        f"randomness {p['randomness']}{SIMULATED.get(p['randomness'], '')})"
    )
