"""The timeline of a round and the picture of the fleet as SVG.

Each is drawn for wide and for narrow screens, where the texts of a shrunken drawing could not be
read; the style sheet shows one of the two.  `timeline_tips` and `fleet_tips` return what the
page's script shows on hover: titles and lines of spots, of which the nearest one is shown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from fedp3.report import text
from fedp3.report.fleets import NOTHING, Cluster, Fleet
from fedp3.report.svg import Frame, short, tick_text, ticks
from fedp3.report.timelines import PHASES, Bar, Phase, Timeline

M = Markup
CHARACTER = 6.6  # pixels of an average character of a label
LINE = 14.0  # height of a label


# --------------------------------------------------------------------------- timeline

TOP, ROW, THICK, BELOW = 6, 27, 9, 42  # pixels: margin, one client, its bar, the axis
REST = 0.5  # opacity of what happens after the end of the round


def timeline_frame(shown: Timeline, width: int) -> Frame:
    """Where the seconds of a timeline are in its drawing; y counts clients from the top."""
    rows = len(shown.bars)
    return Frame(
        width=width,
        height=TOP + ROW * rows + BELOW,
        x=shown.limits,
        y=(rows, 0),
        left=10,
        right=14,
        top=TOP,
        bottom=BELOW,
    )


def timeline_picture(shown: Timeline, key: str, width: int = 560) -> Markup:
    """A bar for each client: its name and outcome above what it does when.

    Args:
        shown: the content.
        key: under which the page's script finds what to show on hover.
        width: width of the drawing.
    """
    f = timeline_frame(shown, width)
    end, _ = f.position(shown.seconds, 0)
    line = M('<line class="end" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>')
    body = [
        _seconds_axis(f),
        *(_bar(bar, j, shown.seconds, f) for j, bar in enumerate(shown.bars)),
        line.format(end, TOP, f.height - BELOW + 4),
        *(_names(bar, j, f) for j, bar in enumerate(shown.bars)),
    ]
    mark = M('<rect class="mark" x="2" y="{}" width="{}" height="{}" rx="4"/>').format(
        -ROW / 2, width - 4, ROW
    )
    return M(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-spots="{}">{}{}</svg>'
    ).format(width, f.height, timeline_summary(shown), key, M("").join(body), mark)


def timeline_summary(shown: Timeline) -> str:
    """A timeline in words, for screen readers."""
    bars = "; ".join(f"{_who(bar)}: {bar.outcome}" for bar in shown.bars[:12])
    return f"Round {shown.round}, {text.duration(shown.seconds)} of virtual time. {bars}."


def _who(bar: Bar) -> str:
    return f"client {bar.client}, {bar.device}" if bar.device else f"client {bar.client}"


def _seconds_axis(f: Frame) -> Markup:
    unit = text.unit(text.TIMES, f.x[1])
    values = ticks(f.x[0] / unit.size, f.x[1] / unit.size, f.width // 90)
    show = tick_text(values, share=False)
    bottom = f.height - f.bottom
    rule = M('<line class="rule" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>')
    label = M('<text class="tick" x="{:.1f}" y="{}">{}</text>')
    title = M('<text class="axis" x="{}" y="{}">{} since the start of the round</text>')
    parts = [title.format(f.width // 2, f.height - 5, unit.words)]
    for v in values:
        x, _ = f.position(v * unit.size, 0)
        parts += [rule.format(x, f.top, bottom), label.format(x, bottom + 18, show(v))]
    return M("").join(parts)


def _names(bar: Bar, j: int, f: Frame) -> Markup:
    """Who it is, and what became of its work."""
    _, top = f.position(0, j)
    name = M('<text class="tick total halo" x="{}" y="{:.1f}">{}</text>')
    outcome = M('<text class="tick y halo{}" x="{}" y="{:.1f}">{}</text>')
    room = int((f.width - f.left - f.right) / CHARACTER) - len(bar.outcome) - 2
    missed = " missed" if bar.missed else ""
    return name.format(f.left, top + 12, short(_who(bar), max(12, room))) + outcome.format(
        missed, f.width - f.right, top + 12, bar.outcome
    )


def _bar(bar: Bar, j: int, seconds: float, f: Frame) -> Markup:
    _, top = f.position(0, j)
    parts = [p for phase in bar.phases for p in _split(phase, seconds)]
    return M("").join(_stretch(p, top + 16, seconds, f) for p in parts)


def _split(phase: Phase, seconds: float) -> list[Phase]:
    """A phase in two, if it goes on after the end of the round."""
    if not phase.start < seconds < phase.end:
        return [phase]
    return [Phase(phase.kind, phase.start, seconds), Phase(phase.kind, seconds, phase.end)]


def _stretch(p: Phase, y: float, seconds: float, f: Frame) -> Markup:
    """A rectangle, cut at the edges of the drawing."""
    first, last = (min(max(t, f.x[0]), f.x[1]) for t in (p.start, p.end))
    if last <= first:
        return M("")
    x0, x1 = f.position(first, 0)[0], f.position(last, 0)[0]
    rest = M(' fill-opacity="{}"').format(REST) if p.start >= seconds else M("")
    return M('<rect class="phase {}"{} x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"/>').format(
        p.kind, rest, x0, y, max(0.6, x1 - x0), THICK
    )


def timeline_tips(shown: Timeline, width: int = 560) -> dict[str, Any]:
    """What each client of a timeline shows on hover."""
    f = timeline_frame(shown, width)
    lines = []
    for bar in shown.bars:
        phases = [f"{PHASES[p.kind]} {text.duration(p.end - p.start)}" for p in bar.phases]
        lines.append([", ".join(phases), bar.outcome])
    return {
        "x": [],  # the whole row is the spot
        "y": [round(f.position(0, j + 0.5)[1], 1) for j in range(len(shown.bars))],
        "reach": ROW / 2,
        "titles": [_who(bar) for bar in shown.bars],
        "lines": lines,
    }


# --------------------------------------------------------------------------- fleet

GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether the two have a point in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def within(self, other: "Box") -> bool:
        """Whether the other one contains it."""
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


def log_ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 and 5 times a power of ten between two positive limits, or only the powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**k for k in powers for m in (1, 2, 5)]
    inside = [v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
    if len(inside) <= 8:
        return inside
    return [v for v in inside if math.isclose(math.log10(v), round(math.log10(v)))]


def log_limits(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis with room around these positive values."""
    low, high = min(values), max(values)
    room = max(1.35, (high / low) ** 0.08)
    return low / room, high * room


