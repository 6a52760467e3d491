"""The figures of the pages; matplotlib is imported when the first one is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedp3.core.types import LayerMap
from fedp3.costs.traffic import communication_by_layer, deployed_by_layer, spread
from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.arithmetic import KEEPS, NETS, net_of
from fedp3_paper.reproduce.cells import PROTOCOLS, SPLITS, Bench
from fedp3_paper.reproduce.claims import Finding
from fedp3_paper.reproduce.stats import Interval
from fedp3_paper.reproduce.targets import Row, Target, places_of, runs_on
from fedp3_paper.reproduce.training import Results, against, scores
from fedp3_paper.theory.figures import COLOURS, house_style, save

Panel = tuple[Bench, str, Sequence[tuple[Row, Interval]]]
# Title, then what each keep loses against 1.0: ours, published
Curve = tuple[str, Sequence[float], Sequence[float]]
ALPHAS = (0, 50)  # points; lines are straight


def _grid(heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """A figure with panels in two columns, and its axes.

    Args:
        heights: the height of each panel in inches; a row of panels is as high as its higher one.
    """
    import matplotlib.pyplot as plt

    columns = min(len(heights), 2)
    lines = [max(heights[j : j + columns]) for j in range(0, len(heights), columns)]
    figure, axes = plt.subplots(
        len(lines),
        columns,
        figsize=(5.6 * columns, sum(lines)),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": lines},
    )
    flat = list(axes.flat)
    for spare in flat[len(heights) :]:
        spare.set_visible(False)
    return figure, flat


@house_style
def parameters(out: Path) -> Path:
    """Parameters on a device and uploads by trained layer, for the paper's four networks."""
    figure, axes = _grid([3.4] * len(NETS))
    names = dict.fromkeys(l for data in NETS for l in communication_by_layer(net_of(data)))
    colours = dict(zip(names, COLOURS, strict=False))
    for ax, data in zip(axes, NETS, strict=False):
        _parameter_panel(ax, net_of(data), colours)
        ax.set_title(data)
    return save(figure, out, "fig-parameters")


def _parameter_panel(ax: Any, net: LayerMap, colours: Mapping[str, str]) -> None:
    """Bars by trained layer; above each group, how much its largest exceeds its smallest."""
    uploads = communication_by_layer(net)
    groups = [deployed_by_layer(net, r) for r in KEEPS] + [uploads]
    for j, l in enumerate(uploads):
        positions = [k + (j - (len(uploads) - 1) / 2) * 0.18 for k in range(len(groups))]
        ax.bar(positions, [group[l] / 1e6 for group in groups], 0.17, label=l, color=colours[l])
    for k, group in enumerate(groups):
        ax.text(
            k,
            max(group.values()) / 1e6 + 0.05,
            f"+{spread(list(group.values())):,.2f} %",
            ha="center",
            fontsize=9,
        )
    ax.set_xticks(range(len(groups)), [*(f"device, keep {r}" for r in KEEPS), "uploaded"])
    ax.set_ylabel("million parameters")
    ax.set_ylim(0, 3.6)
    ax.legend(title="trained with the head", ncols=len(uploads), loc="upper center")


def differences(
    name: str, target: Target, results: Results, protocol: str, out: Path
) -> Path | None:
    """Each row against the first, published and ours with its interval.

    Returns:
        The file, or None where nothing was run.
    """
    kind = PROTOCOLS[protocol].score
    panels = []
    for bench, split in places_of(target, protocol):
        shown = _shown(target, results, bench, split, kind)
        if shown:
            panels.append((bench, split, shown))
    return _draw_differences(name, target, panels, out) if panels else None


@house_style
def _draw_differences(name: str, target: Target, panels: Sequence[Panel], out: Path) -> Path:
    figure, axes = _grid([1.2 + 0.32 * len(shown) for _, _, shown in panels])
    for ax, panel in zip(axes, panels, strict=False):
        _difference_panel(ax, target, panel)
    marks = [_mark("ours", "o", COLOURS[0])]
    if any(row.published for _, _, shown in panels for row, _ in shown):
        marks.append(_mark("published", "D", COLOURS[1]))
    figure.legend(handles=marks, loc="outside upper center", ncols=2)
    return save(figure, out, name)


def _dot(ax: Any, d: Interval, y: float, colour: str) -> None:
    """A mean with its interval, if it has one."""
    reach = None if d.low is None or d.high is None else [[d.mean - d.low], [d.high - d.mean]]
    ax.errorbar(d.mean, y, xerr=reach, fmt="o", color=colour, capsize=3)


def _mark(label: str, shape: str, colour: str) -> Any:
    """An entry of a legend: a dot with its interval, or an open diamond."""
    from matplotlib.lines import Line2D

    line, fill = ("-", colour) if shape == "o" else ("", "none")
    return Line2D([], [], marker=shape, color=colour, ls=line, mfc=fill, label=label)


def _shown(
    target: Target, results: Results, bench: Bench, split: str, kind: str
) -> list[tuple[Row, Interval]]:
    rows = [r for r in target.rows[1:] if runs_on(r, bench, split) and r.drawn]
    pairs = [(r, against(results, bench, split, r, target.rows[0], kind)) for r in rows]
    return [(r, d) for r, d in pairs if d is not None]


