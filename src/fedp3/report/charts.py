"""Content of the line charts, for the page and for the figure files alike.

The charts of virtual time and energy exist only for runs with a virtual clock.

With one run, colours stand for G, D and P.  With several, colours stand for runs, and each of
G, D and P has a panel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fedp3.core.scores import ACCURACY
from fedp3.report import text
from fedp3.report.clock import (
    has_clock,
    joules,
    score_by_energy,
    score_by_time,
    virtual_seconds,
)
from fedp3.report.runs import (
    KINDS,
    Curve,
    Point,
    Run,
    Seed,
    bytes_curve,
    dense_curve,
    final,
    loss_curve,
    over_seeds,
    score_by_mb,
    score_curve,
    shown_kinds,
)
from fedp3.report.targets import Target, choose_target

MOST_POINTS = 240  # points of one line; more cannot be distinguished on a screen
MOST_BARS = 12  # bars of one line
GREY = -1
ALL_RUNS = -1
PER_CLIENT = "Mean over clients, each on its test samples."
NOTES = {
    "G": PER_CLIENT,
    "D": "The pruned model as a client receives it, before local training.",
    "P": "P is a mean over the round's participants, after local training.",
    "C": "The server's model on a test set of no client.",
    "loss": "Training loss of the round's participants; test loss of G, mean over clients.",
    "bytes": "Dense FedAvg sends the full model both ways, with the same participants.",
    "mb": "Traffic of all rounds so far, up and down together.",
    "time": "Virtual time on the devices, with waiting for slow ones.",
    "energy": "Energy of all clients that got a task, so far.",
}
WAYS = {"down": "server to clients", "up": "clients to server"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart; its bars are one standard deviation over seeds on each side."""

    label: str
    run: int  # index of the run, or ALL_RUNS
    colour: int  # index of the colour, or GREY
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One panel."""

    title: str
    x: str  # label of the x axis
    y: str  # label of the y axis
    show: Callable[[float | None], str]  # formats a value of y
    series: tuple[Series, ...]
    limits: tuple[float, float]
    show_x: Callable[[float], str]
    note: str
    by_round: bool = True  # x is a round number
    share: bool = False  # y is a share of 1, shown in percent


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that are drawn into one figure file."""

    place: str  # where it is in the page
    name: str  # of its file
    panels: tuple[Chart, ...]


def figures(runs: Sequence[Run], target: float | None = None) -> list[Figure]:
    """All line charts of a report.

    Args:
        runs: the runs.
        target: a G that is marked in charts of virtual time and energy, see `choose_target`.
    """
    panels = {
        "score": _scores(runs),
        "loss": _losses(runs),
        "bytes": _bytes(runs),
        "score-per-mb": _by_mb(runs),
    }
    if any(map(has_clock, runs)):
        chosen = choose_target(runs, target)
        panels["score-per-time"] = _by_time(runs, chosen)
        if any(joules(seed) is not None for run in runs for seed in run.seeds):
            panels["score-per-energy"] = _by_energy(runs, chosen)
    word = "accuracy" if runs[0].score == ACCURACY else "score"
    return [Figure(place, place.replace("score", word), drawn) for place, drawn in panels.items()]


# --------------------------------------------------------------------------- figures


def _scores(runs: Sequence[Run]) -> tuple[Chart, ...]:
    if len(runs) == 1:
        lines = _kinds(runs, score_curve)
        note = f"{PER_CLIENT} {_about_p(runs)}"
        return (_score_chart(runs, f"{_title(runs)} by round", lines, note),)
    kinds = shown_kinds(runs)
    panels = {kind: [_line(runs, i, score_curve(kind)) for i in range(len(runs))] for kind in kinds}
    limits = _limits(
        [line for lines in panels.values() for line in lines], share=runs[0].score.percent
    )
    notes = NOTES | {"P": _about_p(runs)}
    return tuple(
        _score_chart(runs, f"{kind}: {KINDS[kind]}", lines, notes[kind], limits)
        for kind, lines in panels.items()
    )


