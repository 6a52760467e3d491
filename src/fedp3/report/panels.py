"""The page about one run: headline numbers, plan, labels, clients, rejections, commands.

With several seeds the numbers are over all of them.  Plan, labels and clients differ from seed to
seed, so those of the first seed are shown.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedp3.config.toml import toml_value
from fedp3.core.settings import OWN
from fedp3.report import text
from fedp3.report.clock import joules, virtual_seconds
from fedp3.report.grids import Grid, label_grid, plan_grid
from fedp3.report.runs import (
    Json,
    Run,
    Seed,
    client_epsilon,
    epsilon,
    final,
    mean,
    moved,
    rejections,
    score,
    seconds,
    stat,
)
from fedp3.report.svg import grid_picture, grid_tips

LONGEST_LIST = 12  # values of a setting that are shown
MOST_REJECTIONS = 300  # rejections that are listed; all are counted
# A setting of one run: key, value, whether it differs between the runs of the page.
Setting = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Card:
    """One headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; each heading has a flag that is true if its column holds numbers."""

    heads: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Everything that the page shows about one run."""

    name: str
    line: str  # summary of the run
    status: str
    finished: bool
    cards: tuple[Card, ...]
    plan: Markup
    plan_legend: Mapping[str, str]
    plan_note: str
    labels: Markup | None  # None if they equal those of the run `labels_as`
    labels_as: str
    labels_note: str
    clients: Table
    reasons: tuple[tuple[str, int], ...]  # reason of rejection -> count
    rejected: Table
    rejected_note: str
    config: tuple[tuple[str, tuple[Setting, ...]], ...]  # by section
    facts: tuple[tuple[str, str], ...]
    guarantee: tuple[tuple[str, str], ...]  # settings of LDP; empty without it
    client_guarantee: tuple[tuple[str, str], ...]  # of client-level DP; empty without it
    client_statement: tuple[tuple[str, tuple[str, ...]], ...]  # heading -> lines
    warnings: tuple[str, ...]
    unaccounted: tuple[str, ...]  # released, and not covered by epsilon
    commands: tuple[tuple[str, str], ...]


def run_panel(runs: Sequence[Run], i: int, tips: dict[str, Any]) -> Panel:
    """The panel of run i; adds to `tips` what its pictures show on hover."""
    run, seed = runs[i], runs[i].seeds[0]
    ids = [str(c["id"]) for c in seed.about["clients"]]
    plan = plan_grid(seed)
    labels = label_grid(seed.about["labels"], ids, "Label distribution")
    same = [j for j in range(i) if runs[j].seeds[0].about["labels"] == seed.about["labels"]]
    tips[f"plan-{i}"] = grid_tips(plan)
    if not same:
        tips[f"labels-{i}"] = grid_tips(labels)
    rejected = _rejected(run)
    finished = all(s.result for s in run.seeds)
    privacy = seed.about.get("privacy") or {}
    warnings = seed.about.get("warnings", {})
    return Panel(
        name=run.name,
        line=_summary(seed),
        status="finished" if finished else _progress(run),
        finished=finished,
        cards=_cards(run),
        plan=grid_picture(plan, f"plan-{i}"),
        plan_legend=plan.legend,
        plan_note=_plan_note(run, plan),
        labels=None if same else grid_picture(labels, f"labels-{i}"),
        labels_as=runs[same[0]].name if same else "",
        labels_note=labels.legend["label"],
        clients=_clients(seed),
        reasons=tuple(Counter(reason for *_, reason in rejected.rows).most_common()),
        rejected=Table(rejected.heads, rejected.rows[:MOST_REJECTIONS]),
        rejected_note=_rejected_note(run, len(rejected.rows)),
        config=_config([r.seeds[0].config for r in runs], i),
        facts=_facts(run),
        guarantee=_guarantee(seed),
        client_guarantee=_client_guarantee(seed),
        client_statement=_client_statement(seed),
        # W7 and C4 are lists, which the page shows as such
        warnings=tuple(text for code, text in warnings.items() if code not in ("W7", "C4")),
        unaccounted=tuple(privacy.get("unaccounted", ())),
        commands=_commands(run),
    )


# --------------------------------------------------------------------------- headline


def _summary(seed: Seed) -> str:
    c = seed.config
    per_round = f"{c['run']['clients_per_round'] or c['partition']['clients']} per round"
    client_level = c.get("client_privacy", {})
    if client_level.get("enabled"):
        per_round = f"each in a round with probability {client_level['sample_rate']:g}"
    data = "user-provided data" if c["data"]["name"] == OWN else c["data"]["name"]
    model = "user-provided model" if c["model"]["name"] == OWN else c["model"]["name"]
    return (
        f"{c['method']} · {data}, {c['partition']['kind']} over {len(seed.about['clients'])} "
        f"clients, {per_round} · {model}, {seed.about['parameters']:,} parameters in "
        f"{len(seed.about['layers'])} layers · layer sets {c['plan']['layers']}"
    )


