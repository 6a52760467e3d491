"""Content of the two pictures of clients.

They are the plan (layers x clients) and the label distribution (classes x clients).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedp3.report import text
from fedp3.report.runs import Json, Seed


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: its kind (a colour), the strength of the colour, and the texts shown on hover."""

    kind: str
    shade: float  # 0 to 1
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A picture with one column per client."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]  # one tuple per column; equal columns are one object
    about: tuple[str, ...]  # a text for each column
    totals: tuple[str, ...]  # a text for each row
    legend: Mapping[str, str]  # kind -> meaning, for the kinds that occur
    row: str  # what a row is: "layer" or "class"


FULL, PRUNED, FROZEN, NEVER, SKIPPED = "full", "pruned", "frozen", "never", "skipped"
MEANINGS = {
    FULL: "trained in full, uploaded",
    PRUNED: "sent pruned, trained, not uploaded",
    FROZEN: "sent pruned, frozen",
    NEVER: "never sent, stays on the client",
    SKIPPED: "left out of the client's network",
}
UPLOADS = {
    "retained": "retained weights uploaded",
    "zeros": "uploaded with zeros for pruned weights",
}


def plan_grid(seed: Seed) -> Grid:
    """What each client is sent, trains and uploads of each layer."""
    layers, clients = tuple(map(str, seed.about["layers"])), seed.about["clients"]
    plan = seed.config["plan"]
    meanings = _meanings(plan)
    kinds = _kinds_outside(plan)
    known: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
    columns = []
    for client in clients:
        column = tuple(
            _plan_cell(client, l, _kind(client, l, l == layers[-1], kinds), meanings)
            for l in layers
        )
        columns.append(known.setdefault(column, column))
    occurring = {cell.kind for column in known for cell in column}
    legend = {kind: meaning for kind, meaning in meanings.items() if kind in occurring}
    pruned = kinds["pruned"]
    if pruned in legend:
        legend[pruned] += _keep_range(clients)
    return Grid(
        title="Plan",
        rows=layers,
        columns=tuple(str(c["id"]) for c in clients),
        cells=tuple(columns),
        about=tuple(
            f"all layers: {text.mb(c['mb_down'])} down, {text.mb(c['mb_up'])} up per round"
            for c in clients
        ),
        totals=tuple(f"{len(seed.about['coverage'].get(l, ()))} of {len(clients)}" for l in layers),
        legend=legend,
        row="layer",
    )


def _meanings(plan: Json) -> dict[str, str]:
    meanings = dict(MEANINGS)
    if plan["upload"] != "none":
        meanings[PRUNED] = f"sent pruned, trained, {UPLOADS[plan['upload']]}"
    if plan["head"] == "personal_uploaded":
        meanings[NEVER] = "never sent, trained by the client and uploaded"
    return meanings


def _kinds_outside(plan: Json) -> dict[str, str]:
    """The kinds of layers outside L_i: those that are sent pruned, and those that are not sent."""
    frozen = plan["others"] in ("freeze", "hold") and plan["upload"] == "none"
    return {
        "pruned": FROZEN if frozen else PRUNED,
        "not sent": SKIPPED if plan["others"] == "skip" else NEVER,
    }


def _kind(client: Json, layer: str, is_head: bool, kinds: Mapping[str, str]) -> str:
    if client["keep"][layer] == 0:
        return NEVER if is_head else kinds["not sent"]
    return FULL if layer in client["layers"] else kinds["pruned"]


def _keep_range(clients: Sequence[Json]) -> str:
    keeps = [
        share
        for client in clients
        for layer, share in client["keep"].items()
        if share and layer not in client["layers"]
    ]
    low, high = f"{100 * min(keeps):.0f}", f"{100 * max(keeps):.0f}"
    return f" (keep {low} %)" if low == high else f" (keep {low} to {high} %)"


def _plan_cell(client: Json, layer: str, kind: str, meanings: Mapping[str, str]) -> Cell:
    keep = float(client["keep"][layer])
    texts = [meanings[kind]]
    if keep:
        texts.append(f"keep {text.percent(keep)}")
    if layer in client.get("layer_bytes", {}):
        down, up = client["layer_bytes"][layer]
        texts += [f"{text.mb(down / 1e6)} down", f"{text.mb(up / 1e6)} up"]
    shade = round(0.2 + 0.8 * keep, 2) if kind in (PRUNED, FROZEN) else 1.0
    return Cell(kind, shade, tuple(texts))


def label_grid(
    labels: Sequence[Sequence[int]], clients: Sequence[str] = (), title: str = "Labels"
) -> Grid:
    """How many samples of each class each client has.

    Args:
        labels: a row for each client with its number of samples of each class.
        clients: names of the clients; without them, clients are numbered.
        title: title of the picture.
    """
    classes = len(labels[0]) if len(labels) else 0
    largest = max((n for row in labels for n in row), default=0) or 1
    cells = {n: _label_cell(n, largest) for row in labels for n in row}
    per_client = [sum(row) for row in labels]
    per_class = [sum(row[c] for row in labels) for c in range(classes)]
    return Grid(
        title=title,
        rows=tuple(map(str, range(classes))),
        columns=tuple(clients) or tuple(map(str, range(len(labels)))),
        cells=tuple(tuple(cells[n] for n in row) for row in labels),
        about=tuple(f"all classes: {n:,} samples" for n in per_client),
        totals=tuple(f"{n:,}" for n in per_class),
        legend={"label": f"1 to {largest:,} samples"},
        row="class",
    )


def _label_cell(n: int, largest: int) -> Cell:
    if n == 0:
        return Cell("none", 0.0, ("0 samples",))
    # There are 24 steps, so that equal cells side by side join into one stroke.
    # The weakest colour must still be visible.
    step = -(-24 * n // largest)
    return Cell("label", round(0.12 + 0.88 * step / 24, 2), (f"{n:,} samples",))
