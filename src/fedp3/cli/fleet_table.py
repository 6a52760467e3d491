"""The table of `fedp3 plan` for a run whose devices are described: a line for each kind of plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedp3.cli import terminal

if TYPE_CHECKING:
    from fedp3.costs.table import ClientCost
    from fedp3.experiment.experiment import Experiment

COLUMNS = {
    "device": "left",
    "clients": "right",
    "trains and uploads": "left",
    "steps": "right",
    "holds MB": "right",
    "MB down": "right",
    "MB up": "right",
    "code": "left",
    "seconds": "right",
    "binds": "left",
}


def show_fleet(experiment: "Experiment", title: str) -> None:
    """Print what each kind of device does in a round, and which limit binds.

    Args:
        experiment: a run whose devices are described.
        title: the title of the table.
    """
    from fedp3.messages.versions import is_coded

    fleet = experiment.server.fleet
    assert fleet is not None
    groups: dict[tuple[object, ...], list[ClientCost]] = {}
    for cost in experiment.costs:
        device = fleet.devices[cost.id]
        key = (device.gflops, device.name, cost.id in fleet.able, cost.layers, *cost.keep.values())
        groups.setdefault((*key, cost.steps, cost.split, cost.code), []).append(cost)
    rows = []
    last = ""
    for costs in _in_order(groups):
        name = fleet.devices[costs[0].id].name
        able = costs[0].id in fleet.able
        rows.append(_row(name if name != last else "", costs, experiment, able=able))
        last = name
    terminal.table(COLUMNS, rows, title=title)
    settings = fleet.settings
    limits = [f"{100 * settings.memory_share:g} % of a device's memory"]
    if settings.round_seconds:
        limits.append(f"{settings.round_seconds:g} seconds of a round")
    terminal.line(f"limits: {', '.join(limits)}; binds: what keeps a device from training all")
    if is_coded(experiment.config.download):
        terminal.line(
            "MB down and seconds: at most, for a device that needs a copy of all it holds"
        )
    bound = Counter(fleet.binding[i] for i in range(len(fleet.devices)))
    shown = [f"{limit or 'nothing'} {count}" for limit, count in sorted(bound.items())]
    terminal.line(f"clients bound by: {', '.join(shown)}")
    out = len(fleet.devices) - len(fleet.able)
    if out:
        terminal.line(f"{out} clients do not take part: their devices or data allow no plan")


def _in_order(
    groups: "Mapping[tuple[object, ...], list[ClientCost]]",
) -> "list[list[ClientCost]]":
    """Slow devices first; of one device, what most of its clients do."""

    def rank(item: "tuple[tuple[object, ...], list[ClientCost]]") -> tuple[object, ...]:
        (speed, name, *_), costs = item
        return speed, name, -len(costs), costs[0].id

    return [costs for _, costs in sorted(groups.items(), key=rank)]


def _row(
    name: str, costs: "Sequence[ClientCost]", experiment: "Experiment", *, able: bool
) -> list[str]:
    cost = costs[0]
    if not able:
        return [name, str(len(costs)), "does not take part", *["-"] * 6, cost.binding or "-"]
    trains = " ".join(cost.layers)
    if len(cost.layers) == len(cost.keep):
        trains = "everything"
    others = sorted({share for l, share in cost.keep.items() if l not in cost.layers})
    if others and others != [1.0]:
        trains += f", {' '.join(f'{share:g}' for share in others)} of the rest"
    steps = cost.steps or experiment.config.local.steps
    if experiment.config.local.epochs:
        steps = cost.steps
    return [
        name,
        str(len(costs)),
        trains,
        f"{steps or '-'}" + (f" in {cost.split} parts" if cost.split > 1 else ""),
        f"{max(c.peak_mb for c in costs):.0f}",
        f"{cost.mb_copy:.2f}",
        f"{cost.mb_up:.2f}",
        cost.code,
        f"{max(c.seconds for c in costs):.1f}",
        cost.binding or "-",
    ]
