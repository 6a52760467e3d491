"""The page about one run: headline numbers, plan, labels, clients, rejections, commands.

With several seeds the numbers are over all of them.  Plan, labels and clients differ from seed to
seed, so those of the first seed are shown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from fedp3.core.settings import OWN
from fedp3.report import text
from fedp3.report.clock import joules, virtual_seconds
from fedp3.report.grids import Grid, label_grid, plan_grid
from fedp3.report.guarantees import client_guarantee, client_statement, guarantee
from fedp3.report.reproduction import Setting, commands_of, config_of, facts_of
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
    shown_kinds,
    stat,
)
from fedp3.report.svg import grid_box, grid_picture, grid_tips
from fedp3.report.table import Head, Table, plain

MOST_REJECTIONS = 300  # rejections that are listed; all are counted
NARROW = 330  # pixels of the drawings for narrow screens


@dataclass(frozen=True, slots=True)
class Card:
    """One headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Drawings:
    """A picture of clients for wide and for narrow screens."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Everything that the page shows about one run."""

    name: str
    line: str  # summary of the run
    status: str
    finished: bool
    cards: tuple[Card, ...]
    plan: Drawings
    plan_legend: Mapping[str, str]
    plan_note: str
    labels: Drawings | None  # None if they equal those of the run `labels_as`
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
    rejected = _rejected(run)
    finished = all(s.result and not s.result.get("stopped") for s in run.seeds)
    privacy = seed.about.get("privacy") or {}
    warnings = seed.about.get("warnings", {})
    return Panel(
        name=run.name,
        line=_summary(seed),
        status="finished" if finished else _progress(run),
        finished=finished,
        cards=_cards(run),
        plan=_drawings(plan, f"plan-{i}", tips),
        plan_legend=plan.legend,
        plan_note=_plan_note(run, plan),
        labels=None if same else _drawings(labels, f"labels-{i}", tips),
        labels_as=runs[same[0]].name if same else "",
        labels_note=labels.legend["label"],
        clients=_clients(seed),
        reasons=tuple(Counter(reason for *_, (reason, _) in rejected.rows).most_common()),
        rejected=replace(rejected, rows=rejected.rows[:MOST_REJECTIONS]),
        rejected_note=_rejected_note(run, len(rejected.rows)),
        config=config_of([r.seeds[0].config for r in runs], i),
        facts=facts_of(run),
        guarantee=guarantee(seed),
        client_guarantee=client_guarantee(seed),
        client_statement=client_statement(seed),
        # W7 and C4 are lists, which the page shows as such
        warnings=tuple(text for code, text in warnings.items() if code not in ("W7", "C4")),
        unaccounted=tuple(privacy.get("unaccounted", ())),
        commands=commands_of(run),
    )


def _drawings(grid: Grid, key: str, tips: dict[str, Any]) -> Drawings:
    """Both drawings of a grid, which show the same texts on hover."""
    tips[key] = grid_tips(grid)
    tips[f"{key}-narrow"] = {"box": grid_box(grid, NARROW), "texts_of": key}
    return Drawings(grid_picture(grid, key), grid_picture(grid, f"{key}-narrow", NARROW))


# --------------------------------------------------------------------------- numbers


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
    stopped = any(s.result.get("stopped") for s in run.seeds)
    word = "stopped by a callback" if stopped else "not finished"
    return f"{word}: {done} of {run.seeds[0].config['run']['rounds']} rounds"


