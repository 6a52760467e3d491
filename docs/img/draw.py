"""Draw the pictures of the concept pages: `python docs/img/draw.py` writes the files beside it.

Pictures are 640 units wide with letters of at least 19 units, so that they can be read on a phone
of 400 pixels.  They have a background of their own in light and in dark mode.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

WIDTH = 640
STYLE = """
svg { --paper: #fff; --ink: #1b2530; --soft: #56626f; --line: #9aa7b6; --sent: #2f6fd6;
  --trained: #d97b16; --empty: #dfe4ea; --a: #dbe7fb; --b: #fbe6d2; --c: #d7efe6; --d: #ece3f7; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #1a1c1e; --ink: #e6e9ec; --soft: #a9b3bd; --line: #5b6776; --sent: #5b93ee;
    --trained: #e9973d; --empty: #2a2e33; --a: #233a5e; --b: #57391c; --c: #1d4a3c; --d: #41305c; }
}
text { font-family: system-ui, sans-serif; fill: var(--ink); }
"""


def text(x: float, y: float, words: str, size: int = 20, kind: str = "") -> str:
    """A line of text, centred at x; `kind` is "bold", "soft" or "left"."""
    weight = ' font-weight="600"' if "bold" in kind else ""
    colour = ' style="fill: var(--soft)"' if "soft" in kind else ""
    anchor = "" if "left" in kind else ' text-anchor="middle"'
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{anchor}{weight}{colour}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, dashed: bool = False) -> str:
    """A rectangle with round corners."""
    dash = ' stroke-dasharray="5 5"' if dashed else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"'
    return f'<rect {place} style="fill: var(--{fill}); stroke: var(--line)"{dash}/>'


def arrow(*points: tuple[float, float]) -> str:
    """A line through the points, with a head at its end."""
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    look = 'fill="none" style="stroke: var(--soft)" stroke-width="2" marker-end="url(#head)"'
    return f'<path d="M{path}" {look}/>'


def picture(height: int, about: str, parts: Iterable[str]) -> str:
    """An SVG file."""
    head = '<path d="M0 0L8 4L0 8z" style="fill: var(--soft)"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{about}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto">{head}</marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill: var(--paper)"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------- one round

SIDE = 16  # of the square that stands for a weight
LAYERS = {"fc1": (4, 4), "fc2": (4, 4), "head": (4, 2)}  # name -> columns and rows of weights
PRUNED = {"fc1": {1, 4, 6, 11, 12, 15}, "fc2": {0, 3, 5, 10, 13, 14}}  # what P_i leaves out


def weights(x: float, y: float, layer: str, colour: str, pruned: frozenset[int]) -> str:
    """The weights of a layer as squares around x, from y downwards; pruned ones are empty."""
    columns, rows = LAYERS[layer]
    left, top = x - columns * SIDE / 2, y + (4 - rows) * SIDE / 2
    squares = []
    for k in range(columns * rows):
        fill = "empty" if k in pruned else colour
        place = f'x="{left + k % columns * SIDE:g}" y="{top + k // columns * SIDE:g}"'
        squares.append(f'<rect {place} width="14" height="14" rx="3" style="fill: var(--{fill})"/>')
    return "".join(squares)


def one_round() -> str:
    """What is sent to two clients, what they train and upload, and what the server averages."""
    parts = []
    rows = {"sent": 88, "trained": 180, "uploaded": 272}
    for name, y in rows.items():
        parts.append(text(14, y + 38, name, 19, "left bold"))
    for client, (left, full) in {1: (124, "fc1"), 2: (386, "fc2")}.items():
        parts.append(text(left + 123, 34, f"client {client}", 22, "bold"))
        for k, layer in enumerate(LAYERS):
            x = left + 41 + 82 * k
            in_full = layer in (full, "head")
            pruned = frozenset() if in_full else frozenset(PRUNED[layer])
            parts.append(text(x, 64, layer, kind="soft"))
            parts.append(weights(x, rows["sent"] - 8, layer, "sent", pruned))
            parts.append(weights(x, rows["trained"] - 8, layer, "trained", pruned))
            if in_full:
                parts.append(weights(x, rows["uploaded"] - 8, layer, "trained", frozenset()))
            else:
                parts.append(box(x - 33, rows["uploaded"] - 9, 66, 66, "paper", dashed=True))
                parts.append(text(x, rows["uploaded"] + 31, "stays", 19, "soft"))
    parts.append('<path d="M374 18V338" style="stroke: var(--line)" stroke-dasharray="3 6"/>')
    parts.append(text(14, 410, "server's", kind="left bold"))
    parts.append(text(14, 434, "new W", kind="left bold"))
    parts.append(arrow((241, 342), (286, 374)))
    parts.append(arrow((503, 342), (458, 374)))
    origins = {"fc1": "from 1", "fc2": "from 2", "head": "mean of both"}
    for k, (layer, origin) in enumerate(origins.items()):
        x = 250 + 122 * k
        parts.append(weights(x, 384, layer, "trained", frozenset()))
        parts.append(text(x, 476, origin, 19, "soft"))
    legend = 524
    for x, fill, words in (
        (22, "sent", "sent"),
        (110, "trained", "trained"),
        (222, "empty", "pruned by P"),
    ):
        parts.append(
            f'<rect x="{x}" y="{legend - 13}" width="14" height="14" rx="3" '
            f'style="fill: var(--{fill})"/>'
        )
        parts.append(text(x + 22, legend, words, 19, "left soft"))
    about = "Two clients are sent one layer pruned, train all layers, and upload the others"
    return picture(544, about, parts)


# --------------------------------------------------------------------------- copies


def copies() -> str:
    """The server's two models, and what clients with different copies are sent."""
    parts = [
        box(20, 20, 600, 132, "a"),
        text(320, 50, "server", 22, "bold"),
        text(320, 82, "W: its own weights"),
        text(320, 110, "c = code of W - R, the new change"),
        text(320, 138, "R: published weights, version 7"),
    ]
    cases = (
        ("change 7", "holds", "version 6"),
        ("changes 6, 7", "holds", "version 5"),
        ("a copy of R", "missed", "too many"),
    )
    for k, (sent, *state) in enumerate(cases):
        left = 20 + 206 * k
        middle = left + 94
        parts.append(arrow((middle - 80, 156), (middle - 80, 250)))
        parts.append(arrow((middle + 80, 250), (middle + 80, 156)))
        parts.append(text(middle, 208, sent, 19, "bold"))
        parts.append(box(left, 254, 188, 92, "c"))
        parts.append(text(middle, 282, f"client {k + 1}", 21, "bold"))
        parts.append(text(middle, 308, state[0], 19))
        parts.append(text(middle, 332, state[1], 19))
    parts.append(text(320, 382, "down: what is missing of R, layer by layer", kind="soft"))
    parts.append(text(320, 408, "up: the coded change of the layers in L", kind="soft"))
    about = "A server with weights W and R, and three clients that hold different versions of R"
    return picture(426, about, parts)


