"""Devices and a virtual clock for the folder of a run that was made without them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedp3.devices.fleets import make_fleet

LIMITS = ("memory", "time", "upload", "")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def write_events(folder: Path, events: Sequence[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def add_devices(
    folder: Path,
    fleet: str = "boards",
    *,
    seed: int = 0,
    deadline: float = 60.0,
    slower: float = 1.0,
    overlapping: bool = False,
) -> Path:
    """Add the fields of a run with devices to all files of a run folder; returns the folder.

    Args:
        folder: the run folder.
        fleet: a fleet by name.
        seed: draws the fleet and the times.
        deadline: seconds after which a client is late.
        slower: factor of all times.
        overlapping: let clients begin before their round, as in buffered asynchronous rounds.
    """
    rng = np.random.default_rng(seed)
    about = read(folder / "run.json")
    clients = about["clients"]
    devices = make_fleet(fleet, len(clients), seed)
    numbers = ("name", "kind", "memory_mb", "gflops", "mbps_down", "mbps_up", "available", "watts")
    about["devices"] = [{key: getattr(d, key) for key in numbers} for d in devices]
    layers = about["layers"]
    names = sorted(
        {d.name for d in devices}, key=lambda name: min(d.gflops for d in devices if d.name == name)
    )
    by_id = {}
    for client, device in zip(clients, devices, strict=True):
        times = {
            "down": slower * 40 / device.mbps_down,
            "compute": slower * 150 / device.gflops,
            "up": slower * 10 / device.mbps_up,
        }
        rank = names.index(device.name) / len(names)  # the faster, the more it trains
        trained = layers[-1 - int(rank * len(layers)) :]
        client |= {
            "layers": trained,
            "keep": {layer: 1.0 if layer in trained else 0.5 for layer in layers},
            "seconds": sum(times.values()),
            "binding": LIMITS[int(rank * len(LIMITS))],
        }
        by_id[str(client["id"])] = (device, times)
    about["coverage"] = {l: [c["id"] for c in clients if l in c["layers"]] for l in layers}
    (folder / "run.json").write_text(json.dumps(about))
    now, events = 0.0, events_of(folder)
    for event in events:
        event["clock"] = _clock(event, by_id, now, rng, deadline, overlapping)
        now = event["clock"]["ended"]
    write_events(folder, events)
    if (folder / "result.json").exists():
        result = read(folder / "result.json")
        spent = [e["clock"]["joules"] for e in events]
        result |= {"virtual_seconds": now, "joules": None if None in spent else sum(spent)}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def _clock(
    event: dict[str, Any],
    by_id: dict[str, Any],
    began: float,
    rng: np.random.Generator,
    deadline: float,
    overlapping: bool,
) -> dict[str, Any]:
    clients: dict[str, Any] = {}
    joules: float | None = 0.0
    ends = []
    for k, i in enumerate(map(str, event["sampled"])):
        device, planned = by_id[i]
        times = {phase: t * rng.uniform(0.8, 1.2) for phase, t in planned.items()}
        taken = sum(times.values())
        start = began - rng.uniform(0, 0.9) * taken if overlapping else began
        outcome = "left" if k == 7 else "late" if start + taken - began > deadline else "used"
        if outcome == "left":
            times |= {"compute": times["compute"] / 2, "up": 0.0}
        clients[i] = {"began": start, **times, "outcome": outcome}
        if outcome == "used":
            ends.append(start + taken)
        joules = None if joules is None or device.watts is None else joules + device.watts * taken
    late = any(c["outcome"] == "late" for c in clients.values())
    ended = began + deadline if late else max(ends, default=began)
    return {"began": began, "ended": ended, "joules": joules, "clients": clients}
