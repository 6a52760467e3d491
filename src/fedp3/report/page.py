"""The report as one HTML file: no request leaves it, and no name in it can run.

The template escapes all text.  The page's own policy allows the one script and the one style sheet by their hash and
nothing else, so that even markup that slipped through could neither run nor load.
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

from fedp3.errors import RunError
from fedp3.record import write_atomic
from fedp3.report import text
from fedp3.report.charts import Figure, figures
from fedp3.report.comparison import compare_runs
from fedp3.report.panels import run_panel
from fedp3.report.runs import Json, Run, load_runs
from fedp3.report.svg import line_chart, line_tips

WIDE = dict.fromkeys(("accuracy", "loss", "bytes", "accuracy-per-mb"), (560, 320))  # two panels side by side
NARROW = dict.fromkeys(("bytes", "accuracy-per-mb"), (400, 300))  # three
COLUMNS: Mapping[str, str] = {  # of the comparison: heading -> what it means
    "Run": "folder",
    "Method": "plan, pruning and aggregation defaults",
    "Seeds": "runs with other seeds, averaged",
    "G": "server model, mean over clients",
    "D": "as dispatched, untrained",
    "P": "after one local update",
    "Worst client": "lowest G of any client",
    "MB up": "clients to server, whole run",
    "MB down": "server to clients, whole run",
    "G at budget": "G when this much traffic was spent, up and down: what every run has spent",
    "GFLOP": "local training of one client, mean over clients, whole run",
    "Fleet (s)": "the rounds on devices as capable as their keep: a model, not a measurement",
    "Time (s)": "whole run, here",
    "Rejected": "updates refused",
}


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """One self-contained page about these runs; returns where it is."""
    runs = load_runs(folders)
    path = Path(out) if out is not None else runs[0].folder / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder of {path}: {error.strerror or error}") from None
    # A folder name need not be text: what UTF-8 cannot say becomes a question mark.
    write_atomic(path, render(runs).encode("utf-8", "replace"))
    return path


def render(runs: Sequence[Run]) -> str:
    """The page."""
    tips: dict[str, Any] = {}
    panels = [run_panel(runs, i, tips) for i in range(len(runs))]
    sizes = WIDE if len(runs) == 1 else WIDE | NARROW
    charts = {figure.name: _drawn(figure, sizes[figure.name], tips) for figure in figures(runs)}
    rows = compare_runs(runs)
    loader = PackageLoader("fedp3.report", "template")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = _file("style.css"), _file("script.js")
    return environment.get_template("report.html").render(
        title=" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        seeds=max(len(run.seeds) for run in runs),
        runs=panels,
        charts=charts,
        columns=_columns(rows),
        rows=[_cells(row, _private(rows)) for row in rows],
        data=_json(tips),
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )


def _file(name: str) -> str:
    return resources.files("fedp3.report").joinpath("template", name).read_text()


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in: no <, > or & is left in it."""
    plain = json.dumps(value, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(plain)


def _drawn(figure: Figure, size: tuple[int, int], tips: dict[str, Any]) -> list[dict[str, Any]]:
    """A figure's panels as SVG with their legends; what they say on hover goes to `tips`."""
    panels = []
    for i, chart in enumerate(figure.panels):
        key = f"{figure.name}-{i}"
        tips[key] = line_tips(chart, *size)
        legend = [(line["name"], line["mark"]) for line in tips[key]["lines"]]
        drawing = line_chart(chart, key, *size)
        panels.append({"title": chart.title, "svg": drawing, "legend": legend, "note": chart.note})
    return panels


# --------------------------------------------------------------------------- comparison


def _columns(rows: Sequence[Json]) -> list[tuple[str, str]]:
    budget = text.mb(rows[0]["budget_mb"])
    columns = [(name.replace("budget", budget), says) for name, says in COLUMNS.items()]
    return columns + [("ε", "largest of any client")] * _private(rows)


def _private(rows: Sequence[Json]) -> bool:
    return any(row["epsilon_max"] is not None for row in rows)


def _cells(row: Json, private: bool) -> list[tuple[str, str]]:
    """The cells of one line of the comparison, each with a small remark."""

    def share(kind: str) -> tuple[str, str]:
        std = row[f"{kind}_std"]
        return text.percent(row[kind]), "" if std is None else f"± {100 * std:.1f}"

    def traffic(way: str) -> tuple[str, str]:
        part = row[f"share_{way}"]
        return text.number(row[f"mb_{way}"]), "" if part is None else f"{100 * part:.0f} % of dense"

    cells = [
        (row["run"], ""),
        (row["method"], ""),
        (str(row["seeds"]), ""),
        *(share(kind) for kind in "GDP"),
        (text.percent(row["worst"]), ""),
        traffic("up"),
        traffic("down"),
        (text.percent(row["G_at_mb"]), ""),
        (text.number(row["gflop"]), ""),
        (text.number(row["fleet_seconds"]), ""),
        (text.number(row["seconds"]), ""),
        (str(row["rejected"]), ""),
    ]
    return cells + [(text.number(row["epsilon_max"]), "")] * private
