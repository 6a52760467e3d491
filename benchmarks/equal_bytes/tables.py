"""Tables and a figure of the runs that are recorded; nothing is trained.

    python -m benchmarks.equal_bytes.tables                  # one line a method, all scenes
    python -m benchmarks.equal_bytes.tables --scene NAME [--figure FILE]
    python -m benchmarks.equal_bytes.tables --out benchmarks/results/equal-bytes.md

G at a budget is the mean of the last four measurements within it, of every second round each: two
periods of a paced schedule.  A target is reached when the mean of four measurements first reaches
it.  The differences of a table are paired by seed, and their p-values corrected together by Holm.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.equal_bytes.rows import (
    BUDGET,
    RATES_OF_ROW,
    RATES_OF_SCENE,
    REPORTED_ONLY,
    RIVALS,
    ROWS,
    SCENES,
    TUNING_BUDGET,
)
from benchmarks.intervals import shown
from benchmarks.records import find
from fedp3.report.paired import difference, holm

NAME = "equal-bytes"
BASE, OURS = "fedavg", "paced"
BUDGETS = (TUNING_BUDGET, BUDGET)
AVERAGED = 4  # measurements
# rows in which every device holds only its share
FITS = ("fiarse-ternary", "fiarse-ternary-few", "heterofl-ternary", "paced-fits")
# what is changed -> the row without it, and the row with it
PARTS: Mapping[str, tuple[str, str]] = {
    "codes up (FedAvg, 32 bits)": ("fedavg", "fedavg-ternary-up"),
    "codes and copies down too": ("fedavg-ternary-up", "fedavg-ternary"),
    "ternary instead of 4 bits (FedAvg)": ("fedavg-int4", "fedavg-ternary"),
    "schedule, without codes": ("fedavg", "paced-float"),
    "schedule, with codes": ("fedavg-ternary", "paced"),
    "synchrony: the same layers for all": ("paced-dealt", "paced"),
    "tiers: 4 of 10 steps on weak devices": ("paced", "paced-few"),
    "tiers: weak devices leave the convolutions": ("paced", "paced-depth"),
    "devices hold only their share": ("paced", "paced-fits"),
}

Curve = Sequence[Sequence[float]]
Runs = Mapping[int, Mapping[str, Any]]  # seed -> line


def runs_of(scene: str, row: str) -> Runs:
    """The runs of a row by seed, at its tuned learning rate, or at the first one that was tried."""
    tuned_scene, tuned_row = RATES_OF_SCENE.get(scene, scene), RATES_OF_ROW.get(row, row)
    tried = find(NAME, kind="validation", scene=tuned_scene, row=tuned_row)
    runs = find(NAME, kind="run", scene=scene, row=row)
    best = max(tried, key=lambda line: line["G"])["lr"] if tried else None
    rates = [run["lr"] for run in runs]
    rate = best if best in rates else next(iter(rates), None)
    return {run["seed"]: run for run in runs if run["lr"] == rate}


def spent(point: Sequence[float]) -> float:
    """Bytes up and down."""
    return point[1] + point[2]


def at_bytes(curve: Curve, budget: float) -> float | None:
    """The score at a budget of bytes; None if the run did not use it up."""
    within = [point for point in curve if spent(point) <= budget]
    if len(within) == len(curve) and spent(curve[-1]) < 0.97 * budget:
        return None
    return fmean(point[-1] for point in within[-AVERAGED:]) if len(within) >= AVERAGED else None


def final(curve: Curve) -> float:
    """The score at the end."""
    return fmean(point[-1] for point in curve[-AVERAGED:])


def reached(curve: Curve, target: float) -> Sequence[float] | None:
    """The point at which a target is reached."""
    for k in range(AVERAGED, len(curve) + 1):
        if final(curve[:k]) >= target:
            return curve[k - 1]
    return None


def main_table(scene: str) -> Iterator[str]:
    """What each row reaches, and what it takes to reach the final G of FedAvg in 32 bits."""
    base = runs_of(scene, BASE)
    targets = {seed: final(run["curve"]) for seed, run in base.items()}
    yield (
        "| row | fits | seeds | lr | rounds | G | P | bytes | G at 2.5 % | G at 5 % "
        "| to FedAvg's G: bytes | rounds | GFLOP | fleet s |"
    )
    yield "|---|---|" + "---:|" * 12
    for fits in (False, True):
        for row in ROWS:
            runs = runs_of(scene, row)
            seeds = sorted(runs.keys() & targets.keys())
            if (row in FITS) == fits and seeds:
                yield _line(row, {k: runs[k] for k in seeds}, targets, fits=fits)


def _line(row: str, runs: Runs, targets: Mapping[int, float], *, fits: bool) -> str:
    curves = {seed: run["curve"] for seed, run in runs.items()}
    budgets = [
        _mean([at_bytes(c, share * runs[k]["base"]) for k, c in curves.items()])
        for share in BUDGETS
    ]
    ends = {k: end for k, c in curves.items() if (end := reached(c, targets[k])) is not None}
    costs = ["–"] * 4
    if len(ends) == len(curves):
        shares = [spent(end) / runs[k]["base"] for k, end in ends.items()]
        means = [fmean(end[column] for end in ends.values()) for column in (0, 3, 4)]
        costs = [f"{100 * fmean(shares):.2f} %", *(f"{mean:.0f}" for mean in means)]
    share = fmean(spent(c[-1]) / runs[k]["base"] for k, c in curves.items())
    cells = [
        row,
        "yes" if fits else "no",
        str(len(runs)),
        f"{next(iter(runs.values()))['lr']:g}",
        f"{fmean(c[-1][0] for c in curves.values()):.0f}",
        _mean([final(c) for c in curves.values()]),
        _mean([run["P"][-1][-1] for run in runs.values()]),
        f"{100 * share:.1f} %",
        *budgets,
        *costs,
    ]
    return "| " + " | ".join(cells) + " |"


def _mean(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{100 * fmean(known):.1f}" if known and len(known) == len(values) else "–"


def _at(runs: Runs, share: float) -> dict[int, float]:
    """Seed -> G at this share of the bytes, of the runs that used it up."""
    at = {k: at_bytes(run["curve"], share * run["base"]) for k, run in runs.items()}
    return {k: G for k, G in at.items() if G is not None}


def lead_table(scene: str) -> Iterator[str]:
    """How far fedp3-paced is ahead of each rival with the same codes, at equal bytes."""
    ours = runs_of(scene, OURS)
    cases = [
        (row, share, difference(_at(ours, share), _at(runs_of(scene, row), share)))
        for row in (*RIVALS, *REPORTED_ONLY)
        for share in BUDGETS
    ]
    judged = [case for case in cases if case[0] in RIVALS]
    adjusted = dict(
        zip(
            [case[:2] for case in judged],
            holm([d.p if d is not None else None for *_, d in judged]),
            strict=True,
        )
    )
    yield "| ahead of | at | seeds | points, 95 % interval | p, corrected |"
    yield "|---|---:|---:|---:|---:|"
    for row, share, d in cases:
        if d is None:
            continue
        p = adjusted.get((row, share))
        shown_p = "not judged" if row in REPORTED_ONLY else _p(p)
        yield f"| {row} | {100 * share:g} % | {d.seeds} | {shown(d)} | {shown_p} |"


def _p(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def part_table(scene: str) -> Iterator[str]:
    """One part at a time: what it changes at 2.5 % of the bytes, at the end, and to the target."""
    base = runs_of(scene, BASE)
    targets = {seed: final(run["curve"]) for seed, run in base.items()}
    yield "| part | without, with | G at 2.5 % | G at the end | bytes | fleet s to FedAvg's G |"
    yield "|---|---|---:|---:|---:|---:|"
    for part, names in PARTS.items():
        pair = [runs_of(scene, row) for row in names]
        seeds = sorted(set.intersection(*(set(runs) for runs in pair), set(targets)))
        if not seeds:
            continue
        cells = [[_part_cells(runs[k], targets[k]) for k in seeds] for runs in pair]
        columns = []
        for column in range(4):
            means = [_mean_cell([row[column] for row in side], column) for side in cells]
            columns.append(", ".join(means))
        yield f"| {part} | {', '.join(names)} | {' | '.join(columns)} |"


def _part_cells(run: Mapping[str, Any], target: float) -> tuple[float | None, ...]:
    curve, end = run["curve"], reached(run["curve"], target)
    return (
        at_bytes(curve, TUNING_BUDGET * run["base"]),
        final(curve),
        spent(curve[-1]) / run["base"],
        None if end is None else end[4] / 100,
    )


def _mean_cell(values: Sequence[float | None], column: int) -> str:
    text = _mean(values)
    return f"{text} %" if column == 2 and text != "–" else text


def figure(scene: str, rows: Sequence[str], path: Path) -> None:
    """Curves of G and P of seed 0 against bytes, rounds, GFLOP and fleet seconds."""
    axes: Mapping[str, Callable[[Sequence[float], Mapping[str, Any]], float]] = {
        "% of FedAvg's bytes": lambda p, run: 100 * spent(p) / run["base"],
        "rounds": lambda p, run: p[0],
        "GFLOP of a client": lambda p, run: p[3],
        "seconds of the fleet": lambda p, run: p[4],
    }
    picture, panels = plt.subplots(2, len(axes), figsize=(15, 6.5), sharey="row", squeeze=False)
    for row in rows:
        run, name = runs_of(scene, row).get(0), SUMMARY_ROWS.get(row, row).strip("*")
        if run is None:
            continue
        for place, (label, value) in enumerate(axes.items()):
            for side, score in enumerate(("curve", "P")):
                panel = panels[side][place]
                xs = [value(p, run) for p in run[score]]
                panel.plot(
                    xs, [100 * p[-1] for p in run[score]], label=name, lw=1.2, marker="." * side
                )
                panel.set_xlabel(label)
                if place == 0:
                    panel.set_xscale("log")
    panels[0][0].set_ylabel("G, %")
    panels[1][0].set_ylabel("P, %")
    panels[0][-1].legend(fontsize=7)
    picture.tight_layout()
    picture.savefig(path, dpi=110)
    plt.close(picture)


# --------------------------------------------------------------------------- what is shown

# The scenes and rows of the summary, with the names that readers know.
SUMMARY_SCENES: Mapping[str, str] = {
    "fashion-classes": "FashionMNIST",
    "fashion-dirichlet": "Dirichlet",
    "cifar10-classes": "CIFAR-10",
}
SUMMARY_ROWS: Mapping[str, str] = {
    "fedavg": "FedAvg, 32 bits",
    "fedavg-ternary": "FedAvg",
    "fiarse-ternary": "FIARSE",
    "heterofl-ternary": "HeteroFL",
    "fedluar-ternary": "FedLUAR",
    "fedlp-ternary": "FedLP",
    "cocofl-ternary": "CoCoFL",
    "selective-ternary": "selective layers",
    "fedpart-ternary": "FedPart",
    "paced": "**fedp3-paced**",
    "paced-fits": "fedp3-paced, devices hold only their share",
    "fedavg-ternary-few": "FedAvg, 4 steps on weak devices",
    "paced-few": "fedp3-paced, 4 steps on weak devices",
}


def summary_table() -> Iterator[str]:
    """One line a method: G at both budgets, and the bytes to FedAvg's final G."""
    columns = [f"{name}: 2.5 % | 5 % | bytes" for name in SUMMARY_SCENES.values()]
    yield f"| | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * (3 * len(SUMMARY_SCENES))
    for row, name in SUMMARY_ROWS.items():
        cells = [cell for scene in SUMMARY_SCENES for cell in _summary_cells(scene, row)]
        if set(cells) != {"–"}:
            yield f"| {name} | " + " | ".join(cells) + " |"


