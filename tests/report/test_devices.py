"""Virtual time, energy, fleet and timeline of runs with devices, against plain loops."""

import itertools
import json
import math
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import FIGURES, HOSTILE, Outline, make_run

import fedp3
from device_runs import add_devices, events_of, read, write_events
from fedp3.core.scores import ACCURACY
from fedp3.devices.fleets import make_fleet
from fedp3.report import compare, write_figures, write_report
from fedp3.report import text as words
from fedp3.report.charts import figures
from fedp3.report.device_classes import device_classes, limits_text
from fedp3.report.device_svg import (
    centre,
    extent,
    fleet_frame,
    fleet_picture,
    fleet_tips,
    labels,
    log_ticks,
    places,
    radius,
    timeline_frame,
    timeline_picture,
    timeline_tips,
)
from fedp3.report.fleets import LEVELS, NOTHING, Cluster, Dot, Fleet, fleet, level
from fedp3.report.runs import load_runs
from fedp3.report.target_table import target_table
from fedp3.report.targets import choose_target, first_at
from fedp3.report.timelines import Bar, Timeline, evenly, note, representative, timeline
from fedp3.runs.history import History

LAYERS = ("conv1", "conv2", "fc1", "head")


def device_run(folder: Path, fleet: str = "boards", clients: int = 12, **settings: Any) -> Path:
    """A finished run of six rounds on devices; every second round is evaluated."""
    made = {"seed": settings.get("seed", 0), "rounds": settings.pop("rounds", 6)}
    run = make_run(folder, names=range(clients), layers=LAYERS, **made)
    return add_devices(run, fleet, **settings)


def set_G(folder: Path, scores: list[float | None]) -> None:
    """Overwrite the G of every round, and the final one."""
    events = events_of(folder)
    for event, G in zip(events, scores, strict=True):
        old = event["G"] or events[-1]["G"]
        event["G"] = None if G is None else old | {"mean": G}
    write_events(folder, events)
    result = read(folder / "result.json")
    result["final"]["G"]["mean"] = scores[-1]
    (folder / "result.json").write_text(json.dumps(result))


# --------------------------------------------------------------------------- time and energy


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), max_size=8),
    st.floats(0, 1),
)
def test_a_target_is_reached_at_the_first_point_at_or_above_it(
    points: list[tuple[float, float]], target: float
) -> None:
    curve = [(t, x, y) for t, (x, y) in enumerate(points)]
    want = None
    for x, y in points:
        if y >= target:
            want = x
            break
    assert first_at(curve, target) == want
    if points:
        assert first_at(curve, points[0][1]) == points[0][0]  # exactly the target counts


@pytest.mark.parametrize("target", [0.0, 0.45, 0.6, 0.85])
def test_time_and_energy_to_a_target_are_those_of_a_plain_loop(
    tmp_path: Path, target: float
) -> None:
    folder = device_run(tmp_path / "a")
    (row,) = compare([folder], target=target)
    spent, reached = 0.0, None
    for event in events_of(folder):
        spent += event["clock"]["joules"]
        if reached is None and event["G"] is not None and event["G"]["mean"] >= target:
            reached = (event["clock"]["ended"], spent)
    assert reached is not None
    assert row["seconds_to_target"] == pytest.approx(reached[0])
    assert row["joules_to_target"] == pytest.approx(reached[1])
    result = read(folder / "result.json")
    assert row["virtual_seconds"] == pytest.approx(result["virtual_seconds"])
    assert row["joules"] == pytest.approx(result["joules"]) == pytest.approx(spent)
    assert row["target"] == target and row["seeds_at_target"] == 1


def test_a_run_that_never_reaches_the_target_says_so(tmp_path: Path) -> None:
    never, reaches = device_run(tmp_path / "never"), device_run(tmp_path / "reaches")
    set_G(never, [None, 0.2, None, 0.79, None, 0.5])
    set_G(reaches, [None, 0.2, None, 0.8, None, 0.5])
    rows = compare([never, reaches], target=0.8)
    assert rows[0]["seconds_to_target"] is None and rows[0]["seeds_at_target"] == 0
    assert rows[1]["seconds_to_target"] == events_of(reaches)[3]["clock"]["ended"]
    table = target_table(rows)
    assert table is not None and "80.0" in table.title
    assert [value for value, _ in table.lines[0]] == ["never"] * 4
    assert table.lines[1][0][0] not in ("never", words.NONE)
    html = write_report([never, reaches], tmp_path / "page.html", target=0.8).read_text()
    assert "never" in Outline(html).text
    (never / "result.json").unlink()
    unfinished = target_table(compare([never, reaches], target=0.8))
    assert unfinished is not None and unfinished.lines[0][0][0] == "not yet"