def _progress(run: Run) -> str:
    done = min(len(s.events) for s in run.seeds)
    return f"not finished: {done} of {run.seeds[0].config['run']['rounds']} rounds"


def _cards(run: Run) -> tuple[Card, ...]:
    rounds = max(len(s.events) for s in run.seeds)
    planned = run.seeds[0].config["run"]["rounds"]
    late = sum(len(e["late"]) for s in run.seeds for e in s.events)
    rejected = sum(len(e["rejected"]) for s in run.seeds for e in s.events)
    time = mean(stat(map(seconds, run.seeds)))
    epsilons = [e for e in map(epsilon, run.seeds) if e is not None]
    percentile = mean(final(run, "G", "p10"))
    cards = [
        Card(
            "G, server model",
            text.percent_stat(final(run, "G")),
            f"10th percentile {text.percent(percentile)}",
        ),
        Card("D, as dispatched", text.percent_stat(final(run, "D")), "pruned, untrained"),
        Card("P, personal", text.percent_stat(final(run, "P")), "after one local update"),
        Card("Worst client", text.percent_stat(final(run, "G", "worst")), _worst(run)),
        _traffic_card(run, "Uploaded", "up"),
        _traffic_card(run, "Downloaded", "down"),
        Card("Rounds", f"{rounds} / {planned}", f"{late} late, {rejected} rejected"),
        Card(
            "Time",
            text.duration(time),
            "mean over seeds" if len(run.seeds) > 1 else "entire run",
        ),
    ]
    virtual = mean(stat(map(virtual_seconds, run.seeds)))
    if virtual is not None:
        energy = mean(stat(map(joules, run.seeds)))
        note = "on the devices" if energy is None else f"on the devices, {text.energy(energy)}"
        cards.append(Card("Virtual time", text.duration(virtual), note))
    if epsilons:
        cards.append(Card("ε", text.number(max(epsilons)), "largest of any client"))
    client_epsilons = [e for e in map(client_epsilon, run.seeds) if e is not None]
    if client_epsilons:
        worst = text.number(max(client_epsilons))
        cards.append(Card("Client-level ε", worst, "the server is trusted"))
    return (*cards, _model_card(run))


def _model_card(run: Run) -> Card:
    shas = {str(s.result.get("model_sha256") or "") for s in run.seeds} - {""}
    value = f"{len(shas)} models" if shas else text.NONE
    if len(shas) == 1:
        value = shas.pop()[:10]
    return Card("Model", value, "sha256, complete below")


def _worst(run: Run) -> str:
    scores = score(run.seeds[0], "G")
    if len(run.seeds) > 1 or not scores:
        return "worst G of any client"
    kind, clients = run.seeds[0].score, scores["clients"]
    return f"client {min(clients, key=lambda i: kind.utility(clients[i]))}, by G"


def _traffic_card(run: Run, label: str, way: str) -> Card:
    mb, share = moved(run, way)
    note = text.NONE if share is None else f"{100 * share:.1f}{text.NBSP}% of dense FedAvg"
    return Card(label, text.mb(mean(mb)), note)


def _plan_note(run: Run, plan: Grid) -> str:
    notes = []
    if len(run.seeds) > 1:
        notes.append(f"Shown for seed {run.seeds[0].config['run']['seed']}.")
    if run.seeds[0].config["plan"]["redraw"]:
        notes.append("Layer sets are redrawn every round; those of round 1 are shown.")
    if len(plan.legend) > 1:
        notes.append("The weaker the colour, the less of the layer is sent.")
    notes.append("Numbers at the right: clients that upload the layer.")
    return " ".join(notes)


# --------------------------------------------------------------------------- clients


CLIENT_HEADS = (
    ("Client", False),
    ("Keep", True),
    ("In full (L_i)", False),
    ("Examples", True),
    ("Parameters", True),
    ("MFLOP / example", True),
    ("Peak MB", True),
    ("MB down", True),
    ("MB up", True),
    ("Accepted", True),
    ("Late", True),
    ("Rejected", True),
    ("G", True),
    ("P", True),
)


