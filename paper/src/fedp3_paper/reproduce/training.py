"""Tables of the targets that train: published scores, ours, and differences paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean

from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.cells import PROTOCOLS, SPLITS, Bench, Cell
from fedp3_paper.reproduce.stats import Interval, interval
from fedp3_paper.reproduce.summary import KINDS, Summary
from fedp3_paper.reproduce.tables import Table, number
from fedp3_paper.reproduce.targets import Row, Target, places_of, queue, runs_on

Results = Mapping[str, Mapping[int, Summary]]  # cell -> seed -> summary


def scores(
    results: Results, bench: Bench, split: str, row: Row, kind: str, back: int = 0
) -> dict[int, float]:
    """Seed -> score of a row, in percent.

    Args:
        results: the results.
        bench: the bench.
        split: the split of its data.
        row: the row.
        kind: the accuracy that is scored: G, D or P.
        back: how many tens of evaluations before the last ten are scored.
    """
    runs = results.get(Cell(bench, split, row.variant).name, {})
    by_seed = {seed: result.score(kind, back) for seed, result in runs.items()}
    return {seed: score for seed, score in by_seed.items() if score is not None}


def against(
    results: Results, bench: Bench, split: str, row: Row, base: Row, kind: str
) -> Interval | None:
    """The scores of a row minus those of another, over the seeds that both have."""
    minuend, subtrahend = (scores(results, bench, split, r, kind) for r in (row, base))
    seeds = sorted(minuend.keys() & subtrahend.keys())
    return interval([minuend[k] - subtrahend[k] for k in seeds]) if seeds else None


COLUMNS = ("row", "published", "ours", "difference", "published, vs first", "ours, vs first [95 %]")
MORE = ("G", "D", "P", "MB up", "step density", "seeds")


def table(target: Target, results: Results, protocol: str, bench: Bench, split: str) -> Table:
    """The table of one bench and split, with the rows that were run."""
    kind = PROTOCOLS[protocol].score
    base = target.rows[0]
    planned = [row for row in target.rows if runs_on(row, bench, split)]
    run = [row for row in planned if scores(results, bench, split, row, kind)]
    lines = [_line(row, base, results, bench, split, kind) for row in run]
    columns: tuple[str, ...] = (*COLUMNS, *MORE)
    if PROTOCOLS[protocol].head_round:
        columns += ("after the round of heads",)
        for line, row in zip(lines, run, strict=True):
            line.append(number(_heads(results, Cell(bench, split, row.variant))))
    return Table(
        title=f"{bench.name}, {SPLITS[split]}",
        columns=columns,
        rows=lines,
        notes=(f"First: {base.label}.{_source(run, bench, split)}",),
    )


def _source(run: Sequence[Row], bench: Bench, split: str) -> str:
    """Where published values come from, if there are any."""
    if all(published.score(row.published, bench.paper, split) is None for row in run):
        return ""
    other = "" if bench.same_data else ", the same network on other data: compare differences only"
    return f" Published: {bench.paper}{other}."


def _line(row: Row, base: Row, results: Results, bench: Bench, split: str, kind: str) -> list[str]:
    runs = results[Cell(bench, split, row.variant).name]
    ours = fmean(scores(results, bench, split, row, kind).values())
    theirs = published.score(row.published, bench.paper, split)
    first = published.score(base.published, bench.paper, split)
    drop = against(results, bench, split, row, base, kind) if row is not base else None
    difference = ours - theirs if theirs is not None and bench.same_data else None
    published_drop = None
    if theirs is not None and first is not None and row is not base:
        published_drop = theirs - first
    finished = list(runs.values())
    return [
        row.label,
        number(theirs),
        number(ours),
        number(difference, sign=True),
        number(published_drop, sign=True),
        drop.text() if drop else "-",
        *(number(_mean([r.score(kind) for r in finished]), 1) for kind in KINDS),
        number(fmean(r.mb_up for r in finished), 0),
        number(_mean([r.density for r in finished])),
        str(len(finished)),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _heads(results: Results, cell: Cell) -> float | None:
    """Accuracy of the personal models after a last round in which only heads train, in percent."""
    mean = _mean([result.final.get("H") for result in results[cell.name].values()])
    return None if mean is None else 100 * mean


def tables(target: Target, results: Results, protocol: str) -> list[Table]:
    """The tables of a target that compare rows; while there is none, those with a single row."""
    candidates = [table(target, results, protocol, b, s) for b, s in places_of(target, protocol)]
    return [t for t in candidates if len(t.rows) > 1] or [t for t in candidates if t.rows]


def brief(table: Table) -> Table:
    """The same table without the columns for which a terminal has no room."""
    shown = [table.columns.index(c) for c in (*COLUMNS, "seeds")]
    rows = [[row[j] for j in shown] for row in table.rows]
    return replace(table, columns=[table.columns[j] for j in shown], rows=rows)


def length(results: Results) -> str:
    """The lengths of the runs, as the end of a sentence about them."""
    lengths = set()
    for runs in results.values():
        lengths |= {result.rounds[-1] for result in runs.values() if result.rounds}
    return f", {' or '.join(map(str, sorted(lengths)))} rounds" if lengths else ""


def progress(target: Target, results: Results, protocol: str) -> tuple[int, int]:
    """The number of finished runs and the number of planned ones."""
    planned = queue([target], protocol, ())
    return sum(seed in results.get(cell.name, {}) for cell, seed in planned), len(planned)


def numbers(target: Target, results: Results, protocol: str) -> dict[str, object]:
    """Every cell of a target with its scores in percent, for other programs."""
    done, planned = progress(target, results, protocol)
    kind = PROTOCOLS[protocol].score
    cells = {}
    for bench, split in places_of(target, protocol):
        for row in target.rows:
            ours = scores(results, bench, split, row, kind) if runs_on(row, bench, split) else {}
            if ours:
                drop = against(results, bench, split, row, target.rows[0], kind)
                cells[Cell(bench, split, row.variant).name] = {
                    "row": row.label,
                    "published": published.score(row.published, bench.paper, split),
                    "ours": fmean(ours.values()),
                    "by_seed": ours,
                    "against_first": asdict(drop) if drop else None,
                }
    return {
        "protocol": protocol,
        "score": kind,
        "runs_finished": done,
        "runs_planned": planned,
        "cells": cells,
    }


# --------------------------------------------------------------------------- global pruning


def nearest_reading(
    target: Target, results: Results, protocol: str, bench: Bench
) -> list[tuple[str, float]]:
    """Readings of global pruning by how far their drops are from the published ones.

    The distance is a root mean square over keep.  The paper does not say whether it scored the
    server's model (G) or the pruned one that devices have (D).
    """
    errors: dict[str, list[float]] = {}
    frozen = PROTOCOLS[protocol].settings.get("prune.freeze_pruned", True)
    plain = f"magnitude, {'frozen' if frozen else 'not frozen'}, retained"
    for kind in ("G", "D"):
        for row in target.rows[1:]:
            drop = against(results, bench, "classes", row, target.rows[0], kind)
            theirs, first = (
                published.score(r.published, bench.paper, "classes") for r in (row, target.rows[0])
            )
            if drop and theirs is not None and first is not None:
                reading = f"{row.label.partition(', ')[2] or plain}, {kind}"
                errors.setdefault(reading, []).append((drop.mean - (theirs - first)) ** 2)
    complete = {name: fmean(e) ** 0.5 for name, e in errors.items() if len(e) == 3}
    return sorted(complete.items(), key=lambda item: item[1])
