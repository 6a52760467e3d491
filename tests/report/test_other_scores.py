"""Reports about runs with another score than accuracy: names, numbers and directions."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedp3.core.errors import InputError
from fedp3.core.scores import ACCURACY, Score
from fedp3.report import compare, live, write_figures, write_report
from fedp3.report import text as words
from fedp3.report.answers import answers, sentence
from fedp3.report.charts import Chart, figures
from fedp3.report.headline import headline
from fedp3.report.runs import Run, Stat, load_runs, score
from score_runs import regression_runs

RMSE = Score("RMSE", lower_is_better=True)
F1 = Score("F1", percent=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return regression_runs(tmp_path_factory.mktemp("regression"), seeds=3)


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> list[Run]:
    return load_runs(folders)


def shown_charts(runs: list[Run]) -> dict[str, Chart]:
    return {figure.name: figure.panels[0] for figure in figures(runs)}


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (words.score(RMSE, 0.4267), "0.427"),
        (words.score(RMSE, None), words.NONE),
        (words.score(RMSE, 3.4e38), "3.4e+38"),
        (words.score(F1, 0.4267), "42.7 %"),
        (words.score_stat(RMSE, Stat(0.4267, 0.0389)), "0.427 ± 0.039"),
        (words.score_stat(F1, Stat(0.4267, 0.0389)), "42.7 ± 3.9 %"),
        (words.score_name(RMSE, "G"), "G (RMSE)"),
        (words.score_name(ACCURACY, "G"), "G"),
        (words.difference_unit(F1), "in percentage points"),
        (words.difference_unit(RMSE), "of RMSE"),
    ],
)
def test_only_shares_are_in_percent(got: str, want: str) -> None:
    assert got.replace(words.NBSP, " ") == want


def test_answers_name_the_score_and_the_lower_one_is_better(runs: list[Run]) -> None:
    for answer in answers(runs):
        assert answer.score == RMSE
        means = {s.run: s.score.mean for s in answer.standings if s.score}
        assert means[answer.reference] == min(means.values())
        said = sentence(answer)
        assert f"G (RMSE) {means[answer.reference]:.3f}" in said
        assert "%" not in said and "points" not in said


def test_the_headline_names_the_score(runs: list[Run]) -> None:
    assert headline(runs[:1])[0].startswith("The server model has G (RMSE) 0.")
    to_target = next(said for said in headline(runs, target=1.9) if said.startswith("To reach"))
    assert to_target.startswith("To reach G (RMSE) 1.900, ")


def test_rows_say_what_their_scores_are(folders: list[Path]) -> None:
    for row in compare(folders):
        assert row["score"] == {"name": "RMSE", "lower_is_better": True, "percent": False}
        assert str(row["target_origin"]).startswith("102 % of the final G")
    best = min(float(str(row["G"])) for row in compare(folders))
    assert compare(folders)[0]["target"] == best / 0.98


def test_a_target_may_be_any_value_of_the_score(folders: list[Path], tmp_path: Path) -> None:
    """The initial model has an RMSE of about 2, so that a target of 50 needs no round."""
    assert all(row["round_to_target"] == 0 for row in compare(folders, target=50.0))
    assert all(row["round_to_target"] is None for row in compare(folders, target=-1.0))
    with pytest.raises(InputError, match="target nan: want a number, a value of RMSE"):
        write_report(folders, tmp_path / "new" / "page.html", target=float("nan"))
    assert not (tmp_path / "new").exists()


def test_the_page_speaks_of_the_score(folders: list[Path], tmp_path: Path) -> None:
    html = write_report(folders, tmp_path / "page.html").read_text()
    body = html[html.index("<body>") :]
    for said in (
        "RMSE of the server model on its test samples",
        "RMSE of the model as dispatched",
        "outcomes and final RMSE of each client",
        "difference of RMSE, paired by seed",
        "highest G of any client",
        "90th percentile",
        "To reach a G (RMSE) of ",
        "mean over clients; lower is better",
    ):
        assert said in body, said
    assert "accuracy" not in body.lower()
    for kind in ("G", "P"):  # the table of clients
        for value in (score(load_runs(folders)[0].seeds[0], kind) or {})["clients"].values():
            assert f"{value:.3f}" in body


def test_the_worst_client_has_the_highest_error(runs: list[Run], folders: list[Path]) -> None:
    alone = replace(runs[0], seeds=runs[0].seeds[:1])
    clients = (score(alone.seeds[0], "G") or {})["clients"]
    worst = max(clients, key=lambda i: clients[i])
    html = write_report([folders[0] / "seed-0"]).read_text()
    assert f"client {worst}, by G" in html and f"{clients[worst]:.3f}" in html


def test_charts_have_the_name_and_the_range_of_the_score(runs: list[Run]) -> None:
    for some in (runs, runs[:1]):
        charts = shown_charts(some)
        assert charts.keys() == {"score", "loss", "bytes", "score-per-mb", "score-per-time"}
        for name in ("score", "score-per-mb", "score-per-time"):
            chart = charts[name]
            values = [p.y for line in chart.series for p in line.points]
            assert chart.y == "RMSE" and not chart.share and chart.show(0.5) == "0.500"
            assert chart.limits[0] >= 0 and chart.limits[1] > max(values) > 1
    assert shown_charts(runs[:1])["score"].title == "RMSE by round"
    assert shown_charts(runs)["score-per-time"].series[-1].label.startswith("target 0.")


def test_a_score_below_one_or_zero_is_not_cut(runs: list[Run]) -> None:
    """R² may be negative, and a loss below 1 has no limit at 1."""

    def scaled(run: Run, factor: float) -> Run:
        seed = run.seeds[0]
        events = [
            e | {"G": e["G"] | {"mean": factor * e["G"]["mean"]}} if e["G"] else e
            for e in seed.events
        ]
        return replace(run, seeds=(replace(seed, events=events, initial={}),))

    low, _ = shown_charts([scaled(runs[0], -1.0), scaled(runs[1], -2.0)])["score"].limits
    assert low < -1
    largest = max(e["G"]["mean"] for e in runs[0].seeds[0].events)
    close = scaled(runs[0], 0.999 / largest)
    _, high = shown_charts([close, close])["score-per-mb"].limits
    assert high > 1


def test_figure_files_are_named_after_the_score(folders: list[Path], tmp_path: Path) -> None:
    names = {path.stem for path in write_figures(folders, tmp_path)}
    assert {"score", "score-per-mb", "score-per-time"} <= names
    assert not [name for name in names if "accuracy" in name]


def test_the_live_page_knows_whether_scores_are_shares(folders: list[Path]) -> None:
    folder = folders[0] / "seed-0"
    reader = live.EventReader(folder)
    reader.update()
    assert live.snapshot(folder, reader.events, "idle")["percent"] is False
