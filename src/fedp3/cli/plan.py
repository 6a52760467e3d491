"""`fedp3 plan`: what a config requires of every client, without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.fleet_table import show_fleet
from fedp3.cli.options import AsJson, DataDir, Overrides, Use

if TYPE_CHECKING:
    from fedp3.core.types import ClientPlan
    from fedp3.costs.table import ClientCost
    from fedp3.experiment.experiment import Experiment

JSON_KEYS = (
    "clients",
    "devices",
    "coverage",
    "schedule",
    "layers",
    "parameters",
    "reductions",
    "dense_bytes",
    "warnings",
    "privacy",
    "client_privacy",
)
SENT: Mapping[str, str] = {
    "dense": "sent dense",
    "pruned": "sent pruned",
    "none": "never sent",
    "skip": "left out of the network",
}
UPLOADED: Mapping[str, str] = {
    "all": "uploaded",
    "retained": "uploaded where retained",
    "zeros": "uploaded with zeros",
    "none": "not uploaded",
}


def plan(
    path: Annotated[Path, typer.Argument(help="Config file")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    use: Use = None,
    json: AsJson = False,
) -> None:
    """Show what a config requires of every client, without training.

    Where devices are described, clients that do the same share a line, which says what keeps their
    devices from training more.

    Example: fedp3 plan my.toml prune.keep=0.5

    Example: fedp3 plan my.toml devices.fleet=phones devices.round_seconds=15
    """
    from fedp3 import config
    from fedp3.config.plugins import load_plugins
    from fedp3.experiment.assemble import assemble
    from fedp3.runs.description import describe

    load_plugins(use or ())
    experiment = assemble(config.load(path, overrides or []), data_dir)
    if json:
        description = describe(experiment)
        terminal.as_json({key: description[key] for key in JSON_KEYS if key in description})
        return
    which = "the first" if experiment.server.plan.changes else "one"
    _show(experiment, f"{path}: what {which} round requires of each client")
    terminal.line("next: " + terminal.command("run", path, *(overrides or [])))


def _show(experiment: "Experiment", title: str) -> None:
    from fedp3.costs.table import unprunable_units
    from fedp3.messages.versions import is_coded
    from fedp3.planning.coverage import coverage
    from fedp3.privacy.budget import planned_epsilons
    from fedp3.runs.description import describe, warnings_of

    server, plans = experiment.server, experiment.turn_plans
    spent = planned_epsilons(server.budget, experiment.schedule) if server.budget else {}
    if server.fleet is None:
        _show_costs(experiment.costs, spent, title)
    else:
        show_fleet(experiment, title)
    terminal.line("; ".join(_roles(plans)))
    if server.fleet is None:
        terminal.line("MFLOP: one example, forward and backward; peak MB: one training step;")
    terminal.line("MB: payload of one round")
    if is_coded(server.spec.download):
        terminal.line(_coded_down(experiment))
    if server.plan.turn(server.layers) > 1:
        _show_schedule(experiment)
    _show_later_rounds(experiment)
    covered = ", ".join(f"{l} {len(clients)}" for l, clients in coverage(plans).items())
    when = " in some round" if server.plan.turn(server.layers) > 1 else ""
    terminal.line(f"clients that train and upload each layer{when}: {covered}")
    unprunable = unprunable_units(server.layers, server.spec.pruning.selector, plans)
    for group, reason in unprunable.items():
        terminal.line(f"units of {group} are not pruned: {reason}")
    if server.layers.note:
        terminal.line(f"note: {server.layers.note}")
    if server.budget:
        terminal.line(terminal.guarantee(describe(experiment)["privacy"]))
    if server.client_level:
        _show_client_privacy(describe(experiment)["client_privacy"])
    for warning in warnings_of(experiment).values():
        terminal.line(f"warning: {warning}")


def _coded_down(experiment: "Experiment") -> str:
    """What MB down stands for where coded changes are sent."""
    copies = [cost.mb_copy for cost in experiment.costs]
    code = experiment.config.download.compress
    return (
        f"MB down: a change of every layer ({code}), for a client that took part in the round "
        f"before; a client that missed many rounds is sent a copy, {min(copies):.2f} to "
        f"{max(copies):.2f} MB"
    )


def _show_later_rounds(experiment: "Experiment") -> None:
    """What later rounds leave out, where the server decides that from what it received."""
    from fedp3.server.recycling import recycled_count

    settings, layers = experiment.config.aggregate, experiment.server.layers
    recycled = recycled_count(settings, layers)
    if recycled:
        terminal.line(
            f"after the first round, {recycled} of {len(layers.layers)} layers are not uploaded in "
            "each round: the server repeats their last change"
        )
    if settings.interval > 1:
        terminal.line(
            f"after {settings.interval} rounds, layers on which clients agree are sent and "
            f"uploaded only once in {settings.interval} rounds"
        )


def _show_schedule(experiment: "Experiment") -> None:
    """A table with a line for rounds in a row that train the same layers, and their mean."""
    from fedp3.experiment.stretches import mean_of, stretches

    found, clients = stretches(experiment), experiment.server.clients
    costs = ("mb_down", "mb_up", "gflop")
    columns = {"rounds": "left", "layers that are trained and uploaded": "left"}
    columns |= dict.fromkeys(("MB down", "MB up", "GFLOP"), "right")
    always = [l for l, n in found[0].clients.items() if all(s.clients.get(l) == n for s in found)]
    rows = []
    for s in found:
        rounds = f"{s.first}" if s.first == s.last else f"{s.first}-{s.last}"
        shown = [
            l if n == clients else f"{l} ({n} of {clients})"
            for l, n in s.clients.items()
            if l not in always
        ]
        rows.append([rounds, " ".join(shown) or "-", *(f"{getattr(s, c):.2f}" for c in costs)])
    rows.append(["mean", "", *(f"{mean_of(found, c):.2f}" for c in costs)])
    turn = experiment.server.plan.turn(experiment.server.layers)
    title = f"the schedule {experiment.server.plan.schedule!r}, which repeats after {turn} rounds"
    terminal.table(columns, rows, title=f"{title}; costs of a round, mean of clients")
    if always:
        terminal.line(f"in every round also: {' '.join(always)}")


def _show_client_privacy(p: Mapping[str, Any]) -> None:
    """The guarantee of client-level DP at the end of the run, and the noise of one round."""
    terminal.line(terminal.client_guarantee(p))
    noise = ", ".join(f"{l} {std:.3g}" for l, std in p["noise"].items())
    terminal.line(f"standard deviation of the noise on each weight in a round, by layer: {noise}")


def _show_costs(costs: "Sequence[ClientCost]", spent: Mapping[int, float], title: str) -> None:
    """A table with a line for each client; `spent` has its planned epsilon under LDP."""
    columns = {"client": "right", "in full (L_i)": "left", "others, keep": "left"}
    for name in ("examples", "parameters", "MFLOP", "peak MB", "MB down", "MB up"):
        columns[name] = "right"
    if spent:
        columns["epsilon"] = "right"
    rows = []
    for cost in costs:
        row = [
            str(cost.id),
            " ".join(cost.layers),
            _others(cost) or "-",
            str(cost.examples),
            f"{cost.parameters:,}",
            f"{cost.mflops_per_example:.2f}",
            f"{cost.peak_mb:.1f}",
            f"{cost.mb_down:.2f}",
            f"{cost.mb_up:.2f}",
        ]
        if spent:
            row.append(f"{spent[cost.id]:.2f}")
        rows.append(row)
    terminal.table(columns, rows, title=title)


def _roles(plans: "Sequence[ClientPlan]") -> list[str]:
    """What is done with the layers in L_i, and with the others."""
    has_full = any(plan.full_layers for plan in plans)
    others: dict[str, None] = {}  # in order of appearance
    for plan in plans:
        for l, p in plan.layers.items():
            if l not in plan.full_layers:
                trained = "trained" if p.train else "frozen"
                sent = "dense" if p.send == "pruned" and p.keep == 1 else p.send
                others[f"{SENT[sent]}, {trained}, {UPLOADED[p.upload]}"] = None
    lines = ["layers in L_i are sent dense, trained and uploaded"] if has_full else []
    if others:
        subject = "the other layers are" if has_full else "every layer is"
        lines.append(f"{subject} {', or '.join(others)}")
    return lines


def _others(cost: "ClientCost") -> str:
    """Layers outside L_i by the share that is sent: 0.9 conv1 conv2, 0.5 fc1."""
    by_share: dict[float, list[str]] = {}
    for l, share in cost.keep.items():
        if l not in cost.layers:
            by_share.setdefault(share, []).append(l)
    return ", ".join(f"{share:g} {' '.join(layers)}" for share, layers in by_share.items())