def fleet_frame(shown: Fleet, width: int, height: int) -> Frame:
    """Where the logarithms of speed and memory are in the drawing."""
    speeds = log_limits([c.gflops for c in shown.clusters])
    memories = log_limits([c.memory_gb for c in shown.clusters])
    return Frame(
        width=width,
        height=height,
        x=(math.log10(speeds[0]), math.log10(speeds[1])),
        y=(math.log10(memories[0]), math.log10(memories[1])),
    )


def radius(shown: Fleet, width: float) -> float:
    """Pixels from the centre of a dot to its edge: the more dots, the smaller."""
    dots = sum(len(cluster.dots) for cluster in shown.clusters)
    return min(5.0, max(1.6, 0.09 * width / math.sqrt(dots)))


def centre(cluster: Cluster, f: Frame) -> tuple[float, float]:
    """The pixel of a device."""
    return f.position(math.log10(cluster.gflops), math.log10(cluster.memory_gb))


def places(cluster: Cluster, f: Frame, r: float) -> list[tuple[float, float]]:
    """The pixel of every dot: equal devices are a sunflower around their place, without overlap."""
    x, y = centre(cluster, f)
    if len(cluster.dots) == 1:
        return [(x, y)]
    away = [1.3 * r * math.sqrt(k + 0.5) for k in range(len(cluster.dots))]
    return [
        (x + d * math.cos(k * GOLDEN_ANGLE), y + d * math.sin(k * GOLDEN_ANGLE))
        for k, d in enumerate(away)
    ]


def extent(cluster: Cluster, f: Frame, r: float) -> Box:
    """The rectangle around the dots of a device."""
    spots = places(cluster, f, r)
    xs, ys = [x for x, _ in spots], [y for _, y in spots]
    return Box(min(xs) - r, min(ys) - r, max(xs) + r, max(ys) + r)


def fleet_picture(shown: Fleet, key: str, width: int = 560, height: int = 380) -> Markup:
    """Memory against speed, both logarithmic.

    Args:
        shown: the content.
        key: under which the page's script finds what to show on hover.
        width: width of the drawing.
        height: height of the drawing.
    """
    f, r = fleet_frame(shown, width, height), radius(shown, width)
    body = [_log_axes(f)]
    for cluster in shown.clusters:
        body += _dots(cluster, f, r)
    label = M('<text class="tick total halo" x="{:.1f}" y="{:.1f}">{}</text>')
    body += [label.format(box.left, box.bottom - 3, name) for name, box in labels(shown, f, r)]
    mark = M('<circle class="mark" r="{:.1f}"/>').format(r + 2)
    return M(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-spots="{}">{}{}</svg>'
    ).format(width, height, fleet_summary(shown), key, M("").join(body), mark)


def fleet_summary(shown: Fleet) -> str:
    """A fleet in words, for screen readers."""
    largest = sorted(shown.clusters, key=lambda c: -len(c.dots))[:12]
    devices = "; ".join(
        f"{len(c.dots)} {c.device}: {text.mb(1e3 * c.memory_gb)}, {text.number(c.gflops)} GFLOP/s"
        for c in largest
    )
    return f"Memory against speed of {len(shown.clusters)} devices. {devices}."


