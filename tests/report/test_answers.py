"""Which run is best: paired differences, verdicts, budgets and conditions, against plain loops."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_report import make_run

from device_runs import add_devices, events_of, read, write_events
from fedp3.core.errors import InputError
from fedp3.core.scores import ACCURACY, Score
from fedp3.report.answers import INCOMPARABLE, answers, as_row, difference_text, sentence
from fedp3.report.budgets import AXES, common_budget, scores_at, smoothed, value_at
from fedp3.report.equality import inequalities
from fedp3.report.headline import headline
from fedp3.report.paired import (
    BETTER,
    UNDECIDED,
    WORSE,
    Difference,
    difference,
    holm,
    reason,
    verdict,
)
from fedp3.report.runs import load_runs
from fedp3.report.targets import choose_target, cost_to

NATS = Score("nats", lower_is_better=True)
SCORES = st.floats(0, 1).map(lambda x: round(x, 4))


def seeds_of(values: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(values))


def set_G(folder: Path, scores: Sequence[float | None]) -> None:
    """Overwrite the G of every round, and the final one."""
    events = events_of(folder)
    for event, G in zip(events, scores, strict=True):
        old = event["G"] or events[-1]["G"]
        event["G"] = None if G is None else old | {"mean": G}
    write_events(folder, events)
    result = read(folder / "result.json")
    result["final"]["G"]["mean"] = scores[-1]
    (folder / "result.json").write_text(json.dumps(result))


def sweep(
    folder: Path, finals: dict[str, Sequence[float]], overrides: Sequence[str] = ()
) -> list[Path]:
    """Runs of two evaluated rounds; name -> the final G of each seed.  All share their splits."""
    made = []
    labels: dict[int, Any] = {}
    for name, values in finals.items():
        for seed, G in enumerate(values):
            place = folder / name / f"seed-{seed}"
            make_run(place, rounds=2, eval_every=1, seed=seed, overrides=overrides)
            about = read(place / "run.json")
            about["labels"] = labels.setdefault(seed, about["labels"])
            (place / "run.json").write_text(json.dumps(about))
            set_G(place, [0.1, G])
        made.append(folder / name)
    return made


# --------------------------------------------------------------------------- statistics


@given(st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=9))
def test_a_difference_is_paired_students_t(pairs: list[tuple[float, float]]) -> None:
    got = difference(seeds_of([a for a, _ in pairs]), seeds_of([b for _, b in pairs]))
    assert got is not None and got.seeds == len(pairs)
    ds = [a - b for a, b in pairs]
    total = 0.0
    for d in ds:
        total += d
    mean = total / len(ds)
    assert got.mean == pytest.approx(mean, abs=1e-12)
    if len(ds) < 3 or max(ds) - min(ds) < 1e-9:
        assert got.low is None and got.high is None and got.p is None and reason(got)
        return
    squares = 0.0
    for d in ds:
        squares += (d - mean) ** 2
    error = math.sqrt(squares / (len(ds) - 1)) / math.sqrt(len(ds))
    reach = stats.t.ppf(0.975, len(ds) - 1) * error
    assert got.low == pytest.approx(mean - reach, abs=1e-9)
    assert got.high == pytest.approx(mean + reach, abs=1e-9)
    assert got.p == pytest.approx(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue, abs=1e-9)
    assert reason(got) == ""


def test_only_seeds_that_both_runs_have_are_compared() -> None:
    got = difference({0: 0.5, 1: 0.6, 7: 0.9}, {1: 0.5, 0: 0.5, 2: 0.0})
    assert got is not None and got.seeds == 2 and got.mean == pytest.approx(0.05)
    assert difference({0: 1.0}, {1: 0.0}) is None
    assert verdict(None, None, ACCURACY) == UNDECIDED and reason(None) == "no seed in common"


@given(st.lists(st.none() | st.floats(0, 1), max_size=7))
def test_holm_is_the_step_down_procedure(ps: list[float | None]) -> None:
    adjusted = holm(ps)
    for level in (0.01, 0.05, 0.2):
        rejected: set[int] = set()
        while True:  # reject the smallest p while it is below level / (hypotheses that are left)
            left = [(p, k) for k, p in enumerate(ps) if p is not None and k not in rejected]
            if not left or min(left)[0] * (len(ps) - len(rejected)) > level:
                break
            rejected.add(min(left)[1])
        assert rejected == {k for k, p in enumerate(adjusted) if p is not None and p <= level}


def test_of_many_comparisons_without_a_difference_few_have_any_false_verdict() -> None:
    rng, wrong, repeats = np.random.default_rng(0), 0, 1000
    for _ in range(repeats):
        scores = [seeds_of(list(rng.normal(0.8, 0.01, 4))) for _ in range(5)]
        ds = [difference(a, b) for a, b in itertools.combinations(scores, 2)]
        ps = holm([None if d is None else d.p for d in ds])
        wrong += any(verdict(d, p, ACCURACY) != UNDECIDED for d, p in zip(ds, ps, strict=True))
    assert wrong / repeats < 0.07  # 5 % and three standard errors


def test_a_verdict_follows_the_direction_of_the_score() -> None:
    d = Difference(mean=0.1, seeds=5, low=0.05, high=0.15, p=0.001)
    assert verdict(d, 0.01, ACCURACY) == BETTER and verdict(d, 0.01, NATS) == WORSE
    assert verdict(d, 0.05, ACCURACY) == verdict(d, None, ACCURACY) == UNDECIDED
    assert difference_text(ACCURACY, d) == "+10.0 [+5.0, +15.0]"
    assert difference_text(NATS, d) == "+0.100 [+0.050, +0.150]"


# --------------------------------------------------------------------------- budgets


@given(st.lists(st.tuples(st.floats(0.1, 9), SCORES), min_size=1, max_size=6), st.floats(0, 40))
def test_reading_a_curve_at_a_budget_is_linear_interpolation(
    steps: list[tuple[float, float]], budget: float
) -> None:
    xs, ys = np.cumsum([s for s, _ in steps]), [y for _, y in steps]
    got = value_at([(t, float(x), y) for t, (x, y) in enumerate(zip(xs, ys, strict=True))], budget)
    if xs[0] <= budget <= xs[-1]:
        assert got == pytest.approx(np.interp(budget, xs, ys))
    else:
        assert got is None


@given(st.lists(SCORES, max_size=8), st.integers(1, 4))
def test_smoothing_averages_the_last_evaluations_up_to_each(ys: list[float], last: int) -> None:
    curve = [(t, float(t), y) for t, y in enumerate(ys, 1)]
    got = smoothed(curve, last)
    for k, (t, x, y) in enumerate(got):
        before = [ys[j] for j in range(k + 1) if j > k - last]
        assert (t, x) == (k + 1, k + 1) and y == pytest.approx(sum(before) / len(before))
    assert smoothed([(0, 0.0, 0.1), *curve], last) == [(0, 0.0, 0.1), *got]


def test_a_run_that_costs_nothing_has_its_last_score_at_every_budget() -> None:
    assert value_at([(1, 0.0, 0.2), (2, 0.0, 0.3)], 7.0) == 0.3
    assert value_at([(0, 0.0, 0.2)], 7.0) is None, "it has not trained yet"
    assert value_at([(0, 0.0, 0.2), (4, 8.0, 0.6)], 2.0) == pytest.approx(0.3)


@pytest.mark.parametrize("axis", AXES)
def test_a_score_at_a_budget_is_that_of_a_plain_loop(tmp_path: Path, axis: str) -> None:
    folder = add_devices(make_run(tmp_path / "a", rounds=8, eval_every=2), deadline=1e9)
    (run,) = load_runs([folder])
    mb = joules = 0.0
    points = []
    for event in events_of(folder):
        mb += (event["bytes_up"] + event["bytes_down"]) / 1e6
        joules += event["clock"]["joules"]
        costs = {
            "mb": mb,
            "seconds": event["clock"]["ended"],
            "joules": joules,
            "round": event["round"],
        }
        if event["G"]:
            points.append((costs[axis], event["G"]["mean"]))
    assert common_budget(AXES[axis], [run]) == pytest.approx(points[-1][0])
    (x0, y0), (x1, y1) = points[1:3]
    middle = scores_at(run, AXES[axis], (x0 + x1) / 2)
    assert middle == {0: pytest.approx((y0 + y1) / 2)}
    assert scores_at(run, AXES[axis], points[-1][0] * 1.01) == {}
    assert scores_at(run, AXES[axis], points[0][0] * 0.99) == {}
    assert cost_to(run.seeds[0], axis, points[2][1]) == pytest.approx(
        next(x for x, y in points if y >= points[2][1])
    )


def test_the_common_budget_is_the_smallest_that_a_seed_reached(tmp_path: Path) -> None:
    short, long = make_run(tmp_path / "s", rounds=4), make_run(tmp_path / "l", rounds=10, seed=1)
    none = make_run(tmp_path / "n", rounds=1, finished=False)
    runs = load_runs([long, short, none])
    assert common_budget(AXES["round"], runs) == 4
    assert common_budget(AXES["seconds"], runs) is None, "no run has devices"
    timed = load_runs([add_devices(long), short])
    assert common_budget(AXES["seconds"], timed) is None, "one of them has none"


# --------------------------------------------------------------------------- answers

CLEAR = {
    "a": [0.80, 0.81, 0.82, 0.80],
    "b": [0.70, 0.712, 0.721, 0.69],
    "c": [0.801, 0.80, 0.831, 0.79],
}


def test_the_best_run_is_compared_with_all_and_the_verdicts_are_corrected(tmp_path: Path) -> None:
    runs = load_runs(sweep(tmp_path, CLEAR))
    (answer,) = [a for a in answers(runs) if a.axis == "round"]
    assert answer.reference == "a" and answer.comparisons == 3, "all pairs: the best was chosen"
    verdicts = {s.run: s.verdict for s in answer.standings}
    assert verdicts == {"a": "", "b": WORSE, "c": UNDECIDED}
    assert sentence(answer).replace("\u00a0", " ") == (
        "At 2 rounds of training a leads with G 80.8 %; it is better than b; whether it is better "
        "than c is not decided."
    )
    (named,) = [a for a in answers(runs, against="b") if a.axis == "round"]
    assert named.comparisons == 2
    assert {s.run: s.verdict for s in named.rivals} == {"a": BETTER, "c": BETTER}
    assert "it is worse than a and c" in sentence(named)
    row = as_row(answer)
    assert row["reference"] == "a" and json.loads(json.dumps(row)) == row


def test_two_runs_are_told_with_their_difference(tmp_path: Path) -> None:
    runs = load_runs(sweep(tmp_path, {name: CLEAR[name] for name in "ab"}))
    (answer,) = [a for a in answers(runs) if a.axis == "round"]
    told = sentence(answer).replace("\u00a0", " ")
    assert told.startswith("At 2 rounds of training a has G 80.8 % and b 70.6 %: a is better, by +")
    assert told.endswith("points over 4 seeds.")
    low, high = told.split("[")[1].split("]")[0].split(", ")
    assert 0 < float(low) < 10.2 < float(high)


def test_a_correction_that_changes_the_verdict_is_told() -> None:
    d = Difference(mean=0.1, seeds=3, low=0.01, high=0.2, p=0.03)
    assert reason(d, 0.09, 3) == "too few seeds for 3 comparisons"
    assert reason(d, 0.03, 1) == "" and verdict(d, 0.09, ACCURACY) == UNDECIDED


@pytest.mark.parametrize(("seeds", "why"), [(1, "1 seed, want 3"), (2, "2 seeds, want 3")])
def test_few_seeds_decide_nothing(tmp_path: Path, seeds: int, why: str) -> None:
    finals = {"a": [0.9] * seeds, "b": [0.1 + k / 10 for k in range(seeds)]}
    runs = load_runs(sweep(tmp_path, finals))
    for answer in answers(runs):
        assert [s.verdict for s in answer.rivals] == [UNDECIDED]
        assert f"not decided ({why} or more)" in sentence(answer)
    assert any(why in said for said in headline(runs))


def test_a_budget_can_be_chosen_and_must_have_been_reached(tmp_path: Path) -> None:
    long, short = make_run(tmp_path / "long", rounds=8), make_run(tmp_path / "short", rounds=4)
    runs = load_runs([long, short])
    (answer,) = answers(runs, {"round": 3.0})
    for standing, run in zip(answer.standings, runs, strict=True):
        events = run.seeds[0].events
        want = (events[1]["G"]["mean"] + events[3]["G"]["mean"]) / 2
        assert standing.score is not None and standing.score.mean == pytest.approx(want)
    (later,) = answers(runs, {"round": 6.0})
    assert later.reference == "long" and [s.score for s in later.rivals] == [None]
    assert "short ended at 4 rounds." in sentence(later)
    with pytest.raises(InputError, match="long from 2 rounds to 8 rounds, short from 2 rounds to"):
        answers(runs, {"round": 9.0})
    with pytest.raises(InputError, match="not all runs have a G at 6 rounds"):
        answers(runs, {"round": 6.0}, against="short")
    with pytest.raises(InputError, match="no such run; the runs are: long, short"):
        answers(runs, against="shrt")


def test_a_seed_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    for k in range(2):
        make_run(tmp_path / "a" / f"seed-{k}", seed=3)
    with pytest.raises(InputError, match="two runs with the same seed"):
        answers(load_runs([tmp_path / "a"]))


# --------------------------------------------------------------------------- conditions


def changed(folder: Path, **sections: dict[str, Any]) -> None:
    for seed in folder.glob("seed-*"):
        about = read(seed / "run.json")
        for section, values in sections.items():
            about["config"][section] |= values
        (seed / "run.json").write_text(json.dumps(about))


def test_runs_on_other_data_or_another_split_get_no_verdict(tmp_path: Path) -> None:
    a, b = sweep(tmp_path, {name: CLEAR[name] for name in "ab"})
    assert inequalities(load_runs([a, b])) == []
    changed(b, data={"name": "mnist"})
    (found,) = inequalities(load_runs([a, b]))
    assert found.sentence == "data: data.name=digits (a); data.name=mnist (b)"
    for answer in answers(load_runs([a, b])):
        assert [s.verdict for s in answer.rivals] == [INCOMPARABLE]
        assert "not comparable (other data)" in sentence(answer)
    assert headline(load_runs([a, b]))[-1].startswith("Caution: these runs differ")


def test_the_same_settings_with_another_split_are_noticed(tmp_path: Path) -> None:
    a, b = sweep(tmp_path, {name: CLEAR[name] for name in "ab"})
    path = b / "seed-2" / "run.json"
    about = read(path)
    about["labels"][0][0] += 1
    path.write_text(json.dumps(about))
    (found,) = inequalities(load_runs([a, b]))
    assert found.condition == "split" and "content 2 (b)" in found.sentence
    assert len(found.forbids) == len(AXES)


def test_other_fleets_forbid_verdicts_on_time_and_other_steps_are_told(tmp_path: Path) -> None:
    a, b = sweep(tmp_path, {name: CLEAR[name] for name in "ab"})
    for folder in (a, b):
        for place in sorted(folder.glob("seed-*")):
            add_devices(place, "boards", deadline=1e9)
        changed(folder, devices={"fleet": "boards"})
    assert inequalities(load_runs([a, b])) == []
    about = read(b / "seed-1" / "run.json")
    about["devices"][0]["gflops"] *= 2
    (b / "seed-1" / "run.json").write_text(json.dumps(about))
    changed(b, local={"steps": 7}, run={"clients_per_round": 3})
    found = {i.condition: i for i in inequalities(load_runs([a, b]))}
    assert set(found) == {"fleet", "local training", "participants"}
    assert (
        found["local training"].sentence == "local training: local.steps=10 (a); local.steps=7 (b)"
    )
    by_axis = {answer.axis: answer.rivals[0].verdict for answer in answers(load_runs([a, b]))}
    assert by_axis["seconds"] == by_axis["joules"] == INCOMPARABLE
    assert by_axis["round"] == WORSE


# --------------------------------------------------------------------------- headline


def test_the_headline_of_one_run_is_its_score_and_its_upload(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    G = read(folder / "result.json")["final"]["G"]["mean"]
    (said,) = headline(load_runs([folder]))
    assert f"{100 * G:.1f}" in said and "after 6 rounds" in said
    assert "44" in said and "of what dense FedAvg uploads" in said  # 200 of 450 kB
    (unfinished,) = headline(load_runs([make_run(tmp_path / "b", finished=False)]))
    assert "after 3 of 6 rounds, so far" in unfinished
    (none,) = headline(load_runs([make_run(tmp_path / "c", rounds=1, finished=False)]))
    assert "not been evaluated yet" in none


def test_the_headline_of_several_runs_has_the_cost_of_a_target(tmp_path: Path) -> None:
    runs = load_runs(sweep(tmp_path, CLEAR))
    said = " ".join(headline(runs, target=0.75)).replace("\u00a0", " ")
    assert "To reach 75.0 %, a took 2 rounds and " in said
    assert "b did not get there in all seeds." in said
    target = choose_target(runs)
    assert target is not None and pytest.approx(0.98 * 0.8075) == target.G
