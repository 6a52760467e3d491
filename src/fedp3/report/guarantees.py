"""What LDP and client-level DP guarantee in a run, for the page."""

from fedp3.report import text
from fedp3.report.runs import Json, Seed


def guarantee(seed: Seed) -> tuple[tuple[str, str], ...]:
    """What LDP guarantees to a client of this run; empty without LDP."""
    p: Json = seed.result.get("privacy") or seed.about.get("privacy") or {}
    if not p:
        return ()
    spent = [f"{name} {text.number(value)}" for name, value in (p.get("spent") or {}).items()]
    names = (
        "delta",
        "adjacency",
        "sampling",
        "sample_rate",
        "noise_multiplier",
        "clip",
        "accountant",
        "randomness",
    )
    return (
        ("ε over clients", ", ".join(spent) or "the run is not finished"),
        ("ε allowed", "no limit" if p["epsilon"] is None else str(p["epsilon"])),
        *((name.replace("_", " "), str(p[name])) for name in names),
        ("steps", f"{p['steps_per_task']} per task, {p['allowed_steps']:,} allowed"),
        ("protects", "each training record of a client, against all who see its uploads"),
    )


def _client_privacy(seed: Seed) -> Json:
    """The statement of client-level DP, after the run or as planned; empty without it."""
    return seed.result.get("client_privacy") or seed.about.get("client_privacy") or {}


def client_guarantee(seed: Seed) -> tuple[tuple[str, str], ...]:
    """What client-level DP guarantees to a client of this run; empty without it."""
    p = _client_privacy(seed)
    if not p:
        return ()
    spent = "the run is not finished"
    if "spent" in p:
        spent = "unbounded" if p["spent"] is None else text.number(p["spent"])
    names = (
        "delta",
        "adjacency",
        "sampling",
        "sample_rate",
        "noise_multiplier",
        "clip",
        "accountant",
        "randomness",
        "protects",
    )
    noise = ", ".join(f"{l} {text.number(std)}" for l, std in p["noise"].items())
    return (
        ("client-level ε", spent),
        ("client-level ε allowed", "no limit" if p["epsilon"] is None else str(p["epsilon"])),
        *((name.replace("_", " "), str(p[name])) for name in names),
        ("noise on each weight in a round", noise),
        ("rounds allowed", f"{p['allowed_rounds']:,}"),
    )


def client_statement(seed: Seed) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What the client-level ε covers, what it does not, and what it assumes."""
    p = _client_privacy(seed)
    headings = {
        "inside": "The client-level ε covers:",
        "outside": "It does not cover:",
        "assumes": "It assumes that:",
    }
    return tuple((heading, tuple(p[key])) for key, heading in headings.items() if p)
