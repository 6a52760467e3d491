"""The figures of `fedp3 theory`; matplotlib is imported when the first one is drawn."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from fedp3_paper.theory.fixed_layers import Rest
from fedp3_paper.theory.gain import Reach
from fedp3_paper.theory.pruning import Curve
from fedp3_paper.theory.stats import Check
from fedp3_paper.theory.theorem1 import costs

P = ParamSpec("P")

STYLE: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "svg.hashsalt": "fedp3",  # with no date either, the same numbers give the same file
}
# Colours that colour-blind readers can distinguish too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def house_style(drawing: Callable[P, Path]) -> Callable[P, Path]:
    """Decorate a function to draw in the house style; the user's settings are left unchanged."""

    @wraps(drawing)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Path:
        import matplotlib as mpl

        mpl.use("Agg", force=False)
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(STYLE)
            return drawing(*args, **kwargs)

    return styled


def panels(count: int) -> tuple[Any, Any]:
    """A figure with `count` panels side by side."""
    import matplotlib.pyplot as plt

    return plt.subplots(1, count, figsize=(5.6 * count, 4.5), layout="constrained")


def save(figure: Any, out: Path, name: str) -> Path:
    """Write `out/name.svg` and make the folder if it does not exist."""
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def by_case(cells: Sequence[Check]) -> Mapping[str, list[Check]]:
    """Case -> its cells, in order of first appearance."""
    groups: dict[str, list[Check]] = {}
    for cell in cells:
        groups.setdefault(cell.case, []).append(cell)
    return groups


def draw_checks(axis: Any, cells: Sequence[Check]) -> None:
    """Measured means with limits, solid, and bounds, dashed, over K."""
    for colour, (case, group) in zip(COLOURS, by_case(cells).items(), strict=False):
        K = [c.K for c in group]
        reach = [[c.measured - c.low for c in group], [c.high - c.measured for c in group]]
        axis.errorbar(
            K, [c.measured for c in group], reach, color=colour, marker="o", capsize=3, label=case
        )
        axis.plot(K, [c.bound for c in group], color=colour, ls="--", lw=1.4)
    axis.plot([], [], color="0.4", ls="--", label="its bound")
    axis.set(xscale="log", yscale="log", xlabel="iterations K")
    axis.legend()


@house_style
def theorem1_figure(cells: Sequence[Check], literal: Sequence[Check], out: Path) -> Path:
    """Left: the bound holds.  Right: with f^inf = inf f it does not."""
    figure, (left, right) = panels(2)
    draw_checks(left, [c for c in cells if "n=16" in c.case or "logistic" in c.case])
    left.set(
        ylabel=r"$\min_k\ E\|\nabla f(w^k)\|^2$",
        title=r"Theorem 1 holds, $f^{\inf}$ below every $f_i$",
    )
    seen = next(iter(by_case(literal).values()))
    right.plot(
        [c.K for c in seen], [c.measured for c in seen], color="black", marker="o", label="measured"
    )
    for colour, (case, group) in zip(COLOURS[1:], by_case(literal).items(), strict=False):
        right.plot(
            [c.K for c in group],
            [c.bound for c in group],
            color=colour,
            ls="--",
            marker=".",
            label=case,
        )
    right.set(
        xscale="log", yscale="log", xlabel="iterations K", ylabel=r"$\min_k\ E\|\nabla f(w^k)\|^2$"
    )
    right.set_title("Start near the optimum of unlike clients")
    right.legend(loc="center left")
    return save(figure, out, "theorem1")


