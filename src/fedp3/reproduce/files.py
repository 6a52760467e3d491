"""One TOML file per cell, with a header that says what it is for, what was published and what came out."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

from fedp3.reproduce import published
from fedp3.reproduce.cells import LR, PROTOCOLS, SPLITS, Cell, settings_of
from fedp3.reproduce.claims import CLAIMS, Claim
from fedp3.reproduce.targets import TARGETS, Row, Target, cells_of
from fedp3.reproduce.training import Found, scores


def write_cells(found: Found, protocol: str, experiments: Path, only: str = "") -> int:
    """Write the file of every cell of a protocol, or of those of one target that were run; returns how many."""
    uses: dict[str, tuple[Cell, dict[str, Row]]] = {}
    for name, target in TARGETS.items():
        for cell in cells_of(target, protocol):
            uses.setdefault(cell.name, (cell, {}))[1][name] = _row_of(target, cell)
    wanted = [(c, rows) for c, rows in uses.values() if not only or (only in rows and c.name in found)]
    for cell, rows in wanted:
        path = experiments / protocol / f"{cell.name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(["# " + line for line in header(cell, rows, found, protocol)]) + "\n" + toml(cell, protocol)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return len(wanted)


def _row_of(target: Target, cell: Cell) -> Row:
    return next(r for r in target.rows if r.variant.name == cell.variant.name)


def header(cell: Cell, rows: Mapping[str, Row], found: Found, protocol: str) -> Iterator[str]:
    """Claim, command, published value, our value and date."""
    kind = PROTOCOLS[protocol].score
    for name, row in rows.items():
        yield f"{name}: {TARGETS[name].about}; row {row.label!r} on {cell.bench.name}, {SPLITS[cell.split]}"
        yield from (f"claim: {claim.text}" for claim in CLAIMS if claim.target == name and row.label in _labels(claim))
    yield f"fedp3 run experiments/{protocol}/{cell.name}.toml --seeds {cell.variant.seeds}"
    row = next(iter(rows.values()))
    theirs = published.score(row.published, cell.bench.paper, cell.split)
    other = "" if cell.bench.same_data else ": other data, compare differences only"
    yield "published: " + (f"{theirs:.2f} % ({cell.bench.paper}{other})" if theirs is not None else "nothing")
    if "local.lr" not in PROTOCOLS[protocol].settings and cell.bench.rate not in LR:
        yield f"lr is a placeholder: choose it first with fedp3 reproduce lr --bench {cell.bench.rate}"
    ours = scores(found, cell.bench, cell.split, row, kind)
    if ours:
        dates = max(s.date for s in found[cell.name].values())
        yield f"ours: {fmean(ours.values()):.2f} % ({kind}, last ten evaluations, seeds: {len(ours)}, {dates})"
    else:
        yield "ours: not run yet"


def _labels(claim: Claim) -> set[str]:
    return {label.partition("@")[0] for label in claim.terms}


def toml(cell: Cell, protocol: str) -> str:
    """What the cell sets, as a config file that `fedp3 run` takes; seed 0."""
    top: list[str] = []
    sections: dict[str, list[str]] = {}
    for key, value in settings_of(cell, protocol, 0).items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, []) if section else top).append(
            f"{name} = {json.dumps(value)}"
        )  # JSON's values are TOML's
    blocks = ["\n".join(top)] if top else []
    blocks += [f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"