def _clients(seed: Seed) -> Table:
    fates = ("accepted", "late", "rejected")
    counts = {fate: Counter(str(i) for e in seed.events for i in e[fate]) for fate in fates}
    scores = {kind: (score(seed, kind) or {}).get("clients", {}) for kind in ("G", "P")}
    spent: Json = seed.result.get("epsilon") or {}
    rows = []
    for c in seed.about["clients"]:
        name = str(c["id"])
        shares = [share for share in c["keep"].values() if share > 0]
        row = (
            name,
            text.percent(min(shares, default=0.0)),
            text.ranges(c["layers"], seed.about["layers"]),
            f"{c['examples']:,}",
            f"{c['parameters']:,}",
            *(text.number(c[key]) for key in ("mflops_per_example", "peak_mb", "mb_down", "mb_up")),
            *(str(counts[fate][name]) for fate in fates),
            *(text.percent(scores[kind].get(name)) for kind in ("G", "P")),
        )
        rows.append((*row, text.number(spent.get(name))) if spent else row)
    heads = (*CLIENT_HEADS, ("ε", True)) if spent else CLIENT_HEADS
    return Table(heads, tuple(rows))


def _rejected(run: Run) -> Table:
    heads: tuple[tuple[str, bool], ...] = (("Round", True), ("Client", False), ("Reason", False))
    many = len(run.seeds) > 1
    rows: list[tuple[str, ...]] = []
    for seed in run.seeds:
        for t, client, reason in rejections(seed):
            row = (str(t), client, reason)
            rows.append((str(seed.config["run"]["seed"]), *row) if many else row)
    return Table((("Seed", True), *heads) if many else heads, tuple(rows))


def _rejected_note(run: Run, rejected: int) -> str:
    events = [e for s in run.seeds for e in s.events]
    requested = sum(len(e["sampled"]) for e in events)
    late = sum(len(e["late"]) for e in events)
    void = len([e for e in events if e["void"]])
    note = (
        f"{rejected:,} of {requested:,} updates were rejected, {late:,} came late, "
        f"{void:,} rounds were void."
    )
    if rejected > MOST_REJECTIONS:
        note += f" The first {MOST_REJECTIONS} are listed."
    return note


# --------------------------------------------------------------------------- reproduction


def _config(configs: Sequence[Json], i: int) -> tuple[tuple[str, tuple[Setting, ...]], ...]:
    """The config of run i by section, with a flag at every key that differs between the runs."""

    def differs(section: str, key: str) -> bool:
        return len({_shown(c.get(section, {}).get(key)) for c in configs}) > 1

    return tuple(
        (section, tuple((key, _shown(v), differs(section, key)) for key, v in keys.items()))
        for section, keys in configs[i].items()
        if isinstance(keys, Mapping) and keys.get("enabled", True)
    )


def _shown(value: Any) -> str:
    """A value as TOML; long lists are shortened."""
    if value is None:
        return text.NONE
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > LONGEST_LIST:
        start = toml_value(value[:LONGEST_LIST]).removesuffix("]")
        return f"{start}, … {len(value)} in all]"
    return toml_value(value)


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    about = run.seeds[0].about
    shas = [
        (str(s.config["run"]["seed"]), str(s.result.get("model_sha256") or "not finished"))
        for s in run.seeds
    ]
    if len(shas) == 1:
        seed, sha = shas[0]
        models = [("seed", seed), ("model sha256", sha)]
    else:
        models = [("seeds", ", ".join(seed for seed, _ in shas))]
        models += [(f"model sha256, seed {seed}", sha) for seed, sha in shas]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        *models,
        ("config sha256", str(about["digest"])),
        ("versions", versions),
        ("folder", str(run.folder)),
    )


def _guarantee(seed: Seed) -> tuple[tuple[str, str], ...]:
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


def _client_guarantee(seed: Seed) -> tuple[tuple[str, str], ...]:
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


def _client_statement(seed: Seed) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What the client-level ε covers, what it does not, and what it assumes."""
    p = _client_privacy(seed)
    headings = {
        "inside": "The client-level ε covers:",
        "outside": "It does not cover:",
        "assumes": "It assumes that:",
    }
    return tuple((heading, tuple(p[key])) for key, heading in headings.items() if p)


def _commands(run: Run) -> tuple[tuple[str, str], ...]:
    seed = run.seeds[0]
    commands = []
    # The command line has neither the model nor the data of a run that was started from Python.
    if seed.config["model"]["name"] != OWN:
        again = ["fedp3", "run", str(seed.folder / "config.toml"), "--out", f"{run.folder}-again"]
        if len(run.seeds) > 1:
            again += ["--seeds", str(len(run.seeds))]
        for plugin in seed.about.get("plugins", ()):
            again += ["--use", str(plugin["path"])]
        commands += [
            ("Resume it", shlex.join(["fedp3", "resume", str(s.folder)]))
            for s in run.seeds
            if not s.result
        ]
        commands.append(("Run it again", shlex.join(again)))
    original = str(seed.about["command"])
    if " " in original:
        commands.append(("Original command", original))
    return tuple(commands)
