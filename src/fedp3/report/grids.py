"""What the pictures of clients show: the plan (layers x clients) and the labels (classes x clients)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedp3.report import text
from fedp3.report.runs import Json, Seed


@dataclass(frozen=True, slots=True)
class Cell:
    """What one cell shows: its kind (a colour), how strong, and what to say about it."""

    kind: str
    shade: float  # 0 to 1
    says: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A picture with one column per client."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]  # one tuple per column; equal columns are one object
    about: tuple[str, ...]  # of each column
    totals: tuple[str, ...]  # of each row
    legend: Mapping[str, str]  # kind -> meaning, of the kinds that occur
    row: str  # what a row is


WHOLE, PRUNED, FROZEN, NEVER = "whole", "pruned", "frozen", "never"
MEANINGS = {
    WHOLE: "trained whole, uploaded",
    PRUNED: "sent pruned, trained, not uploaded",
    FROZEN: "sent pruned, frozen",
    NEVER: "never sent, stays with the client",
}


def plan_grid(seed: Seed) -> Grid:
    """What each client is sent, trains and uploads of each layer."""
    layers, clients = tuple(map(str, seed.about["layers"])), seed.about["clients"]
    meanings = dict(MEANINGS)
    prune, plan = seed.config["prune"], seed.config["plan"]
    if prune["upload"] != "none":
        meanings[PRUNED] = f"sent pruned, trained, uploaded ({prune['upload']})"
    if plan["head"] == "personal_uploaded":
        meanings[NEVER] = "never sent, trained by the client and uploaded"
    rest = PRUNED if plan["others"] == "train" or prune["upload"] != "none" else FROZEN
    known: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
    columns = []
    for client in clients:
        column = tuple(_plan_cell(client, l, rest, meanings) for l in layers)
        columns.append(known.setdefault(column, column))
    legend = {kind: says for kind, says in meanings.items() if any(c.kind == kind for column in known for c in column)}
    if rest in legend:
        legend[rest] += _kept([k for c in clients for l, k in c["keep"].items() if k and l not in c["layers"]])
    return Grid(
        title="Plan",
        rows=layers,
        columns=tuple(str(c["id"]) for c in clients),
        cells=tuple(columns),
        about=tuple(f"whole client: {text.mb(c['mb_down'])} down, {text.mb(c['mb_up'])} up a round" for c in clients),
        totals=tuple(f"{len(seed.about['coverage'].get(l, ()))} of {len(clients)}" for l in layers),
        legend=legend,
        row="layer",
    )


def _kept(keeps: Sequence[float]) -> str:
    low, high = f"{100 * min(keeps):.0f}", f"{100 * max(keeps):.0f}"
    return f" (keep {low} %)" if low == high else f" (keep {low} to {high} %)"


def _plan_cell(client: Json, layer: str, rest: str, meanings: Mapping[str, str]) -> Cell:
    keep = float(client["keep"][layer])
    kind = NEVER if keep == 0 else WHOLE if layer in client["layers"] else rest
    says = (meanings[kind], f"keep {text.percent(keep)}")[: 2 if keep else 1]
    if layer in client.get("layer_bytes", {}):
        down, up = client["layer_bytes"][layer]
        says += (f"{text.mb(down / 1e6)} down", f"{text.mb(up / 1e6)} up")
    return Cell(kind, round(0.2 + 0.8 * keep, 2) if kind == rest else 1.0, says)


def label_grid(labels: Sequence[Sequence[int]], clients: Sequence[str] = (), title: str = "Labels") -> Grid:
    """How many samples of each class each client has."""
    classes = len(labels[0]) if len(labels) else 0
    most = max((n for row in labels for n in row), default=0) or 1
    cells = {n: _label_cell(n, most) for row in labels for n in row}
    sums = [sum(row) for row in labels]
    per_class = [sum(row[c] for row in labels) for c in range(classes)]
    return Grid(
        title=title,
        rows=tuple(map(str, range(classes))),
        columns=tuple(clients) or tuple(map(str, range(len(labels)))),
        cells=tuple(tuple(cells[n] for n in row) for row in labels),
        about=tuple(f"whole client: {n:,} samples" for n in sums),
        totals=tuple(f"{n:,}" for n in per_class),
        legend={"label": f"1 to {most:,} samples"},
        row="class",
    )


def _label_cell(n: int, most: int) -> Cell:
    # In 24 steps, so that equal neighbours join into one stroke; the smallest must still be seen.
    shade = 0.12 + 0.88 * -(-24 * n // most) / 24
    return Cell("label" if n else "none", round(shade, 2) if n else 0.0, (f"{n:,} samples",))
