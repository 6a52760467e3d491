"""The privacy statement of a run under client-level DP, for a reviewer to check and sign.

It shares nothing with the statement of LDP but its form: the two promise different things to
different people.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedp3.privacy import accountant
from fedp3.privacy.ledger import Anchor, Charge, composed
from fedp3.privacy.statement import bullets, evidence, review


def client_statement(
    name: str, about: Mapping[str, Any], charges: Sequence[Charge], anchor: Anchor
) -> str:
    """The statement as Markdown.

    Args:
        name: the name of the run.
        about: the contents of run.json.
        charges: the ledger of its releases, one per round.
        anchor: how far that ledger has grown.
    """
    privacy = about["client_privacy"]
    seeded = privacy["randomness"] != "os"
    counted = list({c.t: c for c in charges}.values()) if seeded else list(charges)
    spent = accountant.epsilon(composed(counted), privacy["delta"])
    shown = f"{spent:.4g}" if math.isfinite(spent) else "no finite number"
    source = "the operating system of the server"
    if seeded:
        source = "run.seed: **a simulation, in which nothing is promised for real clients**"
    promise = [
        f"Protected: {privacy['protects']}.",
        f"Neighbouring fleets: {privacy['adjacency']} ({privacy['sampling']} sampling of clients, "
        f"each with probability {privacy['sample_rate']:g}).",
        f"Spent: **client-level epsilon {shown}** at delta {privacy['delta']:g}, the same for "
        f"every client, in {len(counted)} releases.",
        f"Accountant: {privacy['accountant']}.",
        f"The change of everything that a client uploads is clipped to norm {privacy['clip']:g}. "
        f"Noise multiplier {privacy['noise_multiplier']:g}, on every coordinate in every round, "
        f"drawn from {source}.",
    ]
    return "\n\n".join(
        [
            f"# Privacy statement: {name} (client-level, trusted server)",
            "This is **not** local differential privacy: the server sees every upload without "
            "noise and must be trusted.",
            bullets("## What is promised", promise),
            bullets("## Releases inside epsilon", privacy["inside"]),
            bullets("## Releases outside epsilon", privacy["outside"]),
            bullets("## Assumptions", privacy["assumes"]),
            evidence(about, anchor),
            review(),
        ]
    )
