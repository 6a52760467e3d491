"""`fedp3 theory NAME`: every experiment as a command.

`--json` prints the numbers, and `--out DIR` draws the figure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedp3.core.errors import InputError
from fedp3_paper.theory import (
    figures,
    fixed_layers,
    gain,
    identities,
    ldp_table,
    pruning,
    theorem1,
    theorem2,
)
from fedp3_paper.theory.digits import logistic
from fedp3_paper.theory.stats import CONFIDENCE, Check

app = typer.Typer(
    help="The paper's theory as experiments: identities, Theorems 1-3, and what they do not cover.",
    rich_markup_mode="rich",
    add_completion=False,
    epilog="Example: fedp3 theory theorem1 --out figures",
)

Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]
Runs = Annotated[int, typer.Option(min=20, help="Independent runs behind every mean.")]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for the figure, an SVG file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")]


@app.callback(invoke_without_command=True)
def names(ctx: typer.Context) -> None:
    """List the experiments when none is named."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@contextmanager
def plainly() -> Iterator[None]:
    """Report wrong input as the command line does: on one line, with exit code 2."""
    try:
        yield
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


def plain(value: Any) -> Any:
    """A value for JSON, which has no infinities and no arrays."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(value) if isfinite(value) else None
    return value


def columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in plain text, with numbers of three digits."""
    cells = [
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row]
        for row in [list(header), *rows]
    ]
    width = [max(len(row[j]) for row in cells) for j in range(len(header))]
    return "\n".join(
        "  ".join(v.ljust(w) for v, w in zip(row, width, strict=True)).rstrip() for row in cells
    )


def check_rows(cells: Sequence[Check]) -> str:
    """Checks as a table."""
    header = ("case", "K", "measured", "low", "high", "bound", "verdict")
    return columns(
        header, [(c.case, c.K, c.measured, c.low, c.high, c.bound, c.verdict) for c in cells]
    )


def finish(text: str, numbers: Mapping[str, object], as_json: bool, figure: Path | None) -> None:
    """Print the table and the file to open next, or one JSON object."""
    if as_json:
        shown = {**numbers, "figure": str(figure) if figure else None}
        typer.echo(json.dumps(plain(shown), allow_nan=False))
        return
    typer.echo(text)
    typer.echo(f"open next: {figure}" if figure else "for the figure add --out DIR")


def require(cells: Sequence[Check]) -> None:
    """Exit with code 1 if a bound that must hold is violated."""
    broken = [f"{c.case} (K={c.K})" for c in cells if c.verdict == "violated"]
    if broken:
        typer.echo(f"violated at confidence {CONFIDENCE}: {', '.join(broken)}", err=True)
        raise typer.Exit(1)


@app.command()
def sketches(seed: Seed = 0, as_json: Json = False) -> None:
    """Identities of the sketches and the lemmas, by enumeration and by sampling.

    Example: fedp3 theory sketches
    """
    rows = identities.everything(seed)
    header = ("statement", "setting", "value", "expected", "holds")
    text = columns(header, [(r.statement, r.setting, r.value, r.expected, r.holds) for r in rows])
    if as_json:
        typer.echo(json.dumps(plain({"identities": [asdict(r) for r in rows]}), allow_nan=False))
    else:
        typer.echo(text)
    if not all(r.holds for r in rows):
        raise typer.Exit(1)


@app.command("theorem1")
def theorem1_command(
    seed: Seed = 0, runs: Runs = 40, as_json: Json = False, out: Out = None
) -> None:
    """Theorem 1, model aggregation: measured min_k E||grad||^2, the bound, and its misprints.

    Example: fedp3 theory theorem1 --out figures
    """
    with plainly():
        cells = theorem1.grid(runs=runs, seed=seed)
        sharp = theorem1.sharpness(runs=runs, seed=seed)
        literal = theorem1.literal_reading(runs=runs, seed=seed)
        counts = theorem1.printed_count(runs=runs, seed=seed)
    parts = {
        "bound": ("The bound, f^inf below every f_i", cells),
        "sharpness": ("How sharp it is: one curvature, started in the steady state", sharp),
        "readings": (
            "Three readings of f^inf, started near the optimum of unlike clients",
            literal,
        ),
        "counts": ("Is eps (column bound) reached after K steps?", counts),
    }
    text = "\n\n".join(f"{title}\n{check_rows(rows)}" for title, rows in parts.values())
    numbers = {name: [asdict(c) for c in rows] for name, (_, rows) in parts.items()}
    figure = figures.theorem1_figure(cells, literal, out) if out else None
    finish(text, numbers, as_json, figure)
    printed = ("as printed", "printed K")
    require([c for c in [*cells, *sharp, *literal, *counts] if not c.case.endswith(printed)])