def key(axis: Any, colours: Mapping[str, str], styles: Mapping[str, str], **where: Any) -> None:
    """A legend that names colours and line styles apart."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=c, label=name) for name, c in colours.items()]
    lines += [Line2D([], [], color="0.3", ls=ls, label=name) for name, ls in styles.items()]
    axis.legend(handles=lines, **where)


@house_style
def gain_figure(rows: Sequence[Reach], out: Path) -> Path:
    """Left and middle: bytes measured.  Right: what the bounds promise, against what is printed."""
    figure, axes = panels(3)
    styles = {"FedP3": "-", "DGD": "--", "DGD + Rand-t": ":"}
    clients = dict(zip(sorted({r.n for r in rows}), COLOURS, strict=False))
    for axis, spread, title in (
        (axes[0], 0.0, "Equal clients: the saving is n"),
        (axes[1], 1.0, "Unlike clients: a saving only for large eps"),
    ):
        for n, colour in clients.items():
            for method, ls in styles.items():
                line = [
                    r for r in rows if (r.n, r.method, r.spread) == (n, method, spread) and r.up
                ]
                axis.plot(
                    [r.eps for r in line], [r.up for r in line], color=colour, ls=ls, marker="."
                )
        axis.set(xscale="log", yscale="log", ylim=(80, 1e6), title=title)
        axis.set(
            xlabel=r"target $\epsilon$, share of $\|\nabla f(w^0)\|^2$",
            ylabel="bytes uploaded by all clients",
        )
        axis.invert_xaxis()
        key(axis, {f"n = {n}": c for n, c in clients.items()}, styles, loc="upper left", ncols=2)
    promise(axes[2])
    return save(figure, out, "gain")


def promise(axis: Any) -> None:
    """The saving over DGD that the bounds promise, and the printed one, over n."""
    n = [2**j for j in range(15)]
    targets = dict(zip((1.0, 0.1, 0.01), COLOURS[3:], strict=True))
    for eps, colour in targets.items():
        axis.plot(n, [costs(v, 1, 1.0, 1.0, eps).gain for v in n], color=colour)
        axis.plot(n, [v / eps for v in n], color=colour, ls=":")
    axis.axhline(1, color="0.3", lw=1)
    axis.set(xscale="log", yscale="log", ylim=(1e-4, 1e10), xlabel="clients n")
    axis.set(
        ylabel="uploads of DGD over those of FedP3", title=r"Saving by the bounds ($L\Delta_0=1$)"
    )
    shades = {rf"$\epsilon$ = {eps:g}": c for eps, c in targets.items()}
    styles = {r"holds: order $n\epsilon$": "-", r"printed: $n/\epsilon$": ":"}
    key(axis, shades, styles, loc="upper left", ncols=2)


@house_style
def fixed_layers_figure(rows: Sequence[Rest], out: Path) -> Path:
    """Left: paths at the largest spread.  Right: where each plan rests, over the spread."""
    figure, (left, right) = panels(2)
    top = max(r.spread for r in rows)
    for colour, plan in zip(COLOURS, dict.fromkeys(r.plan for r in rows), strict=True):
        of_plan = [r for r in rows if r.plan == plan]
        path = next(r.path for r in of_plan if r.spread == top)
        k = np.unique(np.geomspace(1, len(path), 150).astype(int))
        left.plot(k, path[k - 1], color=colour, label=plan)
        positive = [r for r in of_plan if r.spread > 0 and r.closed_form > 1e-20]
        if positive:
            x, y = [r.spread for r in positive], [r.closed_form for r in positive]
            right.plot(x, y, color=colour, label=plan)
            right.plot(x, [r.measured for r in positive], color=colour, ls="", marker="o")
    left.set(
        xscale="log", yscale="log", xlabel="iteration", ylabel=r"$\|\nabla f(w^k)\|^2$, start = 1"
    )
    left.set(title=f"Clients unlike (spread {top:g})", ylim=(1e-9, 30))
    left.legend(loc="lower left")
    right.set(xscale="log", yscale="log", xlabel="spread of the clients' minima")
    right.set(
        ylabel=r"$\|\nabla f\|^2$ at rest, start = 1",
        title="At rest: line in closed form, dots measured",
    )
    right.legend()
    return save(figure, out, "fixed-layers")


@house_style
def theorem2_figure(cells: Sequence[tuple[float, Check]], out: Path) -> Path:
    """The bound and both places for the noise, over epsilon."""
    figure, axis = panels(1)
    groups: dict[str, list[tuple[float, Check]]] = {}
    for epsilon, cell in cells:
        groups.setdefault(cell.case.split(", ")[1], []).append((epsilon, cell))
    for colour, (name, group) in zip(COLOURS, groups.items(), strict=False):
        reach = [[c.measured - c.low for _, c in group], [c.high - c.measured for _, c in group]]
        eps = [e for e, _ in group]
        axis.errorbar(
            eps,
            [c.measured for _, c in group],
            reach,
            color=colour,
            marker="o",
            capsize=3,
            label=name,
        )
    first = next(iter(groups.values()))
    axis.plot(
        [e for e, _ in first],
        [c.bound for _, c in first],
        color="0.3",
        ls="--",
        label="bound of Theorem 2",
    )
    axis.set(xscale="log", yscale="log", ylim=(1e-3, 0.3))
    axis.set(xlabel=r"privacy $\epsilon$", ylabel=r"mean over k of $E\|\nabla f(w^k)\|^2$")
    axis.set(title="LDP-FedP3, logistic regression on digits")
    axis.set_xticks([e for e, _ in first], [f"{e:g}" for e, _ in first])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.legend()
    return save(figure, out, "theorem2")


@house_style
def ldp_table_figure(n: Sequence[int], rows: Mapping[str, Sequence[float]], out: Path) -> Path:
    """Communication of every row over the number of clients."""
    figure, axis = panels(1)
    for colour, (name, values) in zip(COLOURS, rows.items(), strict=True):
        # CDP-SGD and LDP-FedP3 coincide at omega = n - 1; a dashed line on a broad one shows both.
        broad, dashed = name == "LDP-FedP3", name == "CDP-SGD"
        axis.plot(
            n, values, color=colour, lw=5 if broad else 1.8, ls="--" if dashed else "-", label=name
        )
        axis.lines[-1].set_zorder(1 if broad else 2)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="clients n",
        ylabel="communication (values, constants left out)",
    )
    axis.set_title("LDP algorithms by the printed formulas")
    # The legend goes into the free space between rounds and values.
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 0.16), ncols=2)
    return save(figure, out, "ldp-table")


@house_style
def theorem3_figure(
    cells: Sequence[Check], curves: Sequence[Curve], stalls: Sequence[Curve], out: Path
) -> Path:
    """Bound; pruning alone with b = 0; where pruning rests with b != 0."""
    figure, (left, middle, right) = panels(3)
    shown = ("diagonal, n=2, keep 4/8", "random, n=2, keep 4/8")
    draw_checks(left, [c for c in cells if c.case in shown or "correlated" in c.case])
    left.set(ylabel=r"$E\|\nabla f\|^2$ in the norm of Theorem 3", title="b = 0: the bound holds")
    for axis, lines in ((middle, curves), (right, stalls)):
        for colour, curve in zip(COLOURS, lines, strict=False):
            axis.plot(curve.path, color=colour, label=curve.name)
            if curve.rest is not None:
                axis.axhline(curve.rest, color=colour, ls="--", lw=1)
        axis.set(xlabel="iteration", ylabel=r"$E\|\nabla f(w^k)\|^2$, start = 1")
    middle.set(yscale="log", ylim=(1e-12, 100), title="b = 0: pruning alone suffices")
    middle.legend(loc="upper right")
    right.plot([], [], color="0.4", ls="--", label="at the mean rest point")
    right.set(ylim=(-0.02, 1.75), title="b \u2260 0: pruning stalls")
    right.legend(loc="upper right", ncols=2)
    return save(figure, out, "theorem3")
