"""`fedp3 utility`: accuracy under local differential privacy, as a table and a figure.

A cell is a config with other layer sets, another epsilon or another fleet.  Its runs are ordinary
run folders: the same command again reads those that are finished and resumes one that was stopped.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir, Workers
from fedp3.cli.training import Options, train_seeds
from fedp3.core.errors import InputError
from fedp3.core.registry import pick
from fedp3_paper import PAPER

if TYPE_CHECKING:
    from fedp3.report.runs import Run

UPLOADS: Mapping[str, str] = {"full": "full upload", "opu2": "OPU2", "lowerb": "LowerB"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table: its row and column, and the settings that it changes."""

    row: str
    column: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.row}-{self.column}".replace(" ", "-")


def _by_epsilon(epsilons: Sequence[str]) -> list[Cell]:
    return [
        Cell(layers, e, (f"plan.layers={layers}", f"privacy.epsilon={e}"))
        for e in reversed(epsilons)  # without noise first: it shows what the others can reach
        for layers in UPLOADS
    ]


def _by_fleet() -> list[Cell]:
    """Fleets of n clients that train 800 / n rounds, so that all make as many uploads."""
    return [
        Cell(
            layers,
            str(n),
            (f"plan.layers={layers}", f"partition.clients={n}", f"run.rounds={800 // n}"),
        )
        for n in (10, 20, 40, 80)
        for layers in UPLOADS
    ]


TABLES: Mapping[str, tuple[str, list[Cell]]] = {  # name -> what the columns are, cells
    "mlp": ("epsilon", _by_epsilon(("1", "2", "4", "8", "inf"))),
    "cnn": ("epsilon", _by_epsilon(("2", "8", "inf"))),
    "fleet": ("clients", _by_fleet()),
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line of fedp3."""
    app.command("utility")(utility)


def utility(
    table: Annotated[
        str,
        typer.Argument(help="mlp, cnn (accuracy by epsilon) or fleet (by clients, at equal bytes)"),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for all runs, the table and the figure")
    ],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Else paper/configs/ldp/mlp.toml or cnn.toml")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per cell")] = 1,
    workers: Workers = 1,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Accuracy under LDP: run every cell, then write table.md and utility.svg.

    Call it again to resume it.

    Example: fedp3 utility mlp --out runs/ldp-mlp --seeds 3
    """
    from fedp3 import config
    from fedp3.experiment.assemble import assemble
    from fedp3.report.runs import load_runs

    columns, cells = pick(TABLES, table, "table")
    path = config_file or PAPER / "configs" / "ldp" / ("cnn.toml" if table == "cnn" else "mlp.toml")
    configs = {c: config.load(path, c.overrides) for c in cells}
    if not all(settings.privacy.enabled for settings in configs.values()):
        raise InputError(f"{path} runs without LDP; set [privacy] enabled = true")
    for settings in configs.values():
        assemble(settings, data_dir)  # every mistake shows before the first run begins
    options = Options(workers=workers, data_dir=data_dir)
    for c, settings in configs.items():
        train_seeds(settings, out / c.folder, seeds, options)
    runs = dict(zip(cells, load_runs([out / c.folder for c in cells]), strict=True))
    written = _write(out, columns, runs)
    if json:
        terminal.as_json(
            {"table": str(written[0]), "figure": str(written[1]), "cells": _rows(columns, runs)}
        )
        return
    terminal.line(written[0].read_text())
    terminal.line(f"open {os.path.relpath(written[1])}")


def _rows(columns: str, runs: "Mapping[Cell, Run]") -> list[dict[str, object]]:
    from fedp3.report.runs import epsilon, final, mean, moved

    rows: list[dict[str, object]] = []
    for c, run in runs.items():
        G, up = final(run, "G"), moved(run, "up")[0]
        rows.append(
            {
                "layers": c.row,
                columns: c.column,
                "G": mean(G),
                "G_std": G.std if G else None,
                "mb_up": mean(up),
                "seeds": len(run.seeds),
                "epsilon_max": max(epsilon(s) or 0.0 for s in run.seeds),
            }
        )
    return rows


def _write(out: Path, columns: str, runs: "Mapping[Cell, Run]") -> tuple[Path, Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = {(str(r["layers"]), str(r[columns])): r for r in _rows(columns, runs)}
    names = sorted({c.column for c in runs}, key=float)
    lines = [
        "| G, % | " + " | ".join(f"{columns} {n}" for n in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    figure, axes = plt.subplots(figsize=(6, 4))
    for layers, label in UPLOADS.items():
        cells = [rows[layers, n] for n in names]
        lines.append(f"| {label} | " + " | ".join(map(_cell, cells)) + " |")
        heights = [100 * float(str(r["G"])) for r in cells]
        spreads = [100 * float(str(r["G_std"] or 0)) for r in cells]
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
