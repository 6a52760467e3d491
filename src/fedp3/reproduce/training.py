"""Summaries as tables: published beside ours, and what each row costs against the first, paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean

from fedp3.reproduce import published
from fedp3.reproduce.cells import PROTOCOLS, SPLITS, Bench, Cell
from fedp3.reproduce.stats import Interval, interval
from fedp3.reproduce.summary import Summary
from fedp3.reproduce.tables import Table, number
from fedp3.reproduce.targets import Row, Target, places_of, queue, runs_on

Found = Mapping[str, Mapping[int, Summary]]  # cell -> seed -> summary


def scores(found: Found, bench: Bench, split: str, row: Row, kind: str, back: int = 0) -> dict[int, float]:
    """Seed -> score of a row, in percent."""
    runs = found.get(Cell(bench, split, row.variant).name, {})
    return {k: score for k, s in runs.items() if (score := s.score(kind, back)) is not None}


def against(found: Found, bench: Bench, split: str, row: Row, base: Row, kind: str) -> Interval | None:
    """Row minus base over the seeds that both have."""
    mine, theirs = (scores(found, bench, split, r, kind) for r in (row, base))
    both = sorted(mine.keys() & theirs.keys())
    return interval([mine[k] - theirs[k] for k in both]) if both else None


COLUMNS = ("row", "published", "ours", "difference", "published, vs first", "ours, vs first [95 %]")
MORE = ("G", "D", "P", "MB up", "step density", "seeds")


def table(target: Target, found: Found, protocol: str, bench: Bench, split: str) -> Table:
    """One bench and split of a target, rows that were run only."""
    kind = PROTOCOLS[protocol].score
    base = target.rows[0]
    run = [r for r in target.rows if runs_on(r, bench, split) and scores(found, bench, split, r, kind)]
    rows = [_line(row, base, found, bench, split, kind) for row in run]
    more: tuple[str, ...] = MORE
    if PROTOCOLS[protocol].head_round:
        more += ("after the round of heads",)
        rows = [
            [*line, number(_heads(found, Cell(bench, split, r.variant)))] for line, r in zip(rows, run, strict=True)
        ]
    title = f"{bench.name}, {SPLITS[split]}"
    return Table(title, (*COLUMNS, *more), rows, (f"First: {base.label}.{_source(run, bench, split)}",))


def _source(run: Sequence[Row], bench: Bench, split: str) -> str:
    """Where published values come from, if there are any."""
    if all(published.score(row.published, bench.paper, split) is None for row in run):
        return ""
    other = "" if bench.same_data else ", the same net on other data: compare differences only"
    return f" Published: {bench.paper}{other}."


def _line(row: Row, base: Row, found: Found, bench: Bench, split: str, kind: str) -> list[str]:
    runs = found[Cell(bench, split, row.variant).name]
    ours = fmean(scores(found, bench, split, row, kind).values())
    theirs = published.score(row.published, bench.paper, split)
    first = published.score(base.published, bench.paper, split)
    drop = against(found, bench, split, row, base, kind) if row is not base else None
    each = {k: [s for r in runs.values() if (s := r.score(k)) is not None] for k in ("G", "D", "P")}
    densities = [r.density for r in runs.values() if r.density is not None]
    return [
        row.label,
        number(theirs),
        number(ours),
        number(ours - theirs if theirs is not None and bench.same_data else None, sign=True),
        number(None if theirs is None or first is None or row is base else theirs - first, sign=True),
        drop.text() if drop else "-",
        *(number(fmean(v) if v else None, 1) for v in each.values()),
        number(fmean(r.mb_up for r in runs.values()), 0),
        number(fmean(densities) if densities else None),
        str(len(runs)),
    ]


def _heads(found: Found, cell: Cell) -> float | None:
    """The clients' own models after a last round in which only heads trained, in percent."""
    scored = [h for s in found[cell.name].values() if (h := s.final.get("H")) is not None]
    return 100 * fmean(scored) if scored else None


def tables(target: Target, found: Found, protocol: str) -> list[Table]:
    """All tables of a target that compare rows; while there is none, those with a single one."""
    all_of = [table(target, found, protocol, b, s) for b, s in places_of(target, protocol)]
    return [t for t in all_of if len(t.rows) > 1] or [t for t in all_of if t.rows]


def brief(table: Table) -> Table:
    """The same without what a terminal has no room for."""
    shown = [table.columns.index(c) for c in (*COLUMNS, "seeds")]
    rows = [[row[j] for j in shown] for row in table.rows]
    return replace(table, columns=[table.columns[j] for j in shown], rows=rows)


def length(found: Found) -> str:
    """How long runs were, for a sentence about them."""
    rounds = sorted({s.rounds[-1] for runs in found.values() for s in runs.values() if s.rounds})
    return f", {' or '.join(map(str, rounds))} rounds" if rounds else ""


def progress(target: Target, found: Found, protocol: str) -> tuple[int, int]:
    """Runs finished and runs planned."""
    planned = queue([target], protocol, ())
    return sum(seed in found.get(cell.name, {}) for cell, seed in planned), len(planned)


def numbers(target: Target, found: Found, protocol: str) -> dict[str, object]:
    """Every cell of a target with its scores, for other programs; percent."""
    done, planned = progress(target, found, protocol)
    kind = PROTOCOLS[protocol].score
    cells = {}
    for bench, split in places_of(target, protocol):
        for row in target.rows:
            ours = scores(found, bench, split, row, kind) if runs_on(row, bench, split) else {}
            if ours:
                drop = against(found, bench, split, row, target.rows[0], kind)
                cells[Cell(bench, split, row.variant).name] = {
                    "row": row.label,
                    "published": published.score(row.published, bench.paper, split),
                    "ours": fmean(ours.values()),
                    "by_seed": ours,
                    "against_first": asdict(drop) if drop else None,
                }
    return {"protocol": protocol, "score": kind, "runs_finished": done, "runs_planned": planned, "cells": cells}


# --------------------------------------------------------------------------- which reading of global pruning


def nearest_reading(target: Target, found: Found, protocol: str, bench: Bench) -> list[tuple[str, float]]:
    """Readings of global pruning by how far their drops lie from the published ones, root mean square over keeps.

    The paper does not say whether the whole server model was scored (G) or the pruned one that devices hold (D).
    """
    errors: dict[str, list[float]] = {}
    held = PROTOCOLS[protocol].settings.get("prune.hold", True)
    plain = f"magnitude, {'held' if held else 'not held'}, kept"
    for kind in ("G", "D"):
        for row in target.rows[1:]:
            drop = against(found, bench, "classes", row, target.rows[0], kind)
            theirs, first = (published.score(r.published, bench.paper, "classes") for r in (row, target.rows[0]))
            if drop and theirs is not None and first is not None:
                reading = f"{row.label.partition(', ')[2] or plain}, {kind}"
                errors.setdefault(reading, []).append((drop.mean - (theirs - first)) ** 2)
    whole = {name: fmean(e) ** 0.5 for name, e in errors.items() if len(e) == 3}
    return sorted(whole.items(), key=lambda item: item[1])
