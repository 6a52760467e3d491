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
from fedp3.gate import NOT_FINITE
from fedp3.locks import locked
from fedp3.recipe import Shard
from fedp3.server import RoundRecord, run

TRAINED = 0.8  # share of the training part that is trained on
EVALUATIONS, SCORED = 20, 10  # a run is evaluated so often, and the last ones count, at most half of them
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
    """Mean of the run's last G on the validation cut; 0 where its updates ended in NaN or infinity."""
    if config.privacy.enabled:
        raise InputError("choosing a setting looks at the samples, which no budget pays for: set it without LDP")
    experiment = validation_cut(assemble(config, data_dir))
    engine = make_engine(experiment, workers)
    scores: list[float] = []
    done = None
    try:
        for _, done in run(experiment.problem, experiment.start, engine.execute):
            scores += [done.G.mean] if done.G else []
            on_round(done)
    except RunError:
        if not _diverged(done):
            raise
    finally:
        engine.close()
    return 0.0 if _diverged(done) else fmean(scores[-min(SCORED, -(-len(scores) // 2)) :])


def _diverged(last: RoundRecord | None) -> bool:
    """Whether a run ended on a round in which nobody had finite weights to send."""
    reasons = last.rejected.values() if last is not None and last.void else ()
    return bool(reasons) and all(why.endswith(NOT_FINITE) for why in reasons)


def search(
    name: str, cases: Mapping[str, Config], place: Path, data_dir: Path | None, workers: int, watch: Watch
) -> Iterator[tuple[str, float]]:
    """Every value with its score, recorded in `place` under `name`; those recorded there are read."""
    known = record.read_json(place) if place.exists() else {}
    scores, configs = (dict(known.get(name, {}).get(part, {})) for part in ("validation", "configs"))
    if any(configs.get(v, c.digest()) != c.digest() for v, c in cases.items()):
        raise InputError(f"{place}: {name} was scored with another config; choose another place with --out")
    place.parent.mkdir(parents=True, exist_ok=True)
    for value, config in cases.items():
        if value not in scores:
            with watch(f"{name} {value}", config.run.rounds) as on_round:
                scores[value] = validate(config, data_dir, workers, on_round)
            configs[value] = config.digest()
        chosen = best({v: s for v, s in scores.items() if v in cases})
        found = {"chosen": chosen, "rounds": config.run.rounds, "validation": scores, "configs": configs}
        with locked(place.parent, f".{place.stem}.lock", wait=True):  # another search may write beside this one
            others = record.read_json(place) if place.exists() else {}
            record.write_json(place, {**others, name: found})
        yield value, scores[value]


def best(scores: Mapping[str, float]) -> str:
    """The value with the highest score, the first of equals."""
    return max(scores, key=lambda v: scores[v])
