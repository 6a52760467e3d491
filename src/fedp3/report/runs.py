"""Reads run folders: what a run was, what happened in it, and its numbers over seeds.

A run is one folder, or a folder of seed-0, seed-1, ...; a value over seeds is their mean with the sample standard
deviation.  A run that is not finished is read as far as it came.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedp3.errors import InputError
from fedp3.record import read_events, read_json

Json = Mapping[str, Any]
KINDS: Mapping[str, str] = {"G": "server model", "D": "as dispatched", "P": "after one local update"}


@dataclass(frozen=True, slots=True)
class Seed:
    """One run folder."""

    folder: Path
    about: Json  # run.json
    toml: str  # config.toml
    events: Sequence[Json]
    result: Json  # result.json; empty where the run is not finished

    @property
    def config(self) -> Json:
        """The config as run."""
        return dict(self.about["config"])


@dataclass(frozen=True, slots=True)
class Run:
    """One line of a comparison: a name and one or more seeds."""

    name: str
    folder: Path
    seeds: tuple[Seed, ...]


@dataclass(frozen=True, slots=True)
class Stat:
    """A number over seeds."""

    mean: float
    std: float | None = None  # None: one seed has no spread


@dataclass(frozen=True, slots=True)
class Point:
    """One place of a curve, over seeds."""

    round: int
    x: float
    y: float
    spread: float = 0.0  # standard deviation of y


Curve = Sequence[tuple[int, float, float]]  # (round, x, y) of one seed


# --------------------------------------------------------------------------- reading


def load_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders, each named by the shortest end of its path that tells it from the others."""
    found = {folder.resolve(): folder for folder in map(Path, folders)}
    if not found:
        raise InputError("no run folder was named; name at least one, as in: fedp3 report runs/a")
    names = _names(list(found))
    return [Run(name, given, _seeds(given)) for name, given in zip(names, found.values(), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-length:]) for p in paths]
        if len(set(names)) == len(names):
            break
    return names


def _seeds(folder: Path) -> tuple[Seed, ...]:
    if (folder / "run.json").exists():
        return (_read(folder),)
    inside = [p for p in folder.glob("seed-*") if p.name[5:].isdigit() and (p / "run.json").exists()]
    if not inside:
        raise InputError(
            f"{folder} is not a run folder: it has neither run.json nor seed-0/run.json; name a folder that was "
            "given to: fedp3 run --out"
        )
    return tuple(_read(p) for p in sorted(inside, key=lambda p: int(p.name[5:])))


def _read(folder: Path) -> Seed:
    toml, result = folder / "config.toml", folder / "result.json"
    try:
        return Seed(
            folder,
            read_json(folder / "run.json"),
            toml.read_text() if toml.exists() else "",
            read_events(folder),
            read_json(result) if result.exists() else {},
        )
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the run in {folder}: {error}") from None


# --------------------------------------------------------------------------- one seed


def score(seed: Seed, kind: str) -> Json | None:
    """G, D or P at the end; of a run that is not finished, when it was last evaluated."""
    final = seed.result.get("final", {}).get(kind)
    return final or next((e[kind] for e in reversed(seed.events) if e[kind]), None)


def score_curve(kind: str, field: str = "mean") -> Callable[[Seed], Curve]:
    """A field of G, D or P by round."""
    return lambda seed: [
        (e["round"], e["round"], e[kind][field]) for e in seed.events if e[kind] and e[kind][field] is not None
    ]


def loss_curve(seed: Seed) -> Curve:
    """Training loss by round."""
    return [(e["round"], e["round"], e["loss"]) for e in seed.events if e["loss"] is not None]


def bytes_curve(way: str) -> Callable[[Seed], Curve]:
    """MB "up" or "down" in each round."""
    return lambda seed: [(e["round"], e["round"], e[f"bytes_{way}"] / 1e6) for e in seed.events]


def dense_curve(way: str) -> Callable[[Seed], Curve]:
    """What FedAvg with the whole model would have moved with the same clients, in MB."""
    # An upload that was late or refused is in neither count, so that failures do not look like savings.
    who = {"up": "accepted", "down": "sampled"}[way]
    return lambda seed: [
        (e["round"], e["round"], seed.about["dense_bytes"][way] * len(e[who]) / 1e6) for e in seed.events
    ]