def test_a_mean_over_seeds_exists_only_if_all_seeds_reached_the_target(tmp_path: Path) -> None:
    for s in range(3):
        set_G(device_run(tmp_path / "a" / f"seed-{s}", seed=s), [None, 0.5, None, 0.8, None, 0.9])
    (row,) = compare([tmp_path / "a"], target=0.8)
    times = [events_of(tmp_path / "a" / f"seed-{s}")[3]["clock"]["ended"] for s in range(3)]
    assert row["seconds_to_target"] == pytest.approx(statistics.fmean(times))
    assert row["seconds_to_target_std"] == pytest.approx(statistics.stdev(times))
    set_G(tmp_path / "a" / "seed-1", [None, 0.5, None, 0.7, None, 0.7])
    rows = compare([tmp_path / "a"], target=0.8)
    assert rows[0]["seconds_to_target"] is None and rows[0]["seeds_at_target"] == 2
    table = target_table(rows)
    assert table is not None and table.lines[0][0] == ("never", "in 1 of 3 seeds")


def test_the_default_target_is_a_share_of_the_best_final_g_of_all_runs(tmp_path: Path) -> None:
    a, b = device_run(tmp_path / "a"), device_run(tmp_path / "b")
    plain = make_run(tmp_path / "plain", rounds=6)
    for folder, G in ((a, 0.5), (b, 0.7), (plain, 0.9)):
        set_G(folder, [None, 0.3, None, 0.4, None, G])
    target = choose_target(load_runs([a, b, plain]))
    assert target is not None and pytest.approx(0.98 * 0.9) == target.G
    assert target.origin == "98 % of the final G of plain"
    alone = choose_target(load_runs([a]))
    assert alone is not None and pytest.approx(0.98 * 0.5) == alone.G
    rows = compare([a, b, plain])
    table = target_table(rows)
    assert table is not None and "98 % of the final G of plain" in table.title
    assert table.lines[2][2:] == ((words.NONE, ""),) * 2  # it has no clock
    assert table.lines[2][0] == ("6", "")


def test_energy_is_unknown_if_a_participant_has_no_watts(tmp_path: Path) -> None:
    phones, boards = device_run(tmp_path / "phones", "phones"), device_run(tmp_path / "boards")
    rows = compare([phones, boards])
    assert rows[0]["joules"] is None and rows[0]["joules_to_target"] is None
    assert rows[0]["virtual_seconds"] is not None and rows[1]["joules"] is not None
    assert "accuracy-per-energy" not in {f.name for f in figures(load_runs([phones]))}
    events = events_of(boards)
    events[4]["clock"]["joules"] = None  # known in the first rounds only
    write_events(boards, events)
    (row,) = compare([boards], target=0.0)
    assert row["joules"] is None and row["joules_to_target"] is not None
    alone = target_table(compare([phones]))
    assert alone is not None and [head for head, _ in alone.heads][:2] == ["rounds", "MB"]
    assert len(alone.heads) == 3


def test_curves_of_time_and_energy_pass_through_the_rounds(tmp_path: Path) -> None:
    folder = device_run(tmp_path / "a")
    drawn = {f.name: f.panels[0] for f in figures(load_runs([folder]), target=0.6)}
    scored = [e for e in events_of(folder) if e["G"]]
    time, energy = drawn["accuracy-per-time"], drawn["accuracy-per-energy"]
    G = time.series[0]
    assert [p.y for p in G.points] == [e["G"]["mean"] for e in scored]
    size = {"s": 1, "min": 60, "h": 3600}[time.x.rsplit(" ", 1)[1]]
    assert [p.x * size for p in G.points] == pytest.approx([e["clock"]["ended"] for e in scored])
    assert [p.x for p in energy.series[0].points] == sorted(p.x for p in energy.series[0].points)
    for chart in (time, energy):
        assert chart.series[-1].label.startswith("target 60.0")
        assert {p.y for p in chart.series[-1].points} == {0.6}


