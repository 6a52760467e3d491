"""What the clients of each device have in common: plan, time, binding limit, and scores."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fedp3.report import text
from fedp3.report.clock import clocks
from fedp3.report.runs import Json, Run, Seed, Stat, mean, score, stat

LIMITS: Mapping[str, str] = {"": "none"}  # in words; other limits have their own names


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """All clients of one run with a device of this name.

    Numbers over clients are means, which are then taken over seeds.
    """

    name: str
    kind: str
    memory_mb: float
    gflops: float
    clients: float  # mean over seeds
    trains: str  # layers trained in full
    seconds: Stat | None  # of a round, as planned
    limits: Mapping[str, float]  # binding limit -> share of the clients
    used: float | None  # share of its tasks whose update was aggregated; None without a clock
    D: Stat | None
    P: Stat | None


def device_of(seed: Seed) -> dict[str, Json]:
    """The device of every client; empty for a run without devices."""
    devices = seed.about.get("devices") or ()
    return {
        str(client["id"]): device
        for client, device in zip(seed.about["clients"], devices, strict=bool(devices))
    }


def device_classes(run: Run) -> list[DeviceClass]:
    """The devices of a run, from the slowest to the fastest; empty for a run without devices."""
    names = {str(d["name"]) for seed in run.seeds for d in device_of(seed).values()}
    classes = [_class(run, name) for name in names]
    return sorted(classes, key=lambda c: (c.gflops, c.memory_mb, c.name))


def as_row(run: Run, c: DeviceClass) -> dict[str, object]:
    """A class as plain data."""
    return {
        "run": run.name,
        "score": asdict(run.score),
        "device": c.name,
        "kind": c.kind,
        "memory_mb": c.memory_mb,
        "gflops": c.gflops,
        "clients": c.clients,
        "trains": c.trains,
        "seconds": mean(c.seconds),
        "limits": dict(c.limits),
        "used": c.used,
        "D": mean(c.D),
        "D_std": c.D.std if c.D else None,
        "P": mean(c.P),
        "P_std": c.P.std if c.P else None,
    }


def binding(client: Json) -> str:
    """The limit that keeps a client's device from training more, in words."""
    limit = str(client.get("binding", ""))
    return LIMITS.get(limit, limit)


def limits_text(limits: Mapping[str, float]) -> str:
    """The binding limits of a class: "memory", or "memory 75 %, time 25 %"."""
    if len(limits) == 1:
        return next(iter(limits))
    ordered = sorted(limits.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{limit} {100 * share:.0f}{text.NBSP}%" for limit, share in ordered)


def _class(run: Run, name: str) -> DeviceClass:
    members = [_members(seed, name) for seed in run.seeds]
    clients = [client for seed_members in members for client in seed_members]
    devices = [
        device
        for seed in run.seeds
        for device in device_of(seed).values()
        if device["name"] == name
    ]
    limits = Counter(map(binding, clients))
    asked, used = 0, 0
    for seed, seed_members in zip(run.seeds, members, strict=True):
        ids = {str(c["id"]) for c in seed_members}
        for _, clock in clocks(seed):
            outcomes = [c["outcome"] for i, c in clock["clients"].items() if i in ids]
            asked += len(outcomes)
            used += outcomes.count("used")
    return DeviceClass(
        name=name,
        kind=str(devices[0]["kind"]),
        # a fleet file can give one name different numbers
        memory_mb=sum(d["memory_mb"] for d in devices) / len(devices),
        gflops=sum(d["gflops"] for d in devices) / len(devices),
        clients=len(clients) / len(run.seeds),
        trains=_trains(clients, run.seeds[0].about["layers"]),
        seconds=stat(mean(stat(c.get("seconds") for c in some)) for some in members),
        limits={limit: count / len(clients) for limit, count in limits.items()},
        used=used / asked if asked else None,
        D=_score_of_class(run, members, "D"),
        P=_score_of_class(run, members, "P"),
    )


def _members(seed: Seed, name: str) -> list[Json]:
    devices = device_of(seed)
    return [c for c in seed.about["clients"] if devices and devices[str(c["id"])]["name"] == name]


def _trains(clients: Sequence[Json], layers: Sequence[str]) -> str:
    """The layers trained in full, or how many, if they differ between clients."""
    chosen = {tuple(c["layers"]) for c in clients}
    if len(chosen) == 1:
        return text.ranges(chosen.pop(), layers)
    counts = sorted({len(each) for each in chosen})
    few, most = counts[0], counts[-1]
    shown = str(few) if few == most else f"{few}–{most}"
    return f"{shown} of {len(layers)} layers"


def _score_of_class(run: Run, members: Sequence[Sequence[Json]], kind: str) -> Stat | None:
    means = []
    for seed, seed_members in zip(run.seeds, members, strict=True):
        scores = (score(seed, kind) or {}).get("clients", {})
        means.append(mean(stat(scores.get(str(c["id"])) for c in seed_members)))
    return stat(means)
