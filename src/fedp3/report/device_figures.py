"""The fleet and the timeline of a round as matplotlib figures, for the figure files."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedp3.report import text
from fedp3.report.device_svg import fleet_frame, labels, log_limits, log_ticks, places, radius
from fedp3.report.fleets import NOTHING, Cluster, Fleet
from fedp3.report.svg import Frame
from fedp3.report.timelines import COMPUTE, DOWN, UP, WAITS, Bar, Timeline, note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL_COLOURS = ("#e0a21b", "#e0703c", "#c9477f", "#8a4bb8", "#4169d8", "#14398a")
GREY = "#6b7787"
PHASE_COLOURS = {DOWN: "#2b9db3", COMPUTE: "#2563c9", UP: "#9333a8", WAITS: "#d5dbe3"}
WARNING = "#8a4b08"
MARKERS = {"phone": "o", "board": "s"}
OTHER_MARKER = "D"
FLEET_SIZE = (5.8, 4.4)  # inches
AXES_POINTS = (350, 250)  # about what the axes of a fleet measure


# --------------------------------------------------------------------------- fleet


def fleets_drawing(fleets: Mapping[str, Fleet]) -> Callable[[], "Figure"]:
    """Pictures of fleets side by side.

    Args:
        fleets: from the name of a run to its fleet.
    """

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(FLEET_SIZE[0] * len(fleets), FLEET_SIZE[1]), layout="constrained")
        axes = figure.subplots(1, len(fleets), squeeze=False)[0]
        for ax, (name, shown) in zip(axes, fleets.items(), strict=True):
            _fleet(ax, name, shown)
        return figure

    return draw


def _fleet(ax: Any, name: str, shown: Fleet) -> None:
    from matplotlib.lines import Line2D

    speeds = log_limits([c.gflops for c in shown.clusters])
    memories = log_limits([c.memory_gb for c in shown.clusters])
    ax.set(xscale="log", yscale="log", xlim=speeds, ylim=memories)
    for axis, limits in ((ax.xaxis, speeds), (ax.yaxis, memories)):
        values = log_ticks(*limits)
        axis.set_ticks(values, [f"{v:g}" for v in values])
        axis.set_ticks([], minor=True)
    ax.set(title=name, xlabel="GFLOP/s", ylabel="memory, GB")
    frame = replace(fleet_frame(shown, *AXES_POINTS), left=0, right=0, top=0, bottom=0)
    r = radius(shown, frame.width)
    for cluster in shown.clusters:
        _dots(ax, cluster, frame, r)
    for device, box in labels(shown, frame, r):
        x, y = _value(frame, box.left, (box.top + box.bottom) / 2)
        ax.text(x, y, device, va="center", size=8.5, color=GREY)
    shapes = [
        Line2D([], [], ls="", marker=MARKERS.get(kind, OTHER_MARKER), color=GREY, label=kind)
        for kind in shown.kinds
    ]
    colours = [
        Line2D([], [], ls="", marker="o", color=_colour(level), label=meaning)
        for level, meaning in shown.legend.items()
    ]
    ax.legend(
        handles=colours + (shapes if len(shapes) > 1 else []),
        loc="lower left",
        bbox_to_anchor=(1, 0),
        title="trained in full",
    )


def _dots(ax: Any, cluster: Cluster, frame: Frame, r: float) -> None:
    spots = [_value(frame, x, y) for x, y in places(cluster, frame, r)]
    ax.scatter(
        *zip(*spots, strict=True),
        c=[_colour(dot.level) for dot in cluster.dots],
        marker=MARKERS.get(cluster.kind, OTHER_MARKER),
        s=(1.8 * r) ** 2,
        linewidths=0,
        zorder=2,
    )


def _value(frame: Frame, x: float, y: float) -> tuple[float, float]:
    """Speed and memory at a pixel of a frame without margins."""
    (x0, x1), (y0, y1) = frame.x, frame.y
    return 10 ** (x0 + (x1 - x0) * x / frame.width), 10 ** (y1 - (y1 - y0) * y / frame.height)


def _colour(level: int) -> str:
    return GREY if level == NOTHING else LEVEL_COLOURS[level]


# --------------------------------------------------------------------------- timeline


def timelines_drawing(rounds: Mapping[str, Timeline]) -> Callable[[], "Figure"]:
    """Timelines one above the other.

    Args:
        rounds: from the name of a run to one of its rounds.
    """

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        heights = [0.24 * len(shown.bars) + 1.6 for shown in rounds.values()]
        figure = Figure(figsize=(9.5, sum(heights)), layout="constrained")
        axes = figure.subplots(len(rounds), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, (name, shown) in zip(axes, rounds.items(), strict=True):
            _timeline(ax, name, shown)
        return figure

    return draw


def _timeline(ax: Any, name: str, shown: Timeline) -> None:
    from matplotlib.patches import Patch

    unit = text.unit(text.TIMES, shown.limits[1])
    for j, bar in enumerate(shown.bars):
        for p in bar.phases:
            length = (p.end - p.start) / unit.size
            ax.barh(j, length, 0.7, p.start / unit.size, color=PHASE_COLOURS[p.kind])
    ax.axvline(shown.seconds / unit.size, color="black", ls="--", lw=1.2)
    rows = range(len(shown.bars))
    ax.set_yticks(rows, [_who(bar) for bar in shown.bars])
    outcomes = ax.secondary_yaxis("right")
    outcomes.set_yticks(rows, [bar.outcome for bar in shown.bars])
    for label, bar in zip(outcomes.get_yticklabels(), shown.bars, strict=True):
        label.set_color(WARNING if bar.missed else GREY)
    outcomes.tick_params(length=0)
    outcomes.spines["right"].set_visible(False)
    first, last = shown.limits
    ax.set(xlim=(first / unit.size, last / unit.size), ylim=(len(shown.bars) - 0.5, -0.5))
    ax.set(xlabel=f"{unit.words} since the start of the round")
    ax.set_title(f"{name}: {note(shown)}", pad=24, fontsize=10, fontweight="normal")
    ax.grid(visible=False, axis="y")
    keys = [Patch(color=PHASE_COLOURS[k], label=meaning) for k, meaning in shown.legend.items()]
    ax.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(keys) or 1,
        borderpad=0,
        borderaxespad=0.5,
    )


def _who(bar: Bar) -> str:
    return f"{bar.client}  {bar.device}" if bar.device else bar.client
