"""`fedp3 privacy utility`: what accuracy an epsilon leaves, cell by cell, ending in a table and a figure.

A cell is one config of the file given, with other layer sets, another epsilon or another fleet.  Cells are ordinary run
folders: call the same again and finished ones are read, a stopped one goes on.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir
from fedp3.cli.runs import Workers, start_seeds
from fedp3.errors import InputError
from fedp3.lookup import pick

if TYPE_CHECKING:
    from fedp3.report.runs import Run

UPLOADS: Mapping[str, str] = {"full": "full upload", "opu2": "OPU2", "lowerb": "LowerB"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: where it stands in the table, and what it changes."""

    row: str
    column: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Its place under the folder of all cells."""
        return f"{self.row}-{self.column}".replace(" ", "-")


def _by_epsilon(epsilons: Sequence[str]) -> list[Cell]:
    return [
        Cell(layers, e, (f"plan.layers={layers}", f"privacy.epsilon={e}"))
        for e in reversed(epsilons)  # without noise first: it tells whether the rest can be of use
        for layers in UPLOADS
    ]


def _by_fleet() -> list[Cell]:
    """Fleets of n clients for 800 / n rounds: the same number of uploads whatever n."""
    return [
        Cell(layers, str(n), (f"plan.layers={layers}", f"partition.clients={n}", f"run.rounds={800 // n}"))
        for n in (10, 20, 40, 80)
        for layers in UPLOADS
    ]


TABLES: Mapping[str, tuple[str, list[Cell]]] = {  # name -> what the columns are, cells
    "mlp": ("epsilon", _by_epsilon(("1", "2", "4", "8", "inf"))),
    "cnn": ("epsilon", _by_epsilon(("2", "8", "inf"))),
    "fleet": ("clients", _by_fleet()),
}


def utility(
    table: Annotated[str, typer.Argument(help="mlp, cnn (accuracy by epsilon) or fleet (by clients, at equal bytes)")],
    out: Annotated[Path, typer.Option("--out", help="Folder for all runs, the table and the figure")],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Else experiments/ldp/mlp.toml or cnn.toml")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per cell")] = 1,
    workers: Workers = 1,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Accuracy under LDP: run every cell, then write table.md and utility.svg; call it again to go on.

    Example: fedp3 privacy utility mlp --out runs/ldp-mlp --seeds 3
    """
    from fedp3 import config
    from fedp3.experiment import assemble
    from fedp3.report.runs import load_runs

    columns, cells = pick(TABLES, table, "table")
    path = config_file or Path("experiments/ldp") / ("cnn.toml" if table == "cnn" else "mlp.toml")
    if config_file is None and not path.exists():
        raise InputError(f"{path} is part of the repository: call this in its root, or name a config with --config")
    settings = {c: config.load(path, c.overrides) for c in cells}  # all mistakes first
    if not all(s.privacy.enabled for s in settings.values()):
        raise InputError(f"{path} runs without LDP; set [privacy] enabled = true")
    for mine in settings.values():
        assemble(mine, data_dir)
    for c, mine in settings.items():
        start_seeds(mine, out / c.folder, seeds, workers, data_dir)
    runs = dict(zip(cells, load_runs([out / c.folder for c in cells]), strict=True))
    written = _write(out, columns, runs)
    if json:
        show.as_json({"table": str(written[0]), "figure": str(written[1]), "cells": _rows(columns, runs)})
        return
    show.tell(written[0].read_text())
    show.tell(f"open {os.path.relpath(written[1])}")


def _rows(columns: str, runs: "Mapping[Cell, Run]") -> list[dict[str, object]]:
    from fedp3.report.runs import epsilon, final, mean, moved

    rows: list[dict[str, object]] = []
    for c, run in runs.items():
        G, up = final(run, "G"), moved(run, "up")[0]
        row: dict[str, object] = {
            "layers": c.row,
            columns: c.column,
            "G": mean(G),
            "G_std": G.std if G else None,
            "mb_up": mean(up),
        }
        rows.append(row | {"seeds": len(run.seeds), "epsilon_max": max(epsilon(s) or 0.0 for s in run.seeds)})
    return rows


def _write(out: Path, columns: str, runs: "Mapping[Cell, Run]") -> tuple[Path, Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = {(str(r["layers"]), str(r[columns])): r for r in _rows(columns, runs)}
    names = sorted({c.column for c in runs}, key=float)
    lines = ["| G, % | " + " | ".join(f"{columns} {n}" for n in names) + " |", "|---" * (len(names) + 1) + "|"]
    figure, axes = plt.subplots(figsize=(6, 4))
    for layers, label in UPLOADS.items():
        mine = [rows[layers, n] for n in names]
        lines.append(f"| {label} | " + " | ".join(map(_cell, mine)) + " |")
        heights = [100 * float(str(r["G"])) for r in mine]
        spreads = [100 * float(str(r["G_std"] or 0)) for r in mine]
        axes.errorbar(names, heights, spreads, marker="o", capsize=3, label=label)
    axes.set(xlabel=columns, ylabel="accuracy of the server's model, %")
    axes.grid(alpha=0.3)
    axes.legend()
    table, picture = out / "table.md", out / "utility.svg"
    table.write_text("\n".join(lines) + "\n")
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)
    return table, picture


def _cell(r: Mapping[str, object]) -> str:
    spread = "" if r["G_std"] is None else f" ± {100 * float(str(r['G_std'])):.1f}"
    return f"{100 * float(str(r['G'])):.1f}{spread} ({float(str(r['mb_up'])):.0f} MB up)"