def _difference_panel(ax: Any, target: Target, panel: Panel) -> None:
    bench, split, shown = panel
    first = published.score(target.rows[0].published, bench.paper, split)
    for y, (row, d) in enumerate(shown):
        _dot(ax, d, y, COLOURS[0])
        theirs = published.score(row.published, bench.paper, split)
        if theirs is not None and first is not None:
            ax.plot(theirs - first, y, "D", mfc="none", color=COLOURS[1])
    ax.axvline(0, color="0.6", lw=1)
    ax.set_yticks(range(len(shown)), [row.label for row, _ in shown])
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlabel(f"points against {target.rows[0].label}")
    ax.set_title(f"{bench.name}, {SPLITS[split]}")


def trade_off(target: Target, results: Results, protocol: str, out: Path) -> Path | None:
    """What accuracy + alpha / r gains over keep 1.0; a larger alpha favours smaller ratios."""
    curves = _trade_offs(target, results, protocol, PROTOCOLS[protocol].score)
    return _draw_trade_off(curves, out) if curves else None


@house_style
def _draw_trade_off(curves: Sequence[Curve], out: Path) -> Path:
    from matplotlib.lines import Line2D

    figure, axes = _grid([3.4] * len(curves))
    for ax, (title, *sides) in zip(axes, curves, strict=False):
        for dropped, line in zip(sides, ("-", "--"), strict=True):
            for r, drop, colour in zip(KEEPS, dropped, COLOURS, strict=False):
                ax.plot(
                    ALPHAS, [drop + alpha * (1 / r - 1) for alpha in ALPHAS], line, color=colour
                )
        ax.axhline(0, color="0.6", lw=1)
        ax.set_title(title)
        ax.set_xlabel("alpha, points")
        ax.set_ylabel("gained over keep 1.0")
    keeps = [
        Line2D([], [], color=colour, label=f"keep {r}")
        for r, colour in zip(KEEPS, COLOURS, strict=False)
    ]
    whose = [
        Line2D([], [], color="0.3", ls=ls, label=label)
        for label, ls in (("ours", "-"), ("published", "--"))
    ]
    figure.legend(handles=[*keeps, *whose], loc="outside upper center", ncols=5)
    return save(figure, out, "fig-global-pruning-trade-off")


def _trade_offs(target: Target, results: Results, protocol: str, kind: str) -> list[Curve]:
    """Our accuracies at keep 0.9, 0.7 and 0.5 less that of 1.0, and the paper's."""
    curves: list[Curve] = []
    rows = target.rows[:4]  # keep 1.0, 0.9, 0.7, 0.5
    for bench, split in places_of(target, protocol):
        by_row = [scores(results, bench, split, row, kind) for row in rows]
        if not all(by_row):
            continue
        ours = [fmean(by_seed.values()) for by_seed in by_row]
        printed = [published.score(row.published, bench.paper, split) for row in rows]
        theirs = [value for value in printed if value is not None]
        title = f"{bench.name}, {SPLITS[split]}"
        curves.append((title, _against_first(ours), _against_first(theirs)))
    return curves


def _against_first(values: Sequence[float]) -> list[float]:
    return [value - values[0] for value in values[1:]]


# --------------------------------------------------------------------------- the claims

SHADES = {"holds": COLOURS[2], "does not hold": COLOURS[1], "not decided": "0.45"}


def claims(judged: Sequence[Finding], out: Path) -> Path | None:
    """A line for every claim that was run: the wanted range, the published difference, ours."""
    run = [f for f in judged if f.ours is not None]
    return _draw_claims(run, out) if run else None


@house_style
def _draw_claims(run: Sequence[Finding], out: Path) -> Path:
    from matplotlib.patches import Patch

    figure, (ax,) = _grid([1.0 + 0.34 * len(run)])
    figure.set_figwidth(13)
    far = 60.0
    for y, f in enumerate(run):
        low, high = max(f.claim.low, -far), min(f.claim.high, far)
        ax.barh(y, high - low, 0.72, left=low, color="0.9", zorder=0)
        if f.there is not None:
            ax.plot(f.there, y, "D", mfc="none", color=COLOURS[0])
        if f.ours is not None:
            _dot(ax, f.ours, y, SHADES[f.verdict])
    ax.set_xscale("symlog", linthresh=1)
    ticks = [-30, -10, -3, -1, 0, 1, 3, 10, 30]
    ax.set_xticks(ticks, [f"{v:+d}" if v else "0" for v in ticks])
    ax.set_xlim(-far, far)
    ax.axvline(0, color="0.6", lw=1)
    ax.set_yticks(range(len(run)), [f.claim.text for f in run])
    ax.set_ylim(len(run) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("points of accuracy (linear between -1 and 1)")
    dots = [_mark(f"ours: {verdict}", "o", colour) for verdict, colour in SHADES.items()]
    paper = _mark("published, same places", "D", COLOURS[0])
    wanted = Patch(color="0.9", label="what the claim says")
    figure.legend(handles=[wanted, paper, *dots], loc="outside upper center", ncols=5)
    return save(figure, out, "claims")
