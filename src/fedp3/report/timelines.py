"""Content of the timeline of a round: what every client does when, in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedp3.report import text
from fedp3.report.clock import clocks
from fedp3.report.device_classes import device_of
from fedp3.report.runs import Json, Seed

DOWN, COMPUTE, UP, WAITS = "down", "compute", "up", "waits"
PHASES: Mapping[str, str] = {  # in their order
    DOWN: "downloads",
    COMPUTE: "computes",
    UP: "uploads",
    WAITS: "waits for the others",
}
MOST_BARS = 20
# The axis reaches this many lengths of the round before its start and after its end.
# Buffered rounds have clients that began long before; a late client can be slow without limit.
MOST_BEFORE, MOST_AFTER = 4.0, 0.3


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a client's work, in seconds since the start of the round."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One client of the round."""

    client: str
    device: str
    outcome: str  # in words, such as "late by 4.2 s"
    missed: bool  # its work is not in the aggregate
    phases: tuple[Phase, ...]

    @property
    def end(self) -> float:
        """When its own work ends, in seconds since the start of the round."""
        return max((p.end for p in self.phases if p.kind != WAITS), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One round."""

    round: int
    rounds: int  # rounds that it was chosen from
    seconds: float  # its length
    bars: tuple[Bar, ...]  # by the end of their work
    clients: int  # of the round, with those that are not shown
    limits: tuple[float, float]  # seconds that are shown

    @property
    def legend(self) -> dict[str, str]:
        """The phases that occur, with their meaning."""
        kinds = {p.kind for bar in self.bars for p in bar.phases}
        return {kind: meaning for kind, meaning in PHASES.items() if kind in kinds}


def timeline(seed: Seed) -> Timeline | None:
    """The timeline of the round of median length; None without a virtual clock."""
    timed = [(event, clock) for event, clock in clocks(seed) if clock["clients"]]
    if not timed:
        return None
    event, clock = representative(timed)
    seconds = clock["ended"] - clock["began"]
    devices = device_of(seed)
    bars = [
        _bar(client, times, clock["began"], seconds, devices.get(client, {}))
        for client, times in clock["clients"].items()
    ]
    bars.sort(key=lambda bar: bar.end)
    shown = evenly(bars, MOST_BARS)
    return Timeline(
        round=event["round"],
        rounds=len(timed),
        seconds=seconds,
        bars=tuple(shown),
        clients=len(bars),
        limits=_limits(shown, seconds),
    )


def representative(timed: Sequence[tuple[Json, Json]]) -> tuple[Json, Json]:
    """The round of median length, the earlier one of equals.

    Args:
        timed: rounds with their clocks.
    """
    ordered = sorted(timed, key=lambda pair: pair[1]["ended"] - pair[1]["began"])
    return ordered[(len(ordered) - 1) // 2]


def evenly(bars: Sequence[Bar], most: int) -> Sequence[Bar]:
    """At most so many bars, evenly spaced, with the first and the last."""
    if len(bars) <= most:
        return bars
    return [bars[round(k * (len(bars) - 1) / (most - 1))] for k in range(most)]


def _bar(client: str, times: Json, began: float, seconds: float, device: Json) -> Bar:
    at = times["began"] - began
    phases = []
    for kind in (DOWN, COMPUTE, UP):
        phases.append(Phase(kind, at, at + times[kind]))
        at += times[kind]
    outcome = times["outcome"]
    if outcome == "used" and at < seconds:
        phases.append(Phase(WAITS, at, seconds))
    return Bar(
        client=client,
        device=str(device.get("name", "")),
        outcome=_outcome(outcome, at - seconds),
        missed=outcome != "used",
        phases=tuple(p for p in phases if p.end > p.start),
    )


def _outcome(outcome: str, after: float) -> str:
    if outcome == "late" and after > 0:
        return f"late by {text.duration(after)}"
    return {"surplus": "not among the first"}.get(outcome, outcome)


def _limits(bars: Sequence[Bar], seconds: float) -> tuple[float, float]:
    length = seconds or max((bar.end for bar in bars), default=0.0) or 1.0
    starts = [p.start for bar in bars for p in bar.phases]
    first = max(min([0.0, *starts]), -MOST_BEFORE * length)
    last = min(max([length, *(bar.end for bar in bars)]), (1 + MOST_AFTER) * length)
    return first, last


def note(shown: Timeline) -> str:
    """What the picture shows, in a sentence or two."""
    notes = [
        f"Round {shown.round}, whose {text.duration(shown.seconds)} are the median of "
        f"{shown.rounds:,} rounds; the line is its end."
        if shown.rounds > 1
        else f"Round {shown.round}; the line is its end."
    ]
    if len(shown.bars) < shown.clients:
        notes.append(f"{len(shown.bars)} of {shown.clients:,} clients, by the end of their work.")
    if any(p.start < 0 for bar in shown.bars for p in bar.phases):
        notes.append("Clients began before the round, since rounds overlap.")
    return " ".join(notes)
