"""Output of commands: progress, tables, and lines of text."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedp3.core.scores import score_of

if TYPE_CHECKING:
    from fedp3.runs.round_warnings import OnRound

SIMULATED = {"seeded": ", simulation only: whoever knows run.seed can remove the noise"}
GAP, EDGES = 3, 2  # columns between two cells of a table, and left and right of it
WIDE = 200  # columns of output that does not go to a terminal, so that nothing is shortened
out = Console() if sys.stdout.isatty() else Console(width=WIDE)
err = Console(stderr=True)


def share(value: float | None, digits: int = 1) -> str:
    """A share of 1 in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def note(text: str) -> None:
    """Print a line about progress to standard error; standard output has the results."""
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def line(text: str) -> None:
    """Print a line of the result."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def prose(text: str) -> None:
    """Print sentences of the result, broken at words where a terminal shows them."""
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def table(
    columns: Mapping[str, str], rows: Sequence[Sequence[str]], title: str | None = None
) -> None:
    """Print a table.

    Args:
        columns: from the name of each column to its alignment, "left" or "right".
        rows: the cells.
        title: is printed above the table.
    """
    if title is not None:
        out.print(f"\n{title}", style="bold", highlight=False, markup=False, soft_wrap=True)
    needed = {
        name: max([cell_len(name), *(_needed(row[k], side, k) for row in rows)])
        for k, (name, side) in enumerate(columns.items())
    }
    for names in _parts(needed, out.width):
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        indices = [list(columns).index(name) for name in names]
        for name in names:
            shown.add_column(
                escape(name),
                justify=columns[name],  # type: ignore[arg-type]
                no_wrap=columns[name] == "right" or name == names[0],
                min_width=needed[name],
                overflow="fold",
            )
        for row in rows:
            # a folder may be called runs/x[1]
            shown.add_row(*(escape(row[index]) for index in indices))
        out.print(shown, crop=False)


def _parts(needed: Mapping[str, int], width: int) -> list[list[str]]:
    """The columns of a table in parts that fit into the terminal, each with the first column.

    A part whose two columns do not fit is wider than the terminal: nothing is ever cut.

    Args:
        needed: the least width of each column.
        width: the width of the terminal.
    """
    first, *others = needed
    parts, used = [[first]], EDGES + needed[first]
    for name in others:
        if len(parts[-1]) > 1 and used + GAP + needed[name] > width:
            parts.append([first])
            used = EDGES + needed[first]
        parts[-1].append(name)
        used += GAP + needed[name]
    return parts


def _needed(cell: str, side: str, k: int) -> int:
    """The least width of a cell: a text other than the first column may be wrapped at words."""
    if side == "right" or k == 0:
        return cell_len(cell)
    return max(map(cell_len, cell.split()), default=0)


def as_json(value: Mapping[str, Any]) -> None:
    """Print a JSON object on one line of standard output; commands call this last."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def rounds(
    name: str, total: int, before: Sequence[Mapping[str, Any]] = ()
) -> AbstractContextManager["OnRound"]:
    """Show the rounds of one run on standard error as they end.

    Args:
        name: the name of the run.
        total: its number of rounds.
        before: events of the rounds before it was resumed.
    """
    from fedp3.runs import progress

    return progress.rounds(err, name, total, before)


SCORED = {
    "G": "global",
    "D": "dispatched",
    "P": "personal",
    "C": "central",
    "worst": "worst_client",
}


def results(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, float] | None = None) -> None:
    """Print the closing table: scores, traffic and time.

    Args:
        rows: the results of runs.
        dense: the result of a dense run, to show traffic as a share of its traffic.
    """
    has_c = any(row.get("score_central") is not None for row in rows)
    kinds = {name: kind for name, kind in SCORED.items() if name != "C" or has_c}
    numbers = [*kinds, "MB up", "MB down", "rejected", "seconds"]
    clock = {"virtual s": "virtual_seconds", "joules": "joules"}
    shown = [name for name, key in clock.items() if any(row.get(key) is not None for row in rows)]
    numbers += shown
    columns = {"run": "left", **dict.fromkeys(numbers, "right")}
    cells = [
        (
            str(row.get("name") or row["method"]),
            *(score_of(row).text(row.get(f"score_{kind}")) for kind in kinds.values()),
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
