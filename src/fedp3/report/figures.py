"""The page's figures as PNG and SVG files, drawn by matplotlib, which is imported on first use."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedp3.core.errors import InputError, RunError
from fedp3.report import charts
from fedp3.report.charts import Chart
from fedp3.report.device_figures import fleets_drawing, timelines_drawing
from fedp3.report.fleets import fleet
from fedp3.report.grids import FROZEN, FULL, NEVER, PRUNED, SKIPPED, Grid, label_grid, plan_grid
from fedp3.report.runs import load_runs
from fedp3.report.timelines import timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {  # matplotlib declares a type for every key
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e7ec",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a run may be called "$x"
    "svg.hashsalt": "fedp3",  # with this and without a date, the same run gives the same file
}
COLOURS = ("#2563c9", "#c2410c", "#0f7b5f", "#9333a8", "#a16207", "#0e7490", "#be185d", "#4d5a6b")
GREY = "#6b7787"
FILLS = {
    FULL: "#2563c9",
    PRUNED: "#e08a2e",
    FROZEN: "#7a8797",
    NEVER: "#b58bc4",
    SKIPPED: "#d5dae1",
    "label": "#0f7b5f",
    "none": "#ffffff",
}
WHITE = np.ones(3)
MARKED_POINTS = 40  # a line with more points has no markers
MOST_ROW_NAMES = 40
SEPARATED_COLUMNS = 60  # with more clients there are no lines between cells


def write_figures(
    folders: Iterable[Path], out_dir: Path, target: float | None = None
) -> list[Path]:
    """Write all figures, each as .png and .svg; returns the files.

    The figures are accuracy, loss, bytes, accuracy-per-mb, plan and labels; and for runs with
    devices accuracy-per-time, accuracy-per-energy, fleet and timeline.  For runs with another
    score, names begin with score instead of accuracy.

    Args:
        folders: the run folders.
        out_dir: folder for the figures.
        target: a G that is marked in the figures of virtual time and energy; None means 98 % of
            the best final G of these runs.
    """
    runs = load_runs(folders)
    first_seeds = [run.seeds[0] for run in runs]
    plans = [plan_grid(seed) for seed in first_seeds]
    labels = [label_grid(seed.about["labels"]) for seed in first_seeds]
    names = [run.name for run in runs]
    paths: list[Path] = []
    for figure in charts.figures(runs, target):
        paths += _write(Path(out_dir), figure.name, _lines(figure.panels), (".png", ".svg"))
    for name, grids in (("plan", plans), ("labels", labels)):
        paths += _write(Path(out_dir), name, _grids(grids, names), (".png", ".svg"))
    fleets = {run.name: devices for run in runs if (devices := fleet(run.seeds[0]))}
    if fleets:
        paths += _write(Path(out_dir), "fleet", fleets_drawing(fleets), (".png", ".svg"))
    rounds = {run.name: shown for run in runs if (shown := timeline(run.seeds[0]))}
    if rounds:
        paths += _write(Path(out_dir), "timeline", timelines_drawing(rounds), (".png", ".svg"))
    return paths


def draw_labels(labels: npt.NDArray[np.integer[Any]], path: Path, title: str = "") -> Path:
    """Draw a partition; returns the file.

    Args:
        labels: the number of samples of each class at each client: (clients, classes).
        path: the picture; without a suffix it is a PNG.
        title: title of the picture.
    """
    table = np.asarray(labels)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise InputError(
            f"cannot draw labels of {table.dtype}{list(table.shape)}: "
            "expected integers of shape clients x classes"
        )
    path = Path(path)
    draw = _grids([label_grid(table.tolist())], [title])
    return _write(path.parent, path.stem, draw, (path.suffix or ".png",))[0]


def _write(
    folder: Path, name: str, draw: Callable[[], "Figure"], suffixes: Sequence[str]
) -> list[Path]:
    import matplotlib as mpl

    paths = [folder / f"{name}{suffix}" for suffix in suffixes]
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = draw()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                metadata = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(path, dpi=150, metadata=metadata)
                # The layout takes half the time of a drawing and is the same for every suffix.
                figure.set_layout_engine("none")
        except OSError as error:
            raise RunError(
                f"cannot write figure {name!r} to {folder}: {error.strerror or error}"
            ) from None
    return paths


# --------------------------------------------------------------------------- lines


def _lines(panels: Sequence[Chart]) -> Callable[[], "Figure"]:
    def draw() -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2 * len(panels), 3.9), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, chart in zip(axes, panels, strict=True):
            _panel(ax, chart)
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            axes[0].legend(handles, labels)
        return figure

    return draw


def _panel(ax: Any, chart: Chart) -> None:
    for k, s in enumerate(chart.series):
        x, y, spread = (
            np.array([getattr(p, k) for p in s.points], dtype=float) for k in ("x", "y", "spread")
        )
        grey = s.colour == charts.GREY
        colour = GREY if grey else COLOURS[s.colour % len(COLOURS)]
        marker = "o" if not grey and len(x) <= MARKED_POINTS else ""
        ax.plot(
            x,
            y,
            "--" if s.dashed else "-",
            color=colour,
            marker=marker,
            ms=3.5,
            label=f"\u200a{s.label}",  # a leading underscore would hide the line from the legend
        )
        if spread.any():
            barred = charts.marked(s.points, k)
            ax.errorbar(
                [p.x for p in barred],
                [p.y for p in barred],
                [p.spread for p in barred],
                fmt="none",
                ecolor=colour,
                alpha=0.7,
                capsize=2.5,
                lw=1.2,
            )
    ax.set(title=chart.title, xlabel=chart.x, ylabel=chart.y, ylim=chart.limits)
    ax.set_xlim(left=0)
    if chart.share:
        ax.yaxis.set_major_formatter(lambda v, _: f"{100 * v:g} %")
    if chart.by_round:
        ax.xaxis.get_major_locator().set_params(integer=True)


# --------------------------------------------------------------------------- clients


def _grids(grids: Sequence[Grid], names: Sequence[str]) -> Callable[[], "Figure"]:
    def draw() -> "Figure":
        from matplotlib.figure import Figure

        heights = [min(9.0, max(1.2, 0.26 * len(g.rows))) + 1.2 for g in grids]
        figure = Figure(figsize=(9.5, sum(heights)), layout="constrained")
        axes = figure.subplots(len(grids), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, grid, name in zip(axes, grids, names, strict=True):
            _picture(ax, grid, name)
        return figure

    return draw


def _picture(ax: Any, grid: Grid, name: str) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    pixels = np.array(
        [[_pixel(to_rgb(FILLS[c.kind]), c.shade) for c in column] for column in grid.cells]
    )
    if pixels.size:
        ax.imshow(pixels.transpose(1, 0, 2), aspect="auto", interpolation="nearest")
    every = -(-len(grid.rows) // MOST_ROW_NAMES) or 1
    ax.set_yticks(range(0, len(grid.rows), every), list(islice(grid.rows, 0, None, every)))
    ax.set(xlabel="client", ylabel=grid.row)
    ax.set_title(name, pad=24)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(visible=False)
    if len(grid.columns) <= SEPARATED_COLUMNS:
        columns, rows = len(grid.columns), len(grid.rows)
        ax.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, color="white", lw=1.5)
        ax.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, color="white", lw=1.5)
    keys = [Patch(color=FILLS[kind], label=meaning) for kind, meaning in grid.legend.items()]
    ax.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(keys),
        borderpad=0,
        borderaxespad=0.5,
    )


def _pixel(rgb: Sequence[float], shade: float) -> npt.NDArray[np.float64]:
    return shade * np.array(rgb) + (1 - shade) * WHITE
