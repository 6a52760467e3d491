"""Choose a setting on a validation cut of the training part, so that no test sample has a say in it.

Each client trains on the first four fifths of its training samples and is scored on the rest.  What was scored is
recorded as it comes, and is not scored again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from fedp3 import record
from fedp3.config import Config
from fedp3.driver import OnRound, make_engine
from fedp3.errors import InputError, RunError
from fedp3.experiment import Experiment, assemble
from fedp3.server import run
from fedp3.steps import Shard

TRAINED = 0.8  # share of the training part that is trained on
EVALUATIONS = 20  # of a run; the second half of them counts
Watch = Callable[[str, int], AbstractContextManager[OnRound]]  # (what is scored, rounds) -> told of every round


def validation_cut(experiment: Experiment) -> Experiment:
    """The same experiment with the tests replaced by the end of every client's training part."""
    shards = {}
    for i, s in experiment.shards.items():
        at = int(TRAINED * len(s.train))
        shards[i] = Shard(s.train[:at], s.train[at:])
    problem = replace(experiment.problem, examples={i: len(s.train) for i, s in shards.items()})
    return replace(experiment, shards=shards, problem=problem)


def shortened(config: Config, rounds: int = 0) -> Config:
    """The same run over so many rounds (0: as many as it has), evaluated often enough to see it jump."""
    T = rounds or config.run.rounds
    return config.model_copy(
        update={"run": config.run.model_copy(update={"rounds": T, "eval_every": max(1, T // EVALUATIONS)})}
    )


def validate(config: Config, data_dir: Path | None, workers: int, on_round: OnRound) -> float:
    """Mean of the second half of the run's G on the validation cut; 0 where it did not survive its updates."""
    if config.privacy.enabled:
        raise InputError("choosing a setting looks at the samples, which no budget pays for: set it without LDP")
    experiment = validation_cut(assemble(config, data_dir))
    engine = make_engine(experiment, workers)
    scores: list[float] = []
    try:
        for _, done in run(experiment.problem, experiment.start, engine.execute):
            scores += [done.G.mean] if done.G else []
            on_round(done)
    except RunError:
        return 0.0  # every update was refused, round after round: the setting makes training diverge
    finally:
        engine.close()
    return fmean(scores[len(scores) // 2 :])


def search(
    name: str, cases: Mapping[str, Config], place: Path, data_dir: Path | None, workers: int, watch: Watch
) -> Iterator[tuple[str, float]]:
    """Every value with its score, recorded in `place` under `name`; those recorded there are read."""
    known = record.read_json(place) if place.exists() else {}
    mine = {v: s for v, s in known.get(name, {}).get("validation", {}).items() if v in cases}
    digests = {v: c.digest() for v, c in cases.items()}
    for v, then in known.get(name, {}).get("configs", {}).items():
        if digests.get(v, then) != then:
            raise InputError(f"{place}: {name} was scored with another config; choose another place with --out")
    for value, config in cases.items():
        if value not in mine:
            rounds = config.run.rounds
            with watch(f"{name} {value}", rounds) as on_round:
                mine[value] = validate(config, data_dir, workers, on_round)
            configs = {v: digests[v] for v in mine}
            known[name] = {"chosen": best(mine), "rounds": rounds, "validation": mine, "configs": configs}
            place.parent.mkdir(parents=True, exist_ok=True)
            record.write_json(place, known)
        yield value, mine[value]


def best(scores: Mapping[str, float]) -> str:
    """The value with the highest score, the first of equals."""
    return max(scores, key=lambda v: scores[v])
