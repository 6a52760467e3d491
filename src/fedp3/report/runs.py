"""Reading run folders: description, rounds and result of a run, and its numbers over seeds.

A run is one folder, or a folder of seed-0, seed-1, ...  A value over seeds is their mean with the
sample standard deviation.  An unfinished run is read up to its last recorded round.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError
from fedp3.core.files import read_json
from fedp3.core.scores import Score, score_of
from fedp3.runs.run_folder import INITIAL_SCORES, read_events

Json = Mapping[str, Any]
KINDS: Mapping[str, str] = {
    "G": "server model",
    "D": "as dispatched",
    "P": "after one local update",
    "C": "server model on a test set of no client",
}
ALWAYS = ("G", "D", "P")  # every run has these; C needs a test set of no client


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """One run folder."""

    folder: Path
    about: Json  # run.json
    toml: str  # config.toml
    events: Sequence[Json]
    result: Json  # result.json; empty for an unfinished run
    initial: Json  # initial.json: the scores of W_0; empty for a run that did not measure them

    @property
    def config(self) -> Json:
        """The config as run."""
        return dict(self.about["config"])

    @property
    def score(self) -> Score:
        """What G, D and P are, and which direction is better."""
        return score_of(self.about)


@dataclass(frozen=True, slots=True)
class Run:
    """One line of a comparison: a name and one or more seeds."""

    name: str
    folder: Path
    seeds: tuple[Seed, ...]

    @property
    def score(self) -> Score:
        """The score of all its seeds."""
        return self.seeds[0].score


@dataclass(frozen=True, slots=True)
class Stat:
    """A number over seeds."""

    mean: float
    std: float | None = None  # None for a single seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a curve, over seeds."""

    round: int
    x: float
    y: float
    spread: float = 0.0  # standard deviation of y


Curve = Sequence[tuple[int, float, float]]  # (round, x, y) of one seed


# --------------------------------------------------------------------------- reading


def load_runs(folders: Iterable[Path]) -> list[Run]:
    """Read the runs in these folders.

    A run's name is the shortest end of its path that distinguishes it from the others.
    """
    by_path = {folder.resolve(): folder for folder in map(Path, folders)}
    if not by_path:
        raise InputError("no run folder was named; name at least one, as in: fedp3 report runs/a")
    names = _names(list(by_path))
    runs = [
        Run(name, folder, _seeds(folder))
        for name, folder in zip(names, by_path.values(), strict=True)
    ]
    scores = {seed.score.name: run.name for run in runs for seed in run.seeds}
    if len(scores) > 1:
        told = " and ".join(f"{run} by {name}" for name, run in scores.items())
        raise InputError(f"runs with different scores cannot be compared: {told}")
    return runs


def _names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-length:]) for p in paths]
        if len(set(names)) == len(names):
            break
    return names


def _seeds(folder: Path) -> tuple[Seed, ...]:
    if (folder / "run.json").exists():
        return (_read(folder),)
    inside = [
        p for p in folder.glob("seed-*") if p.name[5:].isdigit() and (p / "run.json").exists()
    ]
    if not inside:
        raise InputError(
            f"{folder} is not a run folder: it has neither run.json nor seed-0/run.json; "
            "name a folder that was given to: fedp3 run --out"
        )
    return tuple(_read(p) for p in sorted(inside, key=lambda p: int(p.name[5:])))


def _read(folder: Path) -> Seed:
    toml, result, initial = (folder / n for n in ("config.toml", "result.json", INITIAL_SCORES))
    if result.exists() and not (folder / "events.jsonl").exists():
        raise InputError(
            f"{folder}/events.jsonl, the record of its rounds, is missing although the run has "
            "finished; restore it, or run again"
        )
    try:
        return Seed(
            folder=folder,
            about=read_json(folder / "run.json"),
            toml=toml.read_text() if toml.exists() else "",
            events=read_events(folder),
            result=read_json(result) if result.exists() else {},
            initial=read_json(initial) if initial.exists() else {},
        )
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the run in {folder}: {error}") from None


# --------------------------------------------------------------------------- one seed


def score(seed: Seed, kind: str) -> Json | None:
    """The final G, D, P or C; for an unfinished run, that of its last evaluation."""
    final = seed.result.get("final", {}).get(kind)
    return final or next((e[kind] for e in reversed(seed.events) if e.get(kind)), None)


def score_curve(kind: str, field: str = "mean") -> Callable[[Seed], Curve]:
    """A function that reads one field of G, D, P or C from a run, as a curve over its rounds."""
    return lambda seed: [
        *start(seed, kind, field),
        *(
            (e["round"], e["round"], e[kind][field])
            for e in seed.events
            if e.get(kind) and e[kind].get(field) is not None
        ),
    ]


def start(seed: Seed, kind: str, field: str = "mean") -> Curve:
    """The point of W_0 at no cost, with which a curve begins; nothing if it was not measured."""
    scores = seed.initial.get(kind) or {}
    return [] if scores.get(field) is None else [(0, 0.0, scores[field])]


def loss_curve(seed: Seed) -> Curve:
    """Training loss by round."""
    return [(e["round"], e["round"], e["loss"]) for e in seed.events if e["loss"] is not None]


def bytes_curve(way: str) -> Callable[[Seed], Curve]:
    """MB "up" or "down" in each round."""
    return lambda seed: [(e["round"], e["round"], e[f"bytes_{way}"] / 1e6) for e in seed.events]


