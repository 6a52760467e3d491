"""Choose a setting on a validation part of the training samples.

No test sample influences the choice: each client trains on the first four fifths of its training
samples and is scored on the others.  Scores are recorded as they come, and nothing is scored twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from fedp3.config import Config
from fedp3.config.plugins import Plugin
from fedp3.core.errors import InputError, RunError
from fedp3.core.files import locked, read_json, write_json
from fedp3.core.scores import Score, score_of
from fedp3.core.types import RejectionCode
from fedp3.data.shards import Shard
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.runs.round_warnings import OnRound
from fedp3.server.context import RoundRecord
from fedp3.server.gate import METRIC_MOST
from fedp3.server.rounds import run

TRAINED = 0.8  # share of the training samples that is trained on
EVALUATIONS = 20  # of a run
SCORED = 10  # of the last evaluations count, at most half of them
# (what is scored, rounds) -> a context in which rounds are shown as they end
WatchScore = Callable[[str, int], AbstractContextManager[OnRound]]


def validation_split(experiment: Experiment) -> Experiment:
    """The same experiment, in which every client is tested on its last training samples.

    Nothing is tested on test samples, those of a central test set included.
    """
    shards = {}
    for i, shard in experiment.shards.items():
        end = int(TRAINED * len(shard.train))
        shards[i] = Shard(shard.train[:end], shard.train[end:])
    examples = {i: len(s.train) for i, s in shards.items()}
    server = replace(experiment.server, examples=examples, central=None)
    return replace(experiment, shards=shards, server=server)


def shortened(config: Config, rounds: int = 0) -> Config:
    """The same run over fewer rounds, evaluated often enough to average over oscillations.

    Args:
        config: the run.
        rounds: how many; 0 leaves them as they are.
    """
    T = rounds or config.run.rounds
    return replace(config, run=replace(config.run, rounds=T, eval_every=max(1, T // EVALUATIONS)))


def validate(
    config: Config,
    data_dir: Path | None,
    workers: int,
    on_round: OnRound,
    plugins: Sequence[Plugin] = (),
) -> tuple[float, Score]:
    """The mean of a run's last G on the validation samples, and what G is.

    If training diverged, it is 0, or a huge number if less is better.

    Args:
        config: the run.
        data_dir: where data sets are.
        workers: number of processes; 0 chooses.
        on_round: called with the record of every finished round.
        plugins: files that worker processes import.
    """
    if config.privacy.enabled or config.client_privacy.enabled:
        mode = "LDP" if config.privacy.enabled else "client-level DP"
        raise InputError(
            "choosing a setting looks at the samples, which no budget pays for: "
            f"choose it without {mode}"
        )
    experiment = validation_split(assemble(config, data_dir))
    engine = make_engine(experiment, workers, plugins=plugins)
    scores: list[float] = []
    last = None
    try:
        for _, last in run(experiment.server, experiment.start, engine.execute):
            if last.G is not None:
                scores.append(last.G.mean)
            on_round(last)
    except RunError:
        if not _diverged(last):
            raise
    finally:
        engine.close()
    kind = experiment.server.spec.objective.score
    if _diverged(last):
        return METRIC_MOST if kind.lower_is_better else 0.0, kind
    counted = min(SCORED, math.ceil(len(scores) / 2))
    return fmean(scores[-counted:]), kind


def _diverged(last: RoundRecord | None) -> bool:
    """Whether a run ended on a round in which no client's update was finite."""
    rejections = last.rejected.values() if last is not None and last.void else ()
    return bool(rejections) and all(r.code is RejectionCode.NOT_FINITE for r in rejections)


def search(
    name: str,
    cases: Mapping[str, Config],
    path: Path,
    data_dir: Path | None,
    workers: int,
    watch: WatchScore,
    plugins: Sequence[Plugin] = (),
) -> Iterator[tuple[str, float]]:
    """Score every value of a setting, and yield it with its score.

    Args:
        name: the name under which the scores are recorded.
        cases: value -> the config with it.
        path: the JSON file of scores; a value that is recorded there is not scored again.
        data_dir: where data sets are.
        workers: number of processes; 0 chooses.
        watch: shows the rounds of each run.
        plugins: files that worker processes import.
    """
    known = read_json(path) if path.exists() else {}
    recorded = known.get(name, {})
    kind = score_of(recorded)
    scores, digests = dict(recorded.get("validation", {})), dict(recorded.get("configs", {}))
    if any(digests.get(v, c.digest()) != c.digest() for v, c in cases.items()):
        raise InputError(
            f"{path}: {name} was scored with another config; choose another place with --out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for value, config in cases.items():
        if value not in scores:
            with watch(f"{name} {value}", config.run.rounds) as on_round:
                scores[value], kind = validate(config, data_dir, workers, on_round, plugins)
            digests[value] = config.digest()
        chosen = kind.leader({v: s for v, s in scores.items() if v in cases})
        entry = {
            "chosen": chosen,
            "rounds": config.run.rounds,
            "score": asdict(kind),
            "validation": scores,
            "configs": digests,
        }
        # another search may write to the same file
        with locked(path.parent, f".{path.stem}.lock", wait=True):
            others = read_json(path) if path.exists() else {}
            write_json(path, {**others, name: entry})
        yield value, scores[value]
