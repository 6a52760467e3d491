"""Charts as inline SVG.

`line_chart` and `grid_picture` return a drawing; `line_tips` and `grid_tips` return what the page's
script shows on hover.  Every text goes through Markup.format, which escapes it.  The page's style
sheet defines the colours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from fedp3.report.charts import ALL_RUNS, GREY, Chart, Series, marked, thin
from fedp3.report.grids import Cell, Grid
from fedp3.report.runs import Point

M = Markup
MARKED_POINTS = 24  # a line with more points has no markers
BAR_STEP = 3.0  # pixels between the bars of two lines at one point
NEAR = 0.015  # of the y axis: lines no farther apart hide each other
COLOURS = 8  # in the style sheet: c0, c1, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Size and margins of a chart in pixels, and the values at the edges of its plot area."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = 60
    right: int = 14
    top: int = 12
    bottom: int = 40

    def position(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a value."""
        (x0, x1), (y0, y1) = self.x, self.y
        plot_width = self.width - self.left - self.right
        plot_height = self.height - self.top - self.bottom
        return (
            self.left + plot_width * (x - x0) / (x1 - x0),
            self.top + plot_height * (1 - (y - y0) / (y1 - y0)),
        )


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values between two limits."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _coordinates(positions: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)


# --------------------------------------------------------------------------- lines


def frame(chart: Chart, width: int, height: int) -> Frame:
    """The frame of a chart; its x axis starts at 0."""
    high = max((p.x for s in chart.series for p in s.points), default=1.0)
    return Frame(width=width, height=height, x=(0.0, high or 1.0), y=chart.limits)