@given(st.floats(0.001, 1e9))
def test_the_unit_keeps_the_largest_number_short(largest: float) -> None:
    for units in (words.TIMES, words.ENERGIES):
        chosen = words.unit(units, largest)
        assert chosen == units[0] or largest / chosen.size >= 2
        bigger = units[units.index(chosen) + 1 :]
        assert all(largest < 2 * other.size for other in bigger)


# --------------------------------------------------------------------------- without devices


def test_a_run_without_devices_shows_nothing_of_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    events = events_of(folder)
    for event in events[::2]:
        event["clock"] = None  # a record may have the key
    write_events(folder, events)
    (row,) = compare([folder], target=0.5)
    clock_keys = ("virtual_seconds", "joules", "seconds_to_target", "joules_to_target")
    assert all(row[key] is None for key in clock_keys)
    table = target_table([row])
    assert table is not None and [head for head, _ in table.heads] == ["rounds", "MB"]
    html = write_report([folder], target=0.5).read_text()
    page = Outline(html)
    assert not any("data-spots" in attrs for attrs in page.all("svg"))
    shown = " ".join(page.text[: page.text.index("Plan: which client trains which layer")])
    assert "irtual" not in shown and "nergy" not in shown and "evice" not in shown
    (run,) = load_runs([folder])
    assert fleet(run.seeds[0]) is None and timeline(run.seeds[0]) is None
    assert device_classes(run) == []


def test_the_history_has_virtual_time_and_energy(tmp_path: Path) -> None:
    events = events_of(device_run(tmp_path / "a"))
    for event in events:
        event["epsilon"] = None
    events[3]["clock"]["began"] += 0.5  # the server waited before it began
    history = History(events)
    assert sum(history.column("virtual_seconds")) == pytest.approx(events[-1]["clock"]["ended"])
    assert history.column("joules") == [e["clock"]["joules"] for e in events]
    later = History(events[3:])
    assert later[0]["virtual_seconds"] == pytest.approx(history[3]["virtual_seconds"] - 0.5)
    for event in events:
        del event["clock"]
    assert History(events).column("virtual_seconds") == [None] * 6
    assert History(events).column("joules") == [None] * 6


# --------------------------------------------------------------------------- timeline


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_the_round_that_is_shown_has_the_median_length(lengths: list[int]) -> None:
    timed = [({"round": t}, {"began": 10 * t, "ended": 10 * t + n}) for t, n in enumerate(lengths)]
    event, clock = representative(timed)
    length = clock["ended"] - clock["began"]
    assert length == statistics.median_low(lengths)
    assert event["round"] == lengths.index(length) or lengths.count(length) > 1


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_timeline_has_every_phase_of_every_client_in_order(
    tmp_path: Path, overlapping: bool
) -> None:
    folder = device_run(tmp_path / "a", clients=20, deadline=30, overlapping=overlapping)
    (run,) = load_runs([folder])
    shown = timeline(run.seeds[0])
    assert shown is not None
    event = events_of(folder)[shown.round - 1]
    clock = event["clock"]
    assert (
        {bar.client for bar in shown.bars}
        == set(clock["clients"])
        == {str(i) for i in event["sampled"]}
    )
    names = [d["name"] for d in read(folder / "run.json")["devices"]]
    outcomes = {c["outcome"] for c in clock["clients"].values()}
    assert "late" in outcomes and "left" in outcomes and "used" in outcomes
    for bar in shown.bars:
        times = clock["clients"][bar.client]
        assert bar.device == names[int(bar.client)]
        assert bar.phases[0].start == pytest.approx(times["began"] - clock["began"])
        for one, two in itertools.pairwise(bar.phases):
            assert one.end == two.start
        lengths = {p.kind: p.end - p.start for p in bar.phases}
        for kind in ("down", "compute", "up"):
            assert lengths.get(kind, 0) == pytest.approx(times[kind])
        assert bar.missed == (times["outcome"] != "used")
        if times["outcome"] == "used":
            assert bar.phases[-1].end == pytest.approx(shown.seconds)  # it waits for the others
        if times["outcome"] == "late":
            after = times["began"] + sum(times[k] for k in ("down", "compute", "up"))
            assert bar.outcome == f"late by {words.duration(after - clock['ended'])}"
    ends = [bar.end for bar in shown.bars]
    assert ends == sorted(ends)
    assert ("began before" in note(shown)) == overlapping
    assert f"Round {shown.round}," in note(shown) and "median of 6 rounds" in note(shown)