@app.command("gain")
def gain_command(
    seed: Seed = 0,
    runs: Annotated[int, typer.Option(min=1, help="Runs behind every mean.")] = 6,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Bytes to reach ||grad||^2 <= eps for FedP3, DGD and DGD with Rand-t: a saving of order n eps.

    Example: fedp3 theory gain --out figures
    """
    eps = 10.0 ** -np.arange(0.5, 3.6, 0.5)
    with plainly():
        rows = [
            row
            for n in (4, 16, 32)
            for spread in (0.0, 1.0)
            for row in gain.compare(n, spread, eps, K=800, runs=runs, seed=seed)
        ]
    cells: dict[tuple[int, float, float], dict[str, int | None]] = {}
    for r in rows:
        cells.setdefault((r.n, r.spread, r.eps), {})[r.method] = r.up
    header = ("n", "spread", "eps", *(f"bytes up, {name}" for name in gain.METHODS))
    text = columns(
        header, [(*where, *(up[name] for name in gain.METHODS)) for where, up in cells.items()]
    )
    figure = figures.gain_figure(rows, out) if out else None
    finish(text, {"reach": [asdict(r) for r in rows]}, as_json, figure)


@app.command("fixed-layers")
def fixed_layers_command(
    seed: Seed = 0, runs: Runs = 20, as_json: Json = False, out: Out = None
) -> None:
    """Layer sets fixed for the run, as in the paper's experiments, which the theory does not cover.

    Example: fedp3 theory fixed-layers --out figures
    """
    with plainly():
        rows = fixed_layers.survey((0.0, 0.1, 0.3, 1.0, 3.0), K=1000, runs=runs, seed=seed)
    unstable = {f"{g:g}": fixed_layers.growth(2.0, g) for g in (0.5, 0.1, 0.01, 0.001)}
    header = ("plan", "spread", "||grad||^2 at rest", "closed form")
    text = columns(header, [(r.plan, r.spread, r.measured, r.closed_form) for r in rows])
    text += "\n\nTwo convex clients that diverge, growth per step by step size: "
    text += ", ".join(f"{g}: {v:.4f}" for g, v in unstable.items())
    rest = [{k: v for k, v in asdict(r).items() if k != "path"} for r in rows]
    figure = figures.fixed_layers_figure(rows, out) if out else None
    finish(text, {"rest": rest, "growth_of_unstable_pair": unstable}, as_json, figure)


@app.command("theorem2")
def theorem2_command(
    seed: Seed = 0,
    runs: Runs = 20,
    delta: Annotated[float, typer.Option(help="delta of (epsilon, delta)-LDP.")] = 1e-5,
    c: Annotated[
        float, typer.Option(help="Constant of the closed form; see the table it prints.")
    ] = 8.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Theorem 2, LDP-FedP3: utility and the corrected bound, with noise on gradient or weights.

    Example: fedp3 theory theorem2 --delta 1e-5 --out figures
    """
    with plainly():
        problem = logistic(seed, 8, 1.0, components=8)
        m = problem.samples.m if problem.samples else 0
        privacies = [theorem2.Privacy(e, delta, m, c) for e in (1.0, 2.0, 4.0, 8.0)]
        plans = [theorem2.planned(problem, p) for p in privacies]
        pairs = [
            (p.epsilon, theorem2.measure(problem, p, b=8, runs=runs, seed=seed, on_weights=w))
            for p in privacies
            for w in (False, True)
        ]
        needed = {f"{e:g}": theorem2.c_needed(e, delta) for e in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)}
    cells = [cell for _, cell in pairs]
    header = ("epsilon", "K", "gamma", "sigma", "C", "values up", "bound")
    text = columns(header, [tuple(asdict(p).values()) for p in plans]) + "\n\n" + check_rows(cells)
    text += f"\n\nc that makes the closed form exact for full batches, delta={delta:g}: "
    text += ", ".join(f"eps={e}: {v:.2f}" for e, v in needed.items())
    numbers = {
        "schedule": [asdict(p) for p in plans],
        "bound": [asdict(v) for v in cells],
        "c_needed": needed,
    }
    figure = figures.theorem2_figure(pairs, out) if out else None
    finish(text, numbers, as_json, figure)
    require([cell for cell in cells if not cell.case.endswith("weights")])