def score_by_mb(kind: str) -> Callable[[Seed], Curve]:
    """G, D or P by the MB moved so far, up and down together."""

    def curve(seed: Seed) -> Curve:
        moved, out = 0.0, []
        for e in seed.events:
            moved += (e["bytes_up"] + e["bytes_down"]) / 1e6
            if e[kind]:
                out.append((e["round"], moved, e[kind]["mean"]))
        return out

    return curve


def total(curve: Curve) -> float:
    """The sum over rounds."""
    return sum(y for _, _, y in curve)


def seconds(seed: Seed) -> float:
    """Time of the run, the final evaluation included where it is over."""
    return float(seed.result.get("seconds") or sum(e["seconds"] for e in seed.events))


def client_gflop(seed: Seed) -> float | None:
    """GFLOP of local training per client over the run, as the plans of the first round ask; None where not recorded."""
    each = _by_client(seed, "gflop")
    if each is None:
        return None
    return sum(each.get(str(i), 0.0) for e in seed.events for i in e["accepted"]) / len(each)


def fleet_seconds(seed: Seed) -> float | None:
    """How long the rounds would take on the fleet, each as long as its slowest client; None where not recorded."""
    each = _by_client(seed, "seconds")
    if each is None:
        return None
    return sum(max((each.get(str(i), 0.0) for i in e["sampled"]), default=0.0) for e in seed.events)


def _by_client(seed: Seed, key: str) -> dict[str, float] | None:
    each = {str(c["id"]): c.get(key) for c in seed.about["clients"]}
    return None if not each or None in each.values() else {i: float(v) for i, v in each.items() if v is not None}


def epsilon(seed: Seed) -> float | None:
    """The largest epsilon any client has spent; None without privacy."""
    return seed.result.get("epsilon_max")


def rejections(seed: Seed) -> list[tuple[int, str, str]]:
    """(round, client, reason) of every update that was refused."""
    return [(e["round"], str(i), str(why)) for e in seed.events for i, why in e["rejected"].items()]


# --------------------------------------------------------------------------- over seeds


def stat(values: Iterable[float | None]) -> Stat | None:
    """Mean and sample standard deviation of the values there are."""
    known = [float(v) for v in values if v is not None]
    if not known:
        return None
    return Stat(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def mean(value: Stat | None) -> float | None:
    """The number alone."""
    return None if value is None else value.mean


def over_seeds(run: Run, curve: Callable[[Seed], Curve]) -> tuple[Point, ...]:
    """A curve averaged over the seeds that have reached each round."""
    by_round: dict[int, list[tuple[float, float]]] = {}
    for seed in run.seeds:
        for t, x, y in curve(seed):
            by_round.setdefault(t, []).append((x, y))
    return tuple(
        Point(
            t,
            statistics.fmean(x for x, _ in values),
            statistics.fmean(y for _, y in values),
            statistics.stdev(y for _, y in values) if len(values) > 1 else 0.0,
        )
        for t, values in sorted(by_round.items())
    )


def final(run: Run, kind: str, field: str = "mean", last: int = 1) -> Stat | None:
    """A field of the final G, D or P over seeds, or its mean over the last evaluations of the rounds."""
    if last > 1:
        ends = ([y for _, _, y in score_curve(kind, field)(seed)][-last:] for seed in run.seeds)
        return stat(statistics.fmean(ys) for ys in ends if ys)
    scores = (score(seed, kind) for seed in run.seeds)
    return stat(s[field] for s in scores if s)


def moved(run: Run, way: str) -> tuple[Stat | None, float | None]:
    """MB "up" or "down" of the whole run, and the share of dense FedAvg's."""
    mb = stat(total(bytes_curve(way)(seed)) for seed in run.seeds)
    dense = stat(total(dense_curve(way)(seed)) for seed in run.seeds)
    return mb, mb.mean / dense.mean if mb and dense and dense.mean else None
