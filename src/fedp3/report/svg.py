"""Charts as inline SVG.  Every text goes through Markup.format, which escapes it; colours come from the page's CSS.

`line_chart` and `grid_picture` return the drawing, `line_tips` and `grid_tips` what the page's script shows on hover.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from fedp3.report.charts import Chart, Series, thin
from fedp3.report.grids import Cell, Grid
from fedp3.report.runs import Point

M = Markup
MARKERS_UP_TO = 24  # points of a line that are marked one by one


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a chart's plane lies in its drawing, and the values at its edges."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = 60
    right: int = 14
    top: int = 12
    bottom: int = 40

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Values to places."""
        (x0, x1), (y0, y1) = self.x, self.y
        across, down = self.width - self.left - self.right, self.height - self.top - self.bottom
        return self.left + across * (x - x0) / (x1 - x0), self.top + down * (1 - (y - y0) / (y1 - y0))


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values between the two, about `count` of them."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _coordinates(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


# --------------------------------------------------------------------------- lines


def frame(chart: Chart, width: int, height: int) -> Frame:
    """The plane of a chart."""
    high = max((p.x for s in chart.series for p in s.points), default=1.0)
    return Frame(width, height, (0.0, high or 1.0), chart.limits)


def line_chart(chart: Chart, key: str, width: int = 560, height: int = 320) -> Markup:
    """Lines with bands over a grid."""
    f = frame(chart, width, height)
    body = [_y_axis(chart, f), _x_axis(chart, f)]
    body += [_band(s, f) for s in chart.series] + [_line(s, f) for s in chart.series]
    if not any(s.points for s in chart.series):
        body.append(M('<text class="empty" x="{}" y="{}">not evaluated yet</text>').format(width // 2, height // 2))
    guide = M('<line class="guide" y1="{}" y2="{}"/>').format(f.top, height - f.bottom)
    return M('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">{}{}</svg>').format(
        width, height, summary(chart), key, guide, M("").join(body)
    )


def summary(chart: Chart) -> str:
    """A chart in words, for those who cannot see it."""
    said = [
        f"{s.label}: {chart.show(s.points[0].y)} at {chart.show_x(s.points[0].x)}, "
        f"{chart.show(s.points[-1].y)} at {chart.show_x(s.points[-1].x)}"
        for s in chart.series
        if s.points
    ]
    return f"{chart.title}. " + ("; ".join(said) or "no values yet") + "."


def _y_axis(chart: Chart, f: Frame) -> Markup:
    values = ticks(*f.y, 5)
    show = _tick_text(values, share=chart.share)
    middle = (f.top + f.height - f.bottom) // 2
    out = M('<text class="axis" x="12" y="{0}" transform="rotate(-90 12 {0})">{1}</text>').format(middle, chart.y)
    for v in values:
        _, y = f.at(f.x[0], v)
        out += M('<line class="rule" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(f.left, f.width - f.right, y, y)
        out += M('<text class="tick y" x="{}" y="{:.1f}">{}</text>').format(f.left - 7, y + 4, show(v))
    return out


def _x_axis(chart: Chart, f: Frame) -> Markup:
    values = ticks(*f.x, 6)
    if chart.by_round:
        values = [v for v in values if v == round(v)]
    show = _tick_text(values, share=False)
    out = M('<text class="axis" x="{}" y="{}">{}</text>').format(
        (f.left + f.width - f.right) // 2, f.height - 4, chart.x
    )
    for v in values:
        out += M('<text class="tick" x="{:.1f}" y="{}">{}</text>').format(f.at(v, f.y[0])[0], f.height - 22, show(v))
    return out


def _tick_text(values: Sequence[float], *, share: bool) -> Callable[[float], str]:
    """All ticks of an axis with the same number of decimals: as many as their step needs."""
    factor = 100 if share else 1
    step = factor * (values[1] - values[0]) if len(values) > 1 else 1
    digits = next((d for d in range(4) if math.isclose(step * 10**d, round(step * 10**d), rel_tol=1e-6)), 4)
    return lambda v: f"{v * factor:,.{digits}f}" + ("\u2009%" if share else "")


def _band(s: Series, f: Frame) -> Markup:
    points = thin(s.points)
    if not any(p.spread for p in points):
        return M("")
    edge = [f.at(p.x, p.y + p.spread) for p in points] + [f.at(p.x, p.y - p.spread) for p in reversed(points)]
    return M('<polygon class="band {}" points="{}"/>').format(_classes(s), _coordinates(edge))


def _line(s: Series, f: Frame) -> Markup:
    points = thin(s.points)
    places = [f.at(p.x, p.y) for p in points]
    out = M('<polyline points="{}"/>').format(_coordinates(places))
    if len(points) <= MARKERS_UP_TO and s.colour >= 0:
        out += M("").join(M('<circle cx="{:.1f}" cy="{:.1f}" r="3"/>').format(*place) for place in places)
    return M('<g class="line {}">{}</g>').format(_classes(s), out)


def _classes(s: Series) -> str:
    colour = f"c{s.colour % 8}" if s.colour >= 0 else "grey"
    return colour + (f" r{s.run}" if s.run >= 0 else "") + (" dashed" if s.dashed else "")


def line_tips(chart: Chart, width: int = 560, height: int = 320) -> dict[str, Any]:
    """For each place on the x axis that has a value: where it is, what it is called, the value of every line."""
    f = frame(chart, width, height)
    shown = [{round(p.x, 6): p for p in thin(s.points)} for s in chart.series]
    xs = sorted({x for points in shown for x in points})

    def value(p: Point | None) -> str | None:
        return None if p is None else chart.show(p.y) + (f" ± {chart.show(p.spread)}" if p.spread else "")

    return {
        "x": [round(f.at(x, f.y[0])[0], 1) for x in xs],
        "heads": [chart.show_x(x) for x in xs],
        "lines": [
            {"run": s.run, "name": s.label, "mark": _classes(s), "values": [value(points.get(x)) for x in xs]}
            for s, points in zip(chart.series, shown, strict=True)
        ],
    }


# --------------------------------------------------------------------------- clients


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where the cells of a grid lie."""

    left: int
    top: int
    across: float  # size of a cell
    down: float
    width: int
    height: int


def mesh(grid: Grid, width: int = 1160) -> Mesh:
    """Cells as large as the width allows, within reason."""
    left = min(180, max(72, 24 + 7 * max(map(len, grid.rows), default=1)))
    room = width - left - 84
    across = min(64.0, room / max(1, len(grid.columns)))
    down = min(26.0, max(9.0, 420 / max(1, len(grid.rows))))
    return Mesh(left, 8, across, down, width, round(8 + down * len(grid.rows) + 42))


def grid_picture(grid: Grid, key: str) -> Markup:
    """One column per client, one row per layer or class; runs of equal cells are single strokes."""
    m = mesh(grid)
    body = _strokes(grid, m) + _row_names(grid, m) + _column_names(grid, m)
    mark = M('<rect class="mark" width="{:.2f}" height="{:.2f}"/>').format(m.across, m.down)
    return M('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-grid="{}">{}{}</svg>').format(
        m.width, m.height, grid_summary(grid), key, body, mark
    )


def grid_summary(grid: Grid) -> str:
    """A grid in words."""
    rows = "; ".join(f"{grid.row} {r}: {n}" for r, n in list(zip(grid.rows, grid.totals, strict=True))[:12])
    return f"{grid.title}: {len(grid.columns)} clients by {len(grid.rows)} {grid.row} rows. {rows}."


def _strokes(grid: Grid, m: Mesh) -> Markup:
    """A path for each look, in units of cells: "M3 7h2" is a stroke one cell thick over the cells 3 and 4 of row 7."""
    gap = 0.1 if min(m.across, m.down) >= 8 else 0.0
    paths: dict[tuple[str, float], list[str]] = {}
    for j in range(len(grid.rows)):
        at = 0
        for look, cells in groupby(grid.cells, key=lambda column: _look(column[j])):
            size = len(list(cells))
            starts, length = (range(at, at + size), f"h{1 - gap:g}") if gap else ((at,), f"h{size}")
            paths.setdefault(look, []).extend(f"M{i} {j}{length}" for i in starts)
            at += size
    out = M("").join(
        M('<path class="cell {}" stroke-opacity="{:g}" stroke-width="{:g}" d="{}"/>').format(*look, 1 - gap, "".join(d))
        for look, d in sorted(paths.items())
        if look[0] != "none"
    )
    move = f"translate({m.left + gap * m.across / 2:.2f} {m.top + m.down / 2:g}) scale({m.across:.4f} {m.down:.4f})"
    return M('<rect class="sheet" x="{}" y="{}" width="{:.1f}" height="{:.1f}"/><g transform="{}">{}</g>').format(
        m.left, m.top, m.across * len(grid.columns), m.down * len(grid.rows), move, out
    )


def _look(cell: Cell) -> tuple[str, float]:
    return cell.kind, cell.shade


def _row_names(grid: Grid, m: Mesh) -> Markup:
    out, every = M(""), math.ceil(11 / m.down)
    end = m.left + m.across * len(grid.columns) + 8
    for j in range(0, len(grid.rows), every):
        y = m.top + m.down * (j + 0.5) + 4
        out += M('<text class="tick y" x="{}" y="{:.1f}">{}</text>').format(m.left - 8, y, _short(grid.rows[j], 22))
        out += M('<text class="tick total" x="{:.1f}" y="{:.1f}">{}</text>').format(end, y, grid.totals[j])
    return out


def _column_names(grid: Grid, m: Mesh) -> Markup:
    n = len(grid.columns)
    longest = max((len(_short(c, 10)) for c in grid.columns), default=1)
    every = next((k for k in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500) if k * m.across >= 9 * longest + 4), 1000)
    y = m.top + m.down * len(grid.rows)
    out = M('<text class="axis" x="{:.1f}" y="{:.1f}">client</text>').format(m.left + m.across * n / 2, y + 34)
    for i in range(0, n, every):
        x = m.left + m.across * (i + 0.5)
        out += M('<text class="tick" x="{:.1f}" y="{:.1f}">{}</text>').format(x, y + 16, _short(grid.columns[i], 10))
    return out


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def grid_tips(grid: Grid) -> dict[str, Any]:
    """What each cell says; parts of text and equal columns are stored once."""
    m = mesh(grid)
    says: dict[str, int] = {}
    columns: dict[tuple[tuple[int, ...], ...], int] = {}
    of = []
    for column in grid.cells:
        row = tuple(tuple(says.setdefault(part, len(says)) for part in cell.says) for cell in column)
        of.append(columns.setdefault(row, len(columns)))
    return {
        "box": [m.left, m.top, round(m.across, 4), round(m.down, 4)],
        "row": grid.row,
        "rows": grid.rows,
        "names": grid.columns,
        "about": grid.about,
        "says": list(says),
        "columns": list(columns),
        "of": of,
    }
