"""Before a run: write a config, look at what it asks of every client, list the methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import show
from fedp3.errors import InputError

if TYPE_CHECKING:
    from fedp3.experiment import ClientCost
    from fedp3.types import ClientPlan

Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as local.lr=0.05", show_default=False)]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets lie; else FEDP3_DATA, else the cache")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


def init(
    path: Annotated[Path, typer.Argument(help="File to write")] = Path("my.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite")] = False,
) -> None:
    """Write a commented config: digits, 30 rounds, seconds.

    Example: fedp3 init my.toml
    """
    from fedp3 import config

    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name, or overwrite it with --force")
    try:
        path.write_text(config.template())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    show.tell(f"wrote {path}; next: fedp3 plan {path}, then fedp3 run {path}")


def plan(
    path: Annotated[Path, typer.Argument(help="Config file")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Show what a config asks of every client, without training.

    Example: fedp3 plan my.toml prune.keep=0.5
    """
    from fedp3 import config
    from fedp3.driver import describe, warned
    from fedp3.experiment import assemble, costs, masked_units
    from fedp3.privacy.rules import planned
    from fedp3.server import plans_for

    experiment = assemble(config.load(path, overrides or []), data_dir)
    if json:
        summary = describe(experiment)
        keys = ("clients", "coverage", "layers", "parameters", "reductions", "dense_bytes", "warnings", "privacy")
        show.as_json({k: summary[k] for k in keys if k in summary})
        return
    clients, covered = costs(experiment)
    spent = planned(experiment.problem) if experiment.problem.budget else {}
    _show_costs(clients, spent, f"{path}: what one round asks of each client")
    show.tell("; ".join(_roles(plans_for(experiment.problem, 0))))
    show.tell("MFLOP: one example forward and backward; peak MB: one training step; MB: payload of one round")
    show.tell("clients that train and upload each layer: " + ", ".join(f"{l} {len(who)}" for l, who in covered.items()))
    for group, why in masked_units(experiment).items():
        show.tell(f"units of {group} stay whole: {why}")
    if experiment.problem.layers.note:
        show.tell(f"note: {experiment.problem.layers.note}")
    if experiment.problem.budget:
        show.tell(show.guarantee(describe(experiment)["privacy"]))
    for text in warned(experiment).values():
        show.tell(f"warning: {text}")
    show.tell("next: " + show.command("run", path, *(overrides or [])))


def _show_costs(clients: "Sequence[ClientCost]", spent: Mapping[int, float], title: str) -> None:
    """A line for each client; `spent` has its epsilon, if it has one."""
    names = ("examples", "parameters", "MFLOP", "peak MB", "MB down", "MB up", *(["epsilon"] if spent else []))
    columns = {"client": "right", "whole (L_i)": "left", "the rest, kept": "left", **dict.fromkeys(names, "right")}
    rows = [
        (
            str(c.id),
            " ".join(c.layers),
            _rest(c) or "-",
            str(c.examples),
            f"{c.parameters:,}",
            f"{c.mflops_per_example:.2f}",
            f"{c.peak_mb:.1f}",
            f"{c.mb_down:.2f}",
            f"{c.mb_up:.2f}",
            *([f"{spent[c.id]:.2f}"] if spent else []),
        )
        for c in clients
    ]
    show.table(columns, rows, title=title)


SENT: Mapping[str, str] = {
    "dense": "sent whole", "pruned": "sent pruned", "none": "never sent", "skip": "left out of the net",
}  # fmt: skip
BACK: Mapping[str, str] = {
    "all": "uploaded", "kept": "uploaded as far as kept", "zeros": "uploaded with zeros", "none": "not uploaded",
}  # fmt: skip


def _roles(plans: "Sequence[ClientPlan]") -> list[str]:
    """What becomes of the layers in L_i, and of the others."""
    ways = {(l in plan.whole, p.send, p.train, p.upload): None for plan in plans for l, p in plan.layers.items()}
    rest = [
        ", ".join([SENT[send], "trained" if train else "frozen", BACK[upload]])
        for whole, send, train, upload in ways
        if not whole
    ]
    said = ["L_i is sent, trained and uploaded whole"] if any(whole for whole, *_ in ways) else []
    return said + ([f"{'the rest' if said else 'every layer'} is {', or '.join(rest)}"] if rest else [])


def _rest(c: "ClientCost") -> str:
    """Layers outside L_i by the share kept: 0.9 conv1 conv2, 0.5 fc1."""
    by_share: dict[float, list[str]] = {}
    for l, k in c.keep.items():
        if l not in c.layers:
            by_share.setdefault(k, []).append(l)
    return ", ".join(f"{k:g} {' '.join(ls)}" for k, ls in by_share.items())


def methods(json: AsJson = False) -> None:
    """List the methods a config can name.

    Example: fedp3 methods
    """
    from fedp3.config import ABOUT_METHODS

    if json:
        show.as_json(dict(ABOUT_METHODS))
        return
    for name, about in ABOUT_METHODS.items():
        show.tell(f"{name:<13} {about}")