def _cards(run: Run) -> tuple[Card, ...]:
    rounds = max(len(s.events) for s in run.seeds)
    planned = run.seeds[0].config["run"]["rounds"]
    late = sum(len(e["late"]) for s in run.seeds for e in s.events)
    rejected = sum(len(e["rejected"]) for s in run.seeds for e in s.events)
    time = mean(stat(map(seconds, run.seeds)))
    epsilons = [e for e in map(epsilon, run.seeds) if e is not None]
    percentile = text.score(run.score, mean(final(run, "G", "p10")))
    # a tenth of the clients are worse
    tenth = "90th" if run.score.lower_is_better else "10th"

    def shown(kind: str, field: str = "mean") -> str:
        return text.score_stat(run.score, final(run, kind, field))

    cards = [
        Card("G, server model", shown("G"), f"{tenth} percentile {percentile}"),
        Card("D, as dispatched", shown("D"), _dispatched(run)),
        Card("P, personal", shown("P"), _personal(run)),
        *(
            Card("C, central", shown(kind), _central(run))
            for kind in shown_kinds([run])
            if kind == "C"
        ),
        Card("Worst client", shown("G", "worst"), _worst(run)),
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


def _dispatched(run: Run) -> str:
    """What clients receive, which is all of the model where nothing is pruned."""
    shares = {share for c in run.seeds[0].about["clients"] for share in c["keep"].values()}
    return "the full model" if shares == {1.0} else "pruned, before training"


def _personal(run: Run) -> str:
    finished = all(seed.result for seed in run.seeds)
    return f"after one update, of {'all clients' if finished else 'the last participants'}"


def _central(run: Run) -> str:
    samples = run.seeds[0].about.get("central", {}).get("samples")
    return "a test set of no client" if samples is None else f"{samples:,} samples of no client"


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
    elif run.seeds[0].config["plan"].get("schedule", "always") != "always":
        notes.append("Layers follow a schedule; those of round 1 are shown.")
    if len(plan.legend) > 1:
        notes.append("A paler colour means that less of the layer is sent.")
    notes.append("Numbers at the right: clients that upload the layer.")
    return " ".join(notes)


# --------------------------------------------------------------------------- clients


COLUMNS: Mapping[str, str] = {  # of the table of clients: heading -> meaning
    "Client": "number of the client, and its name if it has one",
    "Keep": "smallest share of a layer that the client receives",
    "In full (L_i)": "layers that it trains in full and uploads",
    "Examples": "training samples",
    "Parameters": "number that it receives",
    "MFLOP / example": "forward and backward pass over one sample",
    "Peak MB": "memory of a local step, as planned",
    "MB down": "received in a round",
    "MB up": "sent in a round",
    "Accepted": "updates that were aggregated",
    "Late": "updates that came too late",
    "Rejected": "updates that the server rejected",
    "G": "{score} of the server model on its test samples",
    "P": "{score} after one local update on its test samples",
}
EPSILON = Head(name="ε", meaning="spent by this client under LDP")
TEXTS = ("Client", "In full (L_i)", "Reason")  # columns that hold no numbers


def _heads(columns: Mapping[str, str], score: str = "") -> tuple[Head, ...]:
    return tuple(
        Head(name=name, meaning=meaning.format(score=score), number=name not in TEXTS)
        for name, meaning in columns.items()
    )


def _clients(seed: Seed) -> Table:
    fates = ("accepted", "late", "rejected")
    counts = {fate: Counter(str(i) for e in seed.events for i in e[fate]) for fate in fates}
    scores = {kind: (score(seed, kind) or {}).get("clients", {}) for kind in ("G", "P")}
    spent: Json = seed.result.get("epsilon") or {}
    called = dict(enumerate(seed.about.get("client_names", ())))
    rows = []
    for c in seed.about["clients"]:
        name = str(c["id"])
        shares = [share for share in c["keep"].values() if share > 0]
        row = (
            f"{name} {called.get(c['id'], '')}".strip(),
            text.percent(min(shares, default=0.0)),
            text.ranges(c["layers"], seed.about["layers"]),
            f"{c['examples']:,}",
            f"{c['parameters']:,}",
            *(text.number(c[key]) for key in ("mflops_per_example", "peak_mb", "mb_down", "mb_up")),
            *(str(counts[fate][name]) for fate in fates),
            *(text.score(seed.score, scores[kind].get(name)) for kind in ("G", "P")),
        )
        rows.append((*row, text.number(spent.get(name))) if spent else row)
    heads = _heads(COLUMNS, seed.score.name)
    return Table(
        name="clients",
        title=f"Costs, outcomes and final {seed.score.name} of each client",
        heads=(*heads, EPSILON) if spent else heads,
        rows=plain(rows),
    )


def _rejected(run: Run) -> Table:
    many = len(run.seeds) > 1
    rows: list[tuple[str, ...]] = []
    for seed in run.seeds:
        for t, client, reason in rejections(seed):
            row = (str(t), client, reason)
            rows.append((str(seed.config["run"]["seed"]), *row) if many else row)
    seed_column = {"Seed": "seed of the run"} if many else {}
    columns = {
        "Round": "round of the update",
        "Client": "number of the client",
        "Reason": "why the update was not used",
    }
    return Table(
        name="rejected",
        title="Rejected updates",
        heads=_heads(seed_column | columns),
        rows=plain(rows),
    )


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