def dense_curve(way: str) -> Callable[[Seed], Curve]:
    """MB that FedAvg with the dense model would have sent with the same clients."""
    # Late and rejected uploads are in neither count, so that failures do not look like savings.
    clients = {"up": "accepted", "down": "sampled"}[way]
    return lambda seed: [
        (e["round"], e["round"], seed.about["dense_bytes"][way] * len(e[clients]) / 1e6)
        for e in seed.events
    ]


def score_by_mb(kind: str) -> Callable[[Seed], Curve]:
    """G, D, P or C by the MB sent so far, up and down together."""

    def curve(seed: Seed) -> Curve:
        sent, points = 0.0, [*start(seed, kind)]
        for e in seed.events:
            sent += (e["bytes_up"] + e["bytes_down"]) / 1e6
            if e.get(kind):
                points.append((e["round"], sent, e[kind]["mean"]))
        return points

    return curve


def total(curve: Curve) -> float:
    """The sum over rounds."""
    return sum(y for _, _, y in curve)


def seconds(seed: Seed) -> float:
    """Duration of the run, with the final evaluation if the run is finished."""
    return float(seed.result.get("seconds") or sum(e["seconds"] for e in seed.events))


def client_gflop(seed: Seed) -> float | None:
    """GFLOP of local training over the run, mean over clients; None if not recorded.

    The cost of a task is that of the client's plan in the first round.
    """
    by_client = _by_client(seed, "gflop")
    if by_client is None:
        return None
    spent = sum(by_client.get(str(i), 0.0) for e in seed.events for i in e["accepted"])
    return spent / len(by_client)


def fleet_seconds(seed: Seed) -> float | None:
    """Time of all rounds on the fleet; None if not recorded.

    With a clock it is virtual time.  Otherwise it is estimated, and a round takes as long as its
    slowest client.
    """
    ended = [e["clock"]["ended"] for e in seed.events if e.get("clock")]
    if ended:
        return float(ended[-1])
    by_client = _by_client(seed, "seconds")
    if by_client is None:
        return None
    return sum(
        max((by_client.get(str(i), 0.0) for i in e["sampled"]), default=0.0) for e in seed.events
    )


def _by_client(seed: Seed, key: str) -> dict[str, float] | None:
    """A number for every client; None if one of them has none."""
    values = {str(c["id"]): c.get(key) for c in seed.about["clients"]}
    known = {i: float(v) for i, v in values.items() if v is not None}
    return known if known and len(known) == len(values) else None


def epsilon(seed: Seed) -> float | None:
    """The largest epsilon that any client has spent; None without LDP."""
    return seed.result.get("epsilon_max")


def client_epsilon(seed: Seed) -> float | None:
    """The client-level epsilon of all released models; None without client-level DP."""
    return seed.result.get("client_epsilon")


def rejections(seed: Seed) -> list[tuple[int, str, str]]:
    """(round, client, reason) of every rejected update."""
    return [
        (e["round"], str(i), str(rejection["text"]))
        for e in seed.events
        for i, rejection in e["rejected"].items()
    ]


# --------------------------------------------------------------------------- over seeds


def stat(values: Iterable[float | None]) -> Stat | None:
    """Mean and sample standard deviation of the values that are not None."""
    known = [float(v) for v in values if v is not None]
    if not known:
        return None
    return Stat(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def mean(value: Stat | None) -> float | None:
    """The mean of a number over seeds."""
    return None if value is None else value.mean


def over_seeds(run: Run, curve: Callable[[Seed], Curve]) -> tuple[Point, ...]:
    """A curve averaged over the seeds that have reached each round."""
    by_round: dict[int, list[tuple[float, float]]] = {}
    for seed in run.seeds:
        for t, x, y in curve(seed):
            by_round.setdefault(t, []).append((x, y))
    return tuple(
        Point(
            round=t,
            x=statistics.fmean(x for x, _ in values),
            y=statistics.fmean(y for _, y in values),
            spread=statistics.stdev(y for _, y in values) if len(values) > 1 else 0.0,
        )
        for t, values in sorted(by_round.items())
    )


def final(run: Run, kind: str, field: str = "mean", last: int = 1) -> Stat | None:
    """A final score over seeds.

    Args:
        run: the run.
        kind: G, D, P or C.
        field: the field of the score, such as "mean" or "worst".
        last: with more than 1, average this many last evaluations of each seed instead.
    """
    if last > 1:
        curves = (score_curve(kind, field)(seed) for seed in run.seeds)
        ends = ([y for t, _, y in curve if t > 0][-last:] for curve in curves)
        return stat(statistics.fmean(ys) for ys in ends if ys)
    scores = (score(seed, kind) for seed in run.seeds)
    return stat(s.get(field) for s in scores if s)


def kinds_of(rows: Sequence[Json]) -> list[str]:
    """The kinds of scores that these rows of a comparison have."""
    return [k for k in KINDS if k in ALWAYS or any(row[k] is not None for row in rows)]


def shown_kinds(runs: Sequence[Run]) -> list[str]:
    """The kinds of scores that these runs have."""
    return [k for k in KINDS if k in ALWAYS or any(final(run, k) is not None for run in runs)]


def moved(run: Run, way: str) -> tuple[Stat | None, float | None]:
    """MB sent "up" or "down" over the entire run, and their share of dense FedAvg's traffic."""
    mb = stat(total(bytes_curve(way)(seed)) for seed in run.seeds)
    dense = stat(total(dense_curve(way)(seed)) for seed in run.seeds)
    if mb is None or dense is None or not dense.mean:
        return mb, None
    return mb, mb.mean / dense.mean
