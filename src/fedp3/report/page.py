"""The report as one HTML file that sends no request and runs no script but its own.

The template escapes all text.  The page's security policy allows the script and the style sheet by
their hashes and nothing else, so that even markup that was not escaped could neither run nor load.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedp3.core.errors import RunError
from fedp3.core.files import write_atomic
from fedp3.report import text
from fedp3.report.charts import Figure, figures
from fedp3.report.clock_table import clock_table
from fedp3.report.comparison import compare_runs, shown_epsilons
from fedp3.report.device_panel import device_panel
from fedp3.report.panels import run_panel
from fedp3.report.runs import Json, Run, load_runs
from fedp3.report.svg import line_chart, line_tips

# Width and height of a chart: two panels side by side, or three in a comparison.
WIDE = dict.fromkeys(("accuracy", "loss", "bytes", "accuracy-per-mb"), (560, 320))
NARROW = dict.fromkeys(("bytes", "accuracy-per-mb"), (400, 300))
# Charts of virtual time and energy, of which a run without devices has none, are drawn twice.
CLOCK_CHARTS = ("accuracy-per-time", "accuracy-per-energy")
CLOCK_SIZES = {"": (560, 320), "-narrow": (330, 270)}
COLUMNS: Mapping[str, str] = {  # heading -> meaning, in the table that compares runs
    "Run": "name of the run folder",
    "Method": "sets the defaults of plan, pruning and aggregation",
    "Seeds": "number of runs that are averaged",
    "G": "accuracy of the server model, mean over clients",
    "D": "accuracy of the model as dispatched, before local training",
    "P": "accuracy after one local update",
    "Worst client": "lowest G of any client",
    "MB up": "clients to server, over the entire run",
    "MB down": "server to clients, over the entire run",
    "G at budget": "G after this much traffic, up and down, which every run has reached",
    "GFLOP": "local training of one client over the entire run, mean over clients",
    "Fleet (s)": "time of all rounds on the devices, or on devices as capable as their keep "
    "share where none are described",
    "Time (s)": "measured time of the entire run on the machine that ran it",
    "Rejected": "updates that the server rejected",
}
EPSILON_COLUMNS: Mapping[str, tuple[str, str]] = {  # key of a row -> heading and meaning
    "epsilon_max": ("ε", "largest of any client"),
    "client_epsilon": ("client-level ε", "of every client, against all who see the models"),
}


def write_report(
    folders: Sequence[Path], out: Path | None = None, target: float | None = None
) -> Path:
    """Write one self-contained page about these runs; returns its path.

    Args:
        folders: the run folders.
        out: the page; None writes report.html into the first run folder.
        target: the G that runs with a virtual clock are timed to; None means 98 % of the best
            final G of these runs.
    """
    runs = load_runs(folders)
    path = Path(out) if out is not None else runs[0].folder / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder of {path}: {error.strerror or error}") from None
    # A folder name can have bytes that are not text; they become question marks.
    write_atomic(path, render(runs, target).encode("utf-8", "replace"))
    return path


def render(runs: Sequence[Run], target: float | None = None) -> str:
    """The page as HTML.

    Args:
        runs: the runs.
        target: see `write_report`.
    """
    tips: dict[str, Any] = {}
    panels = [run_panel(runs, i, tips) for i in range(len(runs))]
    sizes = WIDE if len(runs) == 1 else WIDE | NARROW
    drawn = {figure.name: figure for figure in figures(runs, target)}
    charts = {name: _drawn(drawn[name], size, tips) for name, size in sizes.items()}
    clock_charts = [_drawn_twice(drawn[name], tips) for name in CLOCK_CHARTS if name in drawn]
    rows = compare_runs(runs, target=target)
    epsilons = shown_epsilons(rows)
    environment = Environment(
        loader=PackageLoader("fedp3.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = template_file("style.css"), template_file("script.js")
    return environment.get_template("report.html").render(
        title=" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        seeds=max(len(run.seeds) for run in runs),
        runs=panels,
        devices=[device_panel(run, i, tips) for i, run in enumerate(runs)],
        charts=charts,
        clock=clock_table(rows),
        clock_charts=clock_charts,
        columns=_columns(rows, epsilons),
        rows=[_cells(row, epsilons) for row in rows],
        data=_json(tips),
        style=Markup(style),
        script=Markup(script),
        policy=policy_for(style, script),
    )


def policy_for(style: str, script: str) -> str:
    """The security policy of a page with this style sheet and this script, and nothing else."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def template_file(name: str) -> str:
    """A file of the page's templates."""
    return resources.files("fedp3.report").joinpath("template", name).read_text()


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _json(value: Any) -> Markup:
    """JSON without <, > and &, so that it cannot end the script element that contains it."""
    plain = json.dumps(value, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(plain)


def _drawn_twice(figure: Figure, tips: dict[str, Any]) -> dict[str, Any]:
    """The only panel of a figure, for wide and for narrow screens."""
    both = [_drawn(figure, size, tips, suffix)[0] for suffix, size in CLOCK_SIZES.items()]
    return both[0] | {"wide": both[0]["svg"], "narrow": both[1]["svg"]}


def _drawn(
    figure: Figure, size: tuple[int, int], tips: dict[str, Any], suffix: str = ""
) -> list[dict[str, Any]]:
    """A figure's panels as SVG with their legends; adds to `tips` what they show on hover."""
    panels = []
    for i, chart in enumerate(figure.panels):
        key = f"{figure.name}-{i}{suffix}"
        tips[key] = line_tips(chart, *size)
        legend = [(line["name"], line["mark"]) for line in tips[key]["lines"]]
        drawing = line_chart(chart, key, *size)
        panels.append({"title": chart.title, "svg": drawing, "legend": legend, "note": chart.note})
    return panels


# --------------------------------------------------------------------------- comparison


def _columns(rows: Sequence[Json], epsilons: Sequence[str]) -> list[tuple[str, str]]:
    budget = text.mb(rows[0]["budget_mb"])
    columns = [(name.replace("budget", budget), meaning) for name, meaning in COLUMNS.items()]
    return columns + [EPSILON_COLUMNS[key] for key in epsilons]


def _cells(row: Json, epsilons: Sequence[str]) -> list[tuple[str, str]]:
    """The cells of one line of the comparison, each with a small note."""

    def accuracy(kind: str) -> tuple[str, str]:
        std = row[f"{kind}_std"]
        return text.percent(row[kind]), "" if std is None else f"± {100 * std:.1f}"

    def traffic(way: str) -> tuple[str, str]:
        share = row[f"share_{way}"]
        note = "" if share is None else f"{100 * share:.0f} % of dense"
        return text.number(row[f"mb_{way}"]), note

    cells = [
        (row["run"], ""),
        (row["method"], ""),
        (str(row["seeds"]), ""),
        *(accuracy(kind) for kind in "GDP"),
        (text.percent(row["worst"]), ""),
        traffic("up"),
        traffic("down"),
        (text.percent(row["G_at_mb"]), ""),
        (text.number(row["gflop"]), ""),
        (text.number(row["fleet_seconds"]), ""),
        (text.number(row["seconds"]), ""),
        (str(row["rejected"]), ""),
    ]
    return cells + [(text.number(row[key]), "") for key in epsilons]
