"""What the page says about one run: headline numbers, plan, labels, clients, rejections, how to run it again.

With several seeds the numbers are over all of them; plan, labels and clients are drawn per seed, so the first is shown.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedp3.config import OWN
from fedp3.report import text
from fedp3.report.grids import Grid, label_grid, plan_grid
from fedp3.report.runs import Json, Run, Seed, epsilon, final, mean, moved, rejections, score, seconds, stat
from fedp3.report.svg import grid_picture, grid_tips

OWNED = {"data": "data", "model": "net"}  # section -> what it is called where it is the user's own
MOST_REJECTIONS = 300  # listed one by one; all are counted


@dataclass(frozen=True, slots=True)
class Card:
    """One headline number."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Headings, each with whether its column is numbers, and rows."""

    heads: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Everything about one run, ready to print."""

    name: str
    line: str  # the run in a sentence
    status: str
    finished: bool
    cards: tuple[Card, ...]
    plan: Markup
    plan_legend: Mapping[str, str]
    plan_note: str
    labels: Markup | None  # None: as in the run `labels_as`
    labels_as: str
    labels_note: str
    clients: Table
    reasons: tuple[tuple[str, int], ...]
    rejected: Table
    rejected_note: str
    config: tuple[tuple[str, tuple[tuple[str, str, bool], ...]], ...]  # section, (key, value, differs between runs)
    facts: tuple[tuple[str, str], ...]
    guarantee: tuple[tuple[str, str], ...]  # of LDP: what gives its epsilon a meaning
    warnings: tuple[str, ...]
    unaccounted: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]


def run_panel(runs: Sequence[Run], i: int, tips: dict[str, Any]) -> Panel:
    """The panel of run i; what its pictures say on hover goes to `tips`."""
    run, seed = runs[i], runs[i].seeds[0]
    plan, ids = plan_grid(seed), [str(c["id"]) for c in seed.about["clients"]]
    labels = label_grid(seed.about["labels"], ids, "Label distribution")
    same = [j for j in range(i) if runs[j].seeds[0].about["labels"] == seed.about["labels"]]
    tips[f"plan-{i}"] = grid_tips(plan)
    if not same:
        tips[f"labels-{i}"] = grid_tips(labels)
    listed = _rejected(run)
    finished = all(s.result for s in run.seeds)
    return Panel(
        name=run.name,
        line=_sentence(seed),
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
        reasons=tuple(Counter(why for *_, why in listed.rows).most_common()),
        rejected=Table(listed.heads, listed.rows[:MOST_REJECTIONS]),
        rejected_note=_rejected_note(run, len(listed.rows)),
        config=_config([r.seeds[0].config for r in runs], i),
        facts=_facts(run),
        guarantee=_guarantee(seed),
        warnings=tuple(v for k, v in seed.about.get("warnings", {}).items() if k != "W7"),
        unaccounted=tuple((seed.about.get("privacy") or {}).get("unaccounted", ())),
        commands=_commands(run),
    )


# --------------------------------------------------------------------------- headline


def _sentence(seed: Seed) -> str:
    c = seed.config
    asked = c["run"]["clients_per_round"] or c["partition"]["clients"]
    data, net = ("own " + what if c[k]["name"] == OWN else c[k]["name"] for k, what in OWNED.items())
    return (
        f"{c['method']} · {data}, {c['partition']['kind']} over {len(seed.about['clients'])} clients, "
        f"{asked} a round · {net}, {seed.about['parameters']:,} parameters in "
        f"{len(seed.about['layers'])} layers · layer sets {c['plan']['layers']}"
    )


def _progress(run: Run) -> str:
    done = min(len(s.events) for s in run.seeds)
    return f"not finished: {done} of {run.seeds[0].config['run']['rounds']} rounds"


def _cards(run: Run) -> tuple[Card, ...]:
    rounds = max(len(s.events) for s in run.seeds)
    late = sum(len(e["late"]) for s in run.seeds for e in s.events)
    refused = sum(len(e["rejected"]) for s in run.seeds for e in s.events)
    time = stat(map(seconds, run.seeds))
    spent = max((e for s in run.seeds if (e := epsilon(s)) is not None), default=None)
    shas = {str(s.result.get("model_sha256") or "") for s in run.seeds} - {""}
    ten = final(run, "G", "p10")
    cards = [
        Card("G, server model", text.percent_stat(final(run, "G")), f"10th percentile {text.percent(mean(ten))}"),
        Card("D, as dispatched", text.percent_stat(final(run, "D")), "pruned, untrained"),
        Card("P, personal", text.percent_stat(final(run, "P")), "after one local update"),
        Card("Worst client", text.percent_stat(final(run, "G", "worst")), _worst(run)),
        _traffic_card(run, "up"),
        _traffic_card(run, "down"),
        Card("Rounds", f"{rounds} / {run.seeds[0].config['run']['rounds']}", f"{late} late, {refused} rejected"),
        Card("Time", text.duration(mean(time)), "mean over seeds" if len(run.seeds) > 1 else "whole run"),
    ]
    if spent is not None:
        cards.append(Card("ε", text.number(spent), "largest of any client"))
    model = shas.pop()[:10] if len(shas) == 1 else f"{len(shas)} models" if shas else text.NONE
    return (*cards, Card("Model", model, "sha256, in full below"))


def _worst(run: Run) -> str:
    best = score(run.seeds[0], "G")
    if len(run.seeds) > 1 or not best:
        return "lowest G of any client"
    return f"client {min(best['clients'], key=best['clients'].__getitem__)}, by G"


def _traffic_card(run: Run, way: str) -> Card:
    mb, share = moved(run, way)
    note = text.NONE if share is None else f"{100 * share:.1f}{text.NBSP}% of dense FedAvg"
    return Card({"up": "Uploaded", "down": "Downloaded"}[way], text.mb(mean(mb)), note)


def _plan_note(run: Run, plan: Grid) -> str:
    parts = [f"Shown for seed {run.seeds[0].config['run']['seed']}."] if len(run.seeds) > 1 else []
    if run.seeds[0].config["plan"]["redraw"]:
        parts.append("Layer sets are drawn anew each round; this is the first.")
    if len(plan.legend) > 1:
        parts.append("The weaker the colour, the less of the layer is sent.")
    parts.append("At the right: clients that send the layer back.")
    return " ".join(parts)


# --------------------------------------------------------------------------- clients


CLIENT_HEADS = (
    ("Client", False), ("Keep", True), ("Trained whole", False), ("Examples", True), ("Parameters", True),
    ("MFLOP / example", True), ("Peak MB", True), ("MB down", True), ("MB up", True), ("Accepted", True),
    ("Late", True), ("Rejected", True), ("G", True), ("P", True),
)  # fmt: skip


def _clients(seed: Seed) -> Table:
    counts = {what: Counter(str(i) for e in seed.events for i in e[what]) for what in ("accepted", "late", "rejected")}
    ends = {kind: (score(seed, kind) or {}).get("clients", {}) for kind in ("G", "P")}
    spent: Json = seed.result.get("epsilon") or {}
    rows = []
    for c in seed.about["clients"]:
        name = str(c["id"])
        kept = [k for k in c["keep"].values() if k > 0]
        row = (
            name,
            text.percent(min(kept, default=0.0)),
            ranges(c["layers"], seed.about["layers"]),
            f"{c['examples']:,}",
            f"{c['parameters']:,}",
            *(text.number(c[key]) for key in ("mflops_per_example", "peak_mb", "mb_down", "mb_up")),
            *(str(counts[what][name]) for what in ("accepted", "late", "rejected")),
            *(text.percent(ends[kind].get(name)) for kind in ("G", "P")),
        )
        rows.append((*row, text.number(spent.get(name))) if spent else row)
    return Table(CLIENT_HEADS + ((("ε", True),) if spent else ()), tuple(rows))


def ranges(chosen: Sequence[str], layers: Sequence[str]) -> str:
    """Layers in model order, neighbours joined: "fc1–fc3, head"."""
    inside, parts = set(chosen), []
    start: int | None = None
    for j in range(len(layers) + 1):
        if j < len(layers) and layers[j] in inside:
            start = j if start is None else start
        elif start is not None:
            between = "–" if j - start > 2 else ", "
            parts.append(between.join(dict.fromkeys((layers[start], layers[j - 1]))))
            start = None
    return "all" if len(inside) == len(layers) else ", ".join(parts) or text.NONE


def _rejected(run: Run) -> Table:
    many = len(run.seeds) > 1
    rows = [
        ((str(s.config["run"]["seed"]), str(t), i, why) if many else (str(t), i, why))
        for s in run.seeds
        for t, i, why in rejections(s)
    ]
    heads = (("Round", True), ("Client", False), ("Reason", False))
    return Table(((("Seed", True), *heads) if many else heads), tuple(rows))


def _rejected_note(run: Run, listed: int) -> str:
    asked = sum(len(e["sampled"]) for s in run.seeds for e in s.events)
    late = sum(len(e["late"]) for s in run.seeds for e in s.events)
    void = sum(bool(e["void"]) for s in run.seeds for e in s.events)
    note = f"{listed:,} of {asked:,} updates were rejected, {late:,} came late, {void:,} rounds were void."
    return note + (f" The first {MOST_REJECTIONS} are listed." if listed > MOST_REJECTIONS else "")


# --------------------------------------------------------------------------- again


def _config(configs: Sequence[Json], i: int) -> tuple[tuple[str, tuple[tuple[str, str, bool], ...]], ...]:
    """The config of run i by section, with a mark at what differs between the runs."""

    def differs(section: str, key: str) -> bool:
        return len({_toml(c.get(section, {}).get(key)) for c in configs}) > 1

    return tuple(
        (section, tuple((key, _toml(v), differs(section, key)) for key, v in keys.items()))
        for section, keys in configs[i].items()
        if isinstance(keys, Mapping) and keys.get("enabled", True)
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Sequence):
        shown = ", ".join(map(_toml, value[:12]))
        return f"[{shown}, … {len(value)} in all]" if len(value) > 12 else f"[{shown}]"
    return text.NONE if value is None else str(value)


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    seed = run.seeds[0]
    each = [(str(s.config["run"]["seed"]), str(s.result.get("model_sha256") or "not finished")) for s in run.seeds]
    shas = [("seed", each[0][0]), ("model sha256", each[0][1])]
    if len(each) > 1:
        shas = [("seeds", ", ".join(s for s, _ in each)), *((f"model sha256, seed {s}", h) for s, h in each)]
    versions = ", ".join(f"{name} {version}" for name, version in seed.about["versions"].items())
    return (*shas, ("config sha256", str(seed.about["digest"])), ("versions", versions), ("folder", str(run.folder)))


def _guarantee(seed: Seed) -> tuple[tuple[str, str], ...]:
    """What LDP promises a client of this run; empty without it."""
    p: Json = seed.result.get("privacy") or seed.about.get("privacy") or {}
    if not p:
        return ()
    spent = p.get("spent") or {}
    shown = ", ".join(f"{k} {text.number(v)}" for k, v in spent.items()) or "the run is not finished"
    names = ("delta", "adjacency", "sampling", "sample_rate", "noise_multiplier", "clip", "accountant", "randomness")
    return (
        ("ε over clients", shown),
        ("ε allowed", "no limit" if p["epsilon"] is None else str(p["epsilon"])),
        *((name.replace("_", " "), str(p[name])) for name in names),
        ("steps", f"{p['steps_per_task']} a task, {p['allowed_steps']:,} allowed"),
        ("protects", "each training record of a client, against all who see its uploads"),
    )


def _commands(run: Run) -> tuple[tuple[str, str], ...]:
    seed, folder = run.seeds[0], run.folder
    again = ["fedp3", "run", str(seed.folder / "config.toml"), "--out", f"{folder}-again"]
    again += ["--seeds", str(len(run.seeds))] if len(run.seeds) > 1 else []
    commands = [("Go on with it", shlex.join(["fedp3", "resume", str(s.folder)])) for s in run.seeds if not s.result]
    commands.append(("Run it again", shlex.join(again)))
    if seed.config["model"]["name"] == OWN:
        commands = []  # its owner's program can do both, the command line neither
    typed = str(seed.about["command"])
    return tuple(commands) + ((("As it was typed", typed),) if " " in typed else ())