def test_a_timeline_of_many_clients_shows_some_of_them_and_says_so(tmp_path: Path) -> None:
    (run,) = load_runs([device_run(tmp_path / "a", clients=80)])
    shown = timeline(run.seeds[0])
    assert shown is not None and len(shown.bars) == 20 and shown.clients == 40
    assert "20 of 40 clients" in note(shown)


@given(st.integers(1, 60), st.integers(2, 20))
def test_a_selection_of_bars_has_both_ends_and_no_bar_twice(n: int, most: int) -> None:
    bars = [
        Bar(client=str(k), device="", outcome="used", missed=False, phases=()) for k in range(n)
    ]
    chosen = [int(bar.client) for bar in evenly(bars, most)]
    assert len(chosen) == min(n, most) and chosen == sorted(set(chosen))
    assert chosen[0] == 0 and (chosen[-1] == n - 1 or n == 1)


def test_a_slow_client_does_not_shrink_the_round(tmp_path: Path) -> None:
    folder = device_run(tmp_path / "a", rounds=1)
    (event,) = events_of(folder)
    clock = event["clock"]
    slow = next(iter(clock["clients"]))
    clock["clients"][slow] |= {"compute": 1e6, "outcome": "late"}
    write_events(folder, [event])
    (run,) = load_runs([folder])
    shown = timeline(run.seeds[0])
    assert shown is not None and shown.limits[1] == pytest.approx(1.3 * shown.seconds)
    for width in (560, 320):
        f = timeline_frame(shown, width)
        for rect in ET.fromstring(timeline_picture(shown, "k", width)).iter("rect"):
            if "phase" in rect.attrib["class"]:
                x, wide = float(rect.attrib["x"]), float(rect.attrib["width"])
                assert f.left - 0.1 <= x and x + wide <= width - f.right + 0.7


def test_a_round_of_no_length_is_drawn(tmp_path: Path) -> None:
    times = {"began": 5.0, "down": 0.0, "compute": 0.0, "up": 0.0, "outcome": "left"}
    folder = device_run(tmp_path / "a", rounds=1)
    (event,) = events_of(folder)
    event["clock"] = {"began": 5.0, "ended": 5.0, "joules": None, "clients": {"0": times}}
    write_events(folder, [event])
    (run,) = load_runs([folder])
    shown = timeline(run.seeds[0])
    assert isinstance(shown, Timeline) and shown.bars[0].phases == ()
    ET.fromstring(timeline_picture(shown, "k"))
    assert timeline_tips(shown)["lines"] == [["", "left"]]
    assert write_figures([folder], tmp_path / "figures")


# --------------------------------------------------------------------------- fleet


