"""What the line charts show, for the page and for the figure files alike.

With one run, colour tells G, D and P apart; with several, colour is the run and each kind has its own panel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedp3.report import text
from fedp3.report.runs import (
    KINDS,
    Curve,
    Point,
    Run,
    Seed,
    bytes_curve,
    dense_curve,
    loss_curve,
    over_seeds,
    score_by_mb,
    score_curve,
)

MOST_POINTS = 240  # of one line: more cannot be seen
GREY = -1
EACH = "Mean over clients, each on its own test samples."
NOTES = {
    "G": EACH,
    "D": "The pruned model as a client gets it, before it trains.",
    "P": "The round's participants, each on its own test samples after it trained.",
    "loss": "Training loss of the round's participants; test loss of G, mean over clients.",
    "bytes": "Dense FedAvg moves the whole model, for the same participants.",
    "mb": "All traffic so far, up and down together.",
}
WAYS = {"down": "server to clients", "up": "clients to server"}


@dataclass(frozen=True, slots=True)
class Series:
    """One line with its band."""

    label: str
    run: int  # -1: belongs to all
    colour: int
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel."""

    title: str
    x: str  # what the axes are
    y: str
    show: Callable[[float | None], str]  # a value for people
    series: tuple[Series, ...]
    limits: tuple[float, float]
    show_x: Callable[[float], str]
    note: str
    by_round: bool = True  # x is whole numbers

    @property
    def share(self) -> bool:
        """Whether y is shares of 1, written in percent."""
        return self.show is text.percent


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that belong together, under the name of their file."""

    name: str
    panels: tuple[Chart, ...]


def figures(runs: Sequence[Run]) -> list[Figure]:
    """All line charts of a report."""
    return [
        Figure("accuracy", _scores(runs)),
        Figure("loss", _losses(runs)),
        Figure("bytes", _bytes(runs)),
        Figure("accuracy-per-mb", _by_mb(runs)),
    ]


# --------------------------------------------------------------------------- the four figures


def _scores(runs: Sequence[Run]) -> tuple[Chart, ...]:
    if len(runs) == 1:
        note = f"{EACH} P is of the round's participants."
        return (_chart("Accuracy by round", "accuracy", text.percent, _kinds(runs, score_curve), note),)
    panels = {kind: [_line(runs, i, score_curve(kind)) for i in range(len(runs))] for kind in KINDS}
    limits = _limits([line for lines in panels.values() for line in lines])
    return tuple(
        _chart(f"{kind}: {KINDS[kind]}", "accuracy", text.percent, lines, NOTES[kind], limits)
        for kind, lines in panels.items()
    )


def _losses(runs: Sequence[Run]) -> tuple[Chart, ...]:
    alone = len(runs) == 1
    lines = []
    for i, run in enumerate(runs):
        start = "" if alone else f"{run.name}, "
        lines += [
            _line(runs, i, loss_curve, f"{start}training", colour=3 if alone else i),
            _line(runs, i, score_curve("G", "loss"), f"{start}test (G)", dashed=True, colour=0 if alone else i),
        ]
    return (_chart("Loss by round", "loss", text.number, lines, NOTES["loss"], _limits(lines, zero=True)),)


def _bytes(runs: Sequence[Run]) -> tuple[Chart, ...]:
    note, dense = NOTES["bytes"], {way: _dense(runs, way) for way in WAYS}
    if len(runs) == 1:
        lines = [_line(runs, 0, bytes_curve(way), f"{way}, {WAYS[way]}", colour=c) for c, way in enumerate(WAYS)]
        (down,), (up,) = dense["down"], dense["up"]
        lines += [down] if down == up else [replace(s, label=f"{s.label}, {way}") for way in WAYS for s in dense[way]]
        return (_chart("Traffic per round", "MB", text.mb, lines, note, _limits(lines, zero=True)),)
    panels = {way: [*(_line(runs, i, bytes_curve(way)) for i in range(len(runs))), *dense[way]] for way in WAYS}
    limits = _limits([line for lines in panels.values() for line in lines], zero=True)
    return tuple(
        _chart(f"{way.capitalize()}: {WAYS[way]}", "MB per round", text.mb, lines, note, limits)
        for way, lines in panels.items()
    )


def _dense(runs: Sequence[Run], way: str) -> list[Series]:
    """A grey line per different FedAvg: runs with one model and one sampling share it."""
    groups: dict[tuple[Point, ...], list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(over_seeds(run, dense_curve(way)), []).append(i)
    lines = []
    for points, who in groups.items():
        names = "" if len(groups) == 1 else f" ({', '.join(runs[i].name for i in who)})"
        lines.append(Series(f"dense FedAvg{names}", who[0] if len(who) == 1 else -1, GREY, points, dashed=True))
    return lines


def _by_mb(runs: Sequence[Run]) -> tuple[Chart, ...]:
    alone = len(runs) == 1
    lines = _kinds(runs, score_by_mb) if alone else [_line(runs, i, score_by_mb("G")) for i in range(len(runs))]
    chart = _chart("Accuracy per MB" if alone else "G per MB", "accuracy", text.percent, lines, NOTES["mb"])
    return (replace(chart, x="MB moved", show_x=text.mb, by_round=False),)


# --------------------------------------------------------------------------- parts


def _kinds(runs: Sequence[Run], curve: Callable[[str], Callable[[Seed], Curve]]) -> list[Series]:
    """G, D and P of the only run; D is dashed, for it often lies on G."""
    return [
        _line(runs, 0, curve(kind), f"{kind}, {what}", colour=c, dashed=kind == "D")
        for c, (kind, what) in enumerate(KINDS.items())
    ]


def _line(
    runs: Sequence[Run],
    i: int,
    curve: Callable[[Seed], Curve],
    label: str = "",
    *,
    dashed: bool = False,
    colour: int | None = None,
) -> Series:
    return Series(label or runs[i].name, i, i if colour is None else colour, over_seeds(runs[i], curve), dashed)


def _chart(
    title: str,
    y: str,
    show: Callable[[float | None], str],
    lines: Sequence[Series],
    note: str,
    limits: tuple[float, float] | None = None,
) -> Chart:
    return Chart(title, "round", y, show, tuple(lines), limits or _limits(lines), lambda x: f"round {x:.0f}", note)


def _limits(lines: Sequence[Series], *, zero: bool = False) -> tuple[float, float]:
    """The range of y: bands included, never without height, shares never beyond 0 and 1."""
    low = min((p.y - p.spread for s in lines for p in s.points), default=0.0)
    high = max((p.y + p.spread for s in lines for p in s.points), default=1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    if zero:
        return 0.0, high + room
    return max(0.0, low - room), min(1.0, high + room) if high <= 1 else high + room


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most MOST_POINTS of them, evenly spread, and the last one."""
    step = -(-len(points) // MOST_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]