def line_chart(chart: Chart, key: str, width: int = 560, height: int = 320) -> Markup:
    """Lines with bars of spread over a grid.

    Args:
        chart: the content.
        key: under which the page's script finds what to show on hover.
        width: width of the drawing.
        height: height of the drawing.
    """
    f = frame(chart, width, height)
    body = [_y_axis(chart, f), _x_axis(chart, f)]
    body += [_bars(chart, k, f) for k in range(len(chart.series))]
    body += [_line(chart, k, f) for k in range(len(chart.series))]
    if not any(s.points for s in chart.series):
        empty = M('<text class="empty" x="{}" y="{}">not evaluated yet</text>')
        body.append(empty.format(width // 2, height // 2))
    guide = M('<line class="guide" y1="{}" y2="{}"/>').format(f.top, height - f.bottom)
    return M(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">{}{}</svg>'
    ).format(width, height, summary(chart), key, guide, M("").join(body))


def summary(chart: Chart) -> str:
    """A chart in words, for screen readers."""
    lines = []
    for s in chart.series:
        if s.points:
            ends = [
                f"{chart.show(p.y)} at {chart.show_x(p.x)}" for p in (s.points[0], s.points[-1])
            ]
            lines.append(f"{s.label}: {', '.join(ends)}")
    return f"{chart.title}. " + ("; ".join(lines) or "no values yet") + "."


def _y_axis(chart: Chart, f: Frame) -> Markup:
    values = ticks(*f.y, 5)
    show = tick_text(values, share=chart.share)
    middle = (f.top + f.height - f.bottom) // 2
    title = M('<text class="axis" x="12" y="{0}" transform="rotate(-90 12 {0})">{1}</text>')
    rule = M('<line class="rule" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>')
    label = M('<text class="tick y" x="{}" y="{:.1f}">{}</text>')
    parts = [title.format(middle, chart.y)]
    for v in values:
        _, y = f.position(f.x[0], v)
        parts.append(rule.format(f.left, f.width - f.right, y, y))
        parts.append(label.format(f.left - 7, y + 4, show(v)))
    return M("").join(parts)


def _x_axis(chart: Chart, f: Frame) -> Markup:
    values = ticks(*f.x, 6)
    if chart.by_round:
        values = [v for v in values if v == round(v)]
    show = tick_text(values, share=False)
    middle = (f.left + f.width - f.right) // 2
    title = M('<text class="axis" x="{}" y="{}">{}</text>')
    label = M('<text class="tick" x="{:.1f}" y="{}">{}</text>')
    parts = [title.format(middle, f.height - 4, chart.x)]
    for v in values:
        x, _ = f.position(v, f.y[0])
        parts.append(label.format(x, f.height - 22, show(v)))
    return M("").join(parts)


def tick_text(values: Sequence[float], *, share: bool) -> Callable[[float], str]:
    """A format for the ticks of an axis, all with as many decimals as their step needs."""
    factor = 100 if share else 1
    unit = "\u2009%" if share else ""
    step = factor * (values[1] - values[0]) if len(values) > 1 else 1
    digits = 4
    for d in range(4):
        if math.isclose(step * 10**d, round(step * 10**d), rel_tol=1e-6):
            digits = d
            break
    return lambda v: f"{v * factor:,.{digits}f}{unit}"


def _bars(chart: Chart, k: int, f: Frame) -> Markup:
    """A vertical bar of one standard deviation on each side of some points of line k.

    Filled bands would mix their colours where they overlap.  Bars of different lines are drawn
    side by side.
    """
    s, lines = chart.series[k], len(chart.series)
    shift = BAR_STEP * (k - (lines - 1) / 2)
    strokes = []
    for p in marked(thin(s.points), k):
        if p.spread:
            x, top = f.position(p.x, p.y + p.spread)
            _, bottom = f.position(p.x, p.y - p.spread)
            strokes.append(f"M{x + shift - 3:.1f} {top:.1f}h6m-3 0V{bottom:.1f}m-3 0h6")
    if not strokes:
        return M("")
    return M('<path class="bar {}" d="{}"/>').format(_classes(s), "".join(strokes))


def _covered(chart: Chart, k: int) -> bool:
    """Whether a line drawn later hides line k: it is solid and nowhere far from it."""
    near = NEAR * (chart.limits[1] - chart.limits[0])
    ours = {p.x: p.y for p in chart.series[k].points}
    for later in chart.series[k + 1 :]:
        theirs = {p.x: p.y for p in later.points}
        shared = ours.keys() & theirs.keys()
        complete = not later.dashed and bool(ours) and len(shared) == len(ours)
        if complete and all(abs(ours[x] - theirs[x]) <= near for x in shared):
            return True
    return False


def _line(chart: Chart, k: int, f: Frame) -> Markup:
    s = chart.series[k]
    points = thin(s.points)
    positions = [f.position(p.x, p.y) for p in points]
    parts = [M('<polyline points="{}"/>').format(_coordinates(positions))]
    if len(points) <= MARKED_POINTS and s.colour != GREY:
        circle = M('<circle cx="{:.1f}" cy="{:.1f}" r="3"/>')
        parts += [circle.format(x, y) for x, y in positions]
    under = " under" if _covered(chart, k) else ""
    return M('<g class="line {}{}">{}</g>').format(_classes(s), under, M("").join(parts))


def _classes(s: Series) -> str:
    classes = ["grey" if s.colour == GREY else f"c{s.colour % COLOURS}"]
    if s.run != ALL_RUNS:
        classes.append(f"r{s.run}")
    if s.dashed:
        classes.append("dashed")
    return " ".join(classes)


def line_tips(chart: Chart, width: int = 560, height: int = 320) -> dict[str, Any]:
    """What a chart shows on hover: for every x with a value, its position, title and all values.

    Args:
        chart: the content.
        width: width of the drawing.
        height: height of the drawing.
    """
    f = frame(chart, width, height)
    points_by_x = [{round(p.x, 6): p for p in thin(s.points)} for s in chart.series]
    xs = sorted({x for points in points_by_x for x in points})

    def value(p: Point | None) -> str | None:
        if p is None:
            return None
        return f"{chart.show(p.y)} ± {chart.show(p.spread)}" if p.spread else chart.show(p.y)

    return {
        "x": [round(f.position(x, f.y[0])[0], 1) for x in xs],
        "heads": [chart.show_x(x) for x in xs],
        "lines": [
            {
                "run": s.run,
                "name": s.label,
                "mark": _classes(s),
                "values": [value(points.get(x)) for x in xs],
            }
            for s, points in zip(chart.series, points_by_x, strict=True)
        ],
    }


# --------------------------------------------------------------------------- clients


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Where the cells of a grid are in its drawing."""

    left: int
    top: int
    cell_width: float
    cell_height: float
    width: int
    height: int


def mesh(grid: Grid, width: int = 1160) -> Mesh:
    """Cells as large as the width allows, up to a limit."""
    # Narrow drawings leave a third to the names of rows, and little to the totals.
    longest = max(map(len, grid.rows), default=1)
    left = round(min(180, width / 3, max(72 if width > 600 else 40, 24 + 7 * longest)))
    available = width - left - (84 if width > 600 else 66)
    cell_height = min(26.0, max(9.0, 420 / max(1, len(grid.rows))))
    return Mesh(
        left=left,
        top=8,
        cell_width=min(64.0, available / max(1, len(grid.columns))),
        cell_height=cell_height,
        width=width,
        height=round(8 + cell_height * len(grid.rows) + 42),
    )


def grid_picture(grid: Grid, key: str, width: int = 1160) -> Markup:
    """One column per client and one row per layer or class.

    Args:
        grid: the content.
        key: under which the page's script finds what to show on hover.
        width: width of the drawing.
    """
    m = mesh(grid, width)
    body = _strokes(grid, m) + _row_names(grid, m) + _column_names(grid, m)
    mark = M('<rect class="mark" width="{:.2f}" height="{:.2f}"/>')
    return M(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-grid="{}">{}{}</svg>'
    ).format(
        m.width, m.height, grid_summary(grid), key, body, mark.format(m.cell_width, m.cell_height)
    )


def grid_summary(grid: Grid) -> str:
    """A grid in words, for screen readers."""
    totals = list(zip(grid.rows, grid.totals, strict=True))[:12]
    rows = "; ".join(f"{grid.row} {name}: {total}" for name, total in totals)
    return f"{grid.title}: {len(grid.columns)} clients by {len(grid.rows)} {grid.row} rows. {rows}."


def _strokes(grid: Grid, m: Mesh) -> Markup:
    """One path for each look, in units of cells.

    "M3 7h2" is a stroke one cell thick over the cells 3 and 4 of row 7.  Large cells have a gap
    between them and a stroke each; small cells of one look that are side by side share a stroke.
    """
    gap = 0.1 if min(m.cell_width, m.cell_height) >= 8 else 0.0
    paths: dict[tuple[str, float], list[str]] = {}
    for j in range(len(grid.rows)):
        start = 0
        for look, cells in groupby(grid.cells, key=lambda column: _look(column[j])):
            count = len(list(cells))
            strokes = paths.setdefault(look, [])
            if gap:
                strokes += [f"M{i} {j}h{1 - gap:g}" for i in range(start, start + count)]
            else:
                strokes.append(f"M{start} {j}h{count}")
            start += count
    path = M('<path class="cell {}" stroke-opacity="{:g}" stroke-width="{:g}" d="{}"/>')
    drawn = [
        path.format(kind, shade, 1 - gap, "".join(strokes))
        for (kind, shade), strokes in sorted(paths.items())
        if kind != "none"
    ]
    transform = (
        f"translate({m.left + gap * m.cell_width / 2:.2f} {m.top + m.cell_height / 2:g}) "
        f"scale({m.cell_width:.4f} {m.cell_height:.4f})"
    )
    sheet = M('<rect class="sheet" x="{}" y="{}" width="{:.1f}" height="{:.1f}"/>').format(
        m.left, m.top, m.cell_width * len(grid.columns), m.cell_height * len(grid.rows)
    )
    return sheet + M('<g transform="{}">{}</g>').format(transform, M("").join(drawn))


def _look(cell: Cell) -> tuple[str, float]:
    return cell.kind, cell.shade


def _row_names(grid: Grid, m: Mesh) -> Markup:
    name = M('<text class="tick y" x="{}" y="{:.1f}">{}</text>')
    total = M('<text class="tick total" x="{:.1f}" y="{:.1f}">{}</text>')
    end = m.left + m.cell_width * len(grid.columns) + 8
    parts = []
    for j in range(0, len(grid.rows), math.ceil(11 / m.cell_height)):
        y = m.top + m.cell_height * (j + 0.5) + 4
        parts.append(name.format(m.left - 8, y, short(grid.rows[j], (m.left - 14) // 7)))
        parts.append(total.format(end, y, grid.totals[j]))
    return M("").join(parts)


def _column_names(grid: Grid, m: Mesh) -> Markup:
    names = [short(name, 10) for name in grid.columns]
    needed = 9 * max(map(len, names), default=1) + 4  # pixels for the longest name
    steps = (1, 2, 5, 10, 20, 25, 50, 100, 200, 500)
    every = next((k for k in steps if k * m.cell_width >= needed), 1000)
    bottom = m.top + m.cell_height * len(grid.rows)
    middle = m.left + m.cell_width * len(names) / 2
    parts = [
        M('<text class="axis" x="{:.1f}" y="{:.1f}">client</text>').format(middle, bottom + 34)
    ]
    label = M('<text class="tick" x="{:.1f}" y="{:.1f}">{}</text>')
    parts += [
        label.format(m.left + m.cell_width * (i + 0.5), bottom + 16, names[i])
        for i in range(0, len(names), every)
    ]
    return M("").join(parts)


def short(name: str, longest: int) -> str:
    """A name, shortened to so many characters."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def grid_box(grid: Grid, width: int = 1160) -> list[float]:
    """Where the cells of a drawing of this width are: left, top, width and height of a cell."""
    m = mesh(grid, width)
    return [m.left, m.top, round(m.cell_width, 4), round(m.cell_height, 4)]


def grid_tips(grid: Grid) -> dict[str, Any]:
    """What each cell shows on hover; equal texts and equal columns are stored once."""
    texts: dict[str, int] = {}
    columns: dict[tuple[tuple[int, ...], ...], int] = {}
    column_of = []
    for cells in grid.cells:
        column = tuple(
            tuple(texts.setdefault(line, len(texts)) for line in cell.texts) for cell in cells
        )
        column_of.append(columns.setdefault(column, len(columns)))
    return {
        "box": grid_box(grid),
        "row": grid.row,
        "rows": grid.rows,
        "names": grid.columns,
        "about": grid.about,
        "texts": list(texts),
        "columns": list(columns),
        "column_of": column_of,
    }
