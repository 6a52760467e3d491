"""The report as one HTML file that sends no request and runs no script but its own.

The template escapes all text.  The page's security policy allows the script and the style sheet by
their hashes and nothing else, so that even markup that was not escaped could neither run nor load.
Every picture is drawn for wide screens and for narrow ones, so that its text stays legible.
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

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import write_atomic
from fedp3.core.scores import Score
from fedp3.report.answers import answers
from fedp3.report.charts import Figure, figures
from fedp3.report.comparison import compare_runs
from fedp3.report.device_panel import device_panel
from fedp3.report.equality import FLEET, inequalities
from fedp3.report.headline import headline
from fedp3.report.panels import run_panel
from fedp3.report.run_tables import comparison_table, reach_table, standings_table
from fedp3.report.runs import Run, load_runs
from fedp3.report.svg import line_chart, line_tips

# Width and height of a chart: two side by side, three in a comparison, and on a narrow screen.
WIDE, THIRD, NARROW = (560, 320), (350, 290), (330, 270)
THIRDS = ("bytes", "score-per-mb")
CLOCK_CHARTS = ("score-per-time", "score-per-energy")
GLOSSARY: Mapping[str, str] = {
    "W": "the server's network",
    "L_i": "the layers that client i trains in full and uploads",
    "P_i": "what client i receives of its other layers after pruning; their share is called keep",
    "Q_i": "what local pruning retains of those layers in one local step",
    "G": "{score} of the server's model on each client's own test samples, mean over clients",
    "D": "the same for the model as dispatched to the client: pruned, before local training",
    "P": "the same after one local update. In curves it is over the participants of each round, in "
    "tables over all clients at the end. It is not P_i",
    "C": "{score} of the server's model on a test set of no client, such as a published test part: "
    "the number that most papers print; shown where a run has it",
    "dense": "without pruning; dense FedAvg sends the full model both ways to the same clients",
    "virtual time": "time on the described devices, computed and not measured",
}


def write_report(
    folders: Sequence[Path], out: Path | None = None, target: float | None = None
) -> Path:
    """Write one self-contained page about these runs; returns its path.

    Args:
        folders: the run folders.
        out: the page; None writes report.html into the first run folder.
        target: the G whose cost is measured; None means 98 % of the best final G of these runs.
    """
    runs = load_runs(folders)
    path = Path(out) if out is not None else runs[0].folder / "report.html"
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the page to write, as in {path}/report.html")
    page = render(runs, target)  # finds mistakes before anything is written
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder of {path}: {error.strerror or error}") from None
    # A folder name can have bytes that are not text; they become question marks.
    write_atomic(path, page.encode("utf-8", "replace"))
    return path


def render(runs: Sequence[Run], target: float | None = None) -> str:
    """The page as HTML.

    Args:
        runs: the runs.
        target: see `write_report`.
    """
    tips: dict[str, Any] = {}
    environment = Environment(
        loader=PackageLoader("fedp3.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = compare_runs(runs, target=target)
    style, script = template_file("style.css"), template_file("script.js")
    return environment.get_template("report.html").render(
        title=" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        headline=headline(runs, target),
        seeds=max(len(run.seeds) for run in runs),
        runs=[run_panel(runs, i, tips) for i in range(len(runs))],
        devices=[device_panel(run, i, tips) for i, run in enumerate(runs)],
        charts=_charts(runs, target, tips),
        clock_charts=CLOCK_CHARTS,
        **_tables(runs, rows),
        glossary=_glossary(runs[0].score),
        data=_json(tips),
        style=Markup(style),
        script=Markup(script),
        policy=policy_for(style, script),
    )


def _glossary(score: Score) -> dict[str, str]:
    words = {word: meaning.format(score=score.name) for word, meaning in GLOSSARY.items()}
    if score.lower_is_better:
        words["G"] += "; lower is better"
    return words


def _tables(runs: Sequence[Run], rows: Sequence[dict[str, object]]) -> dict[str, Any]:
    """The tables that compare runs; a single run has only that of its target."""
    reach = reach_table(rows)
    if len(runs) == 1:
        return {"standings": [], "comparison": None, "reach": reach}
    one_fleet = all(i.condition != FLEET for i in inequalities(runs))
    index = {run.name: i for i, run in enumerate(runs)}
    return {
        "standings": [standings_table(answer, index) for answer in answers(runs)],
        "comparison": comparison_table(rows, one_fleet=one_fleet),
        "reach": reach,
    }


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


def _charts(
    runs: Sequence[Run], target: float | None, tips: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Place of a figure -> its panels."""
    drawn = {}
    for figure in figures(runs, target):
        size = THIRD if len(runs) > 1 and figure.place in THIRDS else WIDE
        drawn[figure.place] = _drawn(figure, size, tips)
    return drawn


def _drawn(figure: Figure, size: tuple[int, int], tips: dict[str, Any]) -> list[dict[str, Any]]:
    """A figure's panels as SVG with their legends; adds to `tips` what they show on hover."""
    panels = []
    for i, chart in enumerate(figure.panels):
        key = f"{figure.name}-{i}"
        tips[key] = line_tips(chart, *size)
        tips[f"{key}-narrow"] = {"x": line_tips(chart, *NARROW)["x"], "texts_of": key}
        panels.append(
            {
                "title": chart.title,
                "wide": line_chart(chart, key, *size),
                "narrow": line_chart(chart, f"{key}-narrow", *NARROW),
                "legend": [(line["name"], line["mark"]) for line in tips[key]["lines"]],
                "note": chart.note,
            }
        )
    return panels
