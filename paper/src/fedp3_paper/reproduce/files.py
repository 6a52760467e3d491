"""One config file per cell; its header has the claim, the published score and ours."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.cells import LR, PROTOCOLS, SPLITS, Cell, settings_of
from fedp3_paper.reproduce.claims import CLAIMS, Claim
from fedp3_paper.reproduce.targets import TARGETS, Row, cells_of
from fedp3_paper.reproduce.training import Results, scores


def write_cells(
    cells: Iterable[Cell], results: Results, protocol: str, folder: Path, rounds: int = 0
) -> list[Path]:
    """Write FOLDER/PROTOCOL/BENCH/SPLIT/VARIANT.toml for each of these cells."""
    rows = _rows(protocol)
    paths = []
    for cell in cells:
        path = folder / protocol / f"{cell.name}.toml"
        comments = [f"# {line}" for line in header(cell, rows[cell.name], results, protocol, path)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*comments, toml(cell, protocol, rounds)]))
        paths.append(path)
    return paths


def _rows(protocol: str) -> dict[str, dict[str, Row]]:
    """Cell -> target -> the row of the target that the cell is."""
    rows: dict[str, dict[str, Row]] = {}
    for name, target in TARGETS.items():
        for cell in cells_of(target, protocol):
            row = next(r for r in target.rows if r.variant.name == cell.variant.name)
            rows.setdefault(cell.name, {})[name] = row
    return rows


def header(
    cell: Cell, rows: Mapping[str, Row], results: Results, protocol: str, path: Path
) -> Iterator[str]:
    """Lines with the claims, the command, the published score, our score and its date.

    Args:
        cell: the cell.
        rows: target -> the row of the target that the cell is.
        results: the results.
        protocol: the name of the protocol.
        path: the config file that the lines are for.
    """
    kind = PROTOCOLS[protocol].score
    place = f"{cell.bench.name}, {SPLITS[cell.split]}"
    for name, row in rows.items():
        yield f"{name}: {TARGETS[name].about}; row {row.label!r} on {place}"
        for claim in CLAIMS:
            if claim.target == name and row.label in _labels(claim):
                yield f"claim: {claim.text}"
    yield f"fedp3 run {path} --seeds {cell.variant.seeds}"
    row = next(iter(rows.values()))
    theirs = published.score(row.published, cell.bench.paper, cell.split)
    other = "" if cell.bench.same_data else ": other data, compare differences only"
    yield "published: " + (
        f"{theirs:.2f} % ({cell.bench.paper}{other})" if theirs is not None else "nothing"
    )
    if "local.lr" not in PROTOCOLS[protocol].settings and cell.bench.rate not in LR:
        choose = f"fedp3 reproduce lr --bench {cell.bench.rate}"
        yield f"lr is a placeholder: choose it first with {choose}"
    ours = scores(results, cell.bench, cell.split, row, kind)
    if ours:
        date = max(result.date for result in results[cell.name].values())
        about = f"{kind}, last ten evaluations, seeds: {len(ours)}, {date}"
        yield f"ours: {fmean(ours.values()):.2f} % ({about})"
    else:
        yield "ours: not run yet"


def _labels(claim: Claim) -> set[str]:
    return {label.partition("@")[0] for label in claim.terms}


def toml(cell: Cell, protocol: str, rounds: int = 0) -> str:
    """The settings of a cell with seed 0, as a config file for `fedp3 run`."""
    top: list[str] = []
    sections: dict[str, list[str]] = {}
    for key, value in settings_of(cell, protocol, 0, rounds).items():
        section, _, name = key.rpartition(".")
        lines = sections.setdefault(section, []) if section else top
        lines.append(f"{name} = {json.dumps(value)}")  # these values look alike in JSON and TOML
    blocks = ["\n".join(top)] if top else []
    blocks += [f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"