def _about_p(runs: Sequence[Run]) -> str:
    """Whom the curve of P is over, and the P of tables, which is over other clients."""
    finals = {run.name: final(run, "P") for run in runs if all(s.result for s in run.seeds)}
    known = {n: text.score(runs[0].score, P.mean) for n, P in finals.items() if P is not None}
    if not known:
        return NOTES["P"]
    shown = ", ".join(known.values() if len(runs) == 1 else (f"{n} {P}" for n, P in known.items()))
    return f"{NOTES['P']} Over all clients, at the end, it is {shown}."


def _losses(runs: Sequence[Run]) -> tuple[Chart, ...]:
    alone = len(runs) == 1
    lines = []
    for i, run in enumerate(runs):
        prefix = "" if alone else f"{run.name}, "
        training_colour, test_colour = (3, 0) if alone else (i, i)
        lines.append(_line(runs, i, loss_curve, f"{prefix}training", colour=training_colour))
        test = score_curve("G", "loss")
        lines.append(
            _line(runs, i, test, f"{prefix}test (G)", dashed=True, colour=test_colour),
        )
    note = NOTES["loss"]
    if any(run.seeds[0].config.get("privacy", {}).get("enabled") for run in runs):
        note += " Under LDP clients do not return their training loss."
    recorded = [line for line in lines if line.points] or lines
    limits = _limits(recorded, zero=True)
    return (_chart("Loss by round", "loss", text.number, recorded, note, limits),)


def _bytes(runs: Sequence[Run]) -> tuple[Chart, ...]:
    note = NOTES["bytes"]
    dense = {way: _dense(runs, way) for way in WAYS}
    if len(runs) == 1:
        lines = [
            _line(runs, 0, bytes_curve(way), f"{way}, {WAYS[way]}", colour=colour)
            for colour, way in enumerate(WAYS)
        ]
        if dense["down"] == dense["up"]:
            lines += dense["down"]
        else:
            lines += [
                replace(line, label=f"{line.label}, {way}") for way in WAYS for line in dense[way]
            ]
        return (_chart("Traffic per round", "MB", text.mb, lines, note, _limits(lines, zero=True)),)
    panels = {
        way: [*(_line(runs, i, bytes_curve(way)) for i in range(len(runs))), *dense[way]]
        for way in WAYS
    }
    limits = _limits([line for lines in panels.values() for line in lines], zero=True)
    return tuple(
        _chart(f"{way.capitalize()}: {WAYS[way]}", "MB per round", text.mb, lines, note, limits)
        for way, lines in panels.items()
    )