@app.command("ldp-table")
def ldp_table_command(
    n: Annotated[int, typer.Option(help="Clients.")],
    m: Annotated[int, typer.Option(help="Samples per client.")],
    d: Annotated[int, typer.Option(help="Parameters.")],
    epsilon: Annotated[float, typer.Option(help="epsilon of (epsilon, delta)-LDP.")],
    delta: Annotated[float, typer.Option(help="delta of (epsilon, delta)-LDP.")],
    omega: Annotated[
        float | None, typer.Option(help="Compression variance; n - 1 (Rand-t, t = d/n) if unset.")
    ] = None,
    sigma2: Annotated[float, typer.Option(help="Gradient variance in the row of Q-DPSGD-1.")] = 1.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Communication of LDP algorithms by the paper's table, in values, constants left out.

    Example: fedp3 theory ldp-table --n 100 --m 392 --d 2910208 --epsilon 8 --delta 1e-5
    """

    def setting_of(clients: int) -> ldp_table.Setting:
        return ldp_table.Setting(
            n=clients,
            m=m,
            d=d,
            epsilon=epsilon,
            delta=delta,
            omega=clients - 1 if omega is None else omega,
            sigma2=sigma2,
        )

    with plainly():
        setting = setting_of(n)
    printed, values = ldp_table.table(setting), ldp_table.in_values(setting)
    figure = None
    if out:
        sizes = [int(v) for v in np.unique(np.geomspace(1, 10_000, 60).astype(int))]
        tables = [ldp_table.table(setting_of(size)) for size in sizes]
        lines = {name: [t[name] for t in tables] for name in printed}
        lines["Q-DPSGD-1, if it counts rounds"] = [
            v * d * t for v, t in zip(sizes, lines["Q-DPSGD-1"], strict=True)
        ]
        figure = figures.ldp_table_figure(sizes, lines, out)
    if as_json:
        if figure:
            typer.echo(f"open next: {figure}")
        typer.echo(json.dumps(printed))  # flat: one number per algorithm
        return
    header = ("algorithm", "as printed", "in values")
    text = columns(header, [(name, printed[name], values[name]) for name in printed])
    finish(f"{text}\nQ-DPSGD-1 as printed looks like rounds: n d values each.", {}, False, figure)


@app.command("theorem3")
def theorem3_command(
    seed: Seed = 0, runs: Runs = 40, as_json: Json = False, out: Out = None
) -> None:
    """Theorem 3, global pruning: constants, bound, pruning alone (b = 0), the stall (b != 0).

    Example: fedp3 theory theorem3 --out figures
    """
    with plainly():
        constants, cells = pruning.bounds(runs=runs, seed=seed)
        curves = pruning.controls(K=80, runs=runs, seed=seed)
        stalls = pruning.stalls(K=300, runs=runs, seed=seed)
    header = ("case", "theta", "a on average", "a every draw", "largest K")
    text = columns(
        header, [(c.case, c.theta, c.a_expected, c.a_every_draw, c.horizon) for c in constants]
    )
    text += "\n\n" + check_rows(cells)
    ends = [(c.name, float(c.path[-1]), c.rest) for c in [*curves, *stalls]]
    text += "\n\n" + columns(("curve", "||grad||^2 at the end", "at the mean rest point"), ends)
    numbers = {
        "constants": [asdict(c) for c in constants],
        "bound": [asdict(c) for c in cells],
        "curves": [{"name": name, "end": end, "rest": rest} for name, end, rest in ends],
    }
    figure = figures.theorem3_figure(cells, curves, stalls, out) if out else None
    finish(text, numbers, as_json, figure)
    require(cells)