# --------------------------------------------------------------------------- packages

PACKAGES = [  # name, what it is about, colour
    ("core", "types, tools", "a"),
    ("data", "sets, splits", "a"),
    ("models", "nets, layers", "a"),
    ("planning", "L, P, Q, tasks", "b"),
    ("messages", "to the byte", "b"),
    ("client", "local update", "b"),
    ("privacy", "LDP, audit", "b"),
    ("costs", "bytes, FLOPs", "b"),
    ("devices", "fleets, clock", "b"),
    ("server", "gate, averages", "c"),
    ("methods", "one row each", "c"),
    ("config", "TOML in", "c"),
    ("experiment", "assemble", "c"),
    ("node", "trusts nobody", "c"),
    ("engines", "carry tasks", "c"),
    ("runs", "folder, resume", "d"),
    ("report", "tables, page", "d"),
    ("deploy", "Flower apps", "d"),
    ("api", "fedp3.run", "d"),
    ("cli", "fedp3 ...", "d"),
]


def packages() -> str:
    """The packages in the order in which they may import each other, row by row."""
    parts = []
    for k, (name, about, fill) in enumerate(PACKAGES):
        row, column = divmod(k, 3)
        x, y = 20 + 210 * column, 16 + 84 * row
        parts.append(box(x, y, 180, 64, fill))
        parts.append(text(x + 90, y + 28, name, 21, "bold"))
        parts.append(text(x + 90, y + 52, about, 19, "soft"))
        if k + 1 < len(PACKAGES):
            if column < 2:
                parts.append(arrow((x + 182, y + 32), (x + 208, y + 32)))
            else:
                parts.append(
                    arrow((x + 90, y + 66), (x + 90, y + 74), (110, y + 74), (110, y + 83))
                )
    about = "Twenty packages in one line; each imports only packages before it"
    return picture(16 + 84 * 7, about, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "round.svg": one_round,
    "copies.svg": copies,
    "architecture.svg": packages,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")