def _summary_cells(scene: str, row: str) -> list[str]:
    """The cells of a scene; ¹ marks those of a single seed."""
    targets = {seed: final(run["curve"]) for seed, run in runs_of(scene, BASE).items()}
    runs = {seed: run for seed, run in runs_of(scene, row).items() if seed in targets}
    if not runs:
        return ["–"] * 3
    cells = [
        _mean([at_bytes(run["curve"], share * run["base"]) for run in runs.values()])
        for share in BUDGETS
    ]
    ends = [reached(run["curve"], targets[seed]) for seed, run in runs.items()]
    known = [end for end in ends if end is not None]
    if known:
        some = "" if len(known) == len(runs) else f" ({len(known)} of {len(runs)})"
        share = 100 * fmean(map(spent, known)) / fmean(run["base"] for run in runs.values())
        cells.append(f"{share:.3g}{some}")
    else:
        cells.append("never")
    return [cell if cell == "–" or len(runs) > 1 else f"{cell}¹" for cell in cells]


def page() -> Iterator[str]:
    """All tables of all scenes that were trained, as a page."""
    yield "# Methods at equal bytes, with the same codes"
    yield ""
    yield "Written by `python -m benchmarks.equal_bytes.tables --out FILE` from equal-bytes.jsonl."
    yield "docs/methods/comparison.md explains the rows and draws conclusions."
    for scene in SCENES:
        if runs_of(scene, BASE):
            yield from ("", f"## {scene}")
            for make in (main_table, lead_table, part_table):
                yield from ("", *make(scene))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that the arguments name, or write all of them to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_bytes.tables")
    parser.add_argument("--scene", choices=list(SCENES), help="without it, one line a method")
    parser.add_argument("--figure", type=Path, help="also draw the curves of seed 0 to this file")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows of the figure")
    parser.add_argument("--out", type=Path, help="write all tables of all scenes to this file")
    options = parser.parse_args(arguments)
    if options.figure is not None:
        figure(options.scene or "fashion-classes", options.rows.split(","), options.figure)
    if options.out is not None:
        options.out.write_text("\n".join(page()) + "\n")
        return
    makes = (main_table, lead_table, part_table)
    lines = summary_table() if options.scene is None else _joined(options.scene, makes)
    print("\n".join(lines))


def _joined(scene: str, makes: Sequence[Callable[[str], Iterator[str]]]) -> Iterator[str]:
    for make in makes:
        yield from (*make(scene), "")


if __name__ == "__main__":
    main()