@given(st.integers(1, 80), st.data())
def test_more_layers_have_a_later_colour(layers: int, data: st.DataObject) -> None:
    trained = data.draw(st.lists(st.integers(1, layers), min_size=2, max_size=9).map(sorted))
    levels = [level(n, layers) for n in trained]
    assert levels == sorted(levels) and levels[0] >= 0 and levels[-1] < LEVELS
    assert level(layers, layers) == LEVELS - 1 and level(0, layers) == NOTHING
    if 1 < layers <= LEVELS:
        assert len({level(n, layers) for n in range(1, layers + 1)}) == layers


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    number = st.floats(0.1, 1e3)
    clusters = draw(
        st.lists(
            st.builds(
                lambda device, memory, gflops, count: Cluster(
                    device=device,
                    kind="phone",
                    memory_gb=memory,
                    gflops=gflops,
                    dots=tuple(Dot(client=str(k), level=k % 6, texts=()) for k in range(count)),
                ),
                st.sampled_from(["Pixel 3", "raspberry-pi-zero-2w", "x"]),
                number,
                number,
                st.integers(1, 40),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return Fleet(clusters=tuple(clusters), legend={}, note="")


@given(fleets(), st.sampled_from([(560, 380), (320, 300)]))
def test_dots_of_a_device_do_not_overlap_and_labels_cover_nothing(
    shown: Fleet, size: tuple[int, int]
) -> None:
    f, r = fleet_frame(shown, *size), radius(shown, size[0])
    for cluster in shown.clusters:
        spots = places(cluster, f, r)
        assert len(spots) == len(cluster.dots)
        assert all(math.dist(a, b) >= 2 * r for a, b in itertools.combinations(spots, 2))
        x, y = centre(cluster, f)
        assert f.left < x < f.width - f.right and f.top < y < f.height - f.bottom
        assert all(math.dist((x, y), spot) <= 1.3 * r * math.sqrt(len(spots)) for spot in spots)
    placed = labels(shown, f, r)
    clusters = [extent(cluster, f, r) for cluster in shown.clusters]
    for i, (_, box) in enumerate(placed):
        others = [other for j, (_, other) in enumerate(placed) if j != i]
        assert not any(box.meets(other) for other in [*others, *clusters])


@given(st.floats(1e-3, 1e3), st.floats(1.1, 1e6))
def test_logarithmic_ticks_are_few_round_numbers_inside(low: float, ratio: float) -> None:
    got = log_ticks(low, low * ratio)
    assert got == sorted(set(got)) and len(got) <= 12
    assert all(low * 0.999 <= v <= low * ratio * 1.001 for v in got)
    assert all(f"{v:e}"[0] in "125" for v in got)


def test_every_client_is_one_dot_with_its_own_device_and_plan(tmp_path: Path) -> None:
    folder = device_run(tmp_path / "a", "phones", clients=40)
    about = read(folder / "run.json")
    (run,) = load_runs([folder])
    shown = fleet(run.seeds[0])
    assert shown is not None
    seen = {}
    for cluster in shown.clusters:
        for dot in cluster.dots:
            seen[dot.client] = (cluster.device, cluster.memory_gb, cluster.gflops, dot)
    assert len(seen) == 40 == sum(len(c.dots) for c in shown.clusters)
    for client, device in zip(about["clients"], about["devices"], strict=True):
        name, memory_gb, gflops, dot = seen[str(client["id"])]
        assert (name, gflops) == (device["name"], device["gflops"])
        assert memory_gb == pytest.approx(device["memory_mb"] / 1e3)
        assert dot.level == level(len(client["layers"]), len(LAYERS))
        assert f"binding limit: {client['binding'] or 'none'}" in dot.texts[-1]
    tips = fleet_tips(shown)
    assert len(tips["x"]) == len(tips["y"]) == len(tips["titles"]) == len(tips["lines"]) == 40
    drawing = ET.fromstring(fleet_picture(shown, "k"))
    dots = [p.attrib["d"].count("z") for p in drawing.iter("path")]
    assert sum(dots) == 40


# --------------------------------------------------------------------------- by device


def test_numbers_by_device_are_those_of_plain_loops(tmp_path: Path) -> None:
    for s in range(2):
        device_run(tmp_path / "a" / f"seed-{s}", clients=15, seed=s, deadline=55)
    (run,) = load_runs([tmp_path / "a"])
    classes = device_classes(run)
    assert [c.gflops for c in classes] == sorted(c.gflops for c in classes)
    assert sum(c.clients for c in classes) == pytest.approx(15)
    for c in classes:
        D, P, seconds, limits, tasks, used, clients = [], [], [], [], 0, 0, 0
        for s in range(2):
            folder = tmp_path / "a" / f"seed-{s}"
            about, result = read(folder / "run.json"), read(folder / "result.json")
            mine = [
                client
                for client, device in zip(about["clients"], about["devices"], strict=True)
                if device["name"] == c.name
            ]
            clients += len(mine)
            limits += [client["binding"] or "none" for client in mine]
            ids = [str(client["id"]) for client in mine]
            if ids:
                D.append(statistics.fmean(result["final"]["D"]["clients"][i] for i in ids))
                P.append(statistics.fmean(result["final"]["P"]["clients"][i] for i in ids))
                seconds.append(statistics.fmean(client["seconds"] for client in mine))
            for event in events_of(folder):
                for i, times in event["clock"]["clients"].items():
                    tasks += i in ids
                    used += i in ids and times["outcome"] == "used"
        assert c.D is not None and c.P is not None and c.seconds is not None
        assert c.D.mean == pytest.approx(statistics.fmean(D))
        assert c.P.mean == pytest.approx(statistics.fmean(P))
        assert c.seconds.mean == pytest.approx(statistics.fmean(seconds))
        assert c.clients == clients / 2
        assert c.used == (pytest.approx(used / tasks) if tasks else None)
        assert c.limits == {
            limit: pytest.approx(limits.count(limit) / clients) for limit in set(limits)
        }


def test_limits_are_named_with_their_shares_if_there_are_several() -> None:
    assert limits_text({"time": 1.0}) == "time"
    shares = limits_text({"none": 0.25, "memory": 0.75}).replace(words.NBSP, " ")
    assert shares == "memory 75 %, none 25 %"


# --------------------------------------------------------------------------- page and files


def test_the_page_shows_time_fleet_round_and_devices(tmp_path: Path) -> None:
    a, b = device_run(tmp_path / "a"), device_run(tmp_path / "b", slower=3.0, seed=1)
    html = write_report([a, b], tmp_path / "page.html", target=0.6).read_text()
    page = Outline(html)
    svgs = [ET.fromstring(s) for s in re.findall(r"<svg.*?</svg>", html, re.S)]
    # G, D, P, loss, down, up, per MB, time, energy; plan, labels, fleet and timeline of each run;
    # all for wide and for narrow screens
    assert len(svgs) == 2 * (9 + 4 * 2)
    assert all(len(s.attrib["aria-label"]) > 10 for s in svgs)
    shown = " ".join(" ".join(page.text).split()).replace(words.NBSP, " ")
    assert "To reach a G of 60.0 %" in shown and "virtual" in shown
    for folder in (a, b):
        (run,) = load_runs([folder])
        for c in device_classes(run):
            assert (
                c.name in shown
                and words.score_stat(ACCURACY, c.P).replace(words.NBSP, " ") in shown
            )
    data = json.loads(next(t for t in page.text if t.startswith('{"')))
    for key in ("fleet-0", "fleet-1-narrow", "timeline-0", "timeline-1-narrow"):
        spots = data[key] | data[data[key].get("texts_of", key)]
        assert len(spots["titles"]) == len(spots["lines"]) == len(spots["y"])


def test_names_of_devices_stay_text(tmp_path: Path) -> None:
    folder = device_run(tmp_path / "a")
    about = read(folder / "run.json")
    for device in about["devices"]:
        device |= {"name": HOSTILE, "kind": HOSTILE}
    (folder / "run.json").write_text(json.dumps(about))
    page = Outline(write_report([folder]).read_text())
    assert not page.all("img") and len(page.all("script")) == 2
    assert any(HOSTILE in t for t in page.text)
    assert write_figures([folder], tmp_path / "figures")


def test_a_run_with_devices_before_its_first_round_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", names=range(4), layers=LAYERS, rounds=1, finished=False)
    add_devices(folder)
    html = write_report([folder]).read_text()
    assert 'data-spots="fleet-0"' in html
    assert 'data-spots="timeline-0"' not in html and 'id="time"' not in html
    assert target_table(compare([folder])) is None


def test_the_figures_of_devices_are_files_and_repeat_to_the_byte(tmp_path: Path) -> None:
    folder = device_run(tmp_path / "a")
    first, second = (write_figures([folder], tmp_path / out, 0.6) for out in ("one", "two"))
    names = {*FIGURES, "accuracy-per-time", "accuracy-per-energy", "fleet", "timeline"}
    assert {p.name for p in first} == {f"{name}.{end}" for name in names for end in ("png", "svg")}
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_a_real_run_with_devices_is_reported(tmp_path: Path) -> None:
    import torch
    from torch import nn

    x, y = torch.randn(90, 6), torch.arange(90) % 2
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    fedp3.run(
        net,
        (x, y),
        out=tmp_path / "run",
        partition={"kind": "iid", "clients": 5},
        run={"rounds": 3, "clients_per_round": 3, "eval_every": 1},
    )
    add_devices(tmp_path / "run")
    (row,) = compare([tmp_path / "run"])
    assert row["seeds_at_target"] in (0, 1) and row["virtual_seconds"] is not None
    assert "In full (L_i)" in write_report([tmp_path / "run"]).read_text()
    assert {d.name for d in make_fleet("boards", 5, 0)} == {
        c.name for c in device_classes(load_runs([tmp_path / "run"])[0])
    }
