"""The privacy statement of a run: the document that a reviewer reads and signs.

It is written from the run's own record: what the run promised (run.json), what it spent
(result.json), and what was really charged and drawn (ledger.jsonl).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedp3.privacy import accountant
from fedp3.privacy.disclosure import UNACCOUNTED
from fedp3.privacy.ledger import Anchor, Charge, composed

ASSUMPTIONS = (
    "Every client runs this software unchanged, and its operating system's randomness is secret.",
    "The noise is drawn from a Mersenne Twister whose entire state comes from the operating "
    "system; it is not a cryptographic generator.",
    "Noise and sums are 32-bit floating point numbers; epsilon is that of the mechanism over real "
    "numbers.",
    "No record occurs twice among the training records of a client, and records of different "
    "clients are different people's.",
    "Nobody protects what a client does with its own model, or what is released outside this run.",
)


def statement(
    name: str, about: Mapping[str, Any], charges: Sequence[Charge], anchor: Anchor
) -> str:
    """The statement of a run under LDP, as Markdown.

    Args:
        name: the name of the run.
        about: the contents of run.json.
        charges: the run's ledger.
        anchor: how far that ledger has grown.
    """
    privacy = about["privacy"]
    return "\n\n".join(
        [
            f"# Privacy statement: {name}",
            _promise(privacy, charges),
            _clients(charges, privacy["delta"], seeded=privacy["randomness"] != "os"),
            _noise(privacy, charges),
            _releases(charges),
            bullets("## Assumptions", ASSUMPTIONS),
            evidence(about, anchor)
            + "\n- To attack the code that ran: `fedp3 audit config.toml` in the run folder",
            "## Review\n\nChecked by: ______________________    Date: ______________\n\nRemarks:\n",
        ]
    )


def _promise(privacy: Mapping[str, Any], charges: Sequence[Charge]) -> str:
    limit = "no limit" if privacy["epsilon"] is None else f"{privacy['epsilon']:g}"
    return f"""## What is promised

Local differential privacy of single records: an (epsilon, delta) guarantee **for each training
record of each client, against everybody who sees what that client uploads**, the server included,
in all rounds together. It is not a guarantee for a client's entire data set, and it protects
nobody who has several records as if they were one.

- Neighbouring data sets: {privacy["adjacency"]} ({privacy["sampling"]} sampling of records).
- Limit per client: epsilon {limit} at delta {privacy["delta"]:g}.
- Accountant: {privacy["accountant"]}.
- Source of noise: {_source(privacy["randomness"])}"""


def _source(randomness: str) -> str:
    if randomness == "os":
        return "each client's operating system."
    return (
        "run.seed. **This is a simulation: whoever knows the seed can remove the noise, so nothing "
        "is promised for real records.**"
    )


def _clients(charges: Sequence[Charge], delta: float, *, seeded: bool) -> str:
    lines = [
        "## What was spent",
        "",
        f"| client | tasks | steps | epsilon at delta {delta:g} |",
        "|---|---|---|---|",
    ]
    for client in sorted({c.client for c in charges}):
        own = [c for c in charges if c.client == client]
        # A seeded round that is repeated is the identical release.
        counted = list({c.t: c for c in own}.values()) if seeded else own
        spent = accountant.epsilon(composed(counted), delta)
        shown = f"{spent:.4g}" if math.isfinite(spent) else "no finite epsilon"
        lines.append(f"| {client} | {len(own)} | {sum(c.steps for c in counted)} | {shown} |")
    if not charges:
        lines.append("| none | 0 | 0 | 0 |")
    return "\n".join(lines)


def _noise(privacy: Mapping[str, Any], charges: Sequence[Charge]) -> str:
    drawn = Counter((c.noise_multiplier, c.sample_rate) for c in charges)
    lines = [
        f"- noise multiplier {z:g}, sample rate {q:g}: {tasks} tasks"
        for (z, q), tasks in sorted(drawn.items())
    ]
    return "\n".join(
        [
            "## The noise that was drawn",
            "",
            f"Gradients of single records are clipped to norm {privacy['clip']:g}, over all "
            "coordinates that train together. Every step adds Gaussian noise to every such "
            "coordinate, with the noise multiplier times the clip as standard deviation:",
            "",
            *(lines or ["- none: no task was charged"]),
        ]
    )


def _releases(charges: Sequence[Charge]) -> str:
    kinds = Counter(c.released for c in charges)
    names = {
        "update": "updates of the layers that a client uploads",
        "probe": "updates that were discarded after P was measured",
    }
    inside = [f"{n} {names.get(kind, kind)}" for kind, n in sorted(kinds.items())]
    outside = bullets("### Outside epsilon", UNACCOUNTED)
    return bullets("## Every release\n\n### Inside epsilon", inside or ["none"]) + "\n\n" + outside


def evidence(about: Mapping[str, Any], anchor: Anchor) -> str:
    """What the statement can be checked against."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return bullets(
        "## Evidence",
        [
            f"Config digest: `{about['digest']}`",
            f"Ledger: {anchor.entries} lines, SHA-256 of the last one `{anchor.last}`; every line "
            "contains the hash of the line before it",
            f"Versions: {versions}",
        ],
    )


def review() -> str:
    """Where the reviewer signs."""
    lines = "Checked by: ______________________    Date: ______________"
    return f"## Review\n\n{lines}\n\nRemarks:\n"


def bullets(title: str, lines: Sequence[str]) -> str:
    """A heading and a list."""
    return "\n".join([title, "", *(f"- {line}" for line in lines)])