def _log_axes(f: Frame) -> Markup:
    rule = M('<line class="rule" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    across = M('<text class="tick" x="{:.1f}" y="{}">{}</text>')
    upward = M('<text class="tick y" x="{}" y="{:.1f}">{}</text>')
    title = M('<text class="axis" x="{}" y="{}">{}</text>')
    turned = M('<text class="axis" x="12" y="{0}" transform="rotate(-90 12 {0})">{1}</text>')
    right, bottom = f.width - f.right, f.height - f.bottom
    parts = [
        title.format((f.left + right) // 2, f.height - 4, "GFLOP/s"),
        turned.format((f.top + bottom) // 2, "memory, GB"),
    ]
    for v in log_ticks(10 ** f.x[0], 10 ** f.x[1]):
        x, _ = f.position(math.log10(v), f.y[0])
        parts += [rule.format(x, x, f.top, bottom), across.format(x, f.height - 22, f"{v:g}")]
    for v in log_ticks(10 ** f.y[0], 10 ** f.y[1]):
        _, y = f.position(f.x[0], math.log10(v))
        parts += [rule.format(f.left, right, y, y), upward.format(f.left - 7, y + 4, f"{v:g}")]
    return M("").join(parts)


def _circle(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y:.1f}a{r:g} {r:g} 0 1 0 {2 * r:g} 0a{r:g} {r:g} 0 1 0 {-2 * r:g} 0z"


def _square(x: float, y: float, r: float) -> str:
    side = 1.8 * r
    return f"M{x - side / 2:.1f} {y - side / 2:.1f}h{side:g}v{side:g}h{-side:g}z"


def _diamond(x: float, y: float, r: float) -> str:
    return f"M{x:.1f} {y - 1.2 * r:.1f}l{1.2 * r:g} {1.2 * r:g}l{-1.2 * r:g} {1.2 * r:g}" + (
        f"l{-1.2 * r:g} {-1.2 * r:g}z"
    )


SHAPES = {"phone": ("●", _circle), "board": ("■", _square)}
OTHER_SHAPE = ("◆", _diamond)


def glyphs(shown: Fleet) -> dict[str, str]:
    """Kind of device -> its shape as a character; empty if there is only one kind."""
    kinds = shown.kinds
    return {k: SHAPES.get(k, OTHER_SHAPE)[0] for k in kinds} if len(kinds) > 1 else {}


def _dots(cluster: Cluster, f: Frame, r: float) -> list[Markup]:
    """One path for each colour."""
    _, shape = SHAPES.get(cluster.kind, OTHER_SHAPE)
    spots = zip(cluster.dots, places(cluster, f, r), strict=True)
    return [
        M('<path class="spot {}" d="{}"/>').format(
            level_class(level), "".join(shape(x, y, r) for _, (x, y) in group)
        )
        for level, group in groupby(spots, key=lambda spot: spot[0].level)
    ]


def level_class(level: int) -> str:
    """The class in the style sheet of a number of layers."""
    return "grey" if level == NOTHING else f"s{level}"


def labels(shown: Fleet, f: Frame, r: float) -> list[tuple[str, Box]]:
    """Names of devices where there is room, those with most clients first.

    Args:
        shown: the fleet.
        f: the frame.
        r: radius of a dot.
    """
    clusters = sorted(shown.clusters, key=lambda c: (-len(c.dots), c.device))
    taken = [extent(cluster, f, r) for cluster in clusters]
    inside = Box(f.left, f.top, f.width, f.height - f.bottom)
    placed = []
    for cluster, around in zip(clusters, list(taken), strict=True):
        name = short(cluster.device, 22)
        for box in _rooms(around, CHARACTER * len(name)):
            if box.within(inside) and not any(box.meets(other) for other in taken):
                taken.append(box)
                placed.append((name, box))
                break
    return placed


def _rooms(around: Box, width: float) -> list[Box]:
    """Where a label may be: right, left, above or below."""
    x, y = (around.left + around.right) / 2, (around.top + around.bottom) / 2
    corners = [
        (around.right + 3, y - LINE / 2),
        (around.left - 5 - width, y - LINE / 2),
        (x - width / 2, around.top - 1 - LINE),
        (x - width / 2, around.bottom + 1),
    ]
    return [Box(left, top, left + width, top + LINE) for left, top in corners]


def fleet_tips(shown: Fleet, width: int = 560, height: int = 380) -> dict[str, Any]:
    """What each client of a fleet shows on hover."""
    f, r = fleet_frame(shown, width, height), radius(shown, width)
    spots = [spot for cluster in shown.clusters for spot in places(cluster, f, r)]
    dots = [(cluster.device, dot) for cluster in shown.clusters for dot in cluster.dots]
    return {
        "x": [round(x, 1) for x, _ in spots],
        "y": [round(y, 1) for _, y in spots],
        "reach": 16,
        "titles": [f"client {dot.client}, {device}" for device, dot in dots],
        "lines": [dot.texts for _, dot in dots],
    }
