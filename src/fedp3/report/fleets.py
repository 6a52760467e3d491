"""Content of the picture of the fleet: one dot per client, coloured by what it trains."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedp3.report import text
from fedp3.report.device_classes import binding, device_of
from fedp3.report.runs import Json, Seed

LEVELS = 6  # colours, from one layer to all of them
NOTHING = -1  # level of a client that trains no layer in full
KINDS: Mapping[str, str] = {"phone": "phone", "board": "board"}
OTHER = "other device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One client."""

    client: str
    level: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All clients whose devices have the same name and numbers."""

    device: str
    kind: str
    memory_gb: float
    gflops: float
    dots: tuple[Dot, ...]  # from those that train least


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The devices of a run."""

    clusters: tuple[Cluster, ...]
    legend: Mapping[int, str]  # level -> meaning, for the levels that occur
    note: str

    @property
    def kinds(self) -> list[str]:
        """The kinds of devices that occur."""
        return sorted({cluster.kind for cluster in self.clusters})


def fleet(seed: Seed) -> Fleet | None:
    """The fleet of a run; None for a run without devices."""
    devices = device_of(seed)
    if not devices:
        return None
    layers, clients = seed.about["layers"], seed.about["clients"]
    groups: dict[tuple[str, str, float, float], list[Dot]] = {}
    counts: dict[int, set[int]] = {}
    for client in clients:
        device = devices[str(client["id"])]
        trained = len(client["layers"])
        dot = Dot(
            client=str(client["id"]),
            level=level(trained, len(layers)),
            texts=_texts(client, device, layers),
        )
        counts.setdefault(dot.level, set()).add(trained)
        kind = KINDS.get(device["kind"], OTHER)
        place = (str(device["name"]), kind, device["memory_mb"] / 1e3, device["gflops"])
        groups.setdefault(place, []).append(dot)
    return Fleet(
        clusters=tuple(
            Cluster(
                device=name,
                kind=kind,
                memory_gb=memory_gb,
                gflops=gflops,
                dots=tuple(sorted(dots, key=lambda dot: dot.level)),
            )
            for (name, kind, memory_gb, gflops), dots in sorted(groups.items())
        ),
        legend={key: _meaning(counts[key], len(layers)) for key in sorted(counts)},
        note=_note(clients, changes=_changes(seed.config["plan"])),
    )


def level(trained: int, layers: int) -> int:
    """The colour of a client that trains so many of all layers in full.

    One layer has the first colour and all layers have the last.
    """
    if trained == 0:
        return NOTHING
    if trained >= layers:
        return LEVELS - 1
    return (LEVELS - 1) * (trained - 1) // (layers - 1)


def _meaning(trained: set[int], layers: int) -> str:
    few, most = min(trained), max(trained)
    if few == layers:
        return f"all {layers} layers"
    shown = str(few) if few == most else f"{few}–{most}"
    return f"{shown} of {layers} layers"


def _texts(client: Json, device: Json, layers: Sequence[str]) -> tuple[str, ...]:
    texts = [
        f"{text.mb(device['memory_mb'])}, {text.number(device['gflops'])} GFLOP/s, "
        f"{text.number(device['mbps_down'])} Mbit/s down, {text.number(device['mbps_up'])} up",
        f"trains {text.ranges(client['layers'], layers)}",
    ]
    seconds = client.get("seconds")
    planned = "" if seconds is None else f", {text.duration(seconds)} a round as planned"
    return (*texts, f"binding limit: {binding(client)}{planned}")


def _changes(plan: Json) -> bool:
    """Whether layers change from round to round; older runs have no schedule."""
    return bool(plan["redraw"]) or plan.get("schedule", "always") != "always"


def _note(clients: Sequence[Json], *, changes: bool) -> str:
    limits = Counter(map(binding, clients)).most_common()
    shown = ", ".join(f"{limit} {count:,}" for limit, count in limits)
    which = " in round 1" if changes else ""
    return (
        "One dot per client; those with the same device lie side by side. The colour says how many "
        f"layers the client trains in full{which}. Clients by binding limit: {shown}."
    )
