"""The report's numbers, pictures and markup; the page in a browser is in test_report_page."""

import json
import re
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedp3
from fedp3 import config
from fedp3.core.errors import InputError
from fedp3.core.scores import ACCURACY
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.report import compare, draw_labels, write_figures, write_report
from fedp3.report import text as words
from fedp3.report.charts import figures, thin
from fedp3.report.grids import Cell, Grid, label_grid, plan_grid
from fedp3.report.runs import Point, Stat, load_runs
from fedp3.report.svg import grid_picture, grid_tips, line_tips, mesh, ticks
from fedp3.report.text import ranges
from fedp3.runs import session

FIGURES = ("accuracy", "loss", "bytes", "accuracy-per-mb", "plan", "labels")
HOSTILE = "</script><img src=x onerror=window.hurt=1>&\"'"


def accuracy(values: Sequence[float], names: Sequence[object]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "p10": ordered[len(values) // 10],
        "worst": ordered[0],
        "loss": 1.5 - statistics.fmean(values),
        "clients": {str(i): v for i, v in zip(names, values, strict=True)},
    }


def make_run(
    folder: Path,
    *,
    names: Sequence[object] = (0, 1, 2, 3, 4, 5),
    layers: Sequence[str] = ("fc1", "fc2", "fc3", "head"),
    rounds: int = 6,
    seed: int = 0,
    finished: bool = True,
    reason: str = "",
    eval_every: int = 2,
    overrides: Sequence[str] = (),
    **about: Any,
) -> Path:
    """A run folder written by hand, every number drawn from `seed`."""
    rng, n = np.random.default_rng(seed), len(names)
    keeps = rng.choice([0.9, 0.7, 0.5], n)
    clients = []
    for i, name in enumerate(names):
        in_full = {layers[(i + j) % (len(layers) - 1)] for j in range(max(1, len(layers) // 6))} | {
            layers[-1]
        }
        clients.append(
            {
                "id": name,
                "layers": [l for l in layers if l in in_full],
                "keep": {l: 1.0 if l in in_full else float(keeps[i]) for l in layers},
                "examples": 30 + i,
                "parameters": 1000 * (i + 1),
                "mflops_per_example": 0.5 * (i + 1),
                "peak_mb": 1.25,
                "mb_down": 0.4,
                "mb_up": 0.2,
            }
        )
    settings = [
        f"partition.clients={n}",
        f"run.rounds={rounds}",
        f"run.seed={seed}",
        "run.clients_per_round=0",
    ]
    cfg = config.parse({}, [*settings, *overrides])
    description = {
        "config": cfg.as_json(),
        "digest": cfg.digest(),
        "layers": list(layers),
        "parameters": 123456,
        "clients": clients,
        "coverage": {l: [c["id"] for c in clients if l in c["layers"]] for l in layers},
        "labels": rng.integers(0, 9, (n, 5)).tolist(),
        "dense_bytes": {"down": 500_000, "up": 450_000},
        "reductions": {},
        "versions": {"fedp3": "1.2.3", "torch": "9.9"},
        "command": "fedp3 run my.toml",
    }
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(description | about))
    (folder / "config.toml").write_text(config.to_toml(cfg))
    lines = []
    for t in range(rounds if finished else rounds // 2):
        sampled = sorted(rng.permutation(n)[: max(2, n // 2)].tolist())
        rejection = {"code": "not_finite", "text": reason}
        refused = {str(names[sampled[0]]): rejection} if reason else {}
        taken = [names[i] for i in sampled if str(names[i]) not in refused]
        scored = (t + 1) % eval_every == 0
        level = 0.3 + 0.6 * (t + 1) / rounds
        event = {
            "t": t,
            "round": t + 1,
            "sampled": [names[i] for i in sampled],
            "accepted": taken,
            "late": [],
            "rejected": refused,
            "bytes_down": int(4e5 * len(sampled)),
            "bytes_up": int(2e5 * len(taken)),
            "loss": 2.0 - level,
            "density": 1.0,
            "void": False,
            "seconds": 1.5,
            "aggregator": {},
        }
        for kind, shift in (("G", 0.0), ("D", -0.05), ("P", 0.03)):
            values = np.clip(level + shift + 0.05 * rng.standard_normal(n), 0, 1).tolist()
            event[kind] = accuracy(values, names) if scored else None
        lines.append(json.dumps(event))
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    if finished:
        last = json.loads(lines[-1])
        result = {
            "model_sha256": f"{seed:064x}",
            "seconds": 1.5 * rounds + 1,
            "epsilon_max": None,
            "method": "fedp3",
            "final": {k: last[k] for k in "GDP"},
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


class Outline(HTMLParser):
    """What a test asks of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


# --------------------------------------------------------------------------- numbers for people


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (words.percent(0.931), "93.1 %"),
        (words.percent(None), "–"),
        (words.mb(4.2), "4.20 MB"),
        (words.mb(0.0041), "4.10 kB"),
        (words.mb(9_051), "9.05 GB"),
        (words.mb(0.0000005), "0 bytes"),
        (words.mb(0.9999), "1.00 MB"),
        (words.number(150_794), "150,794"),
        (words.number(99.96), "100"),
        (words.number(9.996), "10.0"),
        (words.duration(18.34), "18.3 s"),
        (words.duration(125), "2 min 5 s"),
        (words.duration(59.97), "1 min 0 s"),
        (words.duration(4_325), "1 h 12 min"),
        (words.score_stat(ACCURACY, Stat(0.8574, 0.0389)), "85.7 ± 3.9 %"),
        (words.score_stat(ACCURACY, Stat(0.8574)), "85.7 %"),
    ],
)
def test_numbers_are_written_for_people(got: str, want: str) -> None:
    assert got.replace(words.NBSP, " ") == want


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_lie_inside_and_are_evenly_spaced(low: float, width: float, count: int) -> None:
    high = low + width
    got = ticks(low, high, count)
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= v <= high + slack for v in got)
    assert 1 <= len(got) <= count + 2
    steps = np.diff(got)
    assert np.allclose(steps, steps[:1], atol=slack) if len(got) > 1 else True


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_ranges_name_exactly_the_chosen_layers(chosen: list[bool]) -> None:
    layers = [f"l{j}" for j in range(len(chosen))]
    in_full = [l for l, c in zip(layers, chosen, strict=True) if c]
    shown = ranges(in_full, layers)
    got = layers if shown == "all" else []
    for part in [] if shown in ("all", "–") else shown.split(", "):
        first, _, last = part.partition("–")
        got += layers[layers.index(first) : layers.index(last or first) + 1]
    assert got == in_full


@given(st.integers(1, 6000), st.integers(1, 20))
def test_a_thinned_line_keeps_its_ends_and_stays_drawable(n: int, every: int) -> None:
    rounds = [p.round for p in thin([Point(round=every * t, x=t, y=0.5) for t in range(n)])]
    assert len(rounds) <= 241 and rounds[0] == 0 and rounds[-1] == every * (n - 1)
    assert all(a < b for a, b in pairwise(rounds))


# --------------------------------------------------------------------------- pictures of clients

CELLS = st.builds(
    Cell,
    st.sampled_from(["full", "pruned", "none"]),
    st.sampled_from([0.5, 1.0]),
    st.tuples(st.text(max_size=3)),
)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    n, m = draw(st.integers(1, 200)), draw(st.integers(1, 4))
    kinds = draw(st.lists(st.tuples(*[CELLS] * m), min_size=1, max_size=4))
    columns = tuple(kinds[(i * 7 // 3) % len(kinds)] for i in range(n))
    rows, names = tuple(map(str, range(m))), tuple(map(str, range(n)))
    return Grid(
        title="Plan",
        rows=rows,
        columns=names,
        cells=columns,
        about=("",) * n,
        totals=("",) * m,
        legend={},
        row="layer",
    )


@given(grids())
def test_the_strokes_of_a_picture_cover_each_cell_once_in_its_own_look(grid: Grid) -> None:
    drawn: dict[tuple[int, int], tuple[str, float]] = {}
    for path in ET.fromstring(grid_picture(grid, "k")).iter("path"):
        look = (path.attrib["class"].split()[1], float(path.attrib["stroke-opacity"]))
        for i, j, length in re.findall(r"M(\d+) (\d+)h([\d.]+)", path.attrib["d"]):
            for k in range(max(1, int(float(length)))):
                assert (int(i) + k, int(j)) not in drawn
                drawn[int(i) + k, int(j)] = look
    want = {
        (i, j): (c.kind, c.shade)
        for i, of in enumerate(grid.cells)
        for j, c in enumerate(of)
        if c.kind != "none"
    }
    assert drawn == want


@given(grids())
def test_hovering_shows_the_texts_of_the_cell(grid: Grid) -> None:
    tips = json.loads(json.dumps(grid_tips(grid)))
    for i, column in enumerate(grid.cells):
        for j, cell in enumerate(column):
            indices = tips["columns"][tips["column_of"][i]][j]
            assert tuple(tips["texts"][k] for k in indices) == cell.texts
    left, _, across, _ = tips["box"]
    assert left + across * len(grid.columns) <= mesh(grid).width


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ([], {"full", "pruned"}),
        (["plan.others=freeze"], {"full", "frozen"}),
        (["plan.upload=retained"], {"full", "pruned"}),
    ],
)
def test_the_plan_tells_trained_pruned_and_frozen_apart(
    tmp_path: Path, overrides: list[str], kinds: set[str]
) -> None:
    (run,) = load_runs([make_run(tmp_path / "a", overrides=overrides)])
    grid, clients = plan_grid(run.seeds[0]), run.seeds[0].about["clients"]
    assert set(grid.legend) == kinds
    for client, column in zip(clients, grid.cells, strict=True):
        for layer, cell in zip(grid.rows, column, strict=True):
            assert (cell.kind == "full") == (layer in client["layers"])
            assert cell.texts[1] == f"keep {words.percent(client['keep'][layer])}"
    assert grid.totals[-1] == "6 of 6"


def test_a_layer_that_is_never_sent_is_shown_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", overrides=["plan.head=personal"])
    about = json.loads((folder / "run.json").read_text())
    for client in about["clients"]:
        client["layers"].remove("head")
        client["keep"]["head"] = 0.0
    (folder / "run.json").write_text(json.dumps(about))
    grid = plan_grid(load_runs([folder])[0].seeds[0])
    assert {column[-1].kind for column in grid.cells} == {"never"}
    assert {column[-1].shade for column in grid.cells} == {1.0}


def test_a_layer_that_is_left_out_of_a_clients_network_is_shown_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", overrides=["plan.others=skip"])
    about = json.loads((folder / "run.json").read_text())
    for client in about["clients"]:
        client["keep"] = {l: 1.0 if l in client["layers"] else 0.0 for l in client["keep"]}
    (folder / "run.json").write_text(json.dumps(about))
    grid = plan_grid(load_runs([folder])[0].seeds[0])
    assert set(grid.legend) == {"full", "skipped"}
    assert write_figures([folder], tmp_path / "figures")


def test_the_legend_of_the_plan_is_plain_english(tmp_path: Path) -> None:
    (run,) = load_runs([make_run(tmp_path / "a")])
    assert plan_grid(run.seeds[0]).legend["full"] == "trained in full, uploaded"
    (run,) = load_runs([make_run(tmp_path / "b", overrides=["plan.upload=retained"])])
    assert "trained, retained weights uploaded" in plan_grid(run.seeds[0]).legend["pruned"]


def test_the_plan_shows_the_bytes_of_a_layer_where_they_are_known(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    about = json.loads((folder / "run.json").read_text())
    about["clients"][2]["layer_bytes"] = {"fc1": [4096, 1024]}
    (folder / "run.json").write_text(json.dumps(about))
    grid = plan_grid(load_runs([folder])[0].seeds[0])
    assert grid.cells[2][0].texts[2:] == (f"{words.mb(0.0041)} down", f"{words.mb(0.00102)} up")
    assert len(grid.cells[1][0].texts) == 2


def test_labels_are_darker_where_there_are_more() -> None:
    grid = label_grid([[0, 1, 40], [40, 20, 3]])
    shades = [[c.shade for c in column] for column in grid.cells]
    assert shades[0][0] == 0 and grid.cells[0][0].kind == "none"
    assert 0 < shades[0][1] <= shades[1][2] < shades[1][1] < shades[0][2] == shades[1][0] == 1
    assert grid.totals == ("40", "21", "43")


# --------------------------------------------------------------------------- runs


def test_a_folder_of_seeds_is_one_run_with_mean_and_spread(tmp_path: Path) -> None:
    for s in (0, 1, 2, 10):
        make_run(tmp_path / "a" / f"seed-{s}", seed=s)
    (tmp_path / "a" / "seed-x").mkdir()
    (run,) = load_runs([tmp_path / "a"])
    assert [s.config["run"]["seed"] for s in run.seeds] == [0, 1, 2, 10]
    (row,) = compare([tmp_path / "a"])
    finals = [
        json.loads((tmp_path / "a" / f"seed-{s}" / "result.json").read_text())["final"]
        for s in (0, 1, 2, 10)
    ]
    for kind in "GDP":
        means = [f[kind]["mean"] for f in finals]
        assert row[kind] == pytest.approx(sum(means) / 4)
        assert row[f"{kind}_std"] == pytest.approx(statistics.stdev(means))
    chart = figures([run])[0].panels[0]
    assert len(chart.series[0].points) == 3 and all(p.spread > 0 for p in chart.series[0].points)
    assert "±" in line_tips(chart)["lines"][0]["values"][0]


def test_a_row_of_the_comparison_adds_up(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", reason="NaN")
    (row,) = compare([folder])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    up = down = dense_up = 0
    for e in events:
        up, down, dense_up = (
            up + e["bytes_up"],
            down + e["bytes_down"],
            dense_up + 450_000 * len(e["accepted"]),
        )
    assert row["mb_up"] == pytest.approx(up / 1e6) and row["mb_down"] == pytest.approx(down / 1e6)
    assert row["share_up"] == pytest.approx(up / dense_up)
    assert (
        row["rejected"] == 6 and row["seconds"] == 10 and row["seeds"] == 1 and row["G_std"] is None
    )
    assert row["worst"] == events[-1]["G"]["worst"] and row["epsilon_max"] is None
    assert row["budget_mb"] == pytest.approx((up + down) / 1e6) and row["G_at_mb"] == pytest.approx(
        row["G"]
    )


def test_accuracies_can_be_means_of_the_last_evaluations(tmp_path: Path) -> None:
    for s in (0, 1):
        make_run(tmp_path / "a" / f"seed-{s}", rounds=10, seed=s)
    (row,) = compare([tmp_path / "a"], last=2)
    finals = []
    for s in (0, 1):
        lines = (tmp_path / "a" / f"seed-{s}" / "events.jsonl").read_text().splitlines()
        scores = [e["G"] for line in lines if (e := json.loads(line))["G"]]
        finals.append([sum(g[k] for g in scores[-2:]) / 2 for k in ("mean", "worst")])
    assert row["G"] == pytest.approx((finals[0][0] + finals[1][0]) / 2)
    assert row["G_std"] == pytest.approx(statistics.stdev([finals[0][0], finals[1][0]]))
    assert row["worst"] == pytest.approx((finals[0][1] + finals[1][1]) / 2)
    assert row["G"] != compare([tmp_path / "a"])[0]["G"]


def test_runs_are_compared_at_the_smallest_traffic_they_all_reached(tmp_path: Path) -> None:
    short, long = (
        make_run(tmp_path / "short", rounds=4),
        make_run(tmp_path / "long", rounds=10, seed=1),
    )
    rows = compare([long, short])
    assert (
        rows[0]["budget_mb"]
        == rows[1]["budget_mb"]
        == pytest.approx(rows[1]["mb_up"] + rows[1]["mb_down"])
    )
    assert rows[1]["G_at_mb"] == pytest.approx(rows[1]["G"])
    assert rows[0]["G_at_mb"] != rows[0]["G"]


def test_a_score_at_a_budget_is_over_all_seeds_or_not_there(tmp_path: Path) -> None:
    for s, rounds in ((0, 10), (1, 10)):
        make_run(tmp_path / "a" / f"seed-{s}", rounds=rounds, seed=s)
    assert compare([tmp_path / "a"])[0]["G_at_mb"] is not None
    events = tmp_path / "a" / "seed-1" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for e in lines[:-1]:
        e["G"] = None
    events.write_text("".join(json.dumps(e) + "\n" for e in lines))
    short = make_run(tmp_path / "short", rounds=4)
    assert compare([tmp_path / "a", short])[0]["G_at_mb"] is None, (
        "seed 0 alone would say something else"
    )


def test_names_are_the_shortest_ends_that_differ(tmp_path: Path) -> None:
    a, b, c = (make_run(tmp_path / p) for p in ("x/run", "y/run", "z/other"))
    assert [r.name for r in load_runs([a, b])] == ["x/run", "y/run"]
    assert [r.name for r in load_runs([a, c, a])] == ["run", "other"]


def test_what_is_no_run_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        compare([tmp_path])
    with pytest.raises(InputError, match="at least one"):
        write_report([])
    folder = make_run(tmp_path / "a")
    (folder / "run.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(str(folder))):
        write_report([folder])


# --------------------------------------------------------------------------- the page's markup


def test_a_page_is_complete_and_requests_nothing(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", reason="NaN"),
        make_run(tmp_path / "b", seed=1, finished=False),
    ]
    out = write_report(runs)
    assert out == runs[0] / "report.html"
    html = out.read_text()
    page = Outline(html)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert not any(k in a for _, a in page.tags for k in ("src", "srcset", "style", "action"))
    links = [a["href"] for tag in ("a", "link") for a in page.all(tag)]
    assert all(h == "data:," or (h or "")[1:] in ids for h in links)
    assert not any(k.startswith("on") for _, a in page.tags for k in a)
    assert {a.get("type") for a in page.all("script")} == {
        None,
        "application/json",
    } and "url(" not in html
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(a.get("scope") for a in page.all("th"))
    assert [name for name, _ in page.tags if name == "h1"] == ["h1"]
    svgs = re.findall(r"<svg.*?</svg>", html, re.S)
    assert (
        len(svgs) == len(page.all("svg")) == 2 * 11
    )  # G, D, P, loss, down, up, per MB; plan and labels of each; for wide and narrow screens
    assert all(len(ET.fromstring(s).attrib["aria-label"]) > 10 for s in svgs)


def test_every_promised_number_is_on_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", reason="tensor 'w' holds NaN or infinity")
    text = " ".join(Outline(write_report([folder]).read_text()).text).replace(words.NBSP, " ")
    (row,) = compare([folder])
    for kind in ("G", "D", "P", "worst"):
        assert f"{100 * row[kind]:.1f} %" in text
    assert f"{100 * row['share_up']:.1f} % of dense FedAvg" in text
    assert f"{0:064x}" in text and "fedp3 1.2.3, torch 9.9" in text and "6 / 6" in text
    assert "tensor 'w' holds NaN or infinity" in text and "6 of 18 updates were rejected" in text
    assert (
        f"fedp3 run {folder}/config.toml --out {folder}-again" in text
        and "fedp3 run my.toml" in text
    )
    assert "clients_per_round" in text


def test_a_run_that_is_not_finished_has_a_page_too(tmp_path: Path) -> None:
    half = make_run(tmp_path / "half", finished=False)
    none = make_run(tmp_path / "none", rounds=1, finished=False)
    assert "3 of 6 rounds" in write_report([half]).read_text()
    html = write_report([none]).read_text()
    assert (
        "0 of 1 rounds" in html and "not evaluated yet" in html and f"fedp3 resume {none}" in html
    )
    assert "Resume it" in html and "Run it again" in html
    assert write_report([half, none], tmp_path / "new" / "both.html").exists()
    assert len(write_figures([none, half], tmp_path / "figures")) == 2 * len(FIGURES)
    rows = compare([half, none])
    assert rows[1]["G"] is None and rows[1]["G_at_mb"] is None and rows[0]["G_at_mb"] is not None


def test_the_command_that_runs_it_again_names_the_users_files(tmp_path: Path) -> None:
    plugins = [{"path": "/home/me/my rules.py", "sha256": "0" * 64}]
    html = write_report([make_run(tmp_path / "a", plugins=plugins)]).read_text()
    text = " ".join(Outline(html).text)
    assert f"--out {tmp_path / 'a'}-again --use '/home/me/my rules.py'" in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    names = [HOSTILE, *range(1, 6)]
    layers = ("fc1", f"{HOSTILE}.w", "fc3", "head")
    folder = make_run(
        tmp_path / "<img src=x onerror=hurt()>", names=names, layers=layers, reason=HOSTILE
    )
    page = Outline(write_report([folder]).read_text())
    assert not page.all("img") and len(page.all("script")) == 2
    assert sum(HOSTILE in t for t in page.text) >= 6
    data = json.loads(next(t for t in page.text if t.startswith('{"')))
    assert data["plan-0"]["names"][0] == HOSTILE and data["plan-0"]["rows"][1] == f"{HOSTILE}.w"


def test_epsilon_is_shown_where_there_is_one(tmp_path: Path) -> None:
    folder, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert "ε" not in write_report([folder]).read_text()
    result = json.loads((folder / "result.json").read_text())
    spent = {str(i): 1.0 + i / 4 for i in range(6)}
    (folder / "result.json").write_text(
        json.dumps(result | {"epsilon_max": 2.25, "epsilon": spent})
    )
    text = Outline(write_report([folder, other]).read_text()).text
    assert "2.25" in text and "1.75" in text
    assert [r["epsilon_max"] for r in compare([folder, other])] == [2.25, None]


def test_a_run_that_a_callback_stopped_is_not_called_finished(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert "finished" in Outline(write_report([folder]).read_text()).text
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"stopped": "enough"}))
    text = Outline(write_report([folder]).read_text()).text
    assert "finished" not in text and any(t.startswith("stopped by a callback: ") for t in text)
    assert f"fedp3 resume {folder}" in text


# --------------------------------------------------------------------------- figure files


def test_the_figures_are_files_and_the_same_run_gives_the_same_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "_a $x")
    first, second = (write_figures([run], tmp_path / out) for out in ("one", "two"))
    assert {p.name for p in first} == {
        f"{name}.{end}" for name in FIGURES for end in ("png", "svg")
    }
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
        assert a.read_bytes().startswith(b"\x89PNG" if a.suffix == ".png" else b"<?xml")


def test_a_partition_is_drawn(tmp_path: Path) -> None:
    path = draw_labels(np.arange(12).reshape(4, 3), tmp_path / "new" / "p.png", "digits over 4")
    assert path == tmp_path / "new" / "p.png" and path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="clients x classes"):
        draw_labels(np.zeros(3), tmp_path / "q.png")


def test_curves_begin_with_the_scores_before_the_first_round(tmp_path: Path) -> None:
    x, y = torch.randn(90, 6), torch.arange(90) % 3
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    fedp3.run(
        net,
        (x, y),
        out=tmp_path / "run",
        partition={"kind": "iid", "clients": 4},
        local={"lr": 1e-30, "steps": 1},  # which changes no weight
        run={"rounds": 2, "eval_every": 1},
        method="fedavg",
    )
    (run,) = load_runs([tmp_path / "run"])
    first = run.seeds[0].events[0]
    assert run.seeds[0].initial["G"]["clients"] == first["G"]["clients"]
    for name in ("accuracy", "accuracy-per-mb"):
        figure = next(f for f in figures([run]) if f.name == name)
        G, D, P = (s.points for s in figure.panels[0].series[:3])
        assert (G[0].round, G[0].x) == (D[0].round, D[0].x) == (0, 0.0)
        assert G[0].y == first["G"]["mean"] and P[0].round == 1, "P needs a local update"
    assert compare([tmp_path / "run"], last=9)[0]["G"] == pytest.approx(first["G"]["mean"])


def test_a_real_run_is_reported_as_it_was(tmp_path: Path) -> None:
    settings = [
        "model.width=0.05",
        "partition.clients=4",
        "run.rounds=2",
        "run.eval_every=1",
        "local.steps=1",
    ]
    experiment = assemble(config.parse({}, [*settings, "run.clients_per_round=2"]))
    folder = tmp_path / "run" / "seed-0"
    result = session.train(
        experiment, folder, lambda e, states: make_engine(e, workers=1, states=states)
    ).result
    (row,) = compare([folder])
    assert row["G"] == result["accuracy_global"] and row["worst"] == result["accuracy_worst_client"]
    assert row["mb_up"] == pytest.approx(result["mb_up"]) and row["seconds"] == pytest.approx(
        result["seconds"]
    )
    html = write_report([tmp_path / "run"]).read_text()
    assert result["model_sha256"] in html and "finished" in html
