"""Choosing a setting: on which samples, what counts, and what is recorded."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fedp3 import config
from fedp3.core import files
from fedp3.core.errors import InputError, RunError
from fedp3.core.scores import ACCURACY, Score
from fedp3.experiment.assemble import assemble
from fedp3.runs import tuning

SMALL = (
    "partition.clients=4",
    "run.clients_per_round=0",
    "run.rounds=4",
    "local.steps=2",
    "model.width=0.02",
)


def settings(*more: str) -> config.Config:
    return config.parse({}, [*SMALL, *more])


@contextmanager
def unseen(name: str, rounds: int):
    yield lambda done: None


def test_the_validation_split_has_no_test_sample_and_no_sample_twice():
    experiment = assemble(settings())
    validation = tuning.validation_split(experiment)
    for i, shard in validation.shards.items():
        train, test = set(shard.train.tolist()), set(shard.test.tolist())
        assert not train & test
        assert train | test == set(experiment.shards[i].train.tolist())
        assert not (train | test) & set(experiment.shards[i].test.tolist())
        assert validation.server.examples[i] == len(train)


def test_the_second_half_of_the_evaluations_counts():
    seen = []
    score, kind = tuning.validate(tuning.shortened(settings()), None, 1, seen.append)
    assert kind == ACCURACY
    assert [r.t for r in seen] == [0, 1, 2, 3]
    assert score == pytest.approx((seen[2].G.mean + seen[3].G.mean) / 2)


def test_a_setting_that_makes_training_diverge_scores_nothing():
    for patience in (1, 50):  # the run gives up, or ends before it would
        wild = settings("local.lr=1e30", "local.clip_norm=0", f"run.max_void={patience}")
        assert tuning.validate(tuning.shortened(wild), None, 1, lambda done: None)[0] == 0


def test_a_run_that_fails_for_another_reason_is_no_score(monkeypatch):
    def broken(*_: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("fedp3.engines.base.local_update", broken)
    monkeypatch.setattr("fedp3.engines.base.stacked_updates", broken)
    with pytest.raises(RunError, match="out of memory"):
        tuning.validate(tuning.shortened(settings("run.max_void=1")), None, 1, lambda done: None)


def test_samples_under_ldp_are_not_looked_at_for_a_setting():
    with pytest.raises(InputError, match="no budget pays for"):
        tuning.validate(
            settings("privacy.enabled=true", "privacy.delta=0.001"), None, 1, lambda done: None
        )


def test_recorded_values_are_not_scored_again(tmp_path, monkeypatch):
    scores = {"0.1": 0.4, "0.2": 0.9, "0.5": 0.7}
    scored: list[str] = []

    def validate(c: config.Config, *_: object) -> tuple[float, Score]:
        scored.append(f"{c.local.lr:g}")
        return scores[scored[-1]], ACCURACY

    monkeypatch.setattr(tuning, "validate", validate)
    place, cases = tmp_path / "deep" / "tuned.json", {v: settings(f"local.lr={v}") for v in scores}
    first, later = ({v: cases[v] for v in grid} for grid in (("0.1", "0.2"), ("0.1", "0.5")))
    for each, chosen in ((first, "0.2"), (later, "0.5"), (cases, "0.2"), (later, "0.5")):
        assert dict(tuning.search("fedp3", each, place, None, 1, unseen)) == {
            v: scores[v] for v in each
        }
        assert files.read_json(place)["fedp3"]["chosen"] == chosen
    assert scored == ["0.1", "0.2", "0.5"]


def test_two_searches_at_once_lose_no_score(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "validate", lambda *_: (0.5, ACCURACY))
    place = tmp_path / "tuned.json"

    def look(name: str) -> None:
        dict(
            tuning.search(
                name,
                {f"{v}": settings(f"local.lr=0.{v}") for v in range(1, 9)},
                place,
                None,
                1,
                unseen,
            )
        )

    with ThreadPoolExecutor(6) as several:
        list(several.map(look, "abcdef"))
    assert {
        name: len(found["validation"]) for name, found in files.read_json(place).items()
    } == dict.fromkeys("abcdef", 8)


def test_scores_of_another_config_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "validate", lambda *_: (0.5, ACCURACY))
    place = tmp_path / "tuned.json"
    dict(tuning.search("fedp3", {"0.1": settings("local.lr=0.1")}, place, None, 1, unseen))
    with pytest.raises(InputError, match="scored with another config"):
        dict(
            tuning.search(
                "fedp3", {"0.1": settings("local.lr=0.1", "run.seed=7")}, place, None, 1, unseen
            )
        )