def _dense(runs: Sequence[Run], way: str) -> list[Series]:
    """A grey line for FedAvg; runs of the same model with the same sampling share a line."""
    groups: dict[tuple[Point, ...], list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(over_seeds(run, dense_curve(way)), []).append(i)
    lines = []
    for points, members in groups.items():
        names = ", ".join(runs[i].name for i in members)
        lines.append(
            Series(
                label="dense FedAvg" if len(groups) == 1 else f"dense FedAvg ({names})",
                run=members[0] if len(members) == 1 else ALL_RUNS,
                colour=GREY,
                points=points,
                dashed=True,
            )
        )
    return lines


def _by_mb(runs: Sequence[Run]) -> tuple[Chart, ...]:
    if len(runs) == 1:
        title, lines = f"{_title(runs)} per MB", _kinds(runs, score_by_mb)
    else:
        title, lines = "G per MB", [_line(runs, i, score_by_mb("G")) for i in range(len(runs))]
    chart = _score_chart(runs, title, lines, NOTES["mb"])
    return (replace(chart, x="MB sent", show_x=text.mb, by_round=False),)


def _by_time(runs: Sequence[Run], target: Target | None) -> tuple[Chart, ...]:
    ends = [virtual_seconds(seed) or 0.0 for run in runs for seed in run.seeds]
    unit = text.unit(text.TIMES, max(ends))
    chart = _to_target(runs, lambda kind: score_by_time(kind, unit.size), target, "virtual time")
    return (_against(chart, f"virtual time, {unit.name}", unit, NOTES["time"]),)


def _by_energy(runs: Sequence[Run], target: Target | None) -> tuple[Chart, ...]:
    spent = [joules(seed) or 0.0 for run in runs for seed in run.seeds]
    unit = text.unit(text.ENERGIES, max(spent))
    chart = _to_target(runs, lambda kind: score_by_energy(kind, unit.size), target, "energy")
    return (_against(chart, f"energy, {unit.name}", unit, NOTES["energy"]),)


def _to_target(
    runs: Sequence[Run],
    curve: Callable[[str], Callable[[Seed], Curve]],
    target: Target | None,
    quantity: str,
) -> Chart:
    if len(runs) == 1:
        title, lines = f"{_title(runs)} by {quantity}", _kinds(runs, curve)
    else:
        shown = [i for i, run in enumerate(runs) if has_clock(run)]
        title, lines = f"G by {quantity}", [_line(runs, i, curve("G")) for i in shown]
    xs = sorted({p.x for line in lines for p in line.points})
    if target is not None and xs:
        label = f"target {text.score(runs[0].score, target.G)}"
        level = tuple(Point(round=0, x=x, y=target.G) for x in [0.0, *xs])
        lines.append(
            Series(label=label, run=ALL_RUNS, colour=GREY, points=level, dashed=True),
        )
    return _score_chart(runs, title, lines, "")


def _against(chart: Chart, x: str, unit: text.Unit, note: str) -> Chart:
    def show(value: float) -> str:
        return f"{text.number(value)}{text.NBSP}{unit.name}"

    return replace(chart, x=x, show_x=show, note=note, by_round=False)


# --------------------------------------------------------------------------- parts


def _kinds(runs: Sequence[Run], curve: Callable[[str], Callable[[Seed], Curve]]) -> list[Series]:
    """The scores of the only run; D is dashed, since it often coincides with G."""
    return [
        _line(runs, 0, curve(kind), f"{kind}, {KINDS[kind]}", colour=colour, dashed=kind == "D")
        for colour, kind in enumerate(shown_kinds(runs))
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
    return Series(
        label=label or runs[i].name,
        run=i,
        colour=i if colour is None else colour,
        points=over_seeds(runs[i], curve),
        dashed=dashed,
    )


def _chart(
    title: str,
    y: str,
    show: Callable[[float | None], str],
    lines: Sequence[Series],
    note: str,
    limits: tuple[float, float] | None = None,
) -> Chart:
    return Chart(
        title=title,
        x="round",
        y=y,
        show=show,
        series=tuple(lines),
        limits=limits or _limits(lines),
        show_x=lambda x: f"round {x:.0f}",
        note=note,
    )


def _score_chart(
    runs: Sequence[Run],
    title: str,
    lines: Sequence[Series],
    note: str,
    limits: tuple[float, float] | None = None,
) -> Chart:
    score = runs[0].score
    limits = limits or _limits(lines, share=score.percent)
    chart = _chart(title, score.name, partial(text.score, score), lines, note, limits)
    return replace(chart, share=score.percent)


def _title(runs: Sequence[Run]) -> str:
    name = runs[0].score.name
    return name[:1].upper() + name[1:]


def _limits(
    lines: Sequence[Series], *, zero: bool = False, share: bool = False
) -> tuple[float, float]:
    """The range of y with all bars; it is never empty.

    Args:
        lines: the lines.
        zero: begin at 0, unless there are negative values.
        share: stay within 0 and 1, unless there are larger values.
    """
    low = min((p.y - p.spread for s in lines for p in s.points), default=0.0)
    high = max((p.y + p.spread for s in lines for p in s.points), default=1.0)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    bottom, top = low - margin, high + margin
    if all(p.y >= 0 for s in lines for p in s.points):
        bottom = 0.0 if zero else max(0.0, bottom)
    return bottom, min(1.0, top) if share and high <= 1 else top


def marked(points: Sequence[Point], offset: int = 0) -> Sequence[Point]:
    """The points that have a bar for their spread: at most MOST_BARS, evenly spaced.

    Args:
        points: the points of a line.
        offset: where to begin, so that the bars of several dense lines do not coincide.
    """
    step = -(-len(points) // MOST_BARS)
    return points if step <= 1 else points[offset % step :: step]


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """Evenly spaced points, at most MOST_POINTS of them, and the last one."""
    step = -(-len(points) // MOST_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]
